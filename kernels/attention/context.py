"""``mllm::context_attention``: attention of a sequence that the ranks of an axis have divided.

Every rank fetches the keys that its queries see, and no others, in one all-to-all; while they
travel it attends to its own, and then joins both by their log-sum-exp. The backward fetches them
once more (nothing that was fetched is kept) and returns their gradients the same way, added in the
order of ranks. Which keys these are follows from the intervals alone, on the host, once per mask.

Source: MagiAttention (arXiv 2505.13211) fetches what is needed, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.compiler.split import Split
from mllm_compile.kernels.attention import op, reference
from mllm_compile.kernels.attention.key_exchange import (
    KeyExchange,
    causal_intervals,
    key_exchange,
    shared,
)
from mllm_compile.kernels.collective.members import Member, member

Exchanges = tuple[KeyExchange, ...]
Key = tuple[int, int, str, str, bool, torch.device]
_of_masks: Any = WeakIdKeyDictionary()
_without_mask: dict[Key, Exchanges] = {}


def _exchanges(
    intervals: Tensor | None, causal: bool, queries: str, keys: str, place: int, like: Tensor
) -> Exchanges:
    """Those of every sample, or the one of all; made once per mask."""
    version = 0 if intervals is None else intervals._version
    known = _without_mask if intervals is None else _of_masks.setdefault(intervals, {})
    key = version, place, queries, keys, causal, like.device
    if key not in known:
        splits = Split.parse(queries), Split.parse(keys)
        lengths = [split.length for split in splits]
        on_host = None if intervals is None else intervals.cpu()
        every = causal_intervals(on_host, lengths[0], lengths[1], causal)
        known[key] = tuple(key_exchange(each, *splits, place).on(like.device) for each in every)
    found: Exchanges = known[key]
    return found


class _Fetch:
    """The keys and values of other ranks on their way here, and their gradients on the way back."""

    def __init__(self, k: Tensor, v: Tensor, exchanges: Exchanges, me: Member) -> None:
        self.me, self.size = me, k.shape[-1]
        self.groups = shared(exchanges, k.shape[0])
        self.k, self.v = k, v
        both = torch.cat([k, v], -1)
        parts = [self._packed(both, rank) for rank in range(me.size)]
        self._wait = me.communicator.start_all_to_all(parts, [[n] for n in self._arriving()])

    def _packed(self, both: Tensor, rank: int) -> Tensor:
        rows = [both[at].index_select(2, each.sends[rank]).flatten() for at, each in self.groups]
        return torch.cat(rows)

    def _shape(self, at: slice, keys: int) -> list[int]:
        batch, heads, _, size = self.k[at].shape
        return [batch, heads, keys, size + self.v.shape[-1]]

    def _sizes(self, rank: int) -> list[int]:
        shapes = (self._shape(at, each.counts[rank]) for at, each in self.groups)
        return [torch.Size(shape).numel() for shape in shapes]

    def _arriving(self) -> list[int]:
        return [sum(self._sizes(rank)) for rank in range(self.me.size)]

    def fetched(self) -> list[tuple[Tensor, Tensor]]:
        """By group of samples: the keys and values that came, in the order of the sequence."""
        parts = self._wait()
        by_rank = [torch.split(part, self._sizes(rank)) for rank, part in enumerate(parts)]
        found = []
        for place, (at, each) in enumerate(self.groups):
            came = [
                rows[place].view(self._shape(at, each.counts[rank]))
                for rank, rows in enumerate(by_rank)
            ]
            both = torch.cat(came, 2).index_select(2, each.fetched_order)
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
            unsorted = torch.cat(grads, -1).index_select(2, torch.argsort(each.fetched_order))
            for rank, part in enumerate(torch.split(unsorted, list(each.counts), 2)):
                back[rank].append(part.flatten())
        shapes = [
            [sum(torch.Size(s).numel() for s in self._leaving(rank))]
            for rank in range(self.me.size)
        ]
        parts = self.me.communicator.all_to_all([torch.cat(each) for each in back], shapes)
        made = [
            torch.cat(grads, -1).index_select(2, torch.argsort(each.own_order))
            for (_, each), grads in zip(self.groups, own, strict=True)
        ]
        for rank, part in enumerate(parts):
            leaving = self._leaving(rank)
            pieces = torch.split(part, [torch.Size(shape).numel() for shape in leaving])
            for total, (_, each), piece, shape in zip(
                made, self.groups, pieces, leaving, strict=True
            ):
                total.index_add_(2, each.sends[rank], piece.view(shape))
        every = torch.cat(made)
        return every[..., : self.size].clone(), every[..., self.size :].clone()

    def _leaving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, len(each.sends[rank])) for at, each in self.groups]


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

    Returns:
        out [B, H, q, E] and the log-sum-exp [B, H, q].

    """
    me = member(axis)
    fetch = _Fetch(k, v, _exchanges(intervals, causal, queries, keys, me.place, q), me)

    def attend(own: tuple[Tensor, Tensor], at: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = op.attention(q[at], *own, mask, None, None, False, scale, softcap)
        return out, lse

    made = [
        attend(own, at, each.own) for own, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    for place, (keyed, (at, each)) in enumerate(zip(fetch.fetched(), fetch.groups, strict=True)):
        if sum(each.counts):
            made[place] = reference.merged([made[place], attend(keyed, at, each.fetched)])
    out = torch.cat([out for out, _ in made]).to(q.dtype)
    return op.by_token(out), torch.cat([lse for _, lse in made]).contiguous()


@context_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=reference.accumulation_dtype(q.dtype))
    return op.empty_by_token(q, q.shape[1], q.shape[2], v.shape[3]), lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, each in the shape of its input."""
    me = member(axis)
    fetch = _Fetch(k, v, _exchanges(intervals, causal, queries, keys, me.place, q), me)

    def differentiate(keyed: tuple[Tensor, Tensor], at: slice, mask: Tensor) -> list[Tensor]:
        given = grad_out[at], None if grad_lse is None else grad_lse[at]
        grads = op.attention_backward(
            *given, q[at], *keyed, out[at], lse[at], mask, None, None, False, scale, softcap
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
    return op.by_token(grad_q), op.by_token(grad_k), op.by_token(grad_v)


@context_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(op.empty_by_token(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, intervals, *ctx.terms = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, intervals)


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, intervals = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = context_attention_backward(grad_out, grad_lse, q, k, v, out, lse, intervals, *ctx.terms)
    return (*grads, *[None] * 7)


context_attention.register_autograd(_gradient, setup_context=_setup_context)


def _pairs(q: Any, keys: str) -> int:
    return 2 * int(q[0]) * int(q[1]) * int(q[2]) * Split.parse(keys).length


@register_flop_formula(torch.ops.mllm.context_attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Every pair of an own query and a key of the sequence, as ``mllm::attention`` counts."""
    return _pairs(q, rest[-1]) * int(q[3] + v[3])


@register_flop_formula(torch.ops.mllm.context_attention_backward)
def _backward_flops(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None,
    **kwargs: Any,
) -> int:  # fmt: skip
    return _pairs(q, rest[-1]) * int(3 * q[3] + 2 * v[3])
