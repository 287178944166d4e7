"""``mllm::context_attention``: attention of a sequence that the ranks of an axis have divided.

Every rank fetches the keys that its queries see, and no others, in one all-to-all; while they
travel it attends to its own, and then joins both by their log-sum-exp. The backward fetches them
once more (nothing that was fetched is kept) and returns their gradients the same way, added in the
order of ranks. Which keys these are follows from the intervals alone, on the host, which knows them
before a device does, once per mask. Parts are joined in the accumulation dtype and rounded once.

Source: MagiAttention (arXiv 2505.13211) fetches what is needed, too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mllm_compile.compiler.split import Split
from mllm_compile.kernels.attention import partial, reference
from mllm_compile.kernels.attention.by_token import by_token, empty_by_token
from mllm_compile.kernels.attention.fetch import Fetch, Pair, joined
from mllm_compile.kernels.attention.kernel import backward_of
from mllm_compile.kernels.attention.key_exchange import KeyExchange, key_exchange
from mllm_compile.kernels.attention.shared_runs import once, visible
from mllm_compile.kernels.collective.members import Member, member
from mllm_compile.kernels.host_copies import on_host

Exchanges = tuple[KeyExchange, ...]


def _exchanges(
    intervals: Tensor | None, causal: bool, queries: str, keys: str, q: Tensor, me: Member
) -> Exchanges:
    """Those of every sample, or the one of all; made once per mask, of the host's copy of it."""
    splits = Split.parse(queries), Split.parse(keys)

    def made_of(seen: Tensor) -> Exchanges:
        return tuple(key_exchange(each, *splits, me.place).on(q.device) for each in seen)

    shape = splits[0].length, splits[1].length, causal, torch.device("cpu")
    key = "exchange", me.place, queries, keys, causal, q.device
    if intervals is None:
        whole = visible(None, *shape)
        return once(whole, key, lambda: made_of(whole))
    return once(intervals, key, lambda: made_of(visible(on_host(intervals), *shape)))


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
    fetch = Fetch(k, v, _exchanges(intervals, causal, queries, keys, q, me), me)

    def attend(keyed: Pair, at: slice, mask: Tensor) -> Pair:
        return partial.attention(q[at], *keyed, mask, scale, softcap, kernel)

    made = [
        attend(own, at, each.own) for own, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    for place, (keyed, (at, each)) in enumerate(zip(fetch.fetched(), fetch.groups, strict=True)):
        if sum(each.counts):
            made[place] = reference.merged([made[place], attend(keyed, at, each.fetched)])
    out = joined([out for out, _ in made]).to(q.dtype)
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
    fetch = Fetch(k, v, _exchanges(intervals, causal, queries, keys, q, me), me)

    def differentiate(keyed: Pair, at: slice, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = grad_out[at], None if grad_lse is None else grad_lse[at]
        return partial.attention_backward(
            *given, q[at], *keyed, out[at], lse[at], mask, scale, softcap, kernel
        )

    own = [
        differentiate(keyed, at, each.own)
        for keyed, (at, each) in zip(fetch.own(), fetch.groups, strict=True)
    ]
    others = [
        differentiate(keyed, at, each.fetched)
        for keyed, (at, each) in zip(fetch.fetched(), fetch.groups, strict=True)
    ]
    grad_q = joined([mine[0] + more[0] for mine, more in zip(own, others, strict=True)])
    grad_k, grad_v = fetch.returned([each[1:] for each in own], [each[1:] for each in others])
    return by_token(grad_q.to(q.dtype)), by_token(grad_k.to(k.dtype)), by_token(grad_v.to(v.dtype))


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
