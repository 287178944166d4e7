"""Improve deals by swaps of one unit of a rank against one of another: simulated annealing.

In a round the ranks are paired, and every pair weighs some swaps at once and takes the best under
a noise that fades from round to round, or none. A swap changes what its two ranks need and compute
and nothing else, so pairs do not disturb each other, nor do deals side by side. The price of
imbalance rises meanwhile: at first units gather where their keys are, then the work is levelled.
"""

import numpy as np

from mllm_compile.passes.token_split.deal import Cost, Deal
from mllm_compile.passes.token_split.measure import Ints
from mllm_compile.passes.token_split.units import Floats

SLACK = 0.0125
"""Work above the mean that costs nothing; a rank's share of the noise that tiles make."""
WIDTH = 4
"""Units of each rank that a pair weighs against the other's in a round."""
PRICES = (1.0, 15.0)
"""Of a rank whose work is twice the mean, in receptions of the whole sequence: first and last."""
SETTLING = 20
"""Rounds without noise at the end."""
COLD = 0.0002
"""The last noise, as a share of all units."""


def anneal(
    deal: Deal, weights: Floats, rng: np.random.Generator, rounds: int, noise: float
) -> None:
    """``rounds`` of swaps from ``noise``, a share of all units, down; then some without noise."""
    for at in np.arange(rounds) / rounds:
        price = PRICES[0] * (PRICES[1] / PRICES[0]) ** at
        _round(
            deal, _pairs(deal, rng), _cost(deal, weights, price), rng, noise * (COLD / noise) ** at
        )
    for _ in range(SETTLING):
        _round(deal, _pairs(deal, rng), _cost(deal, weights, 50.0), rng, 0.0)


def _cost(deal: Deal, weights: Floats, price: float) -> Cost:
    return Cost(weights, SLACK, price * deal.units.count)


def _round(
    deal: Deal, pairs: Ints, cost: Cost, rng: np.random.Generator, noise: float, width: int = WIDTH
) -> None:
    """Every pair of ranks [2, P] weighs ``width`` units of each against each other."""
    size = pairs.shape[1]
    if not size:
        return
    both = pairs.ravel()
    slots = rng.integers(deal.held.shape[1], size=(len(both), width))
    lose = deal.held[both[:, None], slots]
    gain = np.concatenate([lose[size:], lose[:size]])
    change = deal.weigh(cost, both, lose, gain)
    change = (change[:size] + change[size:].transpose(0, 2, 1)).reshape(size, -1)
    limit = np.full(size, -1e-9)
    if noise:
        scale = noise * deal.units.count
        change -= scale * rng.standard_exponential(change.shape)
        limit -= scale * rng.standard_exponential(size)
    best = change.argmin(1)
    takes = np.flatnonzero(change[np.arange(size), best] < limit)
    mine, other = np.divmod(best[takes], width)
    rows = np.concatenate([takes, takes + size])
    out, into = np.concatenate([mine, other]), np.concatenate([other, mine])
    deal.swap(both[rows], slots[rows, out], lose[rows, out], gain[rows, into])


def _pairs(deal: Deal, rng: np.random.Generator) -> Ints:
    """Two rounds of three look at units beside those of the rank, where keys are shared."""
    return _neighbours(deal, rng) if rng.random() < 2 / 3 else _strangers(deal, rng)


def _strangers(deal: Deal, rng: np.random.Generator) -> Ints:
    """Pairs [2, P] of ranks of the same deal, drawn."""
    deals = len(deal.owner)
    order = rng.permuted(np.arange(deals * deal.ranks).reshape(deals, -1), axis=1)
    return order[:, : deal.ranks // 2 * 2].reshape(-1, 2).T


def _neighbours(deal: Deal, rng: np.random.Generator) -> Ints:
    """Pairs [2, P] in which one rank has a unit next to one of the other."""
    count = len(deal.held)
    numbers = np.arange(count)
    unit = deal.held[numbers, rng.integers(deal.held.shape[1], size=count)]
    beside = (unit + 2 * rng.integers(2, size=count) - 1) % deal.units.count
    first = numbers - numbers % deal.ranks
    wanted = (first + deal.owner[numbers // deal.ranks, beside]).tolist()
    free = [True] * count
    pairs: list[int] = []
    for number in rng.permutation(count).tolist():
        other = wanted[number]
        if number != other and free[number] and free[other]:
            free[number] = free[other] = False
            pairs += (number, other)
    return np.array(pairs, np.int64).reshape(-1, 2).T
