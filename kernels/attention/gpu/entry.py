"""Attention on a GPU: the entry of the Triton kernels, which needs no Triton to be imported.

Terms as in ``reference``; ``intervals`` as in ``runs``. ``tiles`` are the configurations to try, by
name of the kernel; the table's where there are none.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from mllm_compile.kernels.attention.by_token import empty_by_token
from mllm_compile.kernels.attention.gpu.call import Call
from mllm_compile.kernels.attention.gpu.spec import Score
from mllm_compile.kernels.attention.gpu.table import Config, largest
from mllm_compile.kernels.attention.shared_runs import visible

Tiles = tuple[tuple[str, tuple[Config, ...]], ...]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def computes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> bool:
    """Whether the kernels compute this call; the definition does where they do not.

    Left to it: float64, heads larger than the table's (256, in float32 128, and 64 with a dense
    mask, a bias or a cap), scales of 0 or below, empty inputs, a dense mask or bias of 2**31
    elements a head.
    """
    dense = [x for x in (mask, bias) if x is not None]
    if q.dtype not in DTYPES:
        return False
    most = largest(q.element_size() * 8, bool(dense) or softcap != 0.0)
    fits = max(q.shape[3], v.shape[3]) <= most
    reaches = [_reach(x) for x in dense] + [q.shape[2] * k.shape[2]] * (len(dense) == 2)
    fits = fits and all(reach < 2**31 for reach in reaches)
    return fits and scale > 0.0 and min(q.numel(), k.numel(), v.numel()) > 0


def _check_triton(device: torch.device) -> None:
    if find_spec("triton") is None:
        raise RuntimeError(
            f"attention: q is on {device}, where the kernels are Triton's, and Triton is not "
            'installed; pip install "triton>=3.6"'
        )


def _reach(x: Tensor) -> int:
    """The last offset from a head's first element."""
    return sum((count - 1) * step for count, step in zip(x.shape[2:], x.stride()[2:], strict=True))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    tiles: Tiles,
) -> Call:
    _check_triton(q.device)
    from mllm_compile.kernels.attention.gpu.launch import target_of

    if mask is not None and bias is not None:  # registers hold the addresses of one
        bias = torch.where(mask, bias, bias.new_tensor(float("-inf")))
        mask = None
    seen = visible(intervals, q.shape[2], k.shape[2], causal, q.device)
    score, target = Score(scale, softcap), target_of(q.device)
    return Call(q, k, v, seen, mask, bias, score, target, dict(tiles))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    tiles: Tiles = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in ``dtype`` (else q's), laid out as [B, Q, H, E], and log-sum-exp in float32."""
    from mllm_compile.kernels.attention.gpu import launch

    call = _call(q, k, v, intervals, mask, bias, causal, scale, softcap, tiles)
    out = empty_by_token(q, v.shape[3], dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    launch.forward(call, out, lse)
    return out, lse


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    tiles: Tiles = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in ``dtype`` (else theirs), laid out as [B, S, H, D]."""
    from mllm_compile.kernels.attention.gpu import launch

    call = _call(q, k, v, intervals, mask, bias, causal, scale, softcap, tiles)
    grad_q, grad_k, grad_v = (empty_by_token(x, x.shape[3], dtype) for x in (q, k, v))
    lse = lse.contiguous()
    delta = launch.delta(call, out, grad_out, lse, grad_lse)
    launch.backward(call, grad_out, (grad_q, grad_k, grad_v), lse, delta)
    return grad_q, grad_k, grad_v
