"""The optimizer that a request names, over the trainable parameters of one rank, and its step.

Any class of torch.optim whose update of one parameter needs no other parameter will do: replicas of
a tied weight then stay equal, because their gradients are. Where ranks hold parts of a parameter,
the update of one number must need no other number of it either.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Transport


def make_optimizer(
    request: Optimizer, parameters: Mapping[str, nn.Parameter], *, divided: bool = False
) -> torch.optim.Optimizer | None:
    """The optimizer of this rank, over its trainable parameters in name order; None without any.

    ``divided`` says whether ranks hold parts of some trainable parameter.

    Raises:
        RequestError: torch.optim has no such class, it does not take these options, or it needs
            whole parameters where they are divided.
    """
    kind = _optimizer_class(request.name)
    options: dict[str, Any] = {"lr": request.lr}
    if request.weight_decay:
        options["weight_decay"] = request.weight_decay
    known = inspect.signature(kind).parameters
    for name in options:
        if name not in known:
            raise RequestError(explain(f"[optimizer] {request.name}", expected=f"no {name}"))
    trainable = [parameters[name] for name in sorted(parameters) if parameters[name].requires_grad]
    if not trainable:
        return None
    try:
        if divided and not _is_elementwise(kind, options):
            expected = "an optimizer that updates number by number, as parameters are divided"
            raise RequestError(explain("[optimizer] name", expected=expected, got=request.name))
        return kind(trainable, **options)
    except ValueError as error:
        raise RequestError(f"[optimizer] {request.name}: {error}") from error


def update(
    state: State,
    optimizer: torch.optim.Optimizer | None,
    transport: Transport,
    clip_norm: float | None = None,
) -> torch.Tensor:
    """End a step: sum tied gradients, clip, update the parameters, forget the gradients.

    All ranks call it. Returns the global norm of the gradients before clipping, a scalar.
    """
    state.finish(transport)
    norm = state.grad_norm(transport)
    if clip_norm is not None:
        state.clip(norm, clip_norm)
    if optimizer is not None:
        optimizer.step()
    state.zero()
    return norm


def _is_elementwise(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether two steps of a matrix are those of its halves."""
    whole = torch.linspace(0.1, 2.0, 12, dtype=torch.float64).view(4, 3)
    parts = nn.Parameter(whole.clone()), *map(nn.Parameter, torch.split(whole.clone(), 2))
    for part in parts:
        optimizer = kind([part], **options)
        for scale in (1.0, -3.0):
            part.grad = scale * part.detach().sin()
            optimizer.step()
    return torch.equal(parts[0], torch.cat(parts[1:]))


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    kind = getattr(torch.optim, name, None)
    usable = [key for key, value in sorted(vars(torch.optim).items()) if _is_usable(value)]
    if not _is_usable(kind):
        raise RequestError(
            explain("[optimizer] name", expected=f"one of {', '.join(usable)}", got=repr(name))
        )
    assert isinstance(kind, type)
    return kind


def _is_usable(kind: object) -> bool:
    """Whether it is an optimizer whose ``step`` needs no closure."""
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        return False
    return kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
