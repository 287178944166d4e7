"""Operators that cannot be recorded as they are, and what is recorded instead."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.kernels import grouped_mm

if TYPE_CHECKING:
    from mllm_compile.passes.capture.shadow_mode import ShadowMode

aten = torch.ops.aten
Rule = Callable[["ShadowMode", Any, tuple[Any, ...], dict[str, Any]], Any]


def batch_norm(mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm writes its running statistics behind the back of its schema: write them openly.

    args: input [N, C, ...], weight, bias, running mean, running variance, training, momentum, eps.
    """
    x, weight, bias, mean, variance, training, momentum, eps = args
    if not training or mean is None:
        return NotImplemented
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    with mode:
        results = func(x, weight, bias, None, None, True, momentum, eps)
        with torch.no_grad():
            value = aten.detach.default(x)
            new_mean = aten.mean.dim(value, dims)
            new_variance = aten.var.correction(value, dims, correction=min(1, count - 1))
            for running, new in ((mean, new_mean), (variance, new_variance)):
                kept = aten.mul.Scalar(running, 1 - momentum)
                added = aten.mul.Scalar(aten._to_copy.default(new, dtype=running.dtype), momentum)
                aten.copy_.default(running, aten.add.Tensor(kept, added))
    return results


def grouped_product(
    mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Torch's grouped product has a fake kernel for bfloat16 alone; ours takes every dtype."""
    with mode:
        return grouped_mm.from_aten(*args, **_renamed(kwargs))


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"offsets" if name == "offs" else name: value for name, value in kwargs.items()}


RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: batch_norm,
    aten.cudnn_batch_norm.default: batch_norm,
    aten.miopen_batch_norm.default: batch_norm,
    aten._grouped_mm.default: grouped_product,
}
