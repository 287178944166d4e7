"""The reference: the plain, unmodified model in one process on the whole global batch."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mllm_compile.compiler.request import Request
from mllm_compile.model import global_batch, ready_batch
from mllm_compile.passes.capture.capture import loss_of
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.workload import Workload


def reference(
    request: Request, model: nn.Module, workload: Workload, step: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of ``model`` on the samples of a step; parameters without one are absent.

    In float64 the model's casts to float32 are lifted, as in the program.
    """
    batch = ready_batch(request, workload.collate(global_batch(request, workload, step)))
    with lifted(torch.float64 if request.dtype == "float64" else None), _GroupedProducts():
        (loss,) = loss_of(model(**batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    found = model.named_parameters()
    return loss.item(), {name: p.grad for name, p in found if p.grad is not None}


class _GroupedProducts(TorchFunctionMode):
    """Torch's grouped product takes no float64 on the CPU: there, one product for each group."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in ("_grouped_mm", "grouped_mm"):
            return func(*args, **kwargs)
        if args[0].dtype is not torch.float64 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        rows, weights, offs = (*args, *(kwargs[name] for name in ("offs",) if name in kwargs))[:3]
        return _by_definition(rows, weights, offs)


def _by_definition(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[T, I] x [E, I, O] -> [T, O]; ``offs`` [E] holds the end of each group of rows."""
    ends = offs.tolist()
    parts = [rows[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)]
    rest = rows.new_zeros(len(rows) - ends[-1], weights.shape[2])
    return torch.cat([*parts, rest])
