"""How fine a sequence is cut for the planner, step by step, and how long each step is improved."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mllm_compile.passes.token_split.measure import TILE, tiles
from mllm_compile.passes.token_split.units import Cut, work_of


@dataclass(frozen=True)
class Level:
    """Units per rank; rounds of swaps and the first noise; how many deals are improved at once.

    Deals of few ranks cost little more than one: as many as make ``width`` ranks, or ``deals``.
    """

    units: int
    rounds: int
    noise: float
    width: int = 0
    least: int = 1

    def deals(self, ranks: int) -> int:
        """How many deals to so many ranks are improved at once."""
        return max(self.least, self.width // ranks)


SHORT = (
    Level(4, 60, 0.02, width=128, least=4),
    Level(8, 80, 0.006, width=64),
    Level(16, 100, 0.003, width=32),
)
LONG = (
    Level(4, 1000, 0.015, width=256, least=4),
    Level(16, 1000, 0.0025, width=64),
    Level(64, 800, 0.0006),
)
"""For so many tokens that a second or two of planning are little."""
LONG_FROM = 1 << 18
FINER = 4
"""How much finer another level cuts while a unit has more than ``HEAVY`` of a rank's work."""
HEAVY = 0.25
MOST = (1 << 15) - 1
"""Units of all ranks: as many as the sums of ``deal.py`` hold."""
FEW = 64
"""Tiles of a rank; with more it matters little whether the last of them is a whole one."""


def levels_of(masks: Sequence[NDArray[np.int32]], ranks: int) -> tuple[int, list[Level]]:
    """How many of a rank's tokens its units have, and the levels; the others are the rest.

    Units are whole tiles if a rank has two. A larger rest may give more levels, or fewer tiles if
    ranks do not end between tiles; both are weighed.
    """
    length = len(masks[0])
    every = SHORT if length < LONG_FROM else LONG
    levels = [level for level in every if 2 * level.units * ranks <= MOST] or every[:1]
    size = TILE
    while size > 1 and length // ranks < 2 * size:
        size //= 2
    blocks = length // ranks // size

    def cost(count: int) -> float:
        possible = sum(level.units <= blocks for level in levels)
        total = 0.05 * (1 - count / blocks) + 0.02 * (possible - len(_chain(count, levels)))
        if blocks < FEW and length % (size * ranks):
            made = Cut(length, size, count * ranks, ranks)
            total += max(
                work_of(made.rows(mask), made).sum() / max(tiles(mask).sum(), 1) for mask in masks
            )
        return total

    count = min(range(max(blocks - blocks // 16 - 1, 1), blocks + 1), key=cost)
    return count * size, _chain(count, levels)


def _chain(blocks: int, levels: Sequence[Level]) -> list[Level]:
    """The levels that cut so many blocks evenly, each the one before it."""
    found: list[Level] = []
    for level in levels:
        step = found[-1].units if found else 1
        fit = (n for n in range(level.units, 2 * level.units) if blocks % n == n % step == 0)
        found += [replace(level, units=count) for count in fit][:1]
    return found or [replace(levels[0], units=blocks if blocks < levels[0].units else 1)]


def finer(level: Level, tokens: int, ranks: int) -> list[Level]:
    """A level that cuts the units of this one several times, if they have so many tiles."""
    blocks = tokens // level.units // TILE
    most = MOST // (level.units * ranks)
    fit = (n for n in range(FINER, 4 * FINER) if blocks and blocks % n == 0 and n <= most)
    times = next(fit, 0)
    return [replace(level, units=times * level.units, width=0, least=1)] if times else []
