"""What every rank is doing right now, readable after it was killed.

A file shared by memory mapping has one slot per rank: a label (its stage and module) and the action
under way. Writing costs about a microsecond and no system call.
"""

import mmap
from pathlib import Path

_FIELD_BYTES = 160


class StatusBoard:
    """The slots of all ranks in one file, which the launcher creates."""

    def __init__(self, path: str | Path, num_ranks: int) -> None:
        size = 2 * _FIELD_BYTES * num_ranks
        file = Path(path)
        if not file.exists():
            file.write_bytes(bytes(size))
        with file.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), size)

    def label(self, rank: int, text: str) -> None:
        """Set what the rank is, such as ``stage 1, model.language_model``."""
        self._write(2 * rank, text)

    def publish(self, rank: int, text: str) -> None:
        """Set what the rank does now, such as ``1F3 of step 5``."""
        self._write(2 * rank + 1, text)

    def read(self, rank: int) -> tuple[str, str]:
        """(label, action) of a rank; empty where it never wrote."""
        return self._read(2 * rank), self._read(2 * rank + 1)

    def _write(self, field: int, text: str) -> None:
        data = text.encode()[:_FIELD_BYTES].ljust(_FIELD_BYTES, b"\0")
        self._map[field * _FIELD_BYTES : (field + 1) * _FIELD_BYTES] = data

    def _read(self, field: int) -> str:
        data = self._map[field * _FIELD_BYTES : (field + 1) * _FIELD_BYTES]
        return data.rstrip(b"\0").decode(errors="ignore")
