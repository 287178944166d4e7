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

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.balance import balance
from mllm_compile.passes.token_split.deal import Deal
from mllm_compile.passes.token_split.levels import HEAVY, finer, levels_of
from mllm_compile.passes.token_split.measure import Ints
from mllm_compile.passes.token_split.swaps import SLACK, anneal
from mllm_compile.passes.token_split.units import Cut, Floats, units_of

LIMIT = 1.02
"""Work of the heaviest rank, the mean being 1, above which balance comes first."""
EXCHANGES = 1000
"""At most, to get below it."""


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
    tokens, levels = levels_of(masks, ranks)
    owners = np.arange(ranks)[None]
    while levels:
        level, *levels = levels
        cut = Cut(length, tokens // level.units, ranks * level.units, ranks)
        units = units_of(masks, cut)
        owners = np.repeat(owners, units.count // owners.shape[1], axis=1)
        deal = Deal(units, np.tile(owners, (-(-level.deals(ranks) // len(owners)), 1)))
        anneal(deal, weights, rng, level.rounds, level.noise)
        if not levels and units.work[:, : units.count].max() > HEAVY:
            levels = finer(level, tokens, ranks)
        best = np.argsort(deal.scores(weights, SLACK), kind="stable")
        owners = deal.owner[best[: levels[0].deals(ranks) if levels else 1]]
    deal = Deal(units, owners)
    balance(deal, weights, rng, LIMIT, EXCHANGES)
    # What cannot be improved upon stays simple: one causal document is dealt in zigzag.
    simple = _simple(level.units, ranks)
    every = np.concatenate([simple, deal.owner])
    return cut.split(every[Deal(units, every).scores(weights, SLACK).argmin()])


def _simple(each: int, ranks: int) -> Ints:
    """The rank of every unit if ranks have ``each`` in a row, or two halves, one of them early."""
    unit = np.arange(each * ranks)
    if each % 2:
        return unit[None] // each
    half = unit // (each // 2)
    return np.stack([half // 2, np.minimum(half, 2 * ranks - 1 - half)])


def _causal(mask: NDArray[np.int32]) -> bool:
    """Whether every query sees all keys up to itself."""
    ends = np.arange(1, len(mask) + 1)
    return mask.shape[1] == 1 and not mask[:, 0, 0].any() and bool((mask[:, 0, 1] == ends).all())
