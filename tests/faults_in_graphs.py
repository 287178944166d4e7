"""Seeded faults of what lowering makes: local graphs, segments, collectives, transfers."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.program import Piece, Transfer
from mllm_compile.passes.lower.differentiate import Segments
from tests.faulty import argument, bypass, changed_segment, converts, pick

Rng = random.Random
aten = torch.ops.aten


def _users(node: fx.Node) -> str:
    """A pattern of the nodes at which a wrong value may be noticed first."""
    return "|".join({f"%{user.name} =" for user in node.users} | {f"%{node.name} ="})


def dropped_conversion(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, [n for n in converts(graph) if _computes(n)])
    names = _users(node)
    bypass(node)
    return names


def _computes(node: fx.Node) -> bool:
    return all(user.op == "call_function" for user in node.users)


def dropped_vary(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph, "R", "V"))
    names = _users(node)
    bypass(node)
    return names


def partial_sum_read_as_whole(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph, "P", "R"))
    argument(node, 1, "R")
    return _users(node)


def wrong_axis(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, [n for n in converts(graph) if _computes(n)])
    argument(node, 3, {"tensor": "context", "context": "tensor"}[node.args[3]])
    return _users(node)


def axis_that_is_not_there(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph))
    argument(node, 3, "expert")
    return _users(node)


def wrong_order_of_parts(graph: fx.Graph, rng: Rng) -> str:
    """Parts are joined in another order than they were cut in, or cut in another one."""
    node = pick(rng, [n for n in converts(graph) if "S" in (n.args[1][0], n.args[2][0])])
    place = 4 if node.args[4] else 5
    argument(node, place, "|".join(reversed(node.args[place].split("|"))))
    return _users(node)


def wrong_unit(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph, "S"))
    argument(node, 6, node.args[6] + 1)
    return _users(node)


def wrong_outer(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph, want="S"))
    dim, outer, size = node.args[2][2:-1].split(",")
    argument(node, 2, f"S({dim},{int(outer) + 1},{size})")
    return _users(node)


def wrong_dim(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, converts(graph, "S"))
    dim, rest = node.args[1][2:-1].split(",", 1)
    argument(node, 1, f"S({int(dim) + 1},{rest})")
    return _users(node)


def swapped_operands(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, [n for n in graph.nodes if n.target is aten.mm.default])
    node.args = node.args[::-1]
    return f"%{node.name} ="


def another_parameter(graph: fx.Graph, rng: Rng) -> str:
    """One of the same shape."""
    found = [
        (one, other)
        for one in graph.find_nodes(op="placeholder")
        for other in graph.find_nodes(op="placeholder")
        if one is not other and one.meta["val"].shape == other.meta["val"].shape and one.users
    ]
    one, other = pick(rng, found)
    names = _users(one)
    one.replace_all_uses_with(other)
    return names


def wrong_parameter_shard(graph: fx.Graph, rng: Rng) -> str:
    found = [n for n in graph.find_nodes(op="placeholder") if n.meta["val"].dim() == 2]
    node = pick(rng, found)
    node.meta["val"] = node.meta["val"][1:]
    return f"%{node.name} ="


def wrong_literal(graph: fx.Graph, rng: Rng) -> str:
    found = [n for n in graph.nodes if n.target is aten.reshape.default]
    found = [n for n in found if n.args[1] != n.args[1][::-1]]
    node = pick(rng, found)
    argument(node, 1, list(node.args[1])[::-1])
    return f"%{node.name} ="


def another_operator(graph: fx.Graph, rng: Rng) -> str:
    node = pick(rng, [n for n in graph.nodes if n.target is aten.add.Tensor])
    node.target = aten.mul.Tensor
    return f"%{node.name} ="


def another_result(graph: fx.Graph, rng: Rng) -> str:
    output = graph.output_node()
    (results,) = output.args
    place = rng.randrange(len(results))
    before = results[place].args[0]
    output.args = ((*results[:place], before, *results[place + 1 :]),)
    return "result %"


LOCAL = (
    dropped_conversion,
    dropped_vary,
    partial_sum_read_as_whole,
    wrong_axis,
    axis_that_is_not_there,
    wrong_order_of_parts,
    wrong_unit,
    wrong_outer,
    wrong_dim,
    swapped_operands,
    another_parameter,
    wrong_parameter_shard,
    wrong_literal,
    another_operator,
    another_result,
)


def _segment(segments: Segments, name: str, change: Callable[[fx.Graph], None]) -> Segments:
    return replace(segments, **{name: changed_segment(getattr(segments, name), change)})


def reduction_dropped(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    """Of an input gradient: readers get the partial sum."""

    def change(graph: fx.Graph) -> None:
        bypass(pick(rng, [n for n in converts(graph, "P") if _computes(n)]))

    return _segment(segments, "input_grad", change), "convert"


def consumers_gradient_overwritten(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    """Of two gradients that are summed, one is kept."""

    def change(graph: fx.Graph) -> None:
        bypass(pick(rng, [n for n in graph.nodes if n.target is aten.add.Tensor]))

    return _segment(segments, "input_grad", change), "add"


def collectives_swapped(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    def change(graph: fx.Graph) -> None:
        found = converts(graph)
        pairs = [(a, b) for a in found for b in found if a is not b and _independent(a, b)]
        first, second = pick(rng, pairs)
        second.prepend(first)
        first.prepend(second)

    return _segment(segments, "forward", change), "convert|_context_|_tensor_"


def _independent(first: fx.Node, second: fx.Node) -> bool:
    """Whether ``second``, later in the graph, may stand before ``first``."""
    order = list(first.graph.nodes)
    return order.index(second.args[0]) < order.index(first) < order.index(second)  # type: ignore[arg-type]


def parameter_gradient_lost(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    old = segments.weight_grad
    assert old is not None
    place = rng.randrange(len(old.outputs))

    def change(graph: fx.Graph) -> None:
        (results,) = graph.output_node().args
        graph.output_node().args = ((*results[:place], *results[place + 1 :]),)  # type: ignore[misc]

    names = (*old.outputs[:place], *old.outputs[place + 1 :])
    made = replace(changed_segment(old, change), outputs=names)
    return replace(segments, weight_grad=made), old.outputs[place]


def gradient_made_twice(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    old = segments.weight_grad
    assert old is not None
    first, second, *_ = rng.sample(range(len(old.outputs)), 2)
    names = list(old.outputs)
    names[second] = names[first]
    return replace(segments, weight_grad=replace(old, outputs=tuple(names))), names[first]


def read_before_it_is_made(segments: Segments, rng: Rng) -> tuple[Segments, str]:
    """The forward reads what the input gradients leave."""
    old, later = segments.forward, segments.input_grad
    assert later is not None
    name = pick(rng, [name for name in later.outputs if name not in old.outputs])
    inputs = (name, *old.inputs[1:])
    return replace(segments, forward=replace(old, inputs=inputs)), name


SEGMENTS = {
    reduction_dropped: "joint_graph_is_kept",
    consumers_gradient_overwritten: "joint_graph_is_kept",
    collectives_swapped: "joint_graph_is_kept",
    parameter_gradient_lost: "wanted_gradients_are_made",
    gradient_made_twice: "values_are_made_before_they_are_read",
    read_before_it_is_made: "values_are_made_before_they_are_read",
}


def _transfer(links: Mapping[str, Any], kind: str, rng: Rng, change) -> dict[str, Any]:
    """The links of a rank after a change of the pieces of one transfer."""
    place = pick(rng, [k for k, transfer in enumerate(links[kind]) if transfer.pieces])
    made: list[Transfer] = list(links[kind])
    pieces = list(made[place].pieces)
    change(pieces)
    made[place] = replace(made[place], pieces=tuple(pieces))
    return {**links, kind: tuple(made)}


def wrong_rank(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    def change(pieces: list[Piece]) -> None:
        place = rng.randrange(len(pieces))
        pieces[place] = replace(pieces[place], rank=pieces[place].rank + 1)

    return _transfer(links, kind, rng, change)


def lost_rows(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    return _transfer(links, kind, rng, lambda pieces: pieces.pop(rng.randrange(len(pieces))))


def doubled_rows(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    """A gradient sent twice, if backward."""
    return _transfer(links, kind, rng, lambda pieces: pieces.append(pick(rng, pieces)))


def shorter_rows(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    def change(pieces: list[Piece]) -> None:
        found = [(k, d) for k, p in enumerate(pieces) for d, at in enumerate(p.region) if at]
        place, dim = pick(rng, found)
        region = list(pieces[place].region)
        start, stop = region[dim][0]
        region[dim] = ((start, stop - 1), *region[dim][1:])
        pieces[place] = replace(pieces[place], region=tuple(region))

    return _transfer(links, kind, rng, change)


def moved_rows(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    """As many, but others."""

    def change(pieces: list[Piece]) -> None:
        found = [(k, d) for k, p in enumerate(pieces) for d, at in enumerate(p.region) if at]
        place, dim = pick(rng, found)
        region = list(pieces[place].region)
        region[dim] = tuple((start + 1, stop + 1) for start, stop in region[dim])
        pieces[place] = replace(pieces[place], region=tuple(region))

    return _transfer(links, kind, rng, change)


def not_transferred(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    """A consumer's gradient is never awaited, if backward."""
    made = list(links[kind])
    made.pop(rng.randrange(len(made)))
    return {**links, kind: tuple(made)}


def from_another_stage(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    made = list(links[kind])
    place = rng.randrange(len(made))
    made[place] = replace(made[place], peer=made[place].peer + 1)
    return {**links, kind: tuple(made)}


def in_another_layout(links: Mapping[str, Any], kind: str, rng: Rng) -> dict[str, Any]:
    made = list(links[kind])
    place = rng.randrange(len(made))
    first, *rest = made[place].specs
    other = replace(first, shape=(first.shape[0] + 1, *first.shape[1:]))
    made[place] = replace(made[place], specs=(other, *rest))
    return {**links, kind: tuple(made)}


TRANSFERS = (
    wrong_rank,
    lost_rows,
    doubled_rows,
    shorter_rows,
    moved_rows,
    not_transferred,
    from_another_stage,
    in_another_layout,
)
