"""``mllm::context_attention``: attention of a sequence that the ranks of an axis have divided.

Every rank fetches the keys that its queries see, and no others, in one all-to-all; while they
travel it attends to its own, and then joins both by their log-sum-exp. The backward fetches them
once more (nothing that was fetched is kept) and returns their gradients the same way, added in the
order of ranks. Which keys these are follows from the intervals alone, on the host, once per mask.

Source: MagiAttention (arXiv 2505.13211) fetches what is needed, too.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mllm_compile.compiler.split import Split
from mllm_compile.kernels.attention import partial, reference
from mllm_compile.kernels.attention.by_token import by_token, empty_by_token
from mllm_compile.kernels.attention.kernel import backward_of
from mllm_compile.kernels.attention.key_exchange import KeyExchange, key_exchange, shared
from mllm_compile.kernels.attention.shared_runs import once, visible
from mllm_compile.kernels.collective.members import Member, member

Exchanges = tuple[KeyExchange, ...]
Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


def _exchanges(
    intervals: Tensor | None, causal: bool, queries: str, keys: str, q: Tensor, me: Member
) -> Exchanges:
    """Those of every sample, or the one of all; made once per mask."""
    splits = Split.parse(queries), Split.parse(keys)

    def made_of(seen: Tensor) -> Exchanges:
        return tuple(key_exchange(each, *splits, me.place).on(q.device) for each in seen)

    shape = splits[0].length, splits[1].length, causal
    key = "exchange", me.place, queries, keys, causal
    if intervals is None:
        whole = visible(None, *shape, torch.device("cpu"))
        return once(whole, (*key, q.device), lambda: made_of(whole))
    return once(
        intervals, key, lambda: made_of(visible(intervals.cpu(), *shape, torch.device("cpu")))
    )


class _Fetch:
    """The keys and values of other ranks on their way here, and their gradients on the way back."""

    def __init__(self, k: Tensor, v: Tensor, exchanges: Exchanges, me: Member) -> None:
        self.me, self.size = me, k.shape[-1]
        self.groups = shared(exchanges, k.shape[0])
        self.k, self.v = k, v
        parts = [self._packed(rank) for rank in range(me.size)]
        shapes = [[sum(map(prod, self._arriving(rank)))] for rank in range(me.size)]
        self._wait = me.communicator.start_all_to_all(parts, shapes)

    def _packed(self, rank: int) -> Tensor:
        rows = [
            torch.cat([x[at].index_select(2, each.sends[rank]) for x in (self.k, self.v)], -1)
            for at, each in self.groups
        ]
        return _flat(rows)

    def _shape(self, at: slice, keys: int) -> list[int]:
        batch, heads, _, size = self.k[at].shape
        return [batch, heads, keys, size + self.v.shape[-1]]

    def _arriving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, each.counts[rank]) for at, each in self.groups]

    def _leaving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, len(each.sends[rank])) for at, each in self.groups]

    def fetched(self) -> list[Pair]:
        """By group of samples: the keys and values that came, in the order of the sequence."""
        by_rank = [_cut(part, self._arriving(rank)) for rank, part in enumerate(self._wait())]
        found = []
        for place, (_, each) in enumerate(self.groups):
            both = _sorted(torch.cat([parts[place] for parts in by_rank], 2), each.fetched_order)
            found.append((both[..., : self.size], both[..., self.size :]))
        return found

    def own(self) -> list[Pair]:
        """By group: the keys and values at hand, in the order of the sequence."""
        return [
            (_sorted(self.k[at], each.own_order), _sorted(self.v[at], each.own_order))
            for at, each in self.groups
        ]

    def returned(self, own: Sequence[Pair], fetched: Sequence[Pair]) -> Pair:
        """Gradients of the own keys and values: of those at hand, and what other ranks made.

        Both are given in the accumulation dtype, in which they are summed; they travel in that of
        the keys.
        """
        back: list[list[Tensor]] = [[] for _ in range(self.me.size)]
        for (_, each), grads in zip(self.groups, fetched, strict=True):
            made = _unsorted(torch.cat(grads, -1).to(self.k.dtype), each.fetched_order)
            for rank, part in enumerate(torch.split(made, list(each.counts), 2)):
                back[rank].append(part)
        leaving = [self._leaving(rank) for rank in range(self.me.size)]
        parts = self.me.communicator.all_to_all(
            list(map(_flat, back)), [[sum(map(prod, each))] for each in leaving]
        )
        totals = [
            (_unsorted(grad_k, each.own_order), _unsorted(grad_v, each.own_order))
            for (_, each), (grad_k, grad_v) in zip(self.groups, own, strict=True)
        ]
        for rank, part in enumerate(parts):
            pieces = _cut(part, leaving[rank])
            for pair, (_, each), piece in zip(totals, self.groups, pieces, strict=True):
                sizes = [self.size, piece.shape[-1] - self.size]
                for total, more in zip(pair, piece.split(sizes, -1), strict=True):
                    total.index_add_(2, each.sends[rank], more.to(total.dtype))
        grads_k, grads_v = zip(*totals, strict=True)
        return _joined(grads_k, 0), _joined(grads_v, 0)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Their elements, one tensor behind the other."""
    return _joined([part.reshape(-1) for part in parts], 0)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _cut(part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes that stand one behind the other in a flat one."""
    flat = torch.split(part, list(map(prod, shapes)))
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


def _sorted(x: Tensor, order: Tensor | None) -> Tensor:
    """The keys of ``x`` in the order of the sequence; ``x`` itself where they stand so."""
    return x if order is None else x.index_select(2, order)


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    """What ``_sorted`` made ``x`` of."""
    return x if order is None else torch.empty_like(x).index_copy_(2, order, x)


@torch.library.custom_op("mllm::context_attention", mutates_args=())
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    axis: str,
    queries: str,
    keys: str,
    kernel: str = "",
) -> tuple[Tensor, Tensor]:
    """``mllm::attention`` of this rank's queries to the whole sequence.

    Args:
        q: this rank's queries [B, H, q, D].
        k: this rank's keys [B, G, k, D].
        v: their values [B, G, k, E].
        intervals: int32 [B|1, Q, n, 2] of all Q queries, in the order of the sequence.
        causal: whether query i sees no key behind i, too.
        scale: of the scores.
        softcap: as in ``reference.attention``; 0 means none.
        axis: the mesh axis.
        queries: the split of the Q queries along it, as text.
        keys: that of the keys.
        kernel: as of ``mllm::attention``, for the attention to every part of the keys.

    Returns:
        out [B, H, q, E] and the log-sum-exp [B, H, q].

    """
    me = member(axis)
    fetch = _Fetch(k, v, _exchanges(intervals, causal, queries, keys, q, me), me)

    def attend(keyed: Pair, at: slice, mask: Tensor) -> Pair:
        return partial.attention(q[at], *keyed, mask, scale, softcap, kernel)

    made = [
        attend(own, at, each.own) for own, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    for place, (keyed, (at, each)) in enumerate(zip(fetch.fetched(), fetch.groups, strict=True)):
        if sum(each.counts):
            made[place] = reference.merged([made[place], attend(keyed, at, each.fetched)])
    out = _joined([out for out, _ in made], 0).to(q.dtype)
    return by_token(out), torch.cat([lse for _, lse in made]).contiguous()


@context_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=reference.accumulation_dtype(q.dtype))
    return empty_by_token(q, v.shape[3]), lse


@torch.library.custom_op("mllm::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    axis: str,
    queries: str,
    keys: str,
    kernel: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, each in the shape of its input."""
    me = member(axis)
    fetch = _Fetch(k, v, _exchanges(intervals, causal, queries, keys, q, me), me)

    def differentiate(keyed: Pair, at: slice, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = grad_out[at], None if grad_lse is None else grad_lse[at]
        return partial.attention_backward(
            *given, q[at], *keyed, out[at], lse[at], mask, scale, softcap, kernel
        )

    own = [
        differentiate(keyed, at, each.own)
        for keyed, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    grads_q = [grad_q for grad_q, _, _ in own]
    fetched = []
    for place, (keyed, (at, each)) in enumerate(zip(fetch.fetched(), fetch.groups, strict=True)):
        pair = keyed  # without keys, as their gradients are
        if sum(each.counts):
            more, *pair = differentiate(keyed, at, each.fetched)
            grads_q[place] = grads_q[place] + more
        fetched.append(pair)
    grad_k, grad_v = fetch.returned([(g[1], g[2]) for g in own], fetched)
    grads = (_joined(grads_q, 0).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype))
    return by_token(grads[0]), by_token(grads[1]), by_token(grads[2])


@context_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(empty_by_token(x, x.shape[3]) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, intervals, *ctx.terms, ctx.kernel = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, intervals)


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, intervals = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    kernel = backward_of(ctx.kernel, q, k, v, intervals, None, None, *ctx.terms[1:3])
    grads = context_attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, intervals, *ctx.terms, kernel
    )
    return (*grads, *[None] * 8)


context_attention.register_autograd(_gradient, setup_context=_setup_context)


def _pairs(q: Any, keys: str) -> int:
    return 2 * int(q[0]) * int(q[1]) * int(q[2]) * Split.parse(keys).length


@register_flop_formula(torch.ops.mllm.context_attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Every pair of an own query and a key of the sequence, as ``mllm::attention`` counts."""
    return _pairs(q, rest[6]) * int(q[3] + v[3])


@register_flop_formula(torch.ops.mllm.context_attention_backward)
def _backward_flops(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None,
    **kwargs: Any,
) -> int:  # fmt: skip
    return _pairs(q, rest[8]) * int(3 * q[3] + 2 * v[3])
