"""Random legal requests: any sizes, on ranks of their own, shared or overlapping ones."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from mllm_compile.compiler.request import EXCHANGES, ModuleSpec, Parallel, Request

RANKS = 8
PLACEMENTS = ("disjoint", "shared", "mixed")
SIZES = {
    "tensor": (1, 1, 2, 2, 4),
    "context": (1, 1, 2, 3),
    "pipeline": (1, 1, 2, 3),
    "data": (1, 1, 2, 3, 4),
}


def random_request(
    seed: int, paths: Sequence[tuple[str, ...]], placement: str, shallow: Collection[int] = ()
) -> Request:
    """A request for the parts of a model; those in ``shallow`` are too small for a pipeline."""
    rng = random.Random(f"{seed}/{placement}/{len(paths)}")
    sizes = _sizes(rng, len(paths), placement, shallow)
    trainable = [rng.choice((None, None, False)) for _ in paths]
    if all(flag is False for flag in trainable):
        trainable[rng.randrange(len(paths))] = None
    modules = tuple(
        ModuleSpec(path, ranks, parallel, flag, rng.choice(("contiguous", "zigzag")))
        for path, parallel, ranks, flag in zip(
            paths, sizes, _ranks(rng, sizes, placement), trainable, strict=True
        )
    )
    lanes = max(parallel.data for parallel in sizes)
    drawn = Request(
        modules,
        microbatches=rng.choice((1, 2, 3)),
        microbatch_size=max(lanes, rng.choice((2, 3, 4))),
        dtype="float64",
    )
    exchanges = [rng.choice(("gather", *EXCHANGES)) for _ in modules]
    return replace(
        drawn,
        modules=tuple(
            replace(module, kv_exchange=exchange)
            for module, exchange in zip(modules, exchanges, strict=True)
        ),
    )


def _sizes(
    rng: random.Random, modules: int, placement: str, shallow: Collection[int]
) -> list[Parallel]:
    """Sizes that fit the ranks, and in which something is divided."""
    while True:
        drawn = ({axis: rng.choice(n) for axis, n in SIZES.items()} for _ in range(modules))
        sizes = [
            replace(Parallel(**axes), pipeline=1) if module in shallow else Parallel(**axes)
            for module, axes in enumerate(drawn)
        ]
        used = [size.size for size in sizes]
        fits = sum(used) <= RANKS if placement == "disjoint" else max(used) <= RANKS
        if placement == "mixed":
            fits = used[0] + max(used[1:]) <= RANKS
        divided = any(prod((size.tensor, size.context, size.data)) > 1 for size in sizes)
        if fits and divided:
            return sizes


def _ranks(rng: random.Random, sizes: Sequence[Parallel], placement: str) -> list[tuple[int, ...]]:
    """Disjoint: one behind the other. Shared: all from rank 0. Mixed: the first overlaps others."""
    found, first = [], 0
    for place, parallel in enumerate(sizes):
        start = first if placement == "disjoint" else 0
        if placement == "mixed" and place:
            start = rng.randint(0, sizes[0].size)
        found.append(tuple(range(start, start + parallel.size)))
        first += parallel.size
    used = sorted({rank for ranks in found for rank in ranks})
    return [tuple(used.index(rank) for rank in ranks) for ranks in found]
