"""Choose one strategy for every point of a dataflow so that work and conversions cost least.

An integer program. Every point has one binary per strategy, of which one is taken. Along an edge,
*transport* variables say which layout of the source meets which layout of the reader; their
marginals are the chosen strategies. A *conversion* variable per value and pair of layouts is at
least every transport of that pair: all readers share it, and it carries the price. In this form the
relaxation has been integral so far, so that one linear program decides.

Points of equal ties (repeated blocks) are one: they share variables, and costs count as often.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.dataflow import Edge

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Choice:
    """The strategies of one point; points of equal ties and strategies agree, in prices too."""

    options: tuple[Strategy, ...]
    tie: Hashable


class Prices(Protocol):
    """What is to be paid, in seconds."""

    def work(self, point: str, option: Strategy) -> float:
        """For running a point so."""

    def conversion(self, point: str, output: int, have: Layout, want: Layout) -> float:
        """For having a result of a point, made in one layout, in another."""


def solve(
    choices: Mapping[str, Choice], edges: Sequence[Edge], prices: Prices
) -> dict[str, Strategy]:
    """The best strategy of every point. PlanError if there is none."""
    program = _Program(choices, edges, prices)
    taken = program.solution()
    return {name: choices[name].options[taken[group]] for name, group in program.group.items()}


class _Program:
    def __init__(
        self, choices: Mapping[str, Choice], edges: Sequence[Edge], prices: Prices
    ) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.binary: list[bool] = []
        self.cells: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.limits: list[tuple[float, float]] = []
        self.group: dict[str, int] = {}
        self.leader: list[str] = []
        self.columns: list[tuple[int, ...]] = []
        self.choices, self.prices = choices, prices
        self._points()
        self._edges(edges)

    def _points(self) -> None:
        groups: dict[Choice, list[str]] = {}
        for name, choice in self.choices.items():
            members = groups.setdefault(choice, [])
            members.append(name)
        for group, (choice, members) in enumerate(groups.items()):
            self.group.update(dict.fromkeys(members, group))
            self.leader.append(members[0])
            only = len(choice.options) == 1
            columns = tuple(
                self._column(
                    len(members) * self.prices.work(members[0], option),
                    lower=float(only),
                    binary=True,
                )
                for option in choice.options
            )
            self.columns.append(columns)
            if not only:
                self._row([(column, 1.0) for column in columns], 1.0, 1.0)

    def _edges(self, edges: Sequence[Edge]) -> None:
        """Every different edge once; a conversion counts as often as there are different values."""
        kinds: dict[tuple[int, int, int, int], Edge] = {}
        values: dict[tuple[int, int], dict[str, None]] = {}
        for edge in edges:
            source, reader = self.group[edge.source], self.group[edge.reader]
            kinds.setdefault((source, edge.output, reader, edge.input), edge)
            values.setdefault((source, edge.output), {})[edge.source] = None
        conversions: dict[tuple[int, int, Layout, Layout], int] = {}
        for (source, output, _, _), edge in kinds.items():
            for (have, want), flow in self._transport(edge).items():
                if have == want:
                    continue
                key = source, output, have, want
                if key not in conversions:
                    cost = self.prices.conversion(edge.source, output, have, want)
                    conversions[key] = self._column(len(values[source, output]) * cost)
                terms = [(conversions[key], 1.0), *((column, -1.0) for column in flow)]
                self._row(terms, 0.0, np.inf)

    def _transport(self, edge: Edge) -> dict[tuple[Layout, Layout], list[int]]:
        """For every pair of layouts the columns whose sum says that it meets along the edge."""
        have: dict[Layout, list[int]] = {}
        want: dict[Layout, list[int]] = {}
        for column, option in self._options(edge.source):
            have.setdefault(option.outputs[edge.output], []).append(column)
        for column, option in self._options(edge.reader):
            want.setdefault(option.inputs[edge.input], []).append(column)
        if len(have) == 1:
            return {(layout, other): columns for layout in have for other, columns in want.items()}
        if len(want) == 1:
            return {(layout, other): columns for layout, columns in have.items() for other in want}
        flows = {(layout, other): [self._column(0.0)] for layout in have for other in want}
        for ends, place in ((have, 0), (want, 1)):
            for layout, columns in ends.items():
                met = [(flow[0], 1.0) for pair, flow in flows.items() if pair[place] == layout]
                self._row([*met, *((column, -1.0) for column in columns)], 0.0, 0.0)
        return flows

    def _options(self, point: str) -> list[tuple[int, Strategy]]:
        group = self.group[point]
        options = self.choices[self.leader[group]].options
        return list(zip(self.columns[group], options, strict=True))

    def _column(self, cost: float, lower: float = 0.0, *, binary: bool = False) -> int:
        self.costs.append(cost * MICROSECONDS)
        self.lower.append(lower)
        self.binary.append(binary)
        return len(self.costs) - 1

    def _row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        rows, columns, values = self.cells
        for column, value in terms:
            rows.append(len(self.limits))
            columns.append(column)
            values.append(value)
        self.limits.append((low, high))

    def solution(self) -> list[int]:
        """Which strategy every group takes."""
        if not self.limits:
            return [0] * len(self.columns)
        rows, columns, values = self.cells
        shape = len(self.limits), len(self.costs)
        limits = np.array(self.limits).reshape(-1, 2)
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        found = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix, limits[:, 0], limits[:, 1]),
            integrality=np.array(self.binary, dtype=int),
            bounds=Bounds(np.array(self.lower), 1.0),
            options={"mip_rel_gap": 1e-9},
        )
        if found.x is None:
            raise PlanError(explain("sharding", expected="a solution", got=str(found.message)))
        return [int(np.argmax(found.x[list(columns)])) for columns in self.columns]
