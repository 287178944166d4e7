"""Ranks that compiled different plans say so before anything is sent."""

from dataclasses import replace

import pytest

from mllm_compile.agreement import agree
from mllm_compile.compilation import Compiler
from mllm_compile.compiler.errors import RunError
from mllm_compile.model import microbatches, ready_model
from mllm_compile.runtime.local_transport import run_threads
from tests.families import MODULES
from tests.parity import request_of, workload_of


def _plan(trainable):
    request = request_of(MODULES["custom"], [1, 1, 1], trainable=trainable)
    workload = workload_of("custom")
    compiler = Compiler(request, ready_model(request, workload.model))
    compiler.step(microbatches(request, workload, 0)[:1])
    return compiler.plans[0]


def test_equal_plans_agree_and_other_ones_do_not():
    plan, same, frozen = _plan([None] * 3), _plan([None] * 3), _plan([False, None, None])
    run_threads(2, lambda end: agree(end, [(plan, same)[end.rank]]))
    with pytest.raises(RunError, match="ranks 1: expected the plan of rank 0"):
        run_threads(2, lambda end: agree(end, [(plan, frozen)[end.rank]]))
    unscheduled = replace(plan, schedule=None)
    with pytest.raises(RunError, match="make the workload deterministic"):
        run_threads(2, lambda end: agree(end, [(plan, unscheduled)[end.rank]]))
