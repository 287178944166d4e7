"""Decide where a module may best be cut: candidates, to be judged by the simulated step.

Dynamic programming over the positions between units, at any granularity: whole layers would
quantise away what knowing the frozen parts gains. First the smallest possible work of the busiest
stage, then, for several allowances above it, the cuts with the fewest crossing bytes: a little
balance given up often lets one hidden state cross where several tensors would.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.passes.units import Chain, Floats

ALLOWANCES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

Cuts = tuple[int, ...]
Positions = npt.NDArray[np.int64]
Step = Callable[[Floats, int, Positions], Floats]


def candidates(chain: Chain) -> tuple[Cuts, ...]:
    """Different good cuts of one module, best balanced first; positions never fall."""
    _check_size(chain)
    positions = _worthwhile(chain)
    busiest = _busiest(chain, _solve(chain, positions, _work(chain)))
    limits = [busiest * (1 + allowance) + 0.5 for allowance in ALLOWANCES]
    found = [_solve(chain, positions, _bytes(chain, limit)) for limit in limits]
    return tuple(dict.fromkeys(found))


def _total(chain: Chain) -> Floats:
    return np.concatenate([[0.0], np.cumsum(chain.work)])


def _worthwhile(chain: Chain) -> Positions:
    """All positions, or where sites do not fix them: the narrowest of those that divide alike."""
    everything = np.arange(len(chain.units) + 1)
    if chain.pinned:
        return everything
    total = _total(chain)
    order = np.lexsort((everything, chain.crossing, total))
    _, first = np.unique(total[order], return_index=True)
    chosen = np.union1d(order[first], everything[[0, -1]])
    return chosen if len(chosen) > chain.stages else everything


def _busiest(chain: Chain, cuts: Cuts) -> float:
    ends = _total(chain)[[0, *cuts, len(chain.units)]]
    return float(np.max(np.diff(ends)))


def _work(chain: Chain) -> Step:
    total = _total(chain)
    return lambda value, end, starts: np.maximum(value, total[end] - total[starts])


def _bytes(chain: Chain, limit: float) -> Step:
    total = _total(chain)

    def step(value: Floats, end: int, starts: Positions) -> Floats:
        fits = total[end] - total[starts] <= limit
        return np.where(fits, value + chain.crossing[starts], np.inf)

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
