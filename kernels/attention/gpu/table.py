"""The configurations that are tried on a device, by kernel, target, element size and head size.

Every one of them compiles without stack and spills, within shared memory and with the target's
matrix instructions: HGMMA on sm90, for all dtypes and head sizes. ``mllm-compile kernels`` shows
what each takes. A head size between two is treated as the larger. On sm90 and sm100 all that is
streamed comes by tensor descriptors (TMA). Limits:

- float32 above 64 has none with a dense mask, a bias or a cap: for six products ptxas keeps so many
  matrix descriptors (of wgmma) in registers that it spills what those need beside them;
- dk and dv on sm100 take the older HMMA at head size 256, and in float32 at 128: accumulators of 64
  rows that wide pass through registers between tensor memory and the next product, and spill.
"""

import re
from typing import NamedTuple

from mllm_compile.kernels.attention.gpu.spec import Spec, wide
from mllm_compile.kernels.attention.site import Site

INTERPRETER = "interpreter"
IN_PARTS = "bf16x6"
TARGETS = ("sm80", "sm90", "sm100", "gfx942")


class Config(NamedTuple):
    """How a kernel is cut: tile, warps, pipeline stages, tensor descriptors.

    With ``apart``, dk and dv are made by a launch each.
    """

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2
    descriptors: bool = False
    apart: bool = False

    def __str__(self) -> str:
        """``128x64w8s3tma``: tile of queries and keys, warps, stages, descriptors."""
        cut = f"{self.block_q}x{self.block_k}w{self.warps}s{self.stages}"
        return cut + "tma" * self.descriptors + "apart" * self.apart

    @staticmethod
    def parse(text: str) -> "Config":
        """The inverse of ``str``; ValueError for other text."""
        found = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(tma)?(apart)?", text)
        if found is None:
            raise ValueError(f"no kernel configuration: {text!r}")
        block_q, block_k, warps, stages = map(int, found.groups()[:4])
        return Config(block_q, block_k, warps, stages, bool(found[5]), bool(found[6]))


DELTA = Config(64, 64)

# (target, bits of an element, head size): per kernel, what to try
CONFIGS: dict[tuple[str, int, int], dict[str, tuple[Config, ...]]] = {
    ("sm80", 16, 64): {
        "forward": (Config(128, 64, 8), Config(64, 64)),
        "dq": (Config(64, 64, 8),),
        "dkv": (Config(64, 64, 8),),
    },
    ("sm80", 16, 128): {
        "forward": (Config(64, 64, 4, 3), Config(64, 64)),
        "dq": (Config(64, 64, 8), Config(64, 64)),
        "dkv": (Config(32, 64, 8),),
    },
    ("sm80", 16, 256): {
        "forward": (Config(64, 32, 8),),
        "dq": (Config(32, 32, 8),),
        "dkv": (Config(32, 32, 8),),
    },
    ("sm90", 16, 64): {
        "forward": (
            Config(128, 128, 8, 2, True),
            Config(128, 64, 8, 3, True),
            Config(64, 64, 4, 3, True),
        ),
        "dq": (Config(128, 64, 8, 2, True), Config(64, 64, 4, 2, True)),
        "dkv": (Config(64, 64, 4, 2, True), Config(32, 128, 8, 2, True)),
    },
    ("sm90", 16, 128): {
        "forward": (
            Config(128, 64, 8, 3, True),
            Config(128, 128, 8, 2, True),
            Config(64, 64, 4, 3, True),
        ),
        "dq": (Config(128, 64, 8, 2, True), Config(64, 64, 4, 2, True)),
        "dkv": (Config(64, 64, 8, 2, True), Config(32, 128, 8, 2, True)),
    },
    ("sm90", 16, 256): {
        "forward": (Config(128, 64, 8, 2, True),),
        "dq": (Config(64, 32, 8, 2, True),),
        "dkv": (Config(32, 64, 8, 2, True, True), Config(32, 64, 4, 2, True, True)),
    },
    ("sm100", 16, 64): {
        "forward": (Config(128, 64, 8, 2, True),),
        "dq": (Config(128, 64, 8, 2, True),),
        "dkv": (Config(64, 64, 4, 2, True),),
    },
    ("sm100", 16, 128): {
        "forward": (Config(128, 64, 8, 3, True),),
        "dq": (Config(128, 64, 8, 2, True),),
        "dkv": (Config(64, 64, 8, 2, True),),
    },
    ("sm100", 16, 256): {
        "forward": (Config(64, 32, 8, 2, True),),
        "dq": (Config(64, 32, 8, 2, True),),
        "dkv": (Config(32, 32, 8, 2, True),),
    },
    ("gfx942", 16, 64): {
        "forward": (Config(64, 64, 4, 1),),
        "dq": (Config(64, 64, 4, 1),),
        "dkv": (Config(32, 64, 4, 1),),
    },
    ("gfx942", 16, 128): {
        "forward": (Config(64, 32, 4, 1), Config(64, 64, 8, 1)),
        "dq": (Config(64, 32, 4, 1),),
        "dkv": (Config(32, 32, 4, 1),),
    },
    ("gfx942", 16, 256): {
        "forward": (Config(32, 32, 4, 1),),
        "dq": (Config(32, 32, 4, 1),),
        "dkv": (Config(16, 32, 8, 1),),
    },
    ("sm80", 32, 64): {
        "forward": (Config(64, 32, 8),),
        "dq": (Config(32, 32, 8),),
        "dkv": (Config(32, 32, 8),),
    },
    ("sm80", 32, 128): {
        "forward": (Config(32, 32, 8),),
        "dq": (Config(32, 16, 8),),
        "dkv": (Config(16, 32, 8, 2, False, True),),
    },
    ("sm90", 32, 64): {
        "forward": (Config(64, 32, 4, 2, True),),
        "dq": (Config(64, 32, 4, 2, True),),
        "dkv": (Config(32, 64, 4, 2, True),),
    },
    ("sm90", 32, 128): {
        "forward": (Config(64, 32, 4, 2, True),),
        "dq": (Config(64, 16, 4, 2, True),),
        "dkv": (Config(16, 64, 4, 2, True, True),),
    },
    ("sm100", 32, 64): {
        "forward": (Config(128, 32, 8, 2, True),),
        "dq": (Config(64, 32, 4, 2, True),),
        "dkv": (Config(16, 64, 4, 2, True),),
    },
    ("sm100", 32, 128): {
        "forward": (Config(64, 32, 4, 2, True),),
        "dq": (Config(64, 16, 8, 2, True),),
        "dkv": (Config(32, 16, 8, 2, True, True),),
    },
    ("gfx942", 32, 64): {
        "forward": (Config(32, 32, 4, 1),),
        "dq": (Config(32, 32, 4, 1),),
        "dkv": (Config(32, 32, 4, 1),),
    },
    ("gfx942", 32, 128): {
        "forward": (Config(32, 32, 4, 1),),
        "dq": (Config(32, 32, 4, 1),),
        "dkv": (Config(32, 32, 4, 1),),
    },
}
# What differs where there is a dense mask, a bias or a cap
DENSE: dict[tuple[str, int, int], dict[str, tuple[Config, ...]]] = {
    ("sm80", 16, 64): {
        "dkv": (Config(32, 32, 8),),
    },
    ("sm80", 16, 128): {
        "forward": (Config(64, 64, 8, 2),),
        "dq": (Config(64, 64, 8, 2),),
    },
    ("gfx942", 16, 128): {
        "forward": (Config(64, 32, 4, 1),),
    },
    ("sm90", 16, 64): {
        "forward": (Config(128, 64, 8, 3, True),),
        "dq": (Config(128, 64, 8, 2, True),),
        "dkv": (Config(64, 64, 4, 2, True),),
    },
    ("sm90", 16, 128): {
        "forward": (Config(128, 64, 8, 3, True), Config(64, 64, 4, 3, True)),
        "dq": (Config(128, 64, 8, 2, True), Config(64, 64, 4, 2, True)),
        "dkv": (Config(32, 64, 8, 2, True),),
    },
    ("sm90", 16, 256): {
        "forward": (Config(64, 32, 8, 2, True),),
        "dq": (Config(64, 16, 8, 2, True),),
        "dkv": (Config(32, 64, 4, 2, True, True),),
    },
    ("sm90", 32, 64): {
        "dkv": (Config(16, 64, 4, 2, True),),
    },
    ("sm100", 16, 64): {
        "dkv": (Config(32, 64, 8, 2, True),),
    },
    ("sm100", 16, 128): {
        "dkv": (Config(32, 64, 8, 2, True),),
    },
}

INTERPRETED = {
    "forward": (Config(64, 128, descriptors=True),),
    "dq": (Config(128, 64),),
    "dkv": (Config(64, 128, descriptors=True),),
}


def largest(bits: int, dense: bool = False) -> int:
    """The head size up to which every target has configurations; ``dense``: ``Site.dense``."""
    return {16: 256, 32: 64 if dense else 128}[bits]


def configs(kernel: str, target: str, site: Site) -> tuple[Config, ...]:
    """What to try for a kernel of an attention site on a target: the one place that decides it."""
    if target == INTERPRETER:
        return INTERPRETED[kernel]
    bits, size = site.bits, max(site.size, site.value_size)
    row = target, bits, min(at[2] for at in CONFIGS if at[:2] == (target, bits) and at[2] >= size)
    dense = DENSE.get(row, {}).get(kernel) if site.dense else None
    return dense or CONFIGS[row][kernel]


def precision(target: str, dtype: str) -> str:
    """How a dtype is multiplied: float32 in parts of bfloat16, but on AMD, which has its own."""
    return IN_PARTS if dtype == "float32" and not target.startswith("gfx") else "ieee"


def spec_of(config: Config, target: str, site: Site) -> Spec:
    """What a kernel of an attention site is compiled for."""
    return Spec(
        config.block_q,
        config.block_k,
        site.size,
        site.value_size,
        wide(site.size),
        wide(site.value_size),
        site.intervals,
        site.mask and not site.bias,  # it is added to the bias
        site.bias,
        site.softcap,
        config.descriptors,
        precision(target, site.dtype),
    )


def options(config: Config, target: str) -> dict[str, int | bool]:
    """How a kernel is compiled.

    For sm100 ptxas spills a few registers to fit more warps, unless it is given all that there are.
    """
    limit = {"maxnreg": 255} if target == "sm100" else {}
    cut = {"num_warps": config.warps, "num_stages": config.stages}
    return {**cut, "enable_fp_fusion": True, **limit}


def specs_of(config: Config, target: str, site: Site) -> tuple[Spec, ...]:
    """What each launch of a kernel is compiled for."""
    spec = spec_of(config, target, site)
    return (spec._replace(dv=False), spec._replace(dk=False)) if config.apart else (spec,)


def target_of(backend: str, architecture: int | str) -> str:
    """The table's target for a device, as Triton names it; RuntimeError where there is none."""
    if backend == "hip":
        return "gfx942"
    if int(architecture) < 80:
        raise RuntimeError(
            f"attention: the kernels need compute capability 8.0, got {architecture}"
        )
    return {9: "sm90", 10: "sm100"}.get(int(architecture) // 10, "sm80")
