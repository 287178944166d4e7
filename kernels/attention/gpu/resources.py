"""What a compiled kernel takes, read from its code, and what rules it out."""

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {"sm80": 163, "sm90": 227, "sm100": 227, "gfx942": 64}  # KiB a program may have
MATRIX = {  # what may make the products
    "sm80": ("HMMA",),
    "sm90": ("HGMMA",),
    "sm100": ("UTCHMMA", "HMMA"),
    "gfx942": ("MFMA",),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Per thread registers and bytes of stack; instructions counted in the code; shared bytes."""

    registers: int
    stack: int
    spills: int
    matrix: dict[str, int]
    descriptor_loads: int
    atomics: int
    shared: int = 0

    def with_shared(self, shared: int) -> "Resources":
        """The same, with the bytes of shared memory that a launch must ask for."""
        return replace(self, shared=shared)

    def faults(self, target: str, *, products: bool, descriptors: bool) -> list[str]:
        """Why a kernel may not be in the table, in words.

        With ``products`` it must have them, all made by instructions of ``MATRIX``, with
        ``descriptors`` its tiles loaded by descriptors.
        """
        limit, wanted = SHARED_LIMIT[target], MATRIX[target]
        made = sum(self.matrix.get(name, 0) for name in wanted)
        other = sum(self.matrix.values()) - made
        checks = {
            f"{self.stack} bytes of stack": self.stack > 0,
            f"{self.spills} spills": self.spills > 0,
            f"{self.shared / 1024:.0f} KiB shared of {limit}": self.shared > limit * 1024,
            f"no {' or '.join(wanted)}": products and not made,
            f"{other} older than {' or '.join(wanted)}": other > 0,
            "no descriptor load": descriptors and not self.descriptor_loads,
            f"{self.atomics} atomics": self.atomics > 0,
        }
        return [text for text, broken in checks.items() if broken]


def of_nvidia(cubin: bytes, ptx: str) -> Resources:
    """Read by the disassembler that comes with Triton.

    Atomics are counted in the PTX: the code has some of its own to hand out tensor memory.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    sizes = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert sizes is not None, usage
    return Resources(
        int(sizes[1]),
        int(sizes[2]),
        _count(r"STL|LDL", code),
        {name: _count(name, code) for name in ("HMMA", "HGMMA", "UTCHMMA")},
        _count("UTMALDG", code),
        len(re.findall(r"\b(?:atom|red|multimem)\.", ptx)),
    )


def of_amd(text: str) -> Resources:
    """Read from the assembly's own account."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    return Resources(
        field("vgpr_count"),
        field("private_segment_fixed_size"),
        field("vgpr_spill_count"),  # scalar registers spill into vector registers
        {"MFMA": len(re.findall(r"\bv_mfma", text))},
        0,
        len(re.findall(r"\b(?:global|buffer|flat|ds)_(?:atomic|add|cmpst)\w*", text)),
    )


def _count(opcodes: str, code: str) -> int:
    return len(re.findall(rf"\b(?:{opcodes})\b", code))


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr
