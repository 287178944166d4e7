"""The configurations that are tried on a device, by kernel, target, element size and head size.

Every one of them compiles without stack and spills, within shared memory and with matrix
instructions; ``mllm-compile kernels`` shows what each takes. A head size between two is treated as
the larger. Where tensor descriptors (TMA) can be used, one configuration without them remains for
tensors whose rows do not start at multiples of 16 bytes.
"""

import re
from typing import NamedTuple

INTERPRETER = "interpreter"
TARGETS = ("sm80", "sm90", "sm100", "gfx942")


class Config(NamedTuple):
    """How a kernel is cut: tile, warps, pipeline stages, tensor descriptors."""

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2
    descriptors: bool = False

    def __str__(self) -> str:
        """``128x64w8s3tma``: tile of queries and keys, warps, stages, descriptors."""
        cut = f"{self.block_q}x{self.block_k}w{self.warps}s{self.stages}"
        return cut + "tma" * self.descriptors

    @staticmethod
    def parse(text: str) -> "Config":
        """The inverse of ``str``; ValueError for other text."""
        found = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(tma)?", text)
        if found is None:
            raise ValueError(f"no kernel configuration: {text!r}")
        block_q, block_k, warps, stages = map(int, found.groups()[:4])
        return Config(block_q, block_k, warps, stages, found[5] is not None)


DELTA = Config(64, 64)

# (target, bits of an element, head size): per kernel, what to try
CONFIGS: dict[tuple[str, int, int], dict[str, tuple[Config, ...]]] = {
    ("sm80", 16, 64): {
        "forward": (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
        "dq": (Config(64, 64, 4, 2),),
        "dkv": (Config(64, 64, 8, 2),),
    },
    ("sm80", 16, 128): {
        "forward": (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        "dq": (Config(64, 64, 8, 2), Config(64, 64, 4, 2)),
        "dkv": (Config(32, 64, 8, 2),),
    },
    ("sm80", 16, 256): {
        "forward": (Config(64, 32, 8, 2),),
        "dq": (Config(32, 32, 8, 2),),
        "dkv": (Config(32, 32, 8, 2),),
    },
    ("sm90", 16, 64): {
        "forward": (
            Config(128, 128, 8, 2, True),
            Config(128, 64, 8, 3, True),
            Config(64, 64, 4, 3, True),
            Config(128, 64, 8, 3),
        ),
        "dq": (Config(128, 64, 8, 2, True), Config(64, 64, 4, 2, True), Config(128, 64, 8, 2)),
        "dkv": (Config(64, 64, 4, 2, True), Config(32, 128, 8, 2, True), Config(64, 64, 8, 2)),
    },
    ("sm90", 16, 128): {
        "forward": (
            Config(128, 64, 8, 3, True),
            Config(128, 128, 8, 2, True),
            Config(64, 64, 4, 3, True),
            Config(128, 64, 8, 3),
        ),
        "dq": (Config(128, 64, 8, 2, True), Config(64, 64, 4, 2, True), Config(128, 64, 8, 2)),
        "dkv": (Config(64, 64, 8, 2, True), Config(32, 128, 8, 2, True), Config(32, 64, 8, 2)),
    },
    ("sm90", 16, 256): {
        "forward": (Config(128, 64, 8, 2, True), Config(64, 32, 8, 2)),
        "dq": (Config(64, 32, 8, 2, True), Config(64, 32, 8, 2)),
        "dkv": (Config(32, 32, 8, 2),),
    },
    ("sm100", 16, 64): {
        "forward": (Config(128, 64, 8, 2, True), Config(128, 64, 8, 2)),
        "dq": (Config(128, 64, 8, 2, True), Config(128, 64, 8, 2)),
        "dkv": (Config(64, 64, 4, 2, True), Config(64, 64, 8, 2)),
    },
    ("sm100", 16, 128): {
        "forward": (Config(128, 64, 8, 3, True), Config(128, 64, 8, 3)),
        "dq": (Config(128, 64, 8, 2, True), Config(128, 64, 8, 2)),
        "dkv": (Config(64, 64, 8, 2, True), Config(32, 64, 8, 2)),
    },
    ("sm100", 16, 256): {
        "forward": (Config(64, 32, 8, 2),),
        "dq": (Config(64, 32, 8, 2),),
        "dkv": (Config(32, 32, 8, 2),),
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
        "forward": (Config(64, 32, 8, 2),),
        "dq": (Config(32, 32, 8, 2),),
        "dkv": (Config(32, 32, 8, 2),),
    },
    ("sm80", 32, 128): {
        "forward": (Config(32, 32, 8, 2),),
        "dq": (Config(16, 32, 8, 2),),
        "dkv": (Config(32, 16, 8, 2),),
    },
    ("sm90", 32, 64): {
        "forward": (Config(64, 32, 8, 2),),
        "dq": (Config(16, 32, 8, 2),),
        "dkv": (Config(32, 32, 8, 2),),
    },
    ("sm90", 32, 128): {
        "forward": (Config(32, 32, 8, 2),),
        "dq": (Config(16, 32, 8, 2),),
        "dkv": (Config(32, 16, 8, 2),),
    },
    ("sm100", 32, 64): {
        "forward": (Config(64, 32, 8, 2),),
        "dq": (Config(16, 32, 8, 2),),
        "dkv": (Config(32, 32, 8, 2),),
    },
    ("sm100", 32, 128): {
        "forward": (Config(32, 32, 8, 2),),
        "dq": (Config(16, 32, 8, 2),),
        "dkv": (Config(32, 16, 8, 2),),
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

INTERPRETED = {
    "forward": (Config(64, 128, descriptors=True), Config(64, 128)),
    "dq": (Config(128, 64),),
    "dkv": (Config(64, 128, descriptors=True), Config(64, 128)),
}


def largest(bits: int) -> int:
    """The head size up to which every target has configurations."""
    sizes: dict[str, int] = {}
    for target, at, size in CONFIGS:
        if at == bits:
            sizes[target] = max(size, sizes.get(target, 0))
    return min(sizes.values())


def configs(target: str, kernel: str, bits: int, size: int) -> tuple[Config, ...]:
    """What to try for a kernel on a target; ``size`` is the larger head size."""
    if target == INTERPRETER:
        return INTERPRETED[kernel]
    listed = [at[2] for at in CONFIGS if at[:2] == (target, bits) and at[2] >= size]
    return CONFIGS[target, bits, min(listed)][kernel]


def wide(size: int) -> int:
    """The least power of two that holds a head size and that a tensor core can take."""
    return max(16, 1 << (size - 1).bit_length())


def precision(target: str, dtype: str) -> str:
    """How a dtype is multiplied: float32 as three products of tf32, where a target has those."""
    return "tf32x3" if dtype == "float32" and target.startswith("sm") else "ieee"


def target_of(backend: str, architecture: int | str) -> str:
    """The table's target for a device, as Triton names it; RuntimeError where there is none."""
    if backend == "hip":
        return "gfx942"
    if int(architecture) < 80:
        raise RuntimeError(
            f"attention: the kernels need compute capability 8.0, got {architecture}"
        )
    return {9: "sm90", 10: "sm100"}.get(int(architecture) // 10, "sm80")
