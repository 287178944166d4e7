"""The reference: the plain, unmodified model in one process on the whole global batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mllm_compile.compiler.request import Request
from mllm_compile.kernels.grouped_mm import GroupedProducts
from mllm_compile.model import collated, global_batch
from mllm_compile.passes.capture.capture import loss_of
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.workload import Workload


def reference(
    request: Request, model: nn.Module, workload: Workload, step: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of ``model`` on the samples of a step; parameters without one are absent.

    In float64 the model's casts to float32 are lifted, as in the program.
    """
    batch = collated(request, workload, global_batch(request, workload, step))
    with as_compiled(request):
        (loss,) = loss_of(model(**batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    found = model.named_parameters()
    return loss.item(), {name: p.grad for name, p in found if p.grad is not None}


@contextmanager
def as_compiled(request: Request) -> Iterator[None]:
    """Let a plain model compute what the program does: its casts to float32 lifted in float64."""
    grouped = GroupedProducts()  # type: ignore[no-untyped-call]
    with lifted(torch.float64 if request.dtype == "float64" else None), grouped:
        yield
