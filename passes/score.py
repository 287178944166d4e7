"""What a partition is worth: the simulated time of one step, for comparing partitions.

A nominal machine stands for the real one. Only the ratio of its figures matters: how many FLOPs it
does while one byte crosses, which is about 10 between CPU processes and 1000 to 8000 between GPUs.
With 100 bytes decide where work does not, for small models and large ones.
"""

from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.simulate import Cost, Link, StageCost, simulate
from mllm_compile.compiler.stage import Stage
from mllm_compile.passes.schedule import make_schedule, variant_of

FLOPS_PER_SECOND = 100e12
LINK = Link(bandwidth=1e12)


def score(plan: Plan) -> tuple[float, int]:
    """Simulated seconds of a step, and bytes that cross boundaries for one microbatch.

    Once the pipeline is full every further microbatch takes as long as the one before: long steps
    are extrapolated.
    """
    cost = cost_of(plan)
    count = plan.request.microbatches
    full = min(count, 2 * len(plan.stages) + 2)
    seconds = _step_time(plan, cost, full)
    if count > full:
        seconds += (count - full) * (seconds - _step_time(plan, cost, full - 1))
    return seconds, sum(map(sum, cost.boundaries.values()))


def _step_time(plan: Plan, cost: Cost, microbatches: int) -> float:
    variants = [variant_of(plan)] * microbatches
    schedule = make_schedule(plan.stages, variants)
    return simulate(schedule, plan.stages, variants, [cost] * microbatches, LINK).step_time


def cost_of(plan: Plan) -> Cost:
    """Nominal seconds of every stage and bytes over every boundary, for one microbatch."""
    return Cost(
        {stage.index: stage_cost(plan, stage) for stage in plan.stages},
        {
            (b.source, b.target): (_bytes(plan, b.values), _bytes(plan, b.gradients))
            for b in plan.boundaries
        },
    )


def stage_cost(plan: Plan, stage: Stage) -> StageCost:
    """Nominal seconds of a stage's F, I and W; a stage that sends no gradient does all in W.

    The ranks of a stage are taken to share its work, saved values included.
    """
    costs = [plan.costs[name] for name in (*stage.nodes, *stage.replicated)]
    rate = FLOPS_PER_SECOND * len(stage.ranks)
    inputs = sum(cost.input_grad for cost in costs)
    weights = sum(cost.weight_grad for cost in costs)
    if not any(b.target == stage.index and b.gradients for b in plan.boundaries):
        inputs, weights = 0, inputs + weights
    return StageCost(
        forward=sum(cost.forward for cost in costs) / rate,
        input_grad=inputs / rate,
        weight_grad=weights / rate,
        saved_bytes=sum(cost.saved_bytes for cost in costs) // len(stage.ranks),
    )


def _bytes(plan: Plan, values: tuple[str, ...]) -> int:
    return sum(plan.costs[value].bytes for value in values)
