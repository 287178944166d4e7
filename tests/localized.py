"""Stages lowered for every rank of a mesh, run on threads, and compared with the plain model.

Layouts are decided here by hand: a test names the layouts of parameters, the factors that the
context axis divides, and single strategies; operators agree with their operands.
"""

import copy
import re
from dataclasses import replace

import torch

from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, R, V
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.compiler.sharding import Sharding
from mllm_compile.passes.capture.capture import loss_of
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.lower.lower import lower
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.sharding.refine import refine
from mllm_compile.passes.sharding.strategies import Gradients, strategies
from mllm_compile.passes.sharding.values import operands
from tests.thread_ranks import run_ranks


def planned(model, batch, split="contiguous", exchange="auto", **sizes):
    """(plan of one module in one stage, the values of the batch) for these sizes of axes."""
    prepared = Programs(model).get(batch)
    parallel = Parallel(**{name: size for name, size in sizes.items() if name != "pipeline"})
    parallel = replace(parallel, pipeline=sizes.get("pipeline", 1))
    ranks = tuple(range(parallel.size))
    spec = ModuleSpec(("",), ranks, parallel, context_split=split, kv_exchange=exchange)
    plan = make_plan(Request((spec,)), prepared.program, stop_after="partition")
    return plan, prepared.values


class Decisions:
    """Strategies for the nodes of one module, one axis after the other."""

    def __init__(self, plan):
        self.plan = plan
        self.axes = Mesh.of(plan.request.modules[0], 0).axes
        self.graph = Graph(plan.captured)
        self.refined = refine(self.graph.nodes)
        self.placed = [n for n in self.graph.placed if not is_element(n)]
        self.chosen = {node: [] for node in self.placed}
        self.layouts = {node: [] for node in self.graph.nodes if node.op == "placeholder"}

    def axis(self, name):
        return next(axis for axis in self.axes if axis.name == name)

    def options(self, node, axis):
        outer = list(zip(self.axes, self.chosen[node], strict=False))
        factors = self.refined.factors.get(node)
        return strategies(factors, axis, Gradients.of(node, self.plan), outer)

    def _along(self, node, options):
        """The strategies that divide the tokens: the queries of the last attention."""
        attention = [n for n in self.placed if n.target is torch.ops.mllm.attention.default][-1]
        sizes = self.refined.parts((attention, 0))[2]
        tokens = self.refined.part_class((attention, 0), 2, 1, sizes[0])
        return [s for s in options if self._class(node, s.name) == tokens]

    def context(self):
        """Divide all that runs with the tokens; everything else varies."""
        axis = self.axis("context")
        for placeholder, layouts in self.layouts.items():
            layouts.append(V if placeholder.name in self.plan.needs_grad else R)
        for node in self.placed:
            options = self.options(node, axis)
            along = self._along(node, options)
            varying = [s for s in options if s.name == "whole/V"]
            self.chosen[node].append((along or varying or list(options))[0])
        return self

    def _class(self, node, factor):
        factors = self.refined.factors.get(node)
        known = factors is not None and factor in factors.sizes
        return self.refined.factor_class(node, factor) if known else None

    def agree(self, name, parameters, tokens=""):
        """Parameters by pattern of their name; operators agree with their operands' layouts.

        Nodes whose name fits the pattern ``tokens`` are divided with the tokens instead.
        """
        axis = self.axis(name)
        have = {}
        for placeholder in self.layouts:
            item = self.graph.input_of[placeholder]
            found = [v for k, v in parameters.items() if re.fullmatch(k, item.name)]
            layout = Layout.parse(found[0]) if found and item.kind == "parameter" else R
            self.layouts[placeholder].append(layout)
            have[placeholder, 0] = layout
        for node in self.placed:
            options = self.options(node, axis)
            if re.fullmatch(tokens, node.name):
                options = self._along(node, options) or options
            before = [have.get(value, R) for value in operands(node)]
            best = max(options, key=lambda s: _agreement(s, before))
            self.chosen[node].append(best)
            for place, layout in enumerate(best.outputs):
                have[node, place] = layout
        return self

    def plan_with(self, sent=None):
        sharding = Sharding(
            self.axes,
            {node.name: tuple(found) for node, found in self.chosen.items()},
            {node.name: tuple(found) for node, found in self.layouts.items()} | (sent or {}),
            sent or {},
        )
        return replace(self.plan, shardings=(sharding,))


def _agreement(strategy, before):
    pairs = list(zip(strategy.inputs, before, strict=True))
    good = sum(a == b and b.kind in "SP" for a, b in pairs)
    bad = sum(a != b and (b.kind in "SP" or a.kind in "SP") for a, b in pairs)
    linear = strategy.name == "linear"
    return good - bad - 0.1 * linear, strategy.name != "whole/V"


def shard(tensor, layouts, axes, places):
    """What the rank at ``places`` holds, by plain indexing."""
    divided = tuple(layout if layout.divided else R for layout in layouts)
    at = [places[axis.name] for axis in axes]
    region = Holding.of(tuple(tensor.shape), divided, axes, at).region
    for dim, intervals in enumerate(region):
        held = [i for start, stop in intervals for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(held, dtype=torch.int64))
    return tensor


def assembled(parts, layouts, axes, places, shape):
    """The dense gradient: shards into place, sums over the axes on which parameters vary."""
    dense = torch.zeros(shape, dtype=parts[0].dtype)
    for part, where in zip(parts, places, strict=True):
        counted = all(
            where[axis.name] == 0 or layout.kind in "VS"
            for axis, layout in zip(axes, layouts, strict=True)
        )
        if counted:
            divided = tuple(layout if layout.divided else R for layout in layouts)
            at = [where[axis.name] for axis in axes]
            region = Holding.of(shape, divided, axes, at).region
            index = [torch.tensor([i for a, b in ivs for i in range(a, b)]) for ivs in region]
            spread = torch.zeros(shape, dtype=part.dtype)
            if part.dim() == 0:
                spread = part
            elif part.numel():
                spread[torch.meshgrid(*index, indexing="ij")] = part
            dense = dense + spread
    return dense


def programs_of(plan):
    """Stage programs by (stage, places) of every rank."""
    mesh = Mesh.of(plan.request.modules[0], 0)
    places = [{axis.name: mesh.place(rank, axis.name) for axis in mesh.axes} for rank in mesh.ranks]
    return {
        (stage.index, tuple(at.values())): lower(plan, stage, at)
        for stage in plan.stages
        for at in places
    }


def inputs_of(plan, places, values, model):
    """The live values of one rank before it starts."""
    sharding, live = plan.shardings[0], {}
    for node, item in Graph(plan.captured).input_of.items():
        if item.kind == "parameter":
            whole = model.get_parameter(item.name).detach()
            layouts = sharding.layouts.get(node.name, sharding.whole)
            live[f"p:{item.name}"] = shard(whole, layouts, sharding.axes, places)
        elif item.kind == "buffer":
            live[f"b:{item.name}"] = model.get_buffer(item.name)
        else:
            live[f"x:{item.kind}:{item.name}"] = values[item.kind, item.name]
    return live


def run_rank(plan, programs, places, values, model):
    """(loss, gradients) of one rank that holds every stage."""
    live = inputs_of(plan, places, values, model)
    mine = [programs[stage.index, tuple(places.values())] for stage in plan.stages]
    tables = [dict(live) for _ in mine]
    for program, table in zip(mine, tables, strict=True):
        _call(program.forward, table)
        for boundary in (b for b in plan.boundaries if b.source == program.stage):
            names = [f"%{value}" for value in boundary.values]
            tables[boundary.target].update({name: table[name] for name in names})
    for program, table in reversed(list(zip(mine, tables, strict=True))):
        for segment in (program.input_grad, program.weight_grad):
            _call(segment, table)
        for boundary in (b for b in plan.boundaries if b.target == program.stage):
            _add(tables[boundary.source], {f"d%{v}": table[f"d%{v}"] for v in boundary.gradients})
    gradients = {}
    for table in tables:
        _add(gradients, {name[2:]: value for name, value in table.items() if name[:2] == "g:"})
    return tables[-1][mine[-1].loss], gradients


def _add(table, more):
    for name, value in more.items():
        table[name] = table.get(name, 0) + value


def _call(segment, table):
    if segment is None:
        return
    with torch.no_grad():
        results = segment.graph(*[table[name] for name in segment.inputs])
    table.update(zip(segment.outputs, results, strict=True))


def assert_exact(model, batch, plan, values, tolerance=1e-9):
    """Loss and every gradient on the ranks of the plan are the model's. Returns their logs."""
    theirs = copy.deepcopy(model)
    expected = loss_of(theirs(**batch))[0]
    expected.backward()
    programs = programs_of(plan)
    axes = plan.shardings[0].axes
    sizes = {axis.name: axis.size for axis in axes}
    places = []

    def body(where):
        places.append(where)
        return where, run_rank(plan, programs, where, values, model)

    results, logs = run_ranks(sizes, body)
    for _, (loss, _) in results:
        assert abs(loss.item() - expected.item()) <= tolerance * max(abs(expected.item()), 1)
    named = {name: node.name for name, node in Graph(plan.captured).parameters.items()}
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    floor = 1e-5 * torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for name, gradient in gradients.items():
        layouts = plan.shardings[0].layouts[named[name]]
        parts = [found[name] for _, (_, found) in results]
        got = assembled(parts, layouts, axes, [where for where, _ in results], gradient.shape)
        error = (got - gradient).norm().item()
        assert error <= tolerance * max(gradient.norm().item(), floor), (name, error)
    assert {name for _, (_, found) in results for name in found} == set(gradients)
    _assert_same_collectives(programs, plan)
    for group in _groups(logs, [where for where, _ in results]):
        assert len(group) == 1, "ranks of a group call different collectives"
    return programs, logs


def _assert_same_collectives(programs, plan):
    """All ranks of a stage are cut alike: the same collectives in the same order, per segment."""
    for stage in plan.stages:
        mine = [program for (index, _), program in programs.items() if index == stage.index]
        for part in ("forward", "input_grad", "weight_grad"):
            segments = [getattr(program, part) for program in mine]
            found = {
                tuple(
                    (node.args[3], node.args[1][0], node.args[2][0])
                    for node in (segment.graph.graph.nodes if segment else ())
                    if str(node.target) == "mllm.convert.default"
                )
                for segment in segments
            }
            assert len(found) == 1, (stage.index, part)
            assert len({segment and (segment.inputs, segment.outputs) for segment in segments}) == 1


def _groups(logs, places):
    """For every axis and group the distinct sequences of its collectives."""
    for axis in places[0]:
        groups = {}
        for log, where in zip(logs, places, strict=True):
            others = tuple((name, at) for name, at in where.items() if name != axis)
            calls = tuple(what for name, what, _ in log if name == axis)
            groups.setdefault(others, set()).add(calls)
        yield from groups.values()


def counts(program, segment="forward"):
    """How often each kind of conversion stands in a segment: {(axis, from, to): number}."""
    found = {}
    part = getattr(program, segment)
    for node in part.graph.graph.nodes if part is not None else ():
        if str(node.target) == "mllm.convert.default":
            _, have, want, axis = node.args[:4]
            key = (axis, have[0], want[0])
            found[key] = found.get(key, 0) + 1
    return found
