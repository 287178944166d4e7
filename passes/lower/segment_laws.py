"""The laws of a stage's segments. A law raises PlanError; its docstring is the law."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import Segment
from mllm_compile.passes.lower.collectives import SEGMENTS
from mllm_compile.passes.lower.differentiate import Segments
from mllm_compile.passes.lower.extract import StageGraph, input_name
from mllm_compile.passes.lower.tidy import is_view


def wanted_gradients_are_made(segments: Segments, stage: StageGraph, plan: Plan, at: int) -> None:
    """A stage makes each gradient that its nodes return to a parameter or a received value once."""
    expected = Counter(_wanted(stage, plan, at))
    found = Counter(
        name
        for segment in (segments.input_grad, segments.weight_grad)
        for name in (segment.outputs if segment is not None else ())
        if name.startswith(("d%", "g:"))
    )
    found = Counter({n: count for n, count in found.items() if n in expected or n[:2] == "g:"})
    if expected != found:
        names = sorted((expected - found) | (found - expected))
        got = ", ".join(f"{name} {found[name]} times" for name in names)
        expectation = ", ".join(f"{name} {expected[name]} times" for name in names)
        raise PlanError(explain(f"stage {at}", expected=expectation, got=got))


def _wanted(stage: StageGraph, plan: Plan, at: int) -> Iterator[str]:
    returning = {source for source, reader in plan.grad_edges if reader in plan.stages[at].nodes}
    graph = Graph(plan.captured)
    names = {input_name(item): node.name for node, item in graph.input_of.items()}
    for name in stage.inputs:
        if names.get(name, name[1:]) in returning:
            yield f"g:{name[2:]}" if name.startswith("p:") else f"d{name}"


def values_are_made_before_they_are_read(segments: Segments, stage: StageGraph, at: int) -> None:
    """A segment reads what the stage is given and what earlier ones made; nothing is made twice."""
    known = set(stage.inputs)
    made: set[str] = set()
    for kind, segment in _segments(segments):
        for name in segment.inputs:
            if name not in known:
                _refuse(at, kind, name, "a value that is there before the action")
        for name in segment.outputs:
            if name in made:
                _refuse(at, kind, name, "every value made once")
            made.add(name)
        placeholders = segment.graph.graph.find_nodes(op="placeholder")
        results: Sequence[object] = segment.graph.graph.output_node().args[0]  # type: ignore[assignment]
        if (len(placeholders), len(results)) != (len(segment.inputs), len(segment.outputs)):
            _refuse(at, kind, "its graph", "one name for every placeholder and result")
        known |= made
        if kind == "F":
            known |= {f"d{name}" for name in stage.downstream}
    for name in stage.outputs:
        if name not in segments.forward.outputs:
            _refuse(at, "F", name, "every output of the stage")


def joint_graph_is_kept(segments: Segments, at: int) -> None:
    """Every call of the joint graph stands in one segment, as it was (views: in any number)."""
    if segments.joint is None:
        return
    nodes = list(segments.joint.nodes)
    places = {node.name: place for place, node in enumerate(nodes)}
    there: set[str] = set()
    for kind, segment in _segments(segments):
        last = nodes[0]
        for node in (n for n in segment.graph.graph.nodes if n.op == "call_function"):
            original = nodes[places.get(node.name, -1)]  # the output, if there is none
            if original.op == "placeholder":  # the gradient of the loss
                continue
            if _text(node) != _text(original):
                _refuse(at, kind, _text(node), _text(original))
            if places[node.name] < places[last.name]:
                _refuse(at, kind, _text(node), f"it before %{last.name}")
            if not is_view(node) and node.name in there:
                _refuse(at, kind, _text(node), "it in one segment")
            there.add(node.name)
            last = original
    _check_complete([n for n in nodes if n.op == "call_function" and not is_view(n)], there, at)


def _check_complete(calls: Sequence[fx.Node], there: set[str], at: int) -> None:
    """What no segment reads may be gone."""
    for node in calls:
        if node.name not in there and any(user.name in there for user in node.users):
            raise PlanError(explain(f"stage {at}: {_text(node)}", expected="it in a segment"))


def _text(node: fx.Node) -> str:
    return f"%{node.name} = {node.target}{node.args}"


def _segments(segments: Segments) -> list[tuple[str, Segment]]:
    found = ((kind, getattr(segments, name)) for kind, name in SEGMENTS.items())
    return [(kind, segment) for kind, segment in found if segment is not None]


def _refuse(stage: int, kind: str, subject: str, expected: str) -> None:
    raise PlanError(explain(f"stage {stage}, action {kind}: {subject}", expected=expected))
