"""Which rank holds which tokens of a sequence, for context parallelism under any masks.

Every rank gets equally many tokens; under every mask it computes equally many attention tiles, and
it needs few keys that other ranks hold. Attention of each layer ends with its slowest rank, so
balance holds for every mask at once; keys travel once per layer, so traffic is summed over layers.

The sequence is cut into units, a few per rank, that start out in order and are then swapped between
ranks (``swaps.py``). Each level cuts the units of the one before it finer; at the end balance comes
first (``balance.py``). Random numbers come from a fixed seed and moves are counted, not timed: the
same masks give the same split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.balance import balance
from mllm_compile.passes.token_split.deal import Deal
from mllm_compile.passes.token_split.measure import TILE, tiles
from mllm_compile.passes.token_split.swaps import SLACK, anneal
from mllm_compile.passes.token_split.units import Cut, Floats, units_of, work_of


@dataclass(frozen=True)
class Level:
    """Units per rank; rounds of swaps and the first noise; how many deals are improved at once.

    Deals of few ranks cost little more than one: as many as make ``width`` ranks, or ``deals``.
    """

    units: int
    rounds: int
    noise: float
    width: int = 0
    deals: int = 1


LEVELS = (
    Level(4, 60, 0.02, width=128, deals=4),
    Level(8, 80, 0.006, width=64),
    Level(16, 100, 0.003, width=32),
)
FINER = 4
"""How much finer another level cuts while a unit has more than ``HEAVY`` of a rank's work."""
HEAVY = 0.25
MANY = 64
REPAIRS = 1000
LIMIT = 1.02
"""Work of the heaviest rank, the mean being 1, above which a deal is repaired."""


def plan_split(masks: Sequence[NDArray[np.int32]], weights: Sequence[float], ranks: int) -> Split:
    """The split of a sequence of S tokens over ``ranks``, S of any size.

    ``masks``: the keys that each query may see, [S, n, 2] half-open ascending intervals;
    ``weights``: the number of layers that have each.
    """
    length = len(masks[0])
    if ranks == 1 or length <= ranks:
        return Split.contiguous(length, ranks)
    if all(_causal(mask) for mask in masks):
        return Split.zigzag(length, ranks)
    shares = np.array(weights, np.float64) / sum(weights)
    return _planned(masks, shares, ranks)


def _planned(masks: Sequence[NDArray[np.int32]], weights: Floats, ranks: int) -> Split:
    """The split into units that are as fine as it gets."""
    length, rng = len(masks[0]), np.random.default_rng(0)
    tokens, levels = _levels(masks, ranks)
    owners = np.arange(ranks)[None]
    while levels:
        level, *levels = levels
        cut = Cut(length, tokens // level.units, ranks * level.units, ranks)
        units = units_of(masks, cut)
        owners = np.repeat(owners, units.count // owners.shape[1], axis=1)
        deal = Deal(units, np.tile(owners, (-(-_deals(level, ranks) // len(owners)), 1)))
        anneal(deal, weights, rng, level.rounds, level.noise)
        if not levels and units.work[:, : units.count].max() > HEAVY:
            levels = _finer(level, tokens)
        best = np.argsort(deal.scores(weights, SLACK), kind="stable")
        owners = deal.owner[best[: _deals(levels[0], ranks) if levels else 1]]
    deal = Deal(units, owners)
    balance(deal, weights, rng, LIMIT, REPAIRS)
    best_owner = deal.owner[0]
    if level.units % 2:
        return cut.split(best_owner)
    # What zigzag cannot be improved upon stays zigzag: one causal document, more or less.
    chunk = np.arange(units.count) // (level.units // 2)
    both = np.stack([np.minimum(chunk, 2 * ranks - 1 - chunk), best_owner])
    best_owner = both[Deal(units, both).scores(weights, SLACK).argmin()]
    return cut.split(best_owner)


def _deals(level: Level, ranks: int) -> int:
    return max(level.deals, level.width // ranks)


def _levels(masks: Sequence[NDArray[np.int32]], ranks: int) -> tuple[int, list[Level]]:
    """How many of a rank's tokens its units have, and the levels; the others are the rest.

    Units are whole tiles if a rank has some. A larger rest may give deeper levels, or fewer tiles.
    """
    length = len(masks[0])
    size = TILE
    while size > 1 and length // ranks < 2 * size:
        size //= 2
    blocks = length // ranks // size

    def cost(count: int) -> float:
        shallow = max(0, 1 - _chain(count)[-1].units / min(blocks, LEVELS[-1].units))
        total = 0.05 * (1 - count / blocks) + 0.1 * shallow
        if blocks < MANY and length % (size * ranks):
            made = Cut(length, size, count * ranks, ranks)
            total += max(
                work_of(made.rows(mask), made).sum() / max(tiles(mask).sum(), 1) for mask in masks
            )
        return total

    count = min(range(max(blocks - blocks // 16 - 1, 1), blocks + 1), key=cost)
    return count * size, _chain(count)


def _chain(blocks: int) -> list[Level]:
    """The levels that cut so many blocks evenly, each the one before it."""
    found: list[Level] = []
    for level in LEVELS:
        step = found[-1].units if found else 1
        fit = (n for n in range(level.units, 2 * level.units) if blocks % n == n % step == 0)
        found += [replace(level, units=count) for count in fit][:1]
    return found or [replace(LEVELS[0], units=blocks if blocks < LEVELS[0].units else 1)]


def _finer(level: Level, tokens: int) -> list[Level]:
    """A level that cuts the units of this one several times, if they have so many tiles."""
    blocks = tokens // level.units // TILE
    times = next((n for n in range(FINER, 4 * FINER) if blocks and blocks % n == 0), 0)
    return [replace(level, units=times * level.units, width=0, deals=1)] if times else []


def _causal(mask: NDArray[np.int32]) -> bool:
    """Whether every query sees all keys up to itself."""
    ends = np.arange(1, len(mask) + 1)
    return mask.shape[1] == 1 and not mask[:, 0, 0].any() and bool((mask[:, 0, 1] == ends).all())
