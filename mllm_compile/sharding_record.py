"""A sharding as people want to know it: what each axis divides, and what has to be exchanged."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.sharding.conversions import conversions
from mllm_compile.passes.sharding.exchange import EXCHANGE
from mllm_compile.passes.sharding.price import share_of


@dataclass(frozen=True, slots=True)
class ShardingRecord:
    """One axis of one module. ``forward``, ``backward``: its collectives, of one microbatch.

    ``work`` is the part of the module's FLOPs that the busiest rank does, on all axes together.
    """

    module: int
    axis: str
    ranks: int
    parameters: int
    divided: int
    forward: str
    backward: str
    work: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A value that changes its layout in a stage, along one axis, and what its ranks exchange.

    ``forward`` and ``backward`` are "" where none of them needs anything of another.
    """

    stage: int
    axis: str
    value: str
    have: str
    want: str
    forward: str
    backward: str


def collective_records(plan: Plan) -> Iterator[CollectiveRecord]:
    """One record for every conversion that is a collective, in dataflow order; then exchanges."""
    for module in range(len(plan.shardings)):
        yield from _of_module(plan, module)


def _of_module(plan: Plan, module: int) -> Iterator[CollectiveRecord]:
    sharding = plan.shardings[module]
    for made in conversions(plan, module) if sharding.axes else ():
        if made.forward or made.backward:
            yield CollectiveRecord(
                stage=made.stage,
                axis=made.axis,
                value=made.point.removeprefix(">"),
                have=str(made.have),
                want=str(made.want),
                forward=made.forward,
                backward=made.backward,
            )
    stages = {name: stage.index for stage in plan.stages for name in stage.nodes}
    for name, own in sharding.strategies.items():
        for axis, strategy in zip(sharding.axes, own, strict=True):
            if strategy.special == EXCHANGE and len(strategy.inputs) > 1:
                back = "all-to-all" if name in plan.needs_grad else ""
                at = stages[name], axis.name, name, str(strategy.inputs[1])
                yield CollectiveRecord(*at, "keys needed", "all-to-all", back)
                if back:
                    yield CollectiveRecord(*at, "keys again", "", back)


def sharding_records(plan: Plan) -> Iterator[ShardingRecord]:
    """One record for every axis of several ranks of every module."""
    held = plan.parameter_layouts
    for module, sharding in enumerate(plan.shardings):
        made = tuple(_of_module(plan, module))
        for place, axis in enumerate(sharding.axes):
            layouts = [own[place] for (owner, _), own in held.items() if owner == module]
            own = [each for each in made if each.axis == axis.name]
            yield ShardingRecord(
                module=module,
                axis=axis.name,
                ranks=axis.size,
                parameters=len(layouts),
                divided=sum(layout.divided for layout in layouts),
                forward=_listed(each.forward for each in own),
                backward=_listed(each.backward for each in own),
                work=_work(plan, module),
                notes=sharding.notes if place == 0 else (),
            )


def _listed(collectives: Iterable[str]) -> str:
    counts = Counter(collective for collective in collectives if collective)
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"


def _work(plan: Plan, module: int) -> float:
    sharding = plan.shardings[module]
    whole, mine = 0, 0.0
    for name, own in sharding.strategies.items():
        flops = plan.costs[name].total
        pairs = zip(sharding.axes, own, strict=True)
        whole += flops
        mine += flops * prod(share_of(strategy, axis) for axis, strategy in pairs)
    return round(mine / whole, 6) if whole else 1.0
