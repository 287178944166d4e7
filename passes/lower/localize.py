"""Rewrite a stage's graph to what one rank computes: local shapes, explicit conversions.

Every node runs by the strategies of the plan: its operands are brought into the layouts that they
ask for, once for all readers that ask for the same. What the plan does not name is whole. In the
metadata of a call, ``of`` names the node of the stage that it stands for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import is_element, tensors_of
from mllm_compile.compiler.layout import Layout, R
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Layouts, Sharding, Strategy
from mllm_compile.kernels.collective.members import Member
from mllm_compile.passes.lower.causal import CausalIntervals
from mllm_compile.passes.lower.extract import StageGraph
from mllm_compile.passes.lower.local_graph import LocalGraph, Value
from mllm_compile.passes.lower.local_values import LocalRank, Shape
from mllm_compile.passes.lower.masked_rows import divides_rows, masked_rows_call
from mllm_compile.passes.lower.special import special_axis, special_call
from mllm_compile.passes.sharding.exchange import ATTENTION
from mllm_compile.passes.sharding.local_call import local_call

Target = Callable[..., Any]
Strategies = tuple[Strategy, ...]
WHOLE = Strategy("whole", (), ())


def localize(stage: StageGraph, plan: Plan, index: int, places: Mapping[str, int]) -> StageGraph:
    """``StageGraph`` of stage ``index`` -> that of the rank at ``places`` along the module's axes.

    Raises:
        PlanError: a node cannot run in the layouts that the plan gives it.
    """
    sharding = _sharding(plan, index)
    if not sharding.axes:
        return stage
    localizer = _Localizer(plan, sharding, LocalRank.of(sharding.axes, places))
    for node in stage.graph.graph.nodes:
        localizer.add(node, stage)
    localizer.local.graph.lint()
    return replace(stage, graph=fx.GraphModule({}, localizer.local.graph))


def members_of(plan: Plan, index: int, places: Mapping[str, int]) -> Mapping[str, Member]:
    """The rank at ``places`` as a member of the axes, for whoever traces the graph of a stage."""
    return LocalRank.of(_sharding(plan, index).axes, places).members


def _sharding(plan: Plan, index: int) -> Sharding:
    return plan.shardings[plan.stages[index].module] if plan.shardings else Sharding()


class _Localizer:
    """Copies nodes of the stage to the graph of one rank."""

    def __init__(self, plan: Plan, sharding: Sharding, rank: LocalRank) -> None:
        self.plan, self.sharding, self.rank = plan, sharding, rank
        self.local = LocalGraph(rank)
        self.causal = CausalIntervals(self.local)
        self.values: dict[fx.Node, Value] = {}
        self.tuples: dict[fx.Node, tuple[fx.Node, list[Layouts]]] = {}

    def add(self, node: fx.Node, stage: StageGraph) -> None:
        if node.op == "placeholder":
            layouts = self.sharding.layouts.get(node.name, self.sharding.whole)
            self.local.placeholder(self._value(node), layouts)
        elif is_element(node):
            self._element(node)
        elif node.op == "call_function":
            self._operator(node)
        elif node.op == "output":
            self._results(node, stage)

    def _value(self, node: fx.Node) -> Value:
        shape = tuple(node.meta["val"].shape)
        value = Value(node.name, shape, node.name in self.plan.needs_grad, node.meta)
        self.values[node] = value
        return value

    def _keep(self, node: fx.Node, made: fx.Node, layouts: Layouts) -> None:
        value = self._value(node)
        value.forms[value.normal(layouts)] = made

    def _element(self, node: fx.Node) -> None:
        source, place = node.args
        made, outputs = self.tuples[source]  # type: ignore[index]
        meta = {**node.meta, "of": node.name}
        element = self.local.call(getitem, (made, place), {}, meta, node.name)
        self._keep(node, element, outputs[place])  # type: ignore[index]

    def _operator(self, node: fx.Node) -> None:
        strategies = self.sharding.strategies.get(node.name, (WHOLE,) * len(self.rank.axes))
        operands = self._operands(node, strategies)
        rest = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(rest))
        outputs = [_outputs(strategies, place) for place in range(len(tensors_of(node)))]
        results = [
            () if tensor is None else self.rank.shape(tuple(tensor.shape), layouts)
            for tensor, layouts in zip(tensors_of(node), outputs, strict=True)
        ]

        def emit(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            return self.local.call(target, args, kwargs, {**node.meta, "of": node.name}, node.name)

        along = special_axis(node, self.rank.axes, strategies)
        if along is not None:
            made = emit(*special_call(node, args, kwargs, along), {})
        elif divides_rows(node, _inputs(strategies, 0)):
            made = masked_rows_call(self.local, node, operands, _inputs(strategies, 0))
        else:
            if node.target is ATTENTION:
                args = self.causal.explicit(node, args, kwargs, _inputs(strategies, 0))
                kwargs = {}
            shapes = [tuple(operand.meta["val"].shape) for operand in operands]
            made = local_call(emit, node, args, kwargs, shapes, results)
        self._check(node, made, strategies, results)
        if isinstance(node.meta["val"], torch.Tensor):
            self._keep(node, made, outputs[0])
        else:
            self.tuples[node] = made, outputs

    def _operands(self, node: fx.Node, strategies: Strategies) -> list[fx.Node]:
        """The local operands, in the order of the flattened arguments."""
        sources: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), sources.append)
        for strategy in strategies:
            if strategy.inputs and len(strategy.inputs) != len(sources):
                subject, expected = f"strategy {strategy} of %{node.name}", f"{len(sources)} inputs"
                raise PlanError(explain(subject, expected=expected))
        return [
            self.local.form(self.values[source], _inputs(strategies, place), node.meta)
            for place, source in enumerate(sources)
        ]

    def _check(
        self, node: fx.Node, made: fx.Node, strategies: Strategies, results: list[Shape]
    ) -> None:
        """PlanError where a result does not have the shape that its layouts promise."""
        for local, expected in zip(tensors_of(made), results, strict=True):
            if local is not None and tuple(local.shape) != expected:
                names = [strategy.name for strategy in strategies]
                where = f"%{node.name} = {node.target} ({node.meta.get('where', '')}), {names}"
                got = str(list(local.shape))
                raise PlanError(explain(where, expected=f"{list(expected)} here", got=got))

    def _results(self, node: fx.Node, stage: StageGraph) -> None:
        """Sent values leave as the plan says, all others (loss, outputs, buffers) whole."""
        made = []
        for name, source in zip(stage.outputs, node.args[0], strict=True):  # type: ignore[arg-type]
            sent = name.startswith("%") and name != stage.loss
            layouts = self.sharding.sent.get(name[1:]) if sent else None
            value = self.values[source]
            made.append(self.local.form(value, layouts or self.sharding.whole, value.meta))
        self.local.graph.output(tuple(made))


def _inputs(strategies: Strategies, place: int) -> Layouts:
    return tuple(strategy.inputs[place] if strategy.inputs else R for strategy in strategies)


def _outputs(strategies: Strategies, place: int) -> Layouts:
    def layout(strategy: Strategy) -> Layout:
        return strategy.outputs[place] if strategy.outputs else R

    return tuple(map(layout, strategies))
