"""What a partition is worth: the time of one 1F1B step, for comparing partitions with each other.

Nominal machine: an accelerator that does 400 TFLOP/s, and links of 50 GB/s between ranks.
"""

from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.stage import Stage

FLOPS_PER_SECOND = 400e12
BYTES_PER_SECOND = 50e9


def stage_work(plan: Plan, stage: Stage) -> tuple[int, int, int]:
    """FLOPs of one microbatch on a stage: F, dI, dW, replicated nodes included."""
    costs = [plan.costs[name] for name in (*stage.nodes, *stage.replicated)]
    return (
        sum(cost.forward for cost in costs),
        sum(cost.input_grad for cost in costs),
        sum(cost.weight_grad for cost in costs),
    )


def score(plan: Plan) -> tuple[float, int]:
    """Seconds of a step, and bytes that cross boundaries for one microbatch.

    The longest path of one microbatch, and the busiest stage for each further one.
    """
    work = {s.index: sum(stage_work(plan, s)) / FLOPS_PER_SECOND for s in plan.stages}
    moved = {
        (b.source, b.target): sum(plan.costs[v].bytes for v in (*b.values, *b.gradients))
        for b in plan.boundaries
    }
    longest: dict[int, float] = {}
    for stage in reversed(plan.stages):
        after = [
            longest[target] + size / BYTES_PER_SECOND
            for (source, target), size in moved.items()
            if source == stage.index
        ]
        longest[stage.index] = work[stage.index] + max(after, default=0.0)
    further = plan.request.microbatches - 1
    return max(longest.values()) + further * max(work.values()), sum(moved.values())
