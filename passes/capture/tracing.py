"""The private torch interfaces that capture stands on, in one place.

A *fake* is a tensor without data that a trace computes with; a *real* tensor has data.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.passes.capture.recorder import Decompositions, Recorder

__all__ = [
    "HERE",
    "LOCK",
    "TORCH",
    "FakeTensor",
    "FakeTensorMode",
    "WeakIdKeyDictionary",
    "drop_after",
    "fake_like",
    "is_mutable",
    "last_node",
    "node_of",
    "nodes_after",
    "outside_modes",
    "recorded",
    "reparametrize",
    "storage_key",
    "trace",
]

# Frames of these folders are never the model's own.
TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)

# Capture patches process-wide state (hooks, code objects), so one thread captures at a time.
LOCK = threading.RLock()


_recorders: list[Recorder] = []


def trace(
    function: Callable[..., Sequence[Any]],
    fakes: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions | None = None,
) -> fx.GraphModule:
    """Record every ATen call of ``function(*fakes)``, below autograd, as one graph."""
    recorder = Recorder(mode, decompositions)
    _recorders.append(recorder)
    try:
        with mode, _disabled_autocast_cache(), recorder:
            for fake in fakes:
                recorder.placeholder(fake)
            return recorder.finish(function(*fakes))
    finally:
        _recorders.pop()


@contextmanager
def _disabled_autocast_cache() -> Iterator[None]:
    """A weight cast in an earlier trace must not come out of the cache of autocast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake of ``tensor``, of static shape; a meta tensor pretends to be on ``device``."""
    if tensor.device.type == "meta":
        with mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
    else:
        with torch.no_grad():
            fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.requires_grad_(tensor.requires_grad)


def outside_modes() -> AbstractContextManager[Any]:
    """Compute with real tensors in the middle of a trace, unseen by it."""
    return _disable_current_modes()


@contextmanager
def reparametrize(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let ``state`` stand in for parameters and buffers; tied names follow the first of them.

    A module that stands in the model under several names is swapped under each of them, so that
    only the reverse order brings its own tensors back. Buffers that forward adds are dropped.
    """
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    try:
        with _reparametrize_module(model, state, tie_weights=True, stack_weights=True):
            yield
    finally:
        for now, before in buffers:
            now.clear()
            now.update(before)


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that records this tensor in the trace under way; None for a real constant."""
    return _recorders[-1].node_of(tensor) if _recorders else None


def drop_after(mark: fx.Node | None, kept: Iterable[tuple[torch.Tensor, fx.Node | None]]) -> None:
    """Drop the nodes after ``mark``; the tensors are again what the nodes beside them made."""
    for node in reversed(list(nodes_after(mark))):
        node.graph.erase_node(node)
    for tensor, maker in kept:
        if maker is not None:
            _recorders[-1].made(maker, tensor)


def last_node() -> fx.Node | None:
    """The newest node of the trace under way, to find out later which nodes came after it."""
    return next(iter(reversed(_recorders[-1].graph.nodes)), None) if _recorders else None


def recorded() -> tuple[fx.Graph, torch.nn.Module]:
    """The graph of the trace under way, and the module that holds its constants."""
    return _recorders[-1].graph, _recorders[-1].root


def nodes_after(mark: fx.Node | None) -> Iterator[fx.Node]:
    """All nodes that were recorded since ``mark`` was the last one."""
    node = mark.next if mark is not None else None
    while node is not None and node.op != "root":
        yield node
        node = node.next


def is_mutable(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors exactly if they share memory (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)
