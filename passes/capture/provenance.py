"""Where every node comes from: the module that made it, the grad mode and the source line.

Forward hooks follow which module is running; nodes are labelled right after they were recorded.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mllm_compile.passes.capture.tracing import HERE, TORCH

LABELS = ("owner", "grad", "where")


class Provenance:
    """Follows the running module of one model, in one thread.

    ``caller_grad`` is the grad mode in which the model called torch last: operators of our own run
    with gradients off inside, whatever the mode of their caller.
    """

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.running = [""]
        self.caller_grad = True
        self.thread = threading.get_ident()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While open, ``running[-1]`` is the path of the innermost module whose forward runs."""

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == self.thread:
                self.running.append(self.paths.get(id(module), self.running[-1]))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == self.thread and len(self.running) > 1:
                self.running.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def label(self, nodes: Iterable[fx.Node], grad: bool) -> None:
        """Write owner, grad and where into the metadata of nodes recorded just now."""
        labels = None
        for node in nodes:
            if labels is None:
                labels = {
                    "owner": self.running[-1],
                    "grad": grad,
                    "where": source_line(),
                }
            for name, value in labels.items():
                node.meta.setdefault(name, value)


def model_frames() -> Iterator[FrameType]:
    """The frames of the model's own code on this stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(HERE) and code.co_name == "traced_forward":
            return
        if is_model_file(code.co_filename):
            yield frame
        frame = frame.f_back


def is_model_file(filename: str) -> bool:
    """Whether code of this file belongs to the model rather than to torch or to capture."""
    return not filename.startswith((TORCH, HERE, "<"))


def source_line() -> str:
    """``file.py:123 function`` of the model code that runs now."""
    frame = next(model_frames(), None)
    return "" if frame is None else place(frame)


def place(frame: FrameType, line: int | None = None) -> str:
    """``file.py:123 function`` of a frame; of its current line by default."""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{line or frame.f_lineno} {code.co_name}"
