"""Numbers as people read them: ``1.23 G``, ``4.5 MiB``, ``-`` for nothing."""

from collections.abc import Iterable


def count(value: float) -> str:
    """A number of things or FLOPs, in powers of a thousand with three digits."""
    return _scaled(value, 1000, ("", " k", " M", " G", " T", " P", " E"))


def size(value: float) -> str:
    """A number of bytes, in powers of 1024 with three digits."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def share(part: float, whole: float) -> str:
    """A part of a whole in per cent."""
    return f"{100 * part / whole:.0f}%" if part and whole else "-"


def numbers(values: Iterable[int]) -> str:
    """Indices with runs folded: ``0-3, 7``; ``-`` for none."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or "-"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    if not value:
        return "-"
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if unit == units[0] else f"{value:.3g}{unit}"
        value /= base
    return f"{value:.3g}{units[-1]}"
