"""What the kernels of an attention are compiled for."""

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("mask", "bias", "softcap")


class Site(NamedTuple):
    """What the kernels of an attention are compiled for.

    ``size`` and ``value_size`` are the last dims of q and v; ``intervals`` (1 or 2) is how many a
    query has: without any, and where it is causal by position, one; ``mask`` and ``bias`` tell
    whether it has a dense one.
    """

    dtype: str
    size: int
    value_size: int
    intervals: int = 1
    mask: bool = False
    bias: bool = False
    softcap: bool = False

    @staticmethod
    def of(
        q: Tensor,
        v: Tensor,
        intervals: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        softcap: float,
    ) -> "Site":
        """The site of a call of ``mllm::attention``; tensors may be fakes."""
        return Site(
            str(q.dtype).removeprefix("torch."),
            q.shape[3],
            v.shape[3],
            1 if intervals is None else intervals.shape[2],
            mask is not None,
            bias is not None,
            softcap != 0.0,
        )

    @property
    def bits(self) -> int:
        """Of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return 8 * dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether pairs of a query and a key are looked at one by one."""
        return self.mask or self.bias or self.softcap

    @property
    def kind(self) -> str:
        """What masks its scores, and what is done to them: ``i2+mask+softcap``."""
        return "+".join([f"i{self.intervals}", *(k for k in KINDS if getattr(self, k))])

    def __str__(self) -> str:
        """``bfloat16 128x128 i1``."""
        return f"{self.dtype} {self.size}x{self.value_size} {self.kind}"

    @staticmethod
    def parse(text: str) -> "Site":
        """The inverse of ``str``; ValueError for other text."""
        dtype, sizes, kind = text.split()
        size, value_size = sizes.split("x")
        intervals, *kinds = kind.split("+")
        has = {name: name in kinds for name in KINDS}
        site = Site(dtype, int(size), int(value_size), int(intervals.removeprefix("i")), **has)
        if str(site) != text:
            raise ValueError(f"no attention site: {text!r}")
        return site
