"""One call of attention as arguments of the kernels: specialisation, masks and runs of tiles."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mllm_compile.kernels.attention.gpu.spec import (
    Score,
    Sizes,
    Spec,
    Visible,
    pairs_of,
    table_of,
)
from mllm_compile.kernels.attention.gpu.table import Config, wide
from mllm_compile.kernels.attention.shared_runs import bounds_of, tiles_of


@dataclass(frozen=True, slots=True)
class Call:
    """Inputs, with dense last dims, and who sees whom: ``intervals`` [B|1, Q, n, 2] always.

    ``tiles`` are the configurations to try for a kernel, if not the table's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    intervals: Tensor
    mask: Tensor | None
    bias: Tensor | None
    score: Score
    tiles: Mapping[str, tuple[Config, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """Heads and lengths."""
        return Sizes(self.q.shape[1], self.k.shape[1], self.q.shape[2], self.k.shape[2])

    def spec(self, config: Config, precision: str) -> Spec:
        """What a kernel cut like ``config`` is compiled for."""
        size, value_size = self.q.shape[3], self.v.shape[3]
        return Spec(
            config.block_q,
            config.block_k,
            size,
            value_size,
            wide(size),
            wide(value_size),
            self.intervals.shape[2],
            self.mask is not None,
            self.bias is not None,
            self.score.softcap != 0.0,
            config.descriptors,
            precision,
        )

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


def streams(x: Tensor) -> bool:
    """Whether a tensor descriptor can read ``x``: heads and rows start at multiples of 16 bytes."""
    starts = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:3])]
    return all(start % 16 == 0 for start in starts) and min(x.stride()[:3]) > 0
