"""Parameters, buffers and gradients of one rank, under the model's original names.

Gradients are summed over the microbatches of a step, in float32 at least, then over the stages that
share a tied weight: every holder gets the identical sum, taken in rank order. The gradient norm
counts every parameter once. A parameter that got no gradient in a step, on any holder, keeps
``grad`` None, as in the plain model.
"""

from collections.abc import Mapping

import torch
from torch import nn

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.runtime.transport import Transport


class State:
    """What a rank keeps between steps.

    Args:
        parameters: of this rank's stages; a tied weight has one name, the first of its names.
        buffers: of this rank's stages, or all. A step replaces those that the rank updates; copies
            on other ranks stay behind.
        holders: for every tied parameter of the whole model, the ranks (two or more) on which it
            stands; the same mapping on every rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor] | None = None,
        holders: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.buffers = dict(buffers or {})
        self.holders = {name: tuple(sorted(ranks)) for name, ranks in (holders or {}).items()}
        self.updated: set[str] = set()
        self._sums: dict[str, torch.Tensor] = {}

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """The new value of a buffer; ``updated`` tells whose copy is not the latest."""
        self.buffers[name] = value
        self.updated.add(name)

    def accumulate(self, name: str, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient of a parameter."""
        parameter = self.parameters[name]
        if not parameter.requires_grad:
            raise RunError(explain(f"gradient of {name}", expected="none: it is frozen"))
        if gradient.shape != parameter.shape:
            expected, got = str(list(parameter.shape)), str(list(gradient.shape))
            raise RunError(explain(f"gradient of {name}", expected=expected, got=got))
        if name in self._sums:
            self._sums[name].add_(gradient)
            return
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._sums[name] = gradient.to(dtype, memory_format=torch.contiguous_format, copy=True)

    def finish(self, transport: Transport) -> None:
        """Sum tied gradients over their holders and set ``grad`` of every parameter.

        All ranks call it once per step, those without parameters too.
        """
        if self.holders:
            self._sum_tied(transport)
        for name, parameter in self.parameters.items():
            total = self._sums.pop(name, None)
            parameter.grad = None if total is None else total.to(parameter.dtype)

    def zero(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def grad_norm(self, transport: Transport) -> torch.Tensor:
        """The L2 norm of all gradients of the model, a float64 scalar, equal on all ranks.

        All ranks call it after :meth:`finish`; a tied parameter counts on its first holder.
        """
        rank = transport.rank
        square = torch.zeros((), dtype=torch.float64, device=transport.device)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and self.holders.get(name, (rank,))[0] == rank:
                norm = torch.linalg.vector_norm(
                    parameter.grad,
                    dtype=torch.promote_types(parameter.grad.dtype, torch.float32),
                )
                square += norm.double().square()
        squares = transport.all_gather(square)
        return torch.stack(squares).sum().sqrt()

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale all gradients so that ``norm``, their global norm, becomes at most ``limit``."""
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))

    def _sum_tied(self, transport: Transport) -> None:
        names = sorted(self.holders)
        mine = torch.tensor([name in self._sums for name in names], dtype=torch.uint8)
        present = [part.tolist() for part in transport.all_gather(mine.to(transport.device))]
        for index, name in enumerate(names):
            sources = [rank for rank in self.holders[name] if present[rank][index]]
            if sources and transport.rank in self.holders[name]:
                self._sums[name] = self._tied_sum(transport, name, sources)

    def _tied_sum(self, transport: Transport, name: str, sources: list[int]) -> torch.Tensor:
        """The sum of ``name``'s gradients on ``sources``, exchanged among its holders."""
        rank, parameter = transport.rank, self.parameters[name]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parts, handles = {}, []
        for peer in sources:
            if peer != rank:
                parts[peer] = torch.empty(parameter.shape, dtype=dtype, device=transport.device)
                handles.append(transport.receive(parts[peer], peer))
        if rank in sources:
            parts[rank] = self._sums[name]
            others = (peer for peer in self.holders[name] if peer != rank)
            handles.extend([transport.send(parts[rank], peer) for peer in others])
        for handle in handles:
            handle.wait()
        total = parts[sources[0]].clone()
        for peer in sources[1:]:
            total.add_(parts[peer])
        return total
