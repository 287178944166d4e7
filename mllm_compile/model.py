"""Make the user's model and batches ready for a request: dtype, trainable flags, training mode."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.split import Split
from mllm_compile.users_code import users_code
from mllm_compile.workload import Workload


def load_workload(request: Request) -> Workload:
    """The request's workload, its weights drawn from the request's seed: equal on every rank."""
    torch.manual_seed(request.seed)
    return Workload.load(request.workload)


def ready_model(request: Request, model: nn.Module) -> nn.Module:
    """Convert ``model`` in place to the request's dtype and trainable flags, in training mode.

    Parts of a model in training mode that their user has put into evaluation mode (a frozen tower
    with fixed statistics) stay so.

    Raises:
        RequestError: a path of the request is no module of the model.

    """
    known = dict(model.named_modules())
    flags: dict[nn.Parameter, tuple[str, bool]] = {}
    for module in request.modules:
        for path in module.paths:
            if path not in known:
                close = get_close_matches(path, known, n=3)
                remedy = f"did you mean {' or '.join(close)}?" if close else ""
                raise RequestError(
                    explain(f"path {path!r}", expected="a module of the model", remedy=remedy)
                )
            if module.trainable is not None:
                _agree(known[path], path, module.trainable, flags)
                known[path].requires_grad_(module.trainable)
    dtype = getattr(torch, request.dtype)
    # Not model.to(dtype): that drops the imaginary part of complex buffers (rotary tables).
    for values in (model.parameters(), model.buffers()):
        for tensor in values:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return model if model.training else model.train()


def _agree(
    module: nn.Module, path: str, trainable: bool, flags: dict[nn.Parameter, tuple[str, bool]]
) -> None:
    """A weight that two modules share is trained by both or by none."""
    for name, parameter in module.named_parameters(path):
        other, flag = flags.setdefault(parameter, (path, trainable))
        if flag != trainable:
            raise RequestError(
                explain(
                    f"{name}, a weight that {other} and {path} share",
                    expected="one value of trainable",
                    got=f"{str(flag).lower()} and {str(trainable).lower()}",
                    remedy="give both modules the same",
                )
            )


def ready_batch(request: Request, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its floating-point tensors in the request's dtype."""
    dtype = getattr(torch, request.dtype)

    def convert(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    ready: dict[str, Any] = pytree.tree_map_only(torch.Tensor, convert, dict(batch))
    return ready


Microbatch = Mapping[int, tuple[dict[str, Any], ...]]
"""One microbatch, collated: for every data size of the request, one batch for each lane."""


def microbatches(request: Request, workload: Workload, step: int) -> list[Microbatch]:
    """The collated microbatches of a step: samples in order, from the start again at the end."""
    size = request.microbatch_size
    samples = global_batch(request, workload, step)
    parts = [samples[k * size : (k + 1) * size] for k in range(request.microbatches)]
    return [_lanes(request, workload, part) for part in parts]


def whole(microbatch: Microbatch) -> tuple[dict[str, Any], ...]:
    """The microbatch in as few lanes as the request has."""
    return microbatch[min(microbatch)]


def _lanes(request: Request, workload: Workload, samples: list[Any]) -> Microbatch:
    """Lanes take samples in order, as equally many as can be."""
    found: dict[int, tuple[dict[str, Any], ...]] = {}
    for count in request.lane_counts:
        held = Split.contiguous(len(samples), count).parts
        parts = [samples[start:stop] for ((start, stop),) in held]
        found[count] = tuple(collated(request, workload, part) for part in parts)
    return found


def collated(request: Request, workload: Workload, samples: list[Any]) -> dict[str, Any]:
    """One batch of the model, ready for the request.

    Raises:
        RequestError: ``collate`` raised, or returned something else than keyword arguments.

    """
    with users_code("collate"):
        batch = workload.collate(samples)
    if not isinstance(batch, Mapping) or not all(isinstance(key, str) for key in batch):
        raise RequestError(
            explain(
                "collate",
                expected="a dict of the model's keyword arguments",
                got=type(batch).__name__,
            )
        )
    return ready_batch(request, batch)


def pair(request: Request, workload: Workload, step: int) -> dict[str, Any] | None:
    """The first two samples of a step in one batch, if every batch of it holds one sample alone."""
    samples = global_batch(request, workload, step)
    if request.microbatch_size > min(request.lane_counts) or len(samples) < 2:
        return None
    return collated(request, workload, samples[:2])


def global_batch(request: Request, workload: Workload, step: int) -> list[Any]:
    """The samples of a step: ``microbatches * microbatch_size`` of them."""
    count = request.microbatches * request.microbatch_size
    with users_code("samples"):
        if len(workload.samples) == 0:
            raise RequestError(explain("workload", expected="at least one sample", got="none"))
        return [workload.samples[(step * count + k) % len(workload.samples)] for k in range(count)]
