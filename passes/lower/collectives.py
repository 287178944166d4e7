"""Which collectives a segment calls, in words that are the same on all ranks that take part."""

from collections.abc import Iterable

from torch import fx

from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.program import StageProgram

SEGMENTS = {"F": "forward", "I": "input_grad", "W": "weight_grad"}
"""The segment of every computing action."""


def collectives(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """One line for every operator that names a mesh axis, like ``tensor: convert S2 -> V``.

    Of layouts what depends on a rank's place (outer, size, splits) is left out.
    """
    return tuple(line for node in nodes if (line := _line(node)))


def of_program(program: StageProgram) -> dict[str, tuple[str, ...]]:
    """Those of every segment, by the kind of its action."""
    found = {}
    for kind, name in SEGMENTS.items():
        segment = getattr(program, name)
        found[kind] = collectives(segment.graph.graph.nodes) if segment is not None else ()
    return found


def _line(node: fx.Node) -> str:
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    places = {argument.name: place for place, argument in enumerate(arguments)}
    if "axis" not in places or not str(node.target).startswith("mllm."):
        return ""
    name = str(node.target).split(".")[1]
    axis = node.args[places["axis"]]
    if name != "convert":
        return f"{axis}: {name}"
    have, want = (_short(str(node.args[places[side]])) for side in ("have", "want"))
    return f"{axis}: {name} {have} -> {want}"


def _short(text: str) -> str:
    layout = Layout.parse(text)
    return f"S{layout.dim}" if layout.divided else layout.kind
