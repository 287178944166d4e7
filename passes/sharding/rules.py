"""The rule of every operator: one line in factor notation, or one function of the call's shapes.

From a rule everything else follows: the strategies of a node (strategies.py), the factors that
neighbours share (refine.py). An operator without a rule runs whole on every rank, and the plan says
so; ``WHOLE`` names those that cannot have one, with the reason.
"""

from torch import fx

from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.factors import Factors, parse
from mllm_compile.passes.sharding.rules_dims import (
    along,
    joined,
    padded,
    put_in,
    reduced,
    slice_scatter,
    sliced,
    stacked,
    taken_out,
    triangle,
    unfold,
)
from mllm_compile.passes.sharding.rules_index import (
    gather,
    index,
    index_add,
    index_put,
    index_select,
    masked_scatter,
    scatter,
    search,
)
from mllm_compile.passes.sharding.rules_pointwise import (
    Rule,
    creation,
    fill,
    linear,
    pointwise,
    product,
    quotient,
    total,
)
from mllm_compile.passes.sharding.rules_products import (
    attention,
    convolution,
    histogram,
    layer_norm,
    loss,
    triangular_solve,
)
from mllm_compile.passes.sharding.rules_views import (
    expand,
    permute,
    repeat,
    squeeze,
    unsqueeze,
    view,
)


def _packets(names: str) -> list[str]:
    return [f"aten::{name}" for name in names.split()]


_CREATION = _packets("full zeros ones arange scalar_tensor new_full new_zeros new_ones new_empty")
_LINEAR = _packets("neg clone alias detach _to_copy lift_fresh_copy")
_POINTWISE = _packets(
    "abs bitwise_and bitwise_not bitwise_or ceil clamp copy cos empty_like eq erf exp fill floor "
    "floor_divide full_like ge gelu gt isnan le log logical_and logical_not logical_or lt maximum "
    "minimum ne ones_like polar pow reciprocal relu remainder rsqrt rsub sigmoid sign silu sin "
    "softplus sqrt tanh zeros_like"
)

RULES: dict[str, Rule] = {
    # products
    "aten::mm": "m k, k n -> m n | 0; 1",
    "aten::addmm": "+n, m k, k n -> m n | 0+1; 0+2",
    "aten::bmm": "b m k, b k n -> b m n | 0; 1",
    "aten::convolution": convolution,
    "aten::linalg_solve_triangular": triangular_solve,
    "mllm::attention": attention,
    "mllm::grouped_mm": "t! k, e* k n, q! -> t! n | 0; 1",
    # normalisation and loss
    "aten::native_layer_norm": layer_norm,
    "aten::_softmax": along("dim", same="*"),
    "aten::_log_softmax": along("dim", same="*"),
    "aten::nll_loss_forward": loss,
    # views
    "aten::view": view,
    "aten::_unsafe_view": view,
    "aten::expand": expand,
    "aten::repeat": repeat,
    "aten::t": permute,
    "aten::transpose": permute,
    "aten::permute": permute,
    "aten::unsqueeze": unsqueeze,
    "aten::squeeze": squeeze,
    "aten::view_as_complex": "... c! -> ... | 0",
    "aten::view_as_real": "... -> ... c! | 0",
    # along a dim
    "aten::slice": sliced,
    "aten::constant_pad_nd": padded,
    "aten::upsample_linear1d": "n c h! -> n c e! | 0",
    "aten::select": taken_out,
    "aten::unbind": taken_out,
    "aten::split": along("dim", "0"),
    "aten::split_with_sizes": along("dim", "0"),
    "aten::cat": joined,
    "aten::stack": stacked,
    "aten::flip": along("dims", "0"),
    "aten::cumsum": along("dim", "0"),
    "aten::sort": along("dim"),
    "aten::topk": along("dim"),
    "aten::triu": triangle,
    "aten::tril": triangle,
    "aten::unfold": unfold,
    "aten::select_scatter": put_in,
    "aten::slice_scatter": slice_scatter,
    # reductions
    "aten::sum": reduced("", "0"),
    "aten::mean": reduced("", "0"),
    "aten::any": reduced("!"),
    "aten::all": reduced("!"),
    "aten::amax": reduced("!"),
    "aten::amin": reduced("!"),
    "aten::argmax": reduced("!"),
    "aten::max": reduced("!"),
    "aten::min": reduced("!"),
    "aten::prod": reduced("!"),
    "aten::histc": histogram,
    # images
    "aten::im2col": "... c! h! w! -> ... k! l! | 0",
    "aten::avg_pool2d": "... h! w! -> ... i! j! | 0",
    "aten::_adaptive_avg_pool2d": "... h! w! -> ... i! j! | 0",
    "aten::grid_sampler_2d": "n c h! w!, n i! j! t! -> n c i! j! | 0",
    # look-ups
    "aten::embedding": "v* h, ... -> ... h | 0",
    "aten::index": index,
    "aten::index_put": index_put,
    "aten::index_select": index_select,
    "aten::index_add": index_add,
    "aten::gather": gather,
    "aten::scatter": scatter,
    "aten::masked_scatter": masked_scatter,
    "aten::searchsorted": search,
    "aten::bucketize": "..., t! -> ...",
    **dict.fromkeys(_CREATION, creation),
    # pointwise
    "aten::add": total,
    "aten::sub": total,
    "aten::mul": product,
    "aten::div": quotient,
    "aten::where": linear("1+2"),
    "aten::masked_fill": fill,
    **dict.fromkeys(_LINEAR, linear("0")),
    **dict.fromkeys(_POINTWISE, pointwise),
}

WHOLE = {
    "aten::_embedding_bag": "bags of any length stand one behind the other",
    "aten::nonzero_static": "which places are kept depends on all elements before them",
    "mllm::function": "a function of the model, of which nothing is known",
    "mllm::hoisted": "a call of the model, of which nothing is known",
    "mllm::mask": "a predicate over places: every part would need to know where it begins",
    "mllm::mask_intervals": "a predicate over places, as well",
}


def name_of(node: fx.Node) -> str:
    """``aten::mm`` of a computing node, without the overload."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else str(node.target)


def factors_of(node: fx.Node) -> Factors | None:
    """The factors of a computing node by its rule; None if the call has none.

    Groups in which only continuous numbers are linear are kept for those alone.
    """
    rule = RULES.get(name_of(node))
    if rule is None:
        return None
    call = Call.of(node)
    text = rule if isinstance(rule, str) else rule(call)
    if text is None:
        return None
    body, _, groups = text.partition("|")
    kept = [group for group in groups.split(";") if _continuous(call, group)]
    return parse(f"{body}|{';'.join(kept)}", call.inputs, call.results)


def _continuous(call: Call, group: str) -> bool:
    numbers = [int(number) for number in group.split("+") if number.strip()]
    return call.floating and all(call.continuous(number) for number in numbers)
