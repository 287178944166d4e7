"""``mllm::convert``: one operator for every change of a value's layout along one mesh axis.

====== ==================== ====================
from   to R or V            others
====== ==================== ====================
R, V   a copy               P: kept at place 0, zero elsewhere; S: cut
P      all-reduce           S: reduce-scatter
S      all-gather           P: padded with zeros; S: all-to-all
====== ==================== ====================

All tensors are local. Results are new and contiguous; an equal layout is a copy. The backward is
the conversion that the law of compiler/layout.py names: no collective has a backward of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mllm_compile.compiler.layout import Layout, adjoint
from mllm_compile.compiler.split import Split
from mllm_compile.kernels.collective.division import Division, exchange, pick
from mllm_compile.kernels.collective.members import Member, member


def _division(layout: str, split: str, unit: int) -> Division | None:
    parsed = Layout.parse(layout)
    return Division(parsed, Split.parse(split), unit) if parsed.divided else None


@torch.library.custom_op("mllm::convert", mutates_args=())
def convert(
    x: Tensor,
    have: str,
    want: str,
    axis: str,
    split_have: str = "",
    split_want: str = "",
    unit_have: int = 0,
    unit_want: int = 0,
) -> Tensor:
    """Local value in layout ``have`` -> local value in layout ``want``.

    Layouts are texts whose ``outer`` counts elements of the local tensor; for an ``S`` its split
    (as text) and unit are given too, so that the dim of the whole tensor is outer x size x unit.
    """
    source = _division(have, split_have, unit_have)
    target = _division(want, split_want, unit_want)
    me = member(axis)
    if (have, split_have) == (want, split_want):
        return x.clone(memory_format=torch.contiguous_format)
    if source is None:
        return _from_whole(x, have, want, target, me)
    if target is None and want == "P":
        return source.pad(x, me.place)
    if target is None:
        shapes = [source.shape(x.shape, place) for place in range(me.size)]
        return source.join(me.communicator.all_gather(x.contiguous(), shapes))
    return _all_to_all(x, source, target, me)


def _from_whole(x: Tensor, have: str, want: str, target: Division | None, me: Member) -> Tensor:
    if have == "P":
        if target is not None:
            parts = [target.cut(x, place) for place in range(me.size)]
            return me.communicator.reduce_scatter(parts).contiguous()
        return me.communicator.all_reduce(x.contiguous()).contiguous()
    if target is not None:
        return target.cut(x, me.place)
    if want == "P" and me.place != 0:
        return x.new_zeros(x.shape)
    return x.clone(memory_format=torch.contiguous_format)


def _all_to_all(x: Tensor, source: Division, target: Division, me: Member) -> Tensor:
    """Between two dims every rank cuts and joins; within one, elements are picked one by one."""
    ranks = range(me.size)
    if source.dim != target.dim:
        parts = [target.cut(x, place) for place in ranks]
        own = target.shape(x.shape, me.place)
        shapes = [source.shape(own, place) for place in ranks]
        return source.join(me.communicator.all_to_all(parts, shapes))
    dim = source.dim
    sends, counts, order = exchange(source, target, me.place)
    parts = [pick(x, dim, places) for places in sends]
    shapes = [[*x.shape[:dim], count, *x.shape[dim + 1 :]] for count in counts]
    return pick(torch.cat(me.communicator.all_to_all(parts, shapes), dim), dim, order)


@convert.register_fake
def _(
    x: Tensor,
    have: str,
    want: str,
    axis: str,
    split_have: str = "",
    split_want: str = "",
    unit_have: int = 0,
    unit_want: int = 0,
) -> Tensor:
    source = _division(have, split_have, unit_have)
    target = _division(want, split_want, unit_want)
    place, shape = member(axis).place, list(x.shape)
    if source is not None:
        _check(shape, source, source.length(place), have)
        shape = source.shape(shape)
    if target is not None:
        _check(shape, target, target.length(), want)
        shape = target.shape(shape, place)
    return x.new_empty(shape)


def _check(shape: list[int], division: Division, expected: int, layout: str) -> None:
    """ValueError where the dim does not have the length that layout, split and unit give it."""
    if division.dim >= len(shape) or shape[division.dim] != expected:
        raise ValueError(
            f"convert: {layout} with split {division.split} and unit {division.unit} expects "
            f"{expected} elements in dim {division.dim}, got {shape}"
        )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, have, want, ctx.axis, *ctx.division = inputs
    ctx.layouts = adjoint(Layout.parse(have), Layout.parse(want))


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    have, want = map(str, ctx.layouts)
    split_have, split_want, unit_have, unit_want = ctx.division
    back = convert(grad, have, want, ctx.axis, split_want, split_have, unit_want, unit_have)
    return (back, *[None] * 7)


convert.register_autograd(_gradient, setup_context=_setup_context)


@register_flop_formula(torch.ops.mllm.convert)
def _flops(*args: Any, **kwargs: Any) -> int:
    """Nothing is multiplied."""
    return 0
