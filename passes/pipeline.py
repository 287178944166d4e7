"""The passes, in order, and the laws that each of them establishes."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.pass_runner import Observer, Pass, run_passes
from mllm_compile.compiler.plan import Held, Plan, Site
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.passes import invariants, sharding_laws
from mllm_compile.passes.annotate import annotate
from mllm_compile.passes.attention import attention
from mllm_compile.passes.partition import partition
from mllm_compile.passes.schedule import schedule
from mllm_compile.passes.shard import shard

PASSES = (
    Pass(annotate, invariants.ANNOTATE),
    Pass(partition, invariants.PARTITION),
    Pass(attention, invariants.ATTENTION),
    Pass(shard, sharding_laws.SHARD),
    Pass(schedule, invariants.SCHEDULE),
)


def make_plan(
    request: Request,
    captured: Captured,
    placement: Mapping[Site, int] | None = None,
    layouts: Mapping[Held, Layouts] | None = None,
    intervals: Mapping[str, Tensor] | None = None,
    stop_after: str | None = None,
    observers: Sequence[Observer] = (),
) -> Plan:
    """All decisions about one captured program.

    ``placement`` and ``layouts`` are those of other programs' plans for the same model and request:
    the sites that they name stay in their stages, the parameters as they are divided.
    ``intervals``: what the masks of the batches at hand allow (passes/token_split/mask_values.py).

    Raises:
        RequestError: the request cannot be honoured.
    """
    plan = Plan(
        request,
        captured,
        placement=dict(placement or {}),
        given_layouts=dict(layouts or {}),
        intervals=dict(intervals or {}),
    )
    return run_passes(PASSES, plan, stop_after=stop_after, observers=observers)
