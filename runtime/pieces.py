"""Parts of local tensors, as they travel: a region packed into a contiguous tensor, and back.

Within a packed tensor the indices of every dim stand one behind the other, in the order in which
the region lists them.
"""

from collections.abc import Iterator
from itertools import product

import torch

from mllm_compile.compiler import regions
from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.regions import Indices, Region
from mllm_compile.runtime.transport import wire

Slices = tuple[slice, ...]


def pack(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's elements, contiguous; the tensor itself where that is what it is."""
    found = list(blocks(region))
    if len(found) == 1:
        return wire(tensor[found[0][0]])
    packed = tensor.new_empty(regions.shape(region))
    for there, here in found:
        packed[here] = tensor[there]
    return packed


def unpack(packed: torch.Tensor, tensor: torch.Tensor, region: Region) -> None:
    """The inverse of :func:`pack`: write the region of ``tensor``."""
    for there, here in blocks(region):
        tensor[there] = packed[here]


def is_whole(region: Region, tensor: torch.Tensor) -> bool:
    """Whether the region is all of the tensor, in order."""
    return region == tuple(regions.interval(0, size) for size in tensor.shape)


def room(spec: TensorSpec, device: torch.device | None = None) -> torch.Tensor:
    """A fresh tensor for a received value: dense, with the dims in the order of the spec."""
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    dense = torch.empty([spec.shape[dim] for dim in order], dtype=spec.dtype, device=device)
    return dense.permute(sorted(range(len(order)), key=order.__getitem__))


def blocks(region: Region) -> Iterator[tuple[Slices, Slices]]:
    """The rectangles of a region: where they stand in the tensor, and where in the packed one."""
    return (
        (tuple(there for there, _ in block), tuple(here for _, here in block))
        for block in product(*map(_runs, region))
    )


def _runs(indices: Indices) -> list[tuple[slice, slice]]:
    runs, end = [], 0
    for start, stop in indices:
        runs.append((slice(start, stop), slice(end, end + stop - start)))
        end += stop - start
    return runs
