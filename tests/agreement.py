"""Hold a plan's gradients against autograd's, for random freezes of a captured program."""

import random

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.flow import flow, follow_forwards
from mllm_compile.compiler.graph import Graph
from tests.small_graphs import values_of
from tests.watch import Watch


def patterns(model, count):
    """Random freezes: whole modules, single parameters, almost all, almost none."""
    names = [name for name, _ in model.named_parameters()]
    for seed in range(count):
        draw = random.Random(seed)
        share = draw.choice([0.03, 0.2, 0.5, 0.8, 0.97])
        parts = sorted({name.rpartition(".")[0] for name in names})
        kept = {part for part in parts if draw.random() < share}
        single = draw.random() < 0.5
        yield {
            name
            for name in names
            if (draw.random() < share if single else name.rpartition(".")[0] in kept)
        }


def with_trainable(captured: Captured, trainable) -> Captured:
    """The program of the same model with other parameters frozen."""
    inputs = [
        type(item)(item.kind, item.name, item.kind == "parameter" and item.name in trainable)
        for item in captured.inputs
    ]
    made = dict(vars(captured)) | {"inputs": tuple(inputs)}
    return Captured(**made)


def agree(captured: Captured, values=None) -> None:
    """Run main under autograd; every value, edge and parameter must agree with the plan."""
    graph = Graph(captured)
    found = flow(graph)
    watch = Watch(captured)
    values = values_of(captured) if values is None else values
    loss = watch.run(*values)[0]
    requires = {node.name for node, flags in follow_forwards(graph).flags.items() if any(flags)}
    known = graph.live | graph.input_of.keys()
    assert requires == {name for name in watch.requires if graph.by_name[name] in known}
    if loss.requires_grad:
        loss.backward()
    assert {(a.name, b.name) for a, b in found.edges} == watch.edges
    expected = {source for source, _ in watch.edges}
    expected |= {graph.loss.name} if loss.requires_grad else set()
    assert {node.name for node in found.needs} == expected
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, values, strict=True):
        assert (value.grad is not None) == (node in found.needs)
