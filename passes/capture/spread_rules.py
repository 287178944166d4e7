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
from mllm_compile.kernels.attention import mask, op
from mllm_compile.passes.capture import hoisted_calls, opaque_function, spread_movement
from mllm_compile.passes.capture.spread import (
    NOTHING,
    Lookup,
    Rule,
    Spread,
    join,
    mixing,
    of_input,
    packet,
    rank_of,
    reduced_dims,
    reduction_of,
    value_of,
)

aten = torch.ops.aten
mllm = torch.ops.mllm
REGISTERED = (grouped_mm, mask, op, hoisted_calls, opaque_function)  # they define the operators


def spreads(nodes: Iterable[fx.Node], placeholders: dict[fx.Node, Input]) -> dict[fx.Node, Spread]:
    """The spread of every node, in order; one with several results has that of them together."""
    found: dict[fx.Node, Spread] = {}
    for node in nodes:
        if node.op == "placeholder":
            found[node] = of_input(placeholders[node], value_of(node))
        elif node.op == "call_function":
            found[node] = _of_call(node, found)
    return found


def _of_call(node: fx.Node, found: dict[fx.Node, Spread]) -> Spread:
    def lookup(argument: Any) -> Spread:
        return found[argument] if isinstance(argument, fx.Node) else NOTHING

    joined = join([found[source] for source in node.all_input_nodes])
    if not joined.batch:
        return joined
    rule = _rule(node)
    spread = mixing(node, joined) if rule is None else rule(node, lookup)
    return replace(spread, mixed="") if _without_floats(node) else spread


def _rule(node: fx.Node) -> Rule | None:
    target: Any = node.target
    if target is operator.getitem:
        return item_of
    packet = getattr(target, "overloadpacket", None)
    if packet in RULES:
        return RULES[packet]
    tags = getattr(target, "tags", ())
    return pointwise if torch.Tag.pointwise in tags else None


def _without_floats(node: fx.Node) -> bool:
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return not any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def pointwise(node: fx.Node, lookup: Lookup) -> Spread:
    """Broadcasting: dims are aligned from the right. Rows with a pooled value mix."""
    rank = max((rank_of(source) for source in node.all_input_nodes), default=0)
    parts = [lookup(source) for source in node.all_input_nodes]
    places: dict[int, tuple[int, int]] = {}
    for source, part in zip(node.all_input_nodes, parts, strict=True):
        for dim in part.dims:
            new, (outer, size) = dim + rank - rank_of(source), part.place_of(dim)
            if new in places and places[new][0] != outer:  # one dim, in different orders
                return mixing(node, join(parts)).over(places)
            places[new] = (outer, max(size, places.get(new, (outer, size))[1]))
    joined = join(parts)
    pooled = any(part.pooled for part in parts)
    rows = any(part.batch and not part.pooled for part in parts)
    if pooled and rows and not _scales(node, lookup):
        return mixing(node, joined).over(places)
    if joined.single and any(part.dims and not part.single for part in parts):
        return mixing(node, joined).over(places)
    return replace(joined.at(places), pooled=pooled and not rows)


def _scales(node: fx.Node, lookup: Lookup) -> bool:
    """Rows times or divided by a scalar of inputs alone: that scalar can be made global."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) < 2:
        return False
    return scaling_factor(node, lookup) is not None


def scaling_factor(node: fx.Node, lookup: Lookup) -> fx.Node | None:
    """The pooled scalar of inputs alone by which a product or quotient scales its rows."""
    last = node.args[1]
    candidates = [last] if node.target is aten.div.Tensor else [last, node.args[0]]
    for factor in candidates:
        if isinstance(factor, fx.Node) and value_of(factor).dim() == 0:
            spread = lookup(factor)
            if spread.pooled and spread.known and not spread.mixed:
                return factor
    return None


def reduction(node: fx.Node, lookup: Lookup) -> Spread:
    """Over carrying dims: pooled. What remains keeps its order."""
    spread, over = lookup(node.args[0]), reduced_dims(node)
    keep = (len(node.args) > 2 and bool(node.args[2])) or bool(node.kwargs.get("keepdim"))
    rest = [dim for dim in range(rank_of(node.args[0])) if dim not in over]
    left = spread.moved(lambda dim: None if dim in over else dim if keep else rest.index(dim))
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
    """In training, every row is normalised by the statistics of all rows."""
    training = node.args[5]
    return (
        mixing(node, lookup(node.args[0])) if training else spread_movement.like_first(node, lookup)
    )


def loss(node: fx.Node, lookup: Lookup) -> Spread:
    """Losses with a reduction argument: 0 keeps the rows, 1 (mean) and 2 (sum) pool them."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    first = lookup(node.args[0])
    nll = packet(node) in (aten.nll_loss_forward, aten.nll_loss2d_forward)
    reduce = reduction_of(node)
    if any(lookup(source).pooled for source in node.all_input_nodes) or (nll and 1 in first.dims):
        return mixing(node, joined)
    if reduce == 0:
        gone = 1 if nll and packet(node) is aten.nll_loss_forward else None
        return joined.like(first.moved(lambda dim: None if dim == gone else dim))
    return replace(joined.over(set()), pooled=True)


def item_of(node: fx.Node, lookup: Lookup) -> Spread:
    """getitem: one of several results, all with the spread of their node."""
    return lookup(node.args[0])


def hoisted(node: fx.Node, lookup: Lookup) -> Spread:
    """Where a helper's results carry samples is not known."""
    return Spread(batch=True)


def created(node: fx.Node, lookup: Lookup) -> Spread:
    """Its values depend on the shape of its argument alone."""
    return NOTHING


def attention(node: fx.Node, lookup: Lookup) -> Spread:
    """Out and lse go with the queries."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    return joined.over({dim for dim in lookup(node.args[0]).dims if dim < 3})


RULES: dict[Any, Rule] = {
    **spread_movement.RULES,
    **dict.fromkeys((aten._to_copy, aten.clone, aten.alias, aten.detach, aten.where), pointwise),
    **dict.fromkeys((aten.fill, aten.lift_fresh_copy, aten.copy, aten.masked_fill), pointwise),
    **dict.fromkeys((aten.native_dropout, aten.bucketize), pointwise),
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all), reduction),
    **dict.fromkeys((aten.var, aten.std, aten.logsumexp, aten.prod, aten.count_nonzero), reduction),
    **dict.fromkeys((aten.argmax, aten.argmin, aten.max, aten.min), reduction),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten.cumsum, aten.cumprod), along),
    **dict.fromkeys((aten.sort, aten.topk), along),
    aten.native_layer_norm: layer_norm,
    aten.native_group_norm: spread_movement.like_first,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv), product),
    **dict.fromkeys((aten.convolution, aten.avg_pool2d, aten.im2col, aten.unfold), images),
    **dict.fromkeys((aten.upsample_linear1d, aten.upsample_bilinear2d), images),
    **dict.fromkeys((aten.upsample_bicubic2d, aten.grid_sampler_2d), images),
    **dict.fromkeys((aten._adaptive_avg_pool2d, aten.avg_pool1d), images),
    **dict.fromkeys((aten.linalg_solve_triangular, aten.linalg_inv_ex), matrices),
    **dict.fromkeys((aten.tril, aten.triu, aten.diag_embed), spread_movement.like_first),
    aten.native_batch_norm: batch_norm,
    aten.cudnn_batch_norm: batch_norm,
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), loss),
    **dict.fromkeys((aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss), loss),
    **dict.fromkeys((aten.binary_cross_entropy_with_logits, aten.binary_cross_entropy), loss),
    mllm.hoisted: hoisted,
    mllm.attention: attention,
    mllm.mask: spread_movement.like_first,
    mllm.grouped_mm: spread_movement.like_first,
    mllm.function: spread_movement.like_first,
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), created),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), created),
}
