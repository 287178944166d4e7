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
from mllm_compile.kernels.attention import op, reference
from mllm_compile.kernels.attention.by_token import by_token, empty_by_token
from mllm_compile.kernels.attention.kernel import backward_of
from mllm_compile.kernels.attention.key_exchange import KeyExchange, key_exchange, shared
from mllm_compile.kernels.attention.shared_runs import once, visible
from mllm_compile.kernels.collective.members import Member, member

Exchanges = tuple[KeyExchange, ...]


def _exchanges(
    intervals: Tensor | None, causal: bool, queries: str, keys: str, q: Tensor, me: Member
) -> Exchanges:
    """Those of every sample, or the one of all; made once per mask."""
    splits = Split.parse(queries), Split.parse(keys)
    seen = visible(intervals, splits[0].length, splits[1].length, causal, q.device)

    def make() -> Exchanges:
        return tuple(key_exchange(each, *splits, me.place).on(q.device) for each in seen.cpu())

    return once(seen, ("exchange", me.place, queries, keys), make)


class _Fetch:
    """The keys and values of other ranks on their way here, and their gradients on the way back."""

    def __init__(self, k: Tensor, v: Tensor, exchanges: Exchanges, me: Member) -> None:
        self.me, self.size = me, k.shape[-1]
        self.groups = shared(exchanges, k.shape[0])
        self.k, self.v = k, v
        both = torch.cat([k, v], -1)
        parts = [self._packed(both, rank) for rank in range(me.size)]
        shapes = [[sum(map(prod, self._arriving(rank)))] for rank in range(me.size)]
        self._wait = me.communicator.start_all_to_all(parts, shapes)

    def _packed(self, both: Tensor, rank: int) -> Tensor:
        rows = [both[at].index_select(2, each.sends[rank]).flatten() for at, each in self.groups]
        return torch.cat(rows)

    def _shape(self, at: slice, keys: int) -> list[int]:
        batch, heads, _, size = self.k[at].shape
        return [batch, heads, keys, size + self.v.shape[-1]]

    def _arriving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, each.counts[rank]) for at, each in self.groups]

    def _leaving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, len(each.sends[rank])) for at, each in self.groups]

    def fetched(self) -> list[tuple[Tensor, Tensor]]:
        """By group of samples: the keys and values that came, in the order of the sequence."""
        by_rank = [_cut(part, self._arriving(rank)) for rank, part in enumerate(self._wait())]
        found = []
        for place, (_, each) in enumerate(self.groups):
            both = torch.cat([parts[place] for parts in by_rank], 2)
            both = both.index_select(2, each.fetched_order)
            found.append((both[..., : self.size], both[..., self.size :]))
        return found

    def own(self) -> list[tuple[Tensor, Tensor]]:
        """By group: the keys and values at hand, in the order of the sequence."""
        return [
            (
                self.k[at].index_select(2, each.own_order),
                self.v[at].index_select(2, each.own_order),
            )
            for at, each in self.groups
        ]

    def returned(
        self, own: Sequence[tuple[Tensor, Tensor]], fetched: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the own keys and values: of those at hand, and what other ranks made."""
        back: list[list[Tensor]] = [[] for _ in range(self.me.size)]
        for (_, each), grads in zip(self.groups, fetched, strict=True):
            unsorted = _as_before(torch.cat(grads, -1), each.fetched_order)
            for rank, part in enumerate(torch.split(unsorted, list(each.counts), 2)):
                back[rank].append(part.flatten())
        leaving = [self._leaving(rank) for rank in range(self.me.size)]
        parts = self.me.communicator.all_to_all(
            [torch.cat(each) for each in back], [[sum(map(prod, each))] for each in leaving]
        )
        made = [
            _as_before(torch.cat(grads, -1), each.own_order)
            for (_, each), grads in zip(self.groups, own, strict=True)
        ]
        for rank, part in enumerate(parts):
            pieces = _cut(part, leaving[rank])
            for total, (_, each), piece in zip(made, self.groups, pieces, strict=True):
                total.index_add_(2, each.sends[rank], piece)
        every = torch.cat(made)
        return every[..., : self.size].clone(), every[..., self.size :].clone()


def _cut(part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes that stand one behind the other in a flat one."""
    flat = torch.split(part, list(map(prod, shapes)))
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


def _as_before(x: Tensor, order: Tensor) -> Tensor:
    """What ``index_select(2, order)`` made ``x`` of."""
    return torch.empty_like(x).index_copy_(2, order, x)


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

    def attend(own: tuple[Tensor, Tensor], at: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = op.attention(q[at], *own, mask, None, None, False, scale, softcap, kernel)
        return out, lse

    made = [
        attend(own, at, each.own) for own, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    for place, (keyed, (at, each)) in enumerate(zip(fetch.fetched(), fetch.groups, strict=True)):
        if sum(each.counts):
            made[place] = reference.merged([made[place], attend(keyed, at, each.fetched)])
    out = torch.cat([out for out, _ in made]).to(q.dtype)
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

    def differentiate(keyed: tuple[Tensor, Tensor], at: slice, mask: Tensor) -> list[Tensor]:
        given = grad_out[at], None if grad_lse is None else grad_lse[at]
        grads = op.attention_backward(
            *given, q[at], *keyed, out[at], lse[at], mask, None, None, False, scale, softcap, kernel
        )
        return list(grads)

    own = [
        differentiate(keyed, at, each.own)
        for keyed, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    fetched = [
        differentiate(keyed, at, each.fetched)
        if sum(each.counts)
        else [torch.zeros_like(q[at]), *keyed]
        for keyed, (at, each) in zip(fetch.fetched(), fetch.groups, strict=True)
    ]
    grad_q = torch.cat([mine[0] + more[0] for mine, more in zip(own, fetched, strict=True)])
    grad_k, grad_v = fetch.returned([(g[1], g[2]) for g in own], [(g[1], g[2]) for g in fetched])
    return by_token(grad_q), by_token(grad_k), by_token(grad_v)


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
