"""What every rank holds of a dense tensor in a layout, by plain indexing."""

from dataclasses import dataclass

import torch

from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.split import Split


def random_like(dense: torch.Tensor) -> torch.Tensor:
    if dense.is_floating_point() or dense.is_complex():
        return torch.randn_like(dense)
    return torch.randint_like(dense, -5, 5)


@dataclass(frozen=True)
class Form:
    """A layout along one axis, with the split of an ``S``."""

    layout: Layout
    split: Split | None = None

    def indices(self, length: int, place: int) -> torch.Tensor:
        """The places in a dim of ``length`` that the rank at ``place`` holds, in its order."""
        outer, size = self.layout.outer, self.layout.size
        held = [i for a, b in self.split.parts[place] for i in range(a, b)]
        grid = torch.arange(length).reshape(outer, size, length // max(outer * size, 1))
        return grid[:, held].reshape(-1)

    def unit(self, length: int) -> int:
        return length // max(self.layout.outer * self.layout.size, 1)

    @property
    def dual(self) -> "Form":
        return Form(self.layout.dual, self.split)

    def parts(self, dense: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """The local tensors; the summands of a partial sum are random."""
        if self.layout.kind == "S":
            length = dense.shape[self.layout.dim]
            return [
                dense.index_select(self.layout.dim, self.indices(length, place))
                for place in range(ranks)
            ]
        if self.layout.kind == "P":
            parts = [random_like(dense) for _ in range(ranks - 1)]
            return [*parts, dense - sum(parts)]
        return [dense.clone() for _ in range(ranks)]

    def check(
        self, parts: list[torch.Tensor], dense: torch.Tensor, tolerance: float = 1e-12
    ) -> None:
        """The local tensors are a form of ``dense``."""
        got, want = list(parts), self.parts(dense, len(parts))
        if self.layout.kind == "P":
            got, want = [sum(parts)], [dense]
        for mine, expected in zip(got, want, strict=True):
            torch.testing.assert_close(
                mine, expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )

    @property
    def arguments(self) -> tuple[str, str]:
        return str(self.layout), str(self.split or "")
