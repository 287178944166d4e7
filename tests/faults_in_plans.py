"""Seeded faults of decisions: strategies, layouts, boundaries, stages, schedules."""

import random
from collections.abc import Iterator
from dataclasses import replace

from mllm_compile.compiler.action import Action
from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.layout import Layout, P, R, S, V
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Strategy
from tests.faulty import pick

Rng = random.Random
LLM = 2
"""The module of the tests' plans whose values are divided."""


def _operators(plan: Plan) -> Iterator[tuple[str, int, Strategy]]:
    nodes = Graph(plan.captured).by_name
    for name, own in plan.shardings[LLM].strategies.items():
        if not is_element(nodes[name]):
            yield from ((name, axis, strategy) for axis, strategy in enumerate(own))


def _with(plan: Plan, **tables) -> Plan:
    shardings = list(plan.shardings)
    shardings[LLM] = replace(shardings[LLM], **tables)
    return replace(plan, shardings=tuple(shardings))


def _layout(plan: Plan, rng: Rng, side: str, old, new) -> tuple[Plan, str]:
    """One layout of a strategy for which ``old`` holds becomes ``new(layout)``."""
    found = [
        (name, axis, strategy, place)
        for name, axis, strategy in _operators(plan)
        for place, layout in enumerate(getattr(strategy, side))
        if old(layout)
    ]
    name, axis, strategy, place = pick(rng, found)
    layouts = list(getattr(strategy, side))
    layouts[place] = new(layouts[place])
    own = list(plan.shardings[LLM].strategies[name])
    own[axis] = replace(strategy, **{side: tuple(layouts)})
    return _with(plan, strategies={**plan.shardings[LLM].strategies, name: tuple(own)}), f"%{name}"


def swapped_dims(plan: Plan, rng: Rng):
    """Tokens are taken for samples."""
    return _layout(
        plan, rng, "inputs", lambda x: x.divided and x.dim == 1, lambda x: S(0, x.outer, x.size)
    )


def dropped_vary(plan: Plan, rng: Rng):
    return _layout(plan, rng, "inputs", lambda x: x == V, lambda _: R)


def partial_sum_read_as_whole(plan: Plan, rng: Rng):
    return _layout(plan, rng, "outputs", lambda x: x == P, lambda _: R)


def wrong_outer(plan: Plan, rng: Rng):
    return _layout(
        plan, rng, "inputs", lambda x: x.divided, lambda x: S(x.dim, x.outer + 1, x.size)
    )


def wrong_size(plan: Plan, rng: Rng):
    return _layout(
        plan, rng, "outputs", lambda x: x.divided, lambda x: S(x.dim, x.outer, x.size + 1)
    )


def node_without_strategy(plan: Plan, rng: Rng):
    table = dict(plan.shardings[LLM].strategies)
    name = pick(rng, list(table))
    del table[name]
    return _with(plan, strategies=table), name


def wrong_element(plan: Plan, rng: Rng):
    nodes, table = Graph(plan.captured).by_name, plan.shardings[LLM].strategies
    name = pick(rng, [name for name in table if is_element(nodes[name])])
    own = tuple(replace(each, outputs=(P,)) for each in table[name])
    return _with(plan, strategies={**table, name: own}), f"%{name}"


def wrong_parameter_shard(plan: Plan, rng: Rng):
    return _held(plan, rng, lambda x: S(x.dim, x.outer, x.size + 1), lambda x: x.divided)


def partial_parameter(plan: Plan, rng: Rng):
    return _held(plan, rng, lambda _: P, lambda x: not x.divided)


def _held(plan: Plan, rng: Rng, new, old) -> tuple[Plan, str]:
    parameters = {node.name for node in Graph(plan.captured).parameters.values()}
    table = plan.shardings[LLM].layouts
    found = [
        (name, axis)
        for name, layouts in table.items()
        for axis, layout in enumerate(layouts)
        if name in parameters and old(layout)
    ]
    name, axis = pick(rng, found)
    own = list(table[name])
    own[axis] = new(own[axis])
    return _with(plan, layouts={**table, name: tuple(own)}), f"%{name}"


def received_in_another_layout(plan: Plan, rng: Rng):
    inner = [b for b in plan.boundaries if plan.stages[b.source].module == LLM]
    name = pick(rng, [value for boundary in inner for value in boundary.values])
    table = plan.shardings[LLM].layouts
    other: Layout = S(2, 1, 2) if table[name][1] != S(2, 1, 2) else R
    return _with(plan, layouts={**table, name: (table[name][0], other)}), name


def _boundary(plan: Plan, rng: Rng, change, gradients=False) -> tuple[Plan, str]:
    found = [k for k, b in enumerate(plan.boundaries) if b.gradients or not gradients]
    place = pick(rng, found)
    old = plan.boundaries[place]
    boundaries = [*plan.boundaries[:place], *change(old), *plan.boundaries[place + 1 :]]
    return replace(plan, boundaries=tuple(boundaries)), old.values[0]


def gradient_not_sent(plan: Plan, rng: Rng):
    return _boundary(plan, rng, lambda b: [replace(b, gradients=())], gradients=True)


def value_sent_twice(plan: Plan, rng: Rng):
    return _boundary(plan, rng, lambda b: [b, b])


def value_not_sent(plan: Plan, rng: Rng):
    return _boundary(plan, rng, lambda b: [])


def stage_on_wrong_ranks(plan: Plan, rng: Rng):
    place = rng.randrange(len(plan.stages))
    stages = list(plan.stages)
    ranks = tuple(rank + 1 for rank in stages[place].ranks)
    stages[place] = replace(stages[place], ranks=ranks)
    return replace(plan, stages=tuple(stages)), str(ranks)


def _actions(plan: Plan, rng: Rng, rank: int, change) -> tuple[Plan, str]:
    row = list(plan.schedule.actions[rank])
    change(row)
    actions = {**plan.schedule.actions, rank: tuple(row)}
    return replace(plan, schedule=replace(plan.schedule, actions=actions)), f"rank {rank}"


def misordered_action(plan: Plan, rng: Rng):
    """A receive behind the forward that waits for it."""
    rank = pick(rng, plan.stages[-1].ranks)

    def change(row: list[Action]) -> None:
        place = pick(rng, [k for k, action in enumerate(row) if action.kind == "RECV_F"])
        end = next(k for k, action in enumerate(row) if k > place and action.kind == "F")
        row.insert(end, row.pop(place))

    return _actions(plan, rng, rank, change)


def dropped_action(plan: Plan, rng: Rng):
    rank = pick(rng, list(plan.schedule.actions))
    return _actions(plan, rng, rank, lambda row: row.pop(rng.randrange(len(row))))


def repeated_action(plan: Plan, rng: Rng):
    rank = pick(rng, list(plan.schedule.actions))
    return _actions(plan, rng, rank, lambda row: row.append(row[rng.randrange(len(row))]))


def actions_of_another_rank(plan: Plan, rng: Rng):
    first, other = plan.stages[0].ranks[0], plan.stages[-1].ranks[0]
    actions = {**plan.schedule.actions, first: plan.schedule.actions[other]}
    return replace(plan, schedule=replace(plan.schedule, actions=actions)), f"rank {first}, step"


SHARD = {
    swapped_dims: "strategies_follow_rules",
    dropped_vary: "strategies_follow_rules",
    partial_sum_read_as_whole: "strategies_follow_rules",
    wrong_outer: "strategies_follow_rules",
    wrong_size: "strategies_follow_rules",
    node_without_strategy: "sharded_nodes_have_strategies",
    wrong_element: "elements_stand_as_made",
    wrong_parameter_shard: "sizes_divide",
    partial_parameter: "boundaries_are_whole_or_divided",
    received_in_another_layout: "stages_of_a_module_agree",
}
PARTITION = {
    gradient_not_sent: "gradients_cross_where_needed",
    value_sent_twice: "one_boundary_per_target",
    value_not_sent: "stages_are_complete",
    stage_on_wrong_ranks: "stages_match_request",
}
SCHEDULE = dict.fromkeys(
    (misordered_action, dropped_action, repeated_action, actions_of_another_rank), "schedule_ends"
)
