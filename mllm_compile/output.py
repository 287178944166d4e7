"""Where results go: the terminal, and files."""

import os
from pathlib import Path

from rich.console import Console

from mllm_compile.compiler.errors import RequestError, explain

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


def check_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """RequestError, before any work is done, if a file (or a folder) cannot be made there."""
    place = path if folder or path.is_dir() else path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    if path.exists() and (path.is_dir() != folder or not os.access(path, os.W_OK)):
        usable, place = False, path
    if not usable:
        kind = "not a folder" if not place.is_dir() else "not writable"
        got = "a folder" if path.is_dir() and not folder else f"{place}, which is {kind}"
        what = "a folder" if folder else "a file"
        raise RequestError(
            explain(f"{option} {path}", expected=f"{what} that can be written", got=got)
        )
