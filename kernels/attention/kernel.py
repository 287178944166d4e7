"""Which kernel an attention runs, as text that its node in a lowered graph carries.

A *site* is what a kernel is compiled for; a *kernel* is an implementation for a site on a target,
with the tilings that are tried there. Lowering names it (passes/lower/emit.py), so that a graph
tells what runs and all of it can be compiled ahead of time; the operator refuses any other call. An
operator called without a name chooses by the same rule.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mllm_compile.kernels.attention import cpu
from mllm_compile.kernels.attention.gpu import entry as gpu
from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.attention.gpu.table import Config
from mllm_compile.kernels.attention.site import Site

FUSED, TRITON, DEFINITION = "fused", "triton", "definition"
FORWARD, BACKWARD = ("forward",), ("dq", "dkv")  # the Triton kernels of the operators


class Kernel(NamedTuple):
    """An implementation of a site on a target.

    ``how`` is *fused* (torch's CPU kernels), *triton* or *definition*. ``tiles`` are the Triton
    kernels by name, and for each the configurations of which the first launch keeps the fastest.
    """

    how: str
    target: str
    site: Site
    tiles: tuple[tuple[str, tuple[Config, ...]], ...] = ()

    def __str__(self) -> str:
        """``triton sm90 bfloat16 128x128 i1: dq 128x64w8s2tma; dkv 64x64w8s2tma``."""
        named = f"{self.how} {self.target} {self.site}"
        tiles = (" ".join([name, *map(str, configs)]) for name, configs in self.tiles)
        return f"{named}: {'; '.join(tiles)}" if self.tiles else named

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "Kernel":
        """The inverse of ``str``; ValueError for other text."""
        named, _, rest = text.partition(": ")
        how, target, site = named.split(" ", 2)
        tiles = []
        for each in filter(None, rest.split("; ")):
            name, *configs = each.split()
            tiles.append((name, tuple(map(Config.parse, configs))))
        return Kernel(how, target, Site.parse(site), tuple(tiles))


def chosen(
    target: str,
    names: tuple[str, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> Kernel:
    """The kernel of a call on a target; ``names`` are the Triton kernels that it consists of.

    Only shapes, strides and dtypes count, so that fakes on any device do.
    """
    site = Site.of(q, v, intervals, mask, bias, softcap)
    if target == "cpu" and cpu.computes(q, k, v, softcap):
        return Kernel(FUSED, target, site)
    if target not in table.TARGETS or not gpu.computes(q, k, v, mask, bias, scale, softcap):
        return Kernel(DEFINITION, target, site)
    tiles = tuple((name, table.configs(name, target, site)) for name in names)
    return Kernel(TRITON, target, site, tiles)


def target_of(device: torch.device) -> str:
    """The table's name of a GPU's architecture; the device's type for all others."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return table.target_of("hip", "")
    major, minor = torch.cuda.get_device_capability(device)
    return table.target_of("cuda", 10 * major + minor)


def agreed(text: str, names: tuple[str, ...], q: Tensor, *call: Any) -> Kernel:
    """The kernel that ``text`` names, or of the call itself if it names none or is empty.

    Raises:
        ValueError: the call is of another site, or on another target, than the one named.

    """
    own = chosen(target_of(q.device), names, q, *call)
    if not text or 0 in (q.numel(), call[0].numel()):
        return own
    named = Kernel.parse(text)
    if named[:3] != own[:3]:
        raise ValueError(
            f"attention: expected a call of {named._replace(tiles=())}, got one of "
            f"{own._replace(tiles=())}; lower the program again for this machine and these shapes"
        )
    return named


def backward_of(text: str, *call: Any) -> str:
    """The name of the backward's kernel for a forward of that name; "" for ""."""
    return str(chosen(Kernel.parse(text).target, BACKWARD, *call)) if text else ""
