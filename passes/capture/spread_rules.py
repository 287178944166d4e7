"""Where the result of each operator carries samples, and what mixes them.

A rule takes the node and a function from its arguments to their spreads. An operator without a rule
mixes, so that a split is refused rather than wrong.
"""

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.captured import Input
from mllm_compile.kernels import grouped_mm
from mllm_compile.kernels.attention import intervals, mask, op
from mllm_compile.passes.capture import (
    hoisted_calls,
    opaque_function,
    spread_movement,
    spread_parts,
)
from mllm_compile.passes.capture.spread import (
    NOTHING,
    Lookup,
    Rule,
    Spread,
    after_reduction,
    clash,
    join,
    mixing,
    of_input,
    packet,
    place,
    rank_of,
    ranking,
    reduced_dims,
    reduction_of,
    value_of,
)
from mllm_compile.passes.capture.spread_fixed import fixed, told_apart
from mllm_compile.passes.capture.spread_meeting import beside, pointwise
from mllm_compile.passes.capture.spread_recipes import Recipes

aten = torch.ops.aten
mllm = torch.ops.mllm
LOOK_UPS = {
    aten.embedding, aten.gather, aten.index, aten.index_select, aten.index_put, aten.index_add,
    aten.scatter, aten.scatter_add, aten._unsafe_index,
}  # fmt: skip
REGISTERED = (
    grouped_mm,
    intervals,
    mask,
    op,
    hoisted_calls,
    opaque_function,
)  # they define the operators


def spreads(
    nodes: Iterable[fx.Node], placeholders: dict[fx.Node, Input], recipes: Recipes | None = None
) -> dict[fx.Node, Spread]:
    """The spread of every node, in order; one with several results has that of them together."""
    recipes, found = recipes or Recipes(), dict[fx.Node, Spread]()

    def lookup(argument: Any) -> Spread:
        return found[argument] if isinstance(argument, fx.Node) else NOTHING

    for node in nodes:
        if node.op == "placeholder":
            item = placeholders[node]
            recipe = recipes.of_input(node, item)
            found[node] = replace(of_input(item, value_of(node)), recipe=recipe)
        elif node.op == "call_function":
            spread = _of_call(node, lookup, recipes.sized)
            found[node] = replace(spread, recipe=recipes.of_call(node, spread, lookup))
    return found


def _of_call(node: fx.Node, lookup: Lookup, sized: bool) -> Spread:
    parts = [lookup(source) for source in node.all_input_nodes]
    joined = join(parts)
    if not joined.batch:
        return fixed(node, lookup)
    rule = spread_parts.split_rows if sized and spread_parts.splits(node) else _rule(node)
    spread = mixing(node, joined) if rule is None else rule(node, lookup)
    if _without_floats(node):
        return _of_integers(node, spread, lookup)
    if spread.ranked and not _looks_up(node, lookup):
        return replace(mixing(node, spread), mixed=spread.mixed or spread.ranked)
    return replace(spread, ranked="")


def _of_integers(node: fx.Node, spread: Spread, lookup: Lookup) -> Spread:
    """They stay within a sample, unless parts of different samples meet in them."""
    parts = [lookup(source) for source in node.all_input_nodes]
    meet, joins = clash(parts), packet(node) in spread_parts.JOINS
    before = (
        part.mixed
        for source, part in zip(node.all_input_nodes, parts, strict=True)
        if _without_floats(source)
    )
    mixed = place(node) if meet and not joins else next(filter(None, before), "")
    ranked = "" if _is_bool(node) else spread.ranked
    return replace(spread, mixed=mixed, ranked=ranked, part=None if meet else spread.part)


def _looks_up(node: fx.Node, lookup: Lookup) -> bool:
    """Integers that are places in a value of the batch: whose rows they pick is assumed."""
    return packet(node) in LOOK_UPS and lookup(node.args[0]).batch


def _rule(node: fx.Node) -> Rule | None:
    target: Any = node.target
    if target is operator.getitem:
        return spread_parts.item_of
    packet = getattr(target, "overloadpacket", None)
    if packet in RULES:
        return RULES[packet]
    tags = getattr(target, "tags", ())
    return pointwise if torch.Tag.pointwise in tags else None


def _without_floats(node: fx.Node) -> bool:
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return not any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def _is_bool(node: fx.Node) -> bool:
    return getattr(value_of(node), "dtype", None) is torch.bool


def reduction(node: fx.Node, lookup: Lookup) -> Spread:
    """Over carrying dims: pooled. What remains keeps its order."""
    spread, over = lookup(node.args[0]), reduced_dims(node)
    left = spread.moved(after_reduction(node))
    if not spread.dims & over:
        return left
    if left.dims:  # two dims carried samples: each element still depends on several
        return mixing(node, spread).like(left)
    return replace(spread.over(set()), pooled=True)


def along(node: fx.Node, lookup: Lookup) -> Spread:
    """Softmax, scans, sorts: the shape stays, rows along one dim meet."""
    spread = lookup(node.args[0])
    position = 2 if node.target is aten.topk.default else 1
    if spread.dims & reduced_dims(node, position):
        return mixing(node, spread).over(spread.dims)
    return spread


def layer_norm(node: fx.Node, lookup: Lookup) -> Spread:
    """Normalises the last dims, as many as its second argument has."""
    spread, rank = lookup(node.args[0]), rank_of(node.args[0])
    joined = join([lookup(source) for source in node.all_input_nodes])
    first = rank - len(node.args[1])  # type: ignore[arg-type]
    if any(dim >= first for dim in spread.dims):
        return mixing(node, joined).over(spread.dims)
    return joined.like(spread)


def product(node: fx.Node, lookup: Lookup) -> Spread:
    """mm, addmm, bmm, mv: a summed carrying dim pools; two free ones mix every pair of samples."""
    arguments = node.args[1:3] if "add" in str(node.target) else node.args[:2]
    left, right = (lookup(item) for item in arguments)
    rank = rank_of(node)
    joined = join([lookup(source) for source in node.all_input_nodes])
    summed = (rank - 1 in left.dims) or (rank_of(arguments[1]) - 2 in right.dims)
    rows = {dim for dim in left.dims if dim != rank_of(arguments[0]) - 1}
    columns = {rank - 1} if rank_of(arguments[1]) - 1 in right.dims else set()
    columns |= {dim for dim in right.dims if dim < rank - 2}
    if joined.pooled and not (left.pooled or not left.batch) & (right.pooled or not right.batch):
        return mixing(node, joined).over(rows | columns)
    if summed or (rank - 2 in rows and rank - 1 in columns):
        return mixing(node, joined).over(rows | columns)
    places = {dim: left.place_of(dim) for dim in rows} | dict.fromkeys(columns - rows, (1, 0))
    return joined.at(places)


def images(node: fx.Node, lookup: Lookup) -> Spread:
    """Convolution, pooling, resizing: the first dim is free, neighbours meet in all others."""
    spread = lookup(node.args[0])
    joined = join([lookup(source) for source in node.all_input_nodes])
    if spread.dims - {0} or any(lookup(source).pooled for source in node.all_input_nodes):
        return mixing(node, joined).over(spread.dims)
    return joined.like(spread)


def matrices(node: fx.Node, lookup: Lookup) -> Spread:
    """Functions of the matrices in the last two dims."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    spreads = [(lookup(source), rank_of(source)) for source in node.all_input_nodes]
    if any(dim >= rank - 2 for spread, rank in spreads for dim in spread.dims):
        return mixing(node, joined).like(lookup(node.args[0]))
    return joined.like(lookup(node.args[0]))


def batch_norm(node: fx.Node, lookup: Lookup) -> Spread:
    """In training, every channel (dim 1) is normalised by its own statistics, of all rows."""
    spread, training = lookup(node.args[0]), node.args[5]
    statistics = [item for item in node.args[1:5] if isinstance(item, fx.Node)]
    found = spread_movement.like_first(node, lookup)
    if training and spread.dims - {1}:
        return mixing(node, spread)
    if told_apart(statistics, {0: spread.place_of(1)} if 1 in spread.dims else {}, 1, lookup):
        return mixing(node, found).like(found)
    return found


def loss(node: fx.Node, lookup: Lookup) -> Spread:
    """Losses with a reduction argument: 0 keeps the rows, 1 (mean) and 2 (sum) pool them."""
    parts = [lookup(source) for source in node.all_input_nodes]
    joined, first = join(parts), lookup(node.args[0])
    nll = packet(node) in (aten.nll_loss_forward, aten.nll_loss2d_forward)
    if any(part.pooled for part in parts) or (nll and 1 in first.dims) or beside(node, lookup):
        return mixing(node, joined)
    rows = first.moved(lambda dim: dim - (nll and dim > 1))  # as in the target
    target = [item for item in node.args[:2] if isinstance(item, fx.Node)]
    if told_apart(target[nll:], dict(rows.places), rank_of(node.args[1]), lookup):
        return mixing(node, joined)
    if reduction_of(node) == 0:
        return joined.like(rows)
    if joined.single and not any(part.dims for part in parts):  # of one sample alone
        return joined.over(set())
    return replace(joined.over(set()), pooled=True)


def hoisted(node: fx.Node, lookup: Lookup) -> Spread:
    """Where a helper's results carry samples is not known."""
    return Spread(batch=True)


def created(node: fx.Node, lookup: Lookup) -> Spread:
    """Its values depend on the shape of its argument alone."""
    return NOTHING


def attention(node: fx.Node, lookup: Lookup) -> Spread:
    """Out and lse go with the queries. Samples among queries or keys need a mask from the batch."""
    parts = [lookup(item) for item in node.args[:3]]
    joined = join([lookup(source) for source in node.all_input_nodes])
    out = parts[0].moved(lambda dim: dim if dim < 3 else None)
    masks = [item for item in node.args[3:6] if isinstance(item, fx.Node)]
    places = {part.place_of(dim) for part in parts for dim in part.dims & {2, 3}}
    packed = any(lookup(item).batch for item in masks)
    if places and not packed and (not masks or any(size for _, size in places)):
        return mixing(node, joined).like(out)
    return joined.like(out)


def triangle(node: fx.Node, lookup: Lookup) -> Spread:
    """Of tril and triu: which rows stay depends on their places in the last two dims."""
    spread = lookup(node.args[0])
    rank = rank_of(node)
    return ranking(node, spread) if spread.dims & {rank - 1, rank - 2} else spread


RULES: dict[Any, Rule] = {
    **spread_movement.RULES,
    **dict.fromkeys((aten._to_copy, aten.clone, aten.alias, aten.detach, aten.where), pointwise),
    **dict.fromkeys((aten.fill, aten.lift_fresh_copy, aten.copy, aten.masked_fill), pointwise),
    **dict.fromkeys((aten.native_dropout, aten.bucketize), pointwise),
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all), reduction),
    **dict.fromkeys((aten.var, aten.std, aten.logsumexp, aten.prod, aten.count_nonzero), reduction),
    **dict.fromkeys((aten.argmax, aten.argmin, aten.max, aten.min), reduction),
    **dict.fromkeys((aten._softmax, aten._safe_softmax, aten._log_softmax), along),
    **dict.fromkeys((aten.cumsum, aten.cumprod), along),
    **dict.fromkeys((aten.rand_like, aten.randn_like), spread_movement.like_first),
    **dict.fromkeys((aten.sort, aten.topk), along),
    aten.native_layer_norm: layer_norm,
    aten.native_group_norm: spread_movement.like_first,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv), product),
    **dict.fromkeys((aten.convolution, aten.avg_pool2d, aten.im2col, aten.unfold), images),
    **dict.fromkeys((aten.upsample_linear1d, aten.upsample_bilinear2d), images),
    **dict.fromkeys((aten.upsample_bicubic2d, aten.grid_sampler_2d), images),
    **dict.fromkeys((aten._adaptive_avg_pool2d, aten.avg_pool1d), images),
    **dict.fromkeys((aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle), images),
    **dict.fromkeys((aten.linalg_solve_triangular, aten.linalg_inv_ex), matrices),
    **dict.fromkeys((aten.tril, aten.triu), triangle),
    aten.diag_embed: spread_movement.like_first,
    aten.native_batch_norm: batch_norm,
    aten.cudnn_batch_norm: batch_norm,
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), loss),
    **dict.fromkeys((aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss), loss),
    **dict.fromkeys((aten.binary_cross_entropy_with_logits, aten.binary_cross_entropy), loss),
    mllm.hoisted: hoisted,
    mllm.attention: attention,
    mllm.mask: spread_movement.like_first,
    mllm.mask_intervals: spread_movement.like_first,
    mllm.grouped_mm: spread_movement.like_first,
    mllm.function: spread_movement.like_first,
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), created),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), created),
}
