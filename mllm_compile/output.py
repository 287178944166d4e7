"""Where results go: the terminal, and files."""

from pathlib import Path

from rich.console import Console

PLAIN_WIDTH = 160  # of output that is no terminal


def console() -> Console:
    """Where results go; a file or pipe gets a fixed width and no colours."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=PLAIN_WIDTH)


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
