"""Which rank holds which tokens of a sequence, for context parallelism under any masks.

Every rank gets equally many tokens; under every mask it computes equally many attention tiles, and
it needs few keys that other ranks hold. Attention of each layer ends with its slowest rank, so
balance holds for every mask at once; keys travel once per layer, so traffic is summed over layers.

The sequence is cut into units, a few per rank, that start out in order and are then swapped between
ranks (``swaps.py``). Each level cuts the units of the one before it finer. Random numbers come from
a fixed seed and moves are counted, not timed: the same masks give the same split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.deal import Deal
from mllm_compile.passes.token_split.measure import TILE, Ints
from mllm_compile.passes.token_split.swaps import SLACK, anneal, repair
from mllm_compile.passes.token_split.units import Floats, cut, split_of


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
REPAIRS = 200
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
    return split_of(_planned(masks, shares, ranks), ranks, length)


def _planned(masks: Sequence[NDArray[np.int32]], weights: Floats, ranks: int) -> Ints:
    """The rank of every unit, as fine as it gets."""
    tokens = len(masks[0]) // ranks
    rng = np.random.default_rng(0)
    levels = _levels(tokens)
    owners = np.arange(ranks)[None]
    while levels:
        level = levels.pop(0)
        units = cut(masks, ranks * level.units, ranks)
        owners = np.repeat(owners, units.count // owners.shape[1], axis=1)
        deal = Deal(units, np.tile(owners, (-(-_deals(level, ranks) // len(owners)), 1)), ranks)
        anneal(deal, weights, rng, level.rounds, level.noise)
        if not levels and units.work.max() > HEAVY and tokens >= FINER * level.units * TILE:
            levels = [Level(FINER * level.units, level.rounds, level.noise)]
        if not levels:
            repair(deal, weights, rng, REPAIRS, LIMIT)
        best = np.argsort(deal.scores(weights, SLACK), kind="stable")
        owners = deal.owner[best[: _deals(levels[0], ranks) if levels else 1]]
    best_owner: Ints = owners[0]
    if level.units % 2:
        return best_owner
    # What zigzag cannot be improved upon stays zigzag: one causal document, more or less.
    chunk = np.arange(units.count) // (level.units // 2)
    both = np.stack([np.minimum(chunk, 2 * ranks - 1 - chunk), best_owner])
    best_owner = both[Deal(units, both, ranks).scores(weights, SLACK).argmin()]
    return best_owner


def _deals(level: Level, ranks: int) -> int:
    return max(level.deals, level.width // ranks)


def _levels(tokens: int) -> list[Level]:
    """The levels for ranks of so many tokens; units are whole tiles if such can be had."""
    blocks, rest = divmod(tokens, TILE)
    found: list[Level] = []
    for level in LEVELS:
        step = found[-1].units if found else 1
        fit = (n for n in range(level.units, 2 * level.units) if blocks % n == n % step == 0)
        count = next(fit, None)
        if count and blocks and not rest:
            found.append(replace(level, units=count))
    if found:
        return found
    fine = [level for level in LEVELS if tokens >= level.units * TILE]
    return fine or [replace(LEVELS[0], units=min(LEVELS[0].units, tokens))]


def _causal(mask: NDArray[np.int32]) -> bool:
    """Whether every query sees all keys up to itself."""
    ends = np.arange(1, len(mask) + 1)
    return mask.shape[1] == 1 and not mask[:, 0, 0].any() and bool((mask[:, 0, 1] == ends).all())
