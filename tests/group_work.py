"""Collectives of random ragged tensors, and what they must give, on any transport."""

import random
from collections.abc import Sequence

import torch

from mllm_compile.runtime.groups import Group

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64)
KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "max")

Results = list[list[torch.Tensor]]


def tensor(*key: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The same numbers for the same key, wherever it is asked for; not always contiguous."""
    g = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(32))
    made = torch.randn(tuple(shape), generator=g, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(made, made.flip(0) if shape else made).conj()
    made = (10 * made).to(dtype)
    return made.t().contiguous().t() if len(shape) == 2 else made


def shape(draw: random.Random) -> list[int]:
    return [draw.choice([0, 1, 2, 5]), draw.choice([1, 3])]


def calls(seed: int, size: int) -> list[tuple[str, torch.dtype, list[list[list[int]]]]]:
    """Kinds, dtypes, and the shape of what member i has for member j."""
    draw = random.Random(seed)
    made = []
    for number in range(12):
        kind, dtype = KINDS[number % len(KINDS)], draw.choice(DTYPES)
        if kind == "max" and dtype.is_complex:
            dtype = torch.float64
        table = [[shape(draw) for _ in range(size)] for _ in range(size)]
        if kind == "all_gather":
            table = [[row[0]] * size for row in table]
        elif kind == "reduce_scatter":
            table = [table[0]] * size
        elif kind in ("all_reduce", "max"):
            same = draw.choice([[], [37, 41], shape(draw)])  # one of them is not small
            table = [[same] * size] * size
        made.append((kind, dtype, table))
    return made


def run(group: Group, seed: int) -> Results:
    """All calls on one member."""
    results, me = [], group.place
    for number, (kind, dtype, table) in enumerate(calls(seed, group.size)):
        parts = [_part(number, kind, me, j, table, dtype) for j in range(group.size)]
        shapes = [row[me] for row in table]
        if kind == "all_gather":
            results.append(group.all_gather(parts[0], shapes))
        elif kind == "all_to_all":
            results.append(group.all_to_all(parts, shapes))
        elif kind == "reduce_scatter":
            results.append([group.reduce_scatter(parts)])
        else:
            results.append([group.all_reduce(parts[0], "max" if kind == "max" else "sum")])
    return results


def expected(me: int, size: int, seed: int) -> Results:
    """Sums in order of the members."""
    results = []
    for number, (kind, dtype, table) in enumerate(calls(seed, size)):
        parts = [_part(number, kind, i, me, table, dtype) for i in range(size)]
        if kind.startswith("all_gather") or kind == "all_to_all":
            results.append(parts)
            continue
        total = parts[0]
        for part in parts[1:]:
            total = torch.maximum(total, part) if kind == "max" else total + part
        results.append([total])
    return results


def _part(
    number: int, kind: str, i: int, j: int, table: list[list[list[int]]], dtype: torch.dtype
) -> torch.Tensor:
    alike = kind in ("all_gather", "all_reduce", "max")
    return tensor(number, i, 0 if alike else j, shape=table[i][j], dtype=dtype)


def same(one: Results, two: Results, *, exact: bool = True) -> bool:
    pairs = [pair for a, b in zip(one, two, strict=True) for pair in zip(a, b, strict=True)]
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2e-2, atol=0.2))
        for a, b in pairs
    )
