"""Where results go: the terminal, and files."""

from pathlib import Path

from rich.console import Console

PLAIN_WIDTH = 160  # of output that is no terminal


class Output(Console):
    """Where results go; a file or pipe gets a fixed width and no colours."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False)
        if not self.is_terminal:
            self.width = PLAIN_WIDTH

    def on_broken_pipe(self) -> None:
        """The reader has seen enough; rich would exit with an error code."""
        raise BrokenPipeError


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
