"""Real tensors on pretended ranks: what each holds by its layouts, and what moves make of it."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch

from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, R, S
from mllm_compile.compiler.mesh import AXES, Mesh
from mllm_compile.compiler.regions import Indices, Region
from mllm_compile.compiler.request import ModuleSpec, Parallel
from mllm_compile.compiler.reshard import Move
from mllm_compile.compiler.split import Split

Tensors = Mapping[int, torch.Tensor]


def grid(
    tensor: int = 1, context: int = 1, data: int = 1, *, first: int = 0, split: str = "contiguous"
) -> Mesh:
    """A mesh on the ranks from ``first`` on."""
    ranks = tuple(range(first, first + tensor * context * data))
    parallel = Parallel(tensor=tensor, context=context, data=data)
    return Mesh.of(ModuleSpec(("m",), ranks, parallel, context_split=split), 0)


def held(mesh: Mesh, rows: Sequence[int], rest: Sequence[int], layouts: str) -> dict[int, Holding]:
    """Holdings of a value [sum of rows, *rest]: ``rows`` by sample, samples divided over lanes.

    ``layouts`` has one letter for each axis of the mesh: R; r, s, h for the dims 0, 1 and 2.
    """
    lanes = lane_rows(rows, mesh.size("data"))
    made = {}
    for rank in mesh.ranks:
        lane = mesh.lane(rank)
        shape = (lanes[lane], *rest)
        choice = tuple(
            layout_of(letter, shape, axis.size, axis.name)
            for letter, axis in zip(layouts, mesh.axes, strict=True)
        )
        places = [mesh.place(rank, axis.name) for axis in mesh.axes]
        local = Holding.of(shape, choice, mesh.axes, places)
        made[rank] = local.within(0, 1, lanes[lane], sum(lanes[:lane]), sum(lanes))
    return made


def layout_of(letter: str, shape: Sequence[int], ranks: int, axis: str) -> Layout:
    if letter == "R":
        return R
    dim = "rsh".index(letter)
    return S(dim, 1, shape[dim] if axis == "context" else ranks)


def lane_rows(rows: Sequence[int], lanes: int) -> list[int]:
    parts = Split.contiguous(len(rows), lanes).parts
    return [sum(sum(rows[a:b]) for a, b in part) for part in parts]


def local(
    whole: torch.Tensor, mesh: Mesh, rank: int, rows: Sequence[int], layouts: str
) -> torch.Tensor:
    """The same by cutting a tensor up, axis by axis: an account independent of holdings."""
    lane = mesh.lane(rank)
    value = whole.split(lane_rows(rows, mesh.size("data")))[lane]
    for letter, axis in zip(layouts, mesh.axes, strict=True):
        if letter == "R":
            continue
        dim, place = "rsh".index(letter), mesh.place(rank, axis.name)
        if axis.policy == "zigzag":
            blocks = value.tensor_split(_edges(value.shape[dim], 2 * axis.size), dim)
            value = torch.cat([blocks[place], blocks[2 * axis.size - 1 - place]], dim)
        else:
            value = value.tensor_split(axis.size, dim)[place]
    return value


def _edges(length: int, count: int) -> list[int]:
    sizes = [length // count + (i < length % count) for i in range(count)]
    return [sum(sizes[: i + 1]) for i in range(count - 1)]


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region, in its order."""
    for dim, intervals in enumerate(region):
        tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in intervals], dim)
    return tensor


def carry_out(
    moves: Sequence[Move], sources: Tensors, targets: Mapping[int, Sequence[int]]
) -> dict[int, torch.Tensor]:
    """What every target rank has afterwards; an element that does not arrive stays NaN."""
    made = {
        rank: torch.full(tuple(shape), torch.nan, dtype=torch.float64)
        for rank, shape in targets.items()
    }
    for move in moves:
        packed = part(sources[move.source], move.source_region)
        write(made[move.target], move.target_region, packed)
    return made


def write(tensor: torch.Tensor, region: Region, packed: torch.Tensor) -> None:
    """The inverse of ``part``; nothing may have been written there before."""
    index = np.ix_(*(_numbers(indices) for indices in region))
    at = tuple(map(torch.from_numpy, index)) or ...
    assert bool(tensor[at].isnan().all()), f"{region} was written before"
    tensor[at] = packed


def _numbers(indices: Indices) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in indices])


def inbound(moves: Sequence[Move]) -> dict[int, int]:
    """Elements that arrive at every rank from other ranks."""
    found: dict[int, int] = {}
    for move in moves:
        if move.source != move.target:
            found[move.target] = found.get(move.target, 0) + move.size
    return found


def outbound(moves: Sequence[Move]) -> dict[int, int]:
    """Elements that leave every rank to other ranks."""
    found: dict[int, int] = {}
    for move in moves:
        if move.source != move.target:
            found[move.source] = found.get(move.source, 0) + move.size
    return found


def least_inbound(sources: Tensors, targets: Tensors, rank: int) -> int:
    """Elements that a rank needs and does not hold; elements are told apart by their values."""
    mine = set(sources[rank].flatten().tolist()) if rank in sources else set()
    return len(set(targets[rank].flatten().tolist()) - mine)


def meshes(sizes: Sequence[int], first: int = 0) -> list[Mesh]:
    """Every (tensor, context, data) with these sizes."""
    return [grid(t, c, d, first=first) for t, c, d in product(sizes, repeat=3)]


assert AXES == ("data", "expert", "context", "tensor")
