"""The recorded trace as a functional graph: no writes, constants as inputs, gradient cuts as nodes.

Terms: a *cut* is an edge that gradients do not cross: a ``detach``, or the edge from a node
recorded under ``no_grad`` to one recorded with gradients on. Cuts are put in after writes are gone,
because a write through a detached alias would otherwise lose its own gradient.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.captured import Input
from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.provenance import LABELS
from mllm_compile.passes.capture.tracing import (
    FakeTensorMode,
    fake_like,
    is_mutable,
    last_node,
    nodes_after,
    trace,
)

aten = torch.ops.aten
CUT = "cut"
REGISTERED = "register it with register_parameter or register_buffer"


@dataclass
class Functional:
    """A functional graph whose placeholders are ``inputs``; it returns ``outputs`` as one list."""

    graph: fx.GraphModule
    inputs: list[Input]
    constants: dict[str, torch.Tensor]
    updates: dict[str, fx.Node]
    written: list[str]  # batch entries that forward writes into

    @property
    def placeholders(self) -> dict[fx.Node, Input]:
        """What every placeholder stands for."""
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return dict(zip(nodes, self.inputs, strict=True))

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes that the graph returns."""
        return list(_output(self.graph.graph).args[0])  # type: ignore[arg-type]


def functionalize(
    raw: fx.GraphModule, inputs: list[Input], fakes: list[torch.Tensor], mode: FakeTensorMode
) -> Functional:
    """Bring a trace into functional form; ``inputs`` and ``fakes`` describe its placeholders."""
    constants = _lift_constants(raw)
    inputs = [*inputs, *(Input("constant", name) for name in constants)]
    for node in raw.graph.nodes:
        if node.target is aten.detach.default:
            node.target, node.meta[CUT] = aten.alias.default, True
    device = torch.device("cpu")
    with torch.no_grad():
        values = [fake.detach() for fake in fakes]
        values += [fake_like(mode, tensor, device) for tensor in constants.values()]
    if any(is_mutable(node) for node in raw.graph.nodes):
        raw = _without_writes(raw, values, mode)
    found = Functional(raw, inputs, constants, {}, [])
    _drop_aliases(raw.graph)
    _take_updates(found)
    _put_cuts(raw.graph)
    raw.graph.lint()
    return found


def _output(graph: fx.Graph) -> fx.Node:
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def _lift_constants(raw: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Real tensors that the model held outside its state become placeholders, once each."""
    graph, lifted = raw.graph, dict[int, fx.Node]()
    constants: dict[str, torch.Tensor] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = operator.attrgetter(str(node.target))(raw)
        if tensor.requires_grad:
            raise CaptureError(
                explain(
                    f"a tensor of shape {list(tensor.shape)} at {node.meta.get('where', '')}",
                    got="a tensor that requires grad but is no parameter of the model",
                    remedy=REGISTERED,
                )
            )
        if id(tensor) not in lifted:
            name = f"constant_{len(constants)}"
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            last.meta.update(node.meta)
            lifted[id(tensor)], constants[name] = last, tensor
        node.replace_all_uses_with(lifted[id(tensor)])
        graph.erase_node(node)
    raw.recompile()
    return constants


class _Relabel(fx.Interpreter):
    """Runs a graph inside a trace; what a node becomes keeps that node's labels."""

    def run_node(self, node: fx.Node) -> Any:
        mark = last_node()
        result = super().run_node(node)
        if node.op == "call_function":
            labels = {name: node.meta[name] for name in (*LABELS, CUT) if name in node.meta}
            for new in nodes_after(mark):
                new.meta.update(labels)
        return result


def _copy_without_target(
    self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """``aten.copy`` has no derivative, and its result does not depend on the target's values."""
    return source.to(self.dtype).expand(self.shape).clone()


def _without_writes(
    raw: fx.GraphModule, values: list[torch.Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    def rerun(*args: torch.Tensor) -> Any:
        return _Relabel(raw).run(*args)

    with torch.no_grad():
        functional = torch.func.functionalize(rerun, remove="mutations")
        return trace(functional, values, mode, {aten.copy.default: _copy_without_target})


def _take_updates(found: Functional) -> None:
    """A trailing write into a placeholder is its new value: fine for buffers alone."""
    graph, placeholders = found.graph.graph, found.placeholders
    for node in list(graph.nodes):
        if not is_mutable(node):
            continue
        target = node.args[0] if node.args else None
        source = placeholders.get(target) if isinstance(target, fx.Node) else None
        if node.target is not aten.copy_.default or source is None:
            raise CaptureError(f"{node.target}: a write that has no functional form")
        value = node.args[1]
        assert isinstance(value, fx.Node)
        where = value.meta.get("where", "")
        if source.kind in ("parameter", "constant"):
            raise CaptureError(
                explain(
                    f"{source.kind} {source.name} at {where}",
                    got=f"forward writes into a {source.kind}",
                    remedy="keep what changes in a registered buffer",
                )
            )
        if source.kind == "buffer":
            found.updates[source.name] = value
        else:
            found.written.append(source.name)
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def _drop_aliases(graph: fx.Graph) -> None:
    """Aliases that stood for a ``detach`` become one again; all others go."""
    for node in list(graph.nodes):
        if node.target is aten.alias.default:
            if node.meta.get(CUT):
                node.target = aten.detach.default
            else:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _put_cuts(graph: fx.Graph) -> None:
    """A ``detach`` on every edge from a node under ``no_grad`` to one with gradients."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        differentiable = isinstance(value, torch.Tensor) and (
            value.is_floating_point() or value.is_complex()
        )
        if node.op != "call_function" or node.meta.get("grad", True) or not differentiable:
            continue
        users = [user for user in node.users if user.meta.get("grad", True)]
        if users:
            with graph.inserting_after(node):
                cut = graph.call_function(aten.detach.default, (node,))
            cut.meta.update(node.meta)
            for user in users:
                user.replace_input_with(node, cut)
