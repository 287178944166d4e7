"""Decide where a module may best be cut: candidates, to be judged by the simulated step.

Dynamic programming over the positions between units, at any granularity: whole layers would
quantise away what knowing the frozen parts gains. First the smallest possible work of the busiest
stage, then, for several allowances above it, the cuts with the fewest crossing bytes: a little
balance given up often lets one hidden state cross where several tensors would. The busiest stage
is not all: while a pipeline fills only forwards run, while it drains only backwards, so that cuts
which balance one of them a little more are candidates, too.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.passes.units import Chain, Floats

ALLOWANCES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
TILTS = (0.5, -0.5)

Cuts = tuple[int, ...]
Positions = npt.NDArray[np.int64]
Step = Callable[[Floats, int, Positions], Floats]


def candidates(chain: Chain) -> tuple[Cuts, ...]:
    """Different good cuts of one module, best balanced first; positions never fall."""
    _check_size(chain)
    found = _balanced(chain, chain.work.sum(1), ALLOWANCES)
    for tilt in TILTS:
        found += _balanced(chain, chain.work @ [1 + tilt, 1.0, 1 - tilt], ALLOWANCES[:1])
    return tuple(dict.fromkeys(found))


def _balanced(chain: Chain, work: Floats, allowances: Sequence[float]) -> list[Cuts]:
    """For each allowance above the least possible maximum of work, the cuts with fewest bytes."""
    total = np.concatenate([[0.0], np.cumsum(work)])
    positions = _worthwhile(chain, total)
    busiest = _busiest(chain, total, _solve(chain, positions, _work(total)))
    limits = [busiest * (1 + allowance) + 0.5 for allowance in allowances]
    return [_solve(chain, positions, _bytes(chain, total, limit)) for limit in limits]


def _worthwhile(chain: Chain, total: Floats) -> Positions:
    """All positions, or where sites do not fix them: the narrowest of those that divide alike."""
    everything = np.arange(len(chain.units) + 1)
    if chain.pinned:
        return everything
    inner = everything[1:-1]
    order = inner[np.lexsort((inner, chain.crossing[inner], total[inner]))]
    _, first = np.unique(total[order], return_index=True)
    chosen = np.union1d(order[first], everything[[0, -1]])
    return chosen if len(chosen) > chain.stages else everything


def _busiest(chain: Chain, total: Floats, cuts: Cuts) -> float:
    return float(np.max(np.diff(total[[0, *cuts, len(chain.units)]])))


def _work(total: Floats) -> Step:
    return lambda value, end, starts: np.maximum(value, total[end] - total[starts])


def _bytes(chain: Chain, total: Floats, limit: float) -> Step:
    """Crossing bytes, and less than a byte for imbalance: it decides between equals."""

    def step(value: Floats, end: int, starts: Positions) -> Floats:
        share = (total[end] - total[starts]) / limit
        imbalance = share**2 / (2 * chain.stages)
        return np.where(share <= 1, value + chain.crossing[starts] + imbalance, np.inf)

    return step


def _solve(chain: Chain, positions: Positions, step: Step) -> Cuts:
    """The best cuts at ``positions``.

    ``step(value of the best cuts of everything before each start, end, starts)`` is the value, the
    smaller the better, of adding one stage from each start to ``end``.
    """
    least = 0 if chain.pinned or not chain.units else 1
    origin = np.zeros(1), np.zeros(1, np.int64)
    value = np.array([step(origin[0], end, origin[1])[0] for end in positions])
    value[:least] = np.inf
    choices: list[Positions] = []
    for low, high in chain.windows:
        inside = np.flatnonzero((positions >= low) & (positions <= high))
        reached = np.full(len(positions), np.inf)
        choice = np.zeros(len(positions), np.int64)
        for place in range(inside[0] + least, len(positions)):
            starts = inside[: np.searchsorted(inside, place - least, side="right")]
            results = step(value[starts], positions[place], positions[starts])
            choice[place] = starts[np.argmin(results)]
            reached[place] = results.min()
        value = reached
        choices.append(choice)
    return tuple(int(positions[place]) for place in _trace(choices, len(positions) - 1))


def _trace(choices: Sequence[Positions], place: int) -> Iterator[int]:
    """The chosen places, first cut first."""
    found = []
    for choice in reversed(choices):
        place = int(choice[place])
        found.append(place)
    return reversed(found)


def _check_size(chain: Chain) -> None:
    count = len(chain.units)
    if count and not chain.pinned and count < chain.stages:
        raise RequestError(
            explain(
                f"{chain.name}: pipeline",
                expected=f"at most {count}, for it has {count - 1} places to cut",
                got=str(chain.stages),
                remedy=f"use pipeline = {count} or less",
            )
        )
