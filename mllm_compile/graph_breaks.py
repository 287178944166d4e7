"""Tell the user where Dynamo broke the forward apart, and what to do about it.

Dynamo breaks in two ways: it ends a graph at a line and goes on behind it, and then says so; or it
gives up a whole function, runs that as plain Python and compiles what it calls. The second kind
shows only on the stack: a function of the user's runs below Dynamo's entry, uncompiled.
"""

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch
from torch import fx

from mllm_compile.compiler.errors import explain

TORCH = str(Path(torch.__file__).parent)
DYNAMO = str(Path(TORCH, "_dynamo"))
ENTRY = str(Path(DYNAMO, "eval_frame.py"))
REMEDY = (
    "gradients stay right, but every part is compiled alone; "
    "mllm_compile.capture(model, batch) takes the whole forward as one graph"
)


class GraphBreakWarning(UserWarning):
    """Dynamo could not trace the forward as one graph."""


def warn_of_break(graph: fx.GraphModule) -> None:
    """Warn if ``graph``, which Dynamo is compiling right now, is only a part of the forward."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        frame = reason.user_stack[-1]
        _warn(f"{frame.filename}:{frame.lineno} {frame.name}", reason.reason.splitlines()[0])
        return
    for running in _uncompiled(sys._getframe(1)):
        code = running.f_code
        what = "this function runs uncompiled, Dynamo cannot trace it"
        _warn(f"{code.co_filename}:{running.f_lineno} {code.co_name}", what)


def _warn(where: str, why: str) -> None:
    message = explain(where, expected="one graph", got=f"a graph break: {why}", remedy=REMEDY)
    warnings.warn(message, GraphBreakWarning, stacklevel=3)


def _uncompiled(frame: FrameType | None) -> list[FrameType]:
    """Functions between Dynamo's entry and its call of the backend that run uncompiled."""
    found: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename != ENTRY:
        code = frame.f_code
        if code.co_filename.startswith(DYNAMO):
            found.clear()  # whatever ran above it is the backend
        elif not code.co_filename.startswith(TORCH) and not _is_compiled(code.co_names):
            found.append(frame)
        frame = frame.f_back
    return found if frame is not None else []


def _is_compiled(names: tuple[str, ...]) -> bool:
    return any(name.startswith(("__compiled_fn", "__resume_at")) for name in names)
