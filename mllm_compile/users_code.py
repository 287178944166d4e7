"""Errors in functions that the user brought, told with their own text and line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mllm_compile.compiler.errors import CompileError, RequestError, explain

_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """RequestError, naming ``what`` and file and line, for whatever is raised inside."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        raise RequestError(
            explain(
                f"{what} raised {type(error).__name__}{_place(error)}",
                got=" ".join(str(error).split()) or "no message",
                remedy="--debug shows the traceback",
            )
        ) from error


def _place(error: Exception) -> str:
    """`` at file.py:12 function``: the innermost frame outside torch and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return f" at {theirs[-1].filename}:{theirs[-1].lineno} {theirs[-1].name}" if theirs else ""
