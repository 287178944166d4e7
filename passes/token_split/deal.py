"""Units dealt to ranks, the cost of the deal, and what every swap of two units would change.

For every rank and unit it is known how many of the rank's units need that unit's keys. A rank that
loses unit a and gains unit b then needs less where only a needed, and more where nothing did. Both
are differences of prefix sums over the units, so that a swap is weighed exactly in a few look-ups,
whatever the length of its ranges. Many swaps of many ranks are weighed at once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mllm_compile.passes.token_split.measure import Ints
from mllm_compile.passes.token_split.units import Floats, Units

MINE = 1 << 13  # added where the rank holds the unit itself: what it needs of it is not received


@dataclass(frozen=True)
class Cost:
    """Of a rank: units to receive, dearer the more there are, and work beyond ``1 + slack``.

    ``weights`` [masks]: share of the layers that have each mask; it weighs the traffic. Balance
    counts alike for every mask: the ranks wait for each other in every layer.
    """

    weights: Floats
    slack: float
    price: float

    def of_swaps(
        self, need: Ints, change: Ints, load: Floats, moved: Floats, mean: Floats
    ) -> Floats:
        """What ``change`` of need and ``moved`` work [masks, Q, w, w] cost Q ranks [Q, w, w].

        ``need``, ``load`` [masks, Q]: before. ``mean`` [masks, 1]: the need of a rank on average,
        or where hardly any is, a little; a unit costs a rank that needs twice as much a third more.
        """
        slope = self.weights[:, None] * (1 + 0.5 * need / mean)
        bend = self.weights[:, None] * (0.25 / mean)
        traffic = change * (slope[..., None, None] + bend[..., None, None] * change)
        over = self._over(load)[..., None, None]
        total: Floats = (
            traffic + self.price * (self._over(load[..., None, None] + moved) - over)
        ).sum(0)
        return total

    def _over(self, load: Floats) -> Floats:
        over: Floats = np.maximum(load - (1 + self.slack), 0)
        price: Floats = over * (1 + 10 * over)
        return price


class Deal:
    """Several deals side by side; rank r of deal d is number ``d * ranks + r`` here.

    ``owner`` [deals, N]: the rank that has each unit. ``held`` [numbers, N / ranks]: its units.
    ``need`` [masks, numbers]: units that it receives. ``load``: its work, 1 being the mean. Both
    include those of its piece of the rest.
    """

    def __init__(self, units: Units, owner: Ints) -> None:
        (deals, count), ranks = owner.shape, units.ranks
        self.units, self.ranks, self.owner = units, ranks, owner.copy()
        self.held = np.argsort(owner, axis=1, kind="stable").reshape(deals * ranks, count // ranks)
        numbers = np.arange(deals * ranks)
        self.users = self._users(self.held, numbers)
        self.need = _received(self.users)
        self.load = units.work[:, self.held].sum(2) + units.work[:, count + numbers % ranks]

    def _users(self, held: Ints, numbers: Ints) -> NDArray[np.int16]:
        """[masks, Q, N]: what ``users`` of ranks ``numbers`` [Q] with ``held`` [Q, n] would be."""
        units, row = self.units, np.arange(len(held))[:, None]
        every = np.concatenate([held, units.count + numbers[:, None] % self.ranks], axis=1)
        change = np.zeros((len(units.work), len(held), units.count + 1), np.int16)
        for mask, changed in enumerate(change):
            for first, last in zip(units.first[mask], units.last[mask], strict=True):
                np.add.at(changed, (row, first[every]), 1)
                np.add.at(changed, (row, last[every]), -1)
        users = np.cumsum(change, 2, dtype=np.int16)[..., : units.count]
        users[:, row, held] += MINE
        return users

    def needs(self, held: Ints, numbers: Ints) -> Ints:
        """[masks, Q]: what ranks ``numbers`` [Q] would receive if they had ``held`` [Q, n]."""
        return _received(self._users(held, numbers))

    def scores(self, weights: Floats, slack: float) -> Floats:
        """Of every deal: received shares of the sequence, mean and half the most; and balance."""
        shape = len(weights), len(self.owner), self.ranks
        need = self.need.reshape(shape)
        traffic = weights @ (need.mean(2) + 0.5 * need.max(2)) / self.units.count
        scores: Floats = traffic + 200 * np.maximum(self.heaviest() - 1 - slack, 0)
        return scores

    def heaviest(self) -> Floats:
        """The most work of a rank under a mask, of every deal."""
        heaviest: Floats = self.load.reshape(-1, len(self.owner), self.ranks).max((0, 2))
        return heaviest

    def weigh(self, cost: Cost, numbers: Ints, lose: Ints, gain: Ints) -> Floats:
        """What it costs ``numbers`` [Q] to give a unit of ``lose`` for one of ``gain`` [Q, w].

        Returns [Q, w, w]: first the unit that is lost, then the one that comes.
        """
        work = self.units.work
        moved = work[:, gain][..., None, :] - work[:, lose][..., None]
        least = self.units.count / self.ranks / 8
        mean = np.maximum(self.need.mean(1, keepdims=True), least)
        change = self._received_more(self.users[:, numbers], lose, gain)
        return cost.of_swaps(self.need[:, numbers], change, self.load[:, numbers], moved, mean)

    def _received_more(self, users: NDArray[np.int16], lose: Ints, gain: Ints) -> Ints:
        """By how many units a rank's need grows with each swap [masks, Q, w, w]."""
        masks, ranks, count = users.shape
        sums = np.zeros((masks, 1, ranks, count + 1), np.int32)
        once, never = users == 1, users == 0
        np.cumsum(once + (never << np.int32(16)), 2, out=sums[:, 0, :, 1:])
        base = np.arange(0, sums.size, count + 1).reshape(masks, 1, ranks, 1)
        flat = sums.ravel()
        (first, last), (start, stop) = self._ranges(lose), self._ranges(gain)
        saved = ((flat[base + last] - flat[base + first]) & 0xFFFF).sum(1)
        added = ((flat[base + stop] - flat[base + start]) >> 16).sum(1)
        both = _both(flat, base, (first, last), (start, stop))
        row = np.arange(ranks)[:, None]
        change: Ints = added[..., None, :] - saved[..., None] + both
        # The unit that is lost is received if it is still needed; the other one no longer is.
        still = (users[:, row, lose] - MINE - _inside(lose, first, last))[..., None]
        change += still + _inside(lose[..., None], start[..., None, :], stop[..., None, :]) > 0
        had = (users[:, row, gain] + _inside(gain, start, stop))[..., None, :]
        change -= had - _inside(gain[:, None, :], first[..., None], last[..., None]) > 0
        return change

    def _ranges(self, units: Ints) -> tuple[Ints, Ints]:
        """First and end of what units need [masks, n, *units]."""
        return self.units.first[:, :, units], self.units.last[:, :, units]

    def swap(self, numbers: Ints, slots: Ints, lose: Ints, gain: Ints) -> None:
        """``numbers`` have ``gain`` from now on in place of ``lose``, their units in ``slots``."""
        self.held[numbers, slots] = gain
        self.owner[numbers // self.ranks, gain] = numbers % self.ranks
        users = self.users[:, numbers]
        every = np.arange(self.units.count)
        for units, sign in ((lose, -1), (gain, 1)):
            first, last = self._ranges(units[:, None])
            users += np.int16(sign) * _inside(every, first, last)
            users[:, np.arange(len(numbers)), units] += np.int16(sign * MINE)
        self.users[:, numbers] = users
        self.need[:, numbers] = _received(users)
        self.load[:, numbers] += self.units.work[:, gain] - self.units.work[:, lose]


def _both(flat: Ints, base: Ints, lost: tuple[Ints, Ints], gained: tuple[Ints, Ints]) -> Ints:
    """Units that only the lost unit needed and the gained one needs too [masks, Q, w, w]."""
    masks, _, ranks, _ = base.shape
    width = lost[0].shape[-1]
    total = np.zeros((masks, ranks, width, width), np.int64)
    for first, last in zip(lost[0].swapaxes(0, 1), lost[1].swapaxes(0, 1), strict=True):
        for start, stop in zip(gained[0].swapaxes(0, 1), gained[1].swapaxes(0, 1), strict=True):
            low = np.maximum(first[..., None], start[..., None, :])
            high = np.maximum(np.minimum(last[..., None], stop[..., None, :]), low)
            at = base[:, 0, :, None]
            total += (flat[at + high] - flat[at + low]) & 0xFFFF
    return total


def _inside(units: Ints, first: Ints, last: Ints) -> NDArray[np.int8]:
    """In how many of the n ranges (axis 1) units lie."""
    inside = (first <= units) & (units < last)
    return inside[:, 0].view(np.int8) if inside.shape[1] == 1 else inside.sum(1, dtype=np.int8)


def _received(users: NDArray[np.int16]) -> Ints:
    received: Ints = np.count_nonzero((users > 0) & (users < MINE), axis=2)
    return received
