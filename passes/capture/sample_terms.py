"""Terms of a loss that are of one sample each: right in any split if all samples have them."""

from collections import Counter

from torch import fx

from mllm_compile.passes.capture.spread import Spread, place


class NotASum(Exception):
    """The loss is not a sum over samples; the message names the operator and its line."""


class SampleTerms:
    """The terms of single samples that a loss adds up, and whose they are."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, fx.Node]]] = {}

    def term(self, node: fx.Node, spread: Spread) -> fx.Node:
        """What one sample contributes: the same in every split, whatever it is made of."""
        assert spread.part is not None
        rows, count = spread.part
        if not spread.rows or not spread.single or spread.dims:
            raise NotASum(f"{place(node)} is there for some samples of the batch alone")
        self._found.setdefault(count, []).extend((row, node) for row in rows)
        return node

    def check(self) -> None:
        """All samples must have the same number of terms.

        Raises:
            NotASum: they have not.

        """
        for count, terms in self._found.items():
            times = Counter(row for row, _ in terms)
            if len({times[row] for row in range(count)}) > 1:
                raise NotASum(f"{place(terms[0][1])} is there for some samples of the batch alone")
