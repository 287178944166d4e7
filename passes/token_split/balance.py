"""Bring the work of every rank below a limit, at little cost in traffic.

Single swaps (``swaps.py``) come to an end where no unit of a rank is heavier by just so much as
another's. Here a rank over the limit exchanges up to four units at once with another rank. Of many
exchanges that are drawn, the best by traffic is taken among those that lower the excess.
"""

import numpy as np

from mllm_compile.passes.token_split.deal import Deal
from mllm_compile.passes.token_split.units import Floats

DRAWN = 128
WEIGHED = 8
"""Of the exchanges that lower the excess, how many are weighed by traffic."""
MOST = 4
PRICE = 20.0
"""Of excess work, in receptions of the whole sequence."""


def balance(
    deal: Deal, weights: Floats, rng: np.random.Generator, limit: float, rounds: int
) -> None:
    """At most ``rounds`` of exchanges, until no rank of the one deal has more than ``limit``."""
    for _ in range(rounds):
        over = np.flatnonzero(deal.load.max(0) > limit)
        if not len(over):
            return
        _exchange(deal, weights, rng, limit, int(rng.choice(over)))


def _exchange(
    deal: Deal, weights: Floats, rng: np.random.Generator, limit: float, heavy: int
) -> None:
    each = deal.held.shape[1]
    several = np.arange(min(MOST, each))
    other = rng.integers(deal.ranks - 1, size=DRAWN)
    other += other >= heavy
    pair = np.stack([np.full(DRAWN, heavy), other])
    slots = (rng.integers(each, size=(2, DRAWN, 1)) + several) % each
    moves = several < 2 ** rng.integers(3, size=(DRAWN, 1))
    units = deal.held[pair[..., None], slots]
    gained = np.where(moves, units[::-1], units)
    work = deal.units.work
    load = deal.load[:, pair] + (work[:, gained] - work[:, units]).sum(3)
    excess = np.maximum(load - limit, 0).sum((0, 1))
    before = np.maximum(deal.load[:, pair] - limit, 0).sum((0, 1))
    better = np.flatnonzero(excess < before - 1e-9)[:WEIGHED]
    if not len(better):
        return
    held = deal.held[pair[:, better]]
    np.put_along_axis(held, slots[:, better], gained[:, better], 2)
    need = deal.needs(held.reshape(-1, each), pair[:, better].ravel()).reshape(len(work), 2, -1)
    traffic = weights @ (need - deal.need[:, pair[:, better]]).sum(1) / deal.units.count
    best = better[(traffic + PRICE * (excess - before)[better]).argmin()]
    for slot in several[moves[best]]:
        lose, gain = units[:, best, slot], gained[:, best, slot]
        deal.swap(pair[:, best], slots[:, best, slot], lose, gain)
