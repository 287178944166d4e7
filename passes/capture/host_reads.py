"""Calls of torch that reach the host, or autograd, without any operator that a trace would see."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.shadow_mode import ShadowMode

BUILDERS = (torch.tensor, torch.as_tensor, torch.asarray)
REFUSED = {
    torch.Tensor.register_hook: "a tensor hook, whose gradient is not in the graph",
    torch.Tensor.register_post_accumulate_grad_hook: "a hook on a gradient",
    torch.Tensor.backward: "a backward pass inside forward",
    torch.Tensor.data_ptr: "the address of a tensor",
}


class HostReads(TorchFunctionMode):
    """Turns tensors inside lists into host reads, and refuses what no graph can hold."""

    def __init__(self, mode: ShadowMode):
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.mode.give_up_early()
        self.mode.provenance.caller_grad = torch.is_grad_enabled()
        if func in BUILDERS and args and not isinstance(args[0], torch.Tensor):
            args = (pytree.tree_map(_read, args[0]), *args[1:])
        reason = REFUSED.get(func, "")
        if func is torch.autograd.grad and _creates_graph(*args, **(kwargs or {})):
            reason = "a gradient inside forward that is itself differentiated (create_graph=True)"
        if reason:
            raise CaptureError(
                explain(
                    f"{func.__name__} at {source_line()}",
                    got=reason,
                    remedy="express it with tensor operators or a custom autograd.Function",
                )
            )
        return func(*args, **(kwargs or {}))


def _creates_graph(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    **_: Any,
) -> bool:
    return create_graph


def _read(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
