"""Decide the stages: where every module of the request is cut, and what crosses between stages.

Stages are numbered in the order of the request's modules, and every value flows to a higher number.
Modules are cut where the simulated step is shortest, among the candidates of passes/cuts.py, one
module after another. Sites whose stage is given (``placement``, of another program of the same
model) keep it, so that no parameter moves, and operators between them follow it as far as they can,
so that data lanes with other programs exchange the same values; only the rest is decided.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan, Site
from mllm_compile.passes.assemble import boundaries_of, first_stages, stages_of
from mllm_compile.passes.cuts import Cuts, candidates
from mllm_compile.passes.module_order import check_glue, check_order
from mllm_compile.passes.modules import assign_modules, module_of_path
from mllm_compile.passes.score import score
from mllm_compile.passes.units import Chain, chain

NEAR = 1.02


def partition(plan: Plan, placement: Mapping[Site, int] | None = None) -> Plan:
    """Annotated plan -> plan with stages, boundaries, ``placement`` and ``home``."""
    graph = Graph(plan.captured)
    if placement is not None:
        modules = assign_modules(graph, plan.request, placement)
        plan = replace(plan, placement=placement, module_of=modules)
    check_order(graph, plan.request)
    check_glue(graph, plan.request, plan.module_of)
    chains = _chains(graph, plan)
    made = _best(graph, plan, chains, [candidates(each) for each in chains])
    return replace(
        made, placement=dict(sorted({**_undecided(graph, made), **made.placement}.items()))
    )


def _chains(graph: Graph, plan: Plan) -> list[Chain]:
    pins, wishes = pinned(graph, plan), _wished(graph, plan)
    modules = range(len(plan.request.modules))
    return [chain(graph, plan, module, pins, wishes) for module in modules]


def _undecided(graph: Graph, plan: Plan) -> dict[Site, int]:
    """The stage of every operator that its neighbours among the sites leave a choice."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.nodes}
    free = {
        node
        for each in _chains(graph, plan)
        for unit in each.units
        if unit.lowest < unit.highest
        for node in unit.nodes
    }
    return {site: stage_of[n.name] for site, n in graph.operations.items() if n in free}


def _best(graph: Graph, plan: Plan, chains: list[Chain], options: list[tuple[Cuts, ...]]) -> Plan:
    """Module after module the candidate with the shortest step; near ties go to fewer bytes."""
    chosen = [module[0] for module in options]
    for module, cuts in sorted(enumerate(options), key=lambda item: -len(item[1])):
        trials = [[*chosen[:module], cut, *chosen[module + 1 :]] for cut in cuts]
        scores = [score(_cut(graph, plan, chains, trial)) for trial in trials]
        shortest = min(time for time, _ in scores)
        near = [k for k, (time, _) in enumerate(scores) if time <= shortest * NEAR]
        chosen = trials[min(near, key=lambda k: (scores[k][1], scores[k][0]))]
    return _cut(graph, plan, chains, chosen)


def _cut(graph: Graph, plan: Plan, chains: list[Chain], cuts: list[Cuts]) -> Plan:
    """The plan with every module cut at its positions."""
    stage_of: dict[fx.Node, int] = {}
    for first, each, positions in zip(first_stages(plan.request), chains, cuts, strict=False):
        for place, unit in enumerate(each.units):
            stage = first + sum(position <= place for position in positions)
            stage_of.update(dict.fromkeys(unit.nodes, stage))
    placement = {**plan.placement, **{site: stage_of[n] for site, n in graph.sites.items()}}
    return replace(
        plan,
        stages=stages_of(graph, plan, stage_of),
        boundaries=boundaries_of(graph, plan, stage_of),
        placement=dict(sorted(placement.items())),
        home=_homes(graph, plan, placement),
    )


def _homes(graph: Graph, plan: Plan, placement: Mapping[Site, int]) -> dict[str, int]:
    """The one stage that accounts for each parameter: its first reader, else its module's first."""
    firsts = first_stages(plan.request)
    readers: dict[str, int] = {}
    for (_, name, _), stage in placement.items():
        readers[name] = min(stage, readers.get(name, stage))
    homes = {}
    for name in graph.parameters:
        module = module_of_path(plan.request, name)
        homes[name] = readers.get(name, firsts[module or 0])
    return homes


def _wished(graph: Graph, plan: Plan) -> dict[fx.Node, int]:
    """Stage within its module that another program gave to the same operator."""
    firsts = first_stages(plan.request)
    return {
        node: plan.placement[site] - firsts[plan.module_of[node.name]]
        for site, node in graph.operations.items()
        if site in plan.placement
    }


def pinned(graph: Graph, plan: Plan) -> dict[fx.Node, int]:
    """Stage within its module of every node that reads a site whose stage is given."""
    firsts = first_stages(plan.request)
    pins: dict[fx.Node, int] = {}
    for site, node in graph.sites.items():
        if site in plan.placement:
            module = plan.module_of[node.name]
            stage = plan.placement[site] - firsts[module]
            known = range(firsts[module + 1] - firsts[module])
            if stage not in known or pins.setdefault(node, stage) != stage:
                raise RequestError(
                    explain(
                        f"%{node.name} ({site[0]}) reads {site[1]}",
                        expected=f"stage {plan.placement[site]}, as another program fixed it",
                        got=f"inputs of {plan.request.modules[module].name}, or parameters, "
                        "that are not there",
                        remedy="name its module in the request, or plan the fullest program first",
                    )
                )
    return pins
