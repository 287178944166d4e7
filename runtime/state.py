"""Parameters, buffers and gradients of one rank, under the model's original names.

Gradients are summed over the microbatches of a step, in float32 at least, then over the ranks that
have a share in them (``Placement.sums``), in a few large collectives; every rank gets the identical
sum, taken in rank order. The gradient norm counts every element once. A parameter that got no
gradient in a step, on any rank with a share, keeps ``grad`` None, as in the plain model.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import nn

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.runtime.groups import Group
from mllm_compile.runtime.placement import Placement, Ranks
from mllm_compile.runtime.transport import Transport, as_bytes

_BUCKET = 2**24
"""Elements that one collective sums at most, unless a single parameter has more."""


class State:
    """What a rank keeps between steps.

    Args:
        parameters: the parts of this rank's parameters; a tied weight has one name, the first of
            its names.
        buffers: of this rank's stages, or all. A step replaces those that the rank updates; copies
            on other ranks stay behind.
        placements: of every parameter of the whole model that more than one rank holds; the same
            mapping on every rank. All others are whole on one rank.
        updaters: the ranks (two or more) that update a buffer in their stages' programs; the same
            mapping on every rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor] | None = None,
        placements: Mapping[str, Placement] | None = None,
        updaters: Mapping[str, Ranks] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.buffers = dict(buffers or {})
        self.placements = dict(placements or {})
        self.updaters = dict(updaters or {})
        self.updated: set[str] = set()
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def groups(self) -> set[Ranks]:
        """The groups that :meth:`finish` needs on some rank: what ``Transport.connect`` takes."""
        sums = {group for placement in self.placements.values() for group in placement.sums}
        return sums | set(self.updaters.values())

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
        dtype = _sum_dtype(parameter)
        self._sums[name] = gradient.to(dtype, memory_format=torch.contiguous_format, copy=True)

    def finish(self, transport: Transport) -> None:
        """Sum gradients over the ranks with a share in them; set ``grad`` of every parameter.

        All ranks call it once per step, those without parameters too; ``groups`` are connected.

        Raises:
            RunError: ranks have updated a buffer to different values.
        """
        rank = transport.rank
        for name, ranks in sorted(self.updaters.items()):
            if rank in ranks:
                self._check_buffer(name, transport.group(ranks))
        shared: dict[Ranks, list[str]] = {}
        for name, placement in sorted(self.placements.items()):
            group = placement.group(rank)
            if group and self.parameters[name].requires_grad:
                shared.setdefault(group, []).append(name)
        for ranks, names in sorted(shared.items()):
            self._sum(names, transport.group(ranks))
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

        All ranks call it after :meth:`finish`; of ranks with the same part the first one counts it.
        """
        rank = transport.rank
        square = torch.zeros((), dtype=torch.float64, device=transport.device)
        for name, parameter in self.parameters.items():
            placement = self.placements.get(name)
            counts = placement is None or rank in placement.first
            if parameter.grad is not None and counts:
                dtype = _sum_dtype(parameter)
                norm = torch.linalg.vector_norm(parameter.grad, dtype=dtype)
                square += norm.double().square()
        squares = transport.all_gather(square)
        return torch.stack(squares).sum().sqrt()

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale all gradients so that ``norm``, their global norm, becomes at most ``limit``."""
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))

    def _sum(self, names: Sequence[str], group: Group) -> None:
        """Sum what any member has of these gradients."""
        device = self.parameters[names[0]].device
        mine = torch.tensor([name in self._sums for name in names], dtype=torch.uint8)
        present = torch.stack(group.all_gather(mine.to(device), [mine.shape] * group.size))
        some = present.amax(0).tolist()
        for bucket in self._buckets([name for name, has in zip(names, some, strict=True) if has]):
            parts = [self._sum_of(name).view(-1) for name in bucket]
            sizes = [part.numel() for part in parts]
            total = group.all_reduce(torch.cat(parts))
            for name, part in zip(bucket, torch.split(total, sizes), strict=True):
                self._sums[name] = part.view(self.parameters[name].shape)

    def _sum_of(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        found = self._sums.pop(name, None)
        if found is not None:
            return found
        return torch.zeros(parameter.shape, dtype=_sum_dtype(parameter), device=parameter.device)

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Neighbours of one dtype, as many as one collective may sum."""

        def dtype(name: str) -> str:
            return str(_sum_dtype(self.parameters[name]))

        for _, alike in groupby(sorted(names, key=dtype), dtype):
            bucket: list[str] = []
            size = 0
            for name in alike:
                count = self.parameters[name].numel()
                if bucket and size + count > _BUCKET:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(name)
                size += count
            yield bucket

    def _check_buffer(self, name: str, group: Group) -> None:
        own = self.buffers[name].contiguous()
        values = group.all_gather(own, [own.shape] * group.size)
        for rank, value in zip(group.ranks, values, strict=True):
            if not torch.equal(as_bytes(value), as_bytes(values[0])):
                raise RunError(
                    explain(
                        f"buffer {name}",
                        expected="the same new value on all data lanes that update it",
                        got=f"ranks {group.ranks[0]} and {rank} have different ones",
                        remedy="give its module data = 1, or put it in eval mode",
                    )
                )


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
