"""One call of attention as arguments of the kernels: specialisation, masks and runs of tiles."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.attention.gpu.operands import readable, split
from mllm_compile.kernels.attention.gpu.spec import (
    Score,
    Sizes,
    Visible,
    pairs_of,
    table_of,
)
from mllm_compile.kernels.attention.gpu.table import Config
from mllm_compile.kernels.attention.shared_runs import bounds_of, tiles_of
from mllm_compile.kernels.attention.site import Site


@dataclass(frozen=True, slots=True)
class Call:
    """Inputs and who sees whom: ``intervals`` [B|1, Q, n, 2] always.

    ``tiles`` are the configurations to try for a kernel, if not the table's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    intervals: Tensor
    mask: Tensor | None
    bias: Tensor | None
    score: Score
    target: str
    tiles: Mapping[str, tuple[Config, ...]] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """What its kernels are compiled for."""
        return Site.of(self.q, self.v, self.intervals, self.mask, self.bias, self.score.softcap)

    @property
    def sizes(self) -> Sizes:
        """Heads and lengths."""
        return Sizes(self.q.shape[1], self.k.shape[1], self.q.shape[2], self.k.shape[2])

    def read(self, x: Tensor) -> Tensor:
        """``x`` [B, H, S, D] as the kernels multiply it."""
        in_parts = table.precision(self.target, self.site.dtype) == table.IN_PARTS
        return split(x) if in_parts else readable(x)

    def configs(self, kernel: str) -> tuple[Config, ...]:
        """What to try for a kernel."""
        return self.tiles.get(kernel) or table.configs(kernel, self.target, self.site)

    def visible(self, config: Config, by_keys: bool) -> Visible:
        """The masks as arguments, with the runs of the tiles of ``config``."""
        batch, sizes = self.q.shape[0], self.sizes
        blocks = config.block_q, config.block_k
        tiles = bounds = tiles_of(self.intervals, *blocks)
        if by_keys:
            bounds = bounds_of(self.intervals, *blocks, -(-sizes.keys // config.block_k))
        shape = (batch, sizes.heads, sizes.queries, sizes.keys)
        intervals = table_of(self.intervals, batch)
        mask = None if self.mask is None else self.mask.view(torch.uint8)
        return Visible(
            intervals,
            table_of(tiles, batch),
            table_of(bounds, batch),
            pairs_of(mask, shape, intervals),
            pairs_of(self.bias, shape, intervals),
        )
