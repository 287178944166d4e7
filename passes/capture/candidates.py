"""Which Python functions may be worth hoisting: those found around a host read.

A trace that meets a host read notes the functions on the stack that work on integer tensors alone;
the next trace tries to hoist their calls.
"""

from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType

import torch
from torch.utils import _pytree as pytree

from mllm_compile.passes.capture.provenance import is_model_file, model_frames

Candidates = dict[CodeType, str]
GENERATORS = 0x20 | 0x80 | 0x200  # generator, coroutine, asynchronous generator


def candidates_on_stack(frames: Iterable[FrameType] | None = None) -> Candidates:
    """Functions on the stack whose arguments hold integer tensors and no floating-point one.

    Arguments may have been rebound since the call: the trampoline checks the call itself.
    """
    found: Candidates = {}
    for frame in model_frames() if frames is None else frames:
        code = frame.f_code
        if code.co_flags & GENERATORS or code.co_name.startswith("<"):
            continue
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        count += bool(code.co_flags & 8)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        if tensors and not any(tensor.is_floating_point() for tensor in tensors):
            module = frame.f_globals.get("__name__", "?").split(".")[-1]
            found[code] = f"{module}.{code.co_qualname}"
    return found


def candidates_in_traceback(traceback: TracebackType | None) -> Candidates:
    """As ``candidates_on_stack``, for host reads that no operator announces but an error does."""
    frames = []
    while traceback is not None:
        if is_model_file(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return candidates_on_stack(frames)
