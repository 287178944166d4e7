"""Whether two traces are the same computation.

What a trace computes from constants alone counts by its value, whatever way led to it; everything
else by its operators and arguments. Keys that operators of ours get anew in every trace do not
count.
"""

import hashlib
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from mllm_compile.passes.capture.tracing import is_mutable, storage_key

aten = torch.ops.aten
FILLED = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


def fingerprint(graph: fx.GraphModule) -> list[str]:
    """One line for every node of a raw graph that does not depend on constants alone."""
    found = _Fingerprint(graph)
    with torch.no_grad():
        for node in graph.graph.nodes:
            found.visit(node)
    return found.lines


def fingerprint_halves(
    nodes: Iterable[fx.Node],
    root: nn.Module,
    mark: fx.Node | None,
    steady: Collection[fx.Node],
    results: tuple[Sequence[fx.Node | None], Sequence[fx.Node | None]],
) -> tuple[list[str], list[str]]:
    """The same for two runs in one raw graph, and what they return (None: a constant).

    The first run ends with the node ``mark``.
    Placeholders in ``steady`` are the same in both runs, and so is what depends on them and on
    constants alone; all else that the second run takes from the first has a name of its own there.
    """
    first = found = _Fingerprint(root)
    found.steady |= {node: f"steady {number}" for number, node in enumerate(steady)}
    with torch.no_grad():
        for node in nodes:
            found.visit(node)
            if node is mark:
                first, found = found, found.second()
    return first.ended(results[0]), found.ended(results[1])


class _Fingerprint:
    def __init__(self, root: nn.Module):
        self.root = root
        self.values: dict[fx.Node, Any] = {}
        self.steady: dict[fx.Node, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        self.left: set[int] = set()  # memory that an earlier run made

    def second(self) -> "_Fingerprint":
        """A new run, which may use what this one left behind."""
        after = _Fingerprint(self.root)
        after.values, after.steady = self.values, self.steady
        given = {node for node in self.names if node.op == "placeholder"}
        after.names = {n: name if n in given else f"left {name}" for n, name in self.names.items()}
        made = {node for node in (*self.values, *self.steady, *self.names)} - given
        after.left = {memory(node) for node in made if node.op == "call_function"} - {
            memory(node) for node in given
        }
        return after

    def ended(self, results: Sequence[fx.Node | None]) -> list[str]:
        """The lines, and one for every result."""
        labels = [self._label(node) if node is not None else "constant" for node in results]
        return [*self.lines, *map(str, labels)]

    def visit(self, node: fx.Node) -> None:
        if node in self.steady:
            return
        if node.op == "placeholder":
            self.names[node] = f"input {len(self.names)}"
            return
        if node.op == "get_attr":
            self.values[node] = operator.attrgetter(str(node.target))(self.root).detach().clone()
            return
        self._watch_writes(node)
        if node.op == "call_function" and not _random(node) and self._is_fixed(node):
            return
        if is_mutable(node):  # a constant that is written to with something else is none any more
            for source in node.all_input_nodes:
                self.values.pop(source, None)
                self.steady.pop(source, None)
                self.names.setdefault(source, f"written {len(self.lines)}")
        self.names[node] = f"node {len(self.lines)}"
        self.lines.append(f"{node.op} {node.target} {self._arguments(node)}")

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether the node depends on constants and steady inputs alone; then it is noted so."""
        if node.target in FILLED:  # of the shape of a tensor, whatever that holds
            shaped = node.meta["val"]
            rest = [a for a in (*node.args, *node.kwargs.items()) if not isinstance(a, fx.Node)]
            self.steady[node] = f"{node.target} {shaped.dtype} {tuple(shaped.shape)} {rest}"
            return True
        sources = node.all_input_nodes
        if all(source in self.values for source in sources):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return True
        if not all(source in self.values or source in self.steady for source in sources):
            return False
        if is_mutable(node) and sources[0] not in self.steady:
            return False
        what = f"{node.target} {self._arguments(node)}"
        if is_mutable(node):
            written = memory(sources[0])
            for other, label in self.steady.items():
                if memory(other) == written:
                    self.steady[other] = _digest(label + what)
        self.steady[node] = _digest(what)
        return True

    def _watch_writes(self, node: fx.Node) -> None:
        if self.left and is_mutable(node):
            target = node.args[0] if node.args else None
            if isinstance(target, fx.Node) and memory(target) in self.left:
                self.lines.append(f"{node.target} writes into what was left behind")

    def _arguments(self, node: fx.Node) -> str:
        if getattr(node.target, "namespace", "") == "mllm":
            return str([self._label(source) for source in node.all_input_nodes])
        labelled = fx.map_arg((node.args, node.kwargs), lambda source: self._label(source))
        return str(labelled)

    def _label(self, node: fx.Node) -> Any:
        for known in (self.names, self.steady):
            if node in known:
                return known[node]
        value = self.values[node]
        if not isinstance(value, torch.Tensor):
            return str(value)
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"


def memory(node: fx.Node) -> int:
    """Equal for two nodes exactly if their tensors share memory; 0 for what is no tensor."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
