"""One thing is changed in a real job, at a seeded place: a law says so, before anything starts.

Whatever is changed, the message names the node, or rank and action; the law; and the pass.
"""

import random
from dataclasses import replace

import pytest

from mllm_compile.agreement import digests, members_call_alike
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.pass_runner import check
from mllm_compile.compiler.program import StageProgram
from mllm_compile.denominators import totals_are_fed, with_global_denominators
from mllm_compile.passes import invariants, sharding_laws
from mllm_compile.passes.lower.local_law import ranks_hold_what_is_planned
from mllm_compile.passes.lower.lower import lower
from mllm_compile.passes.lower.segment_laws import (
    joint_graph_is_kept,
    values_are_made_before_they_are_read,
    wanted_gradients_are_made,
)
from mllm_compile.passes.lower.transfer_law import Links, pieces_pair_up
from tests import faults_in_graphs, faults_in_plans
from tests.faulty import changed_segment, changed_stage, converts, job, pick

SEEDS = range(2)
ONE = (1, 1, 1, 1)


def wide():
    """A decoder of two stages, each on tensor 2 x context 2."""
    return job("llava", ONE, ONE, (2, 2, 1, 2))


def lanes():
    """An encoder of four data lanes before a decoder of two."""
    return job("qwen2_5_vl", (1, 1, 4, 1), (1, 1, 2, 1))


def shared():
    """Two encoders on the ranks of the decoder."""
    return job("vision_audio_llm", (1, 1, 2, 1), (2, 1, 1, 1), (2, 1, 1, 1), shared=True)


def named(function):
    return function.__name__


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "law", "after"),
    [
        *((f, law, "shard") for f, law in faults_in_plans.SHARD.items()),
        *((f, law, "partition") for f, law in faults_in_plans.PARTITION.items()),
        *((f, law, "schedule") for f, law in faults_in_plans.SCHEDULE.items()),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_decisions(fault, law, after, seed):
    laws = {"shard": sharding_laws.SHARD}.get(after) or getattr(invariants, after.upper())
    plan = wide().plan
    broken, subject = fault(plan, random.Random(seed))

    def checked(plan):
        for each in laws:
            check(each, plan, after=after)

    checked(plan)
    with pytest.raises(PlanError, match=rf"after pass {after}: law {law} \(") as error:
        checked(broken)
    assert subject in str(error.value)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", faults_in_graphs.LOCAL, ids=named)
def test_local_graphs(fault, seed):
    rng = random.Random(seed)
    made, stage = wide(), 2 + rng.randrange(2)
    local, whole, at = made.local(stage, rng.randrange(2), rng.randrange(2))
    subjects = []
    broken = changed_stage(local, lambda graph: subjects.append(fault(graph, rng)))
    law = ranks_hold_what_is_planned
    check(law, local, whole, made.plan, stage, at, after="localize")
    message = rf"after pass localize: law {law.__name__} \(.*\): .*({subjects[0]})"
    with pytest.raises(PlanError, match=message):
        check(law, broken, whole, made.plan, stage, at, after="localize")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "law"), faults_in_graphs.SEGMENTS.items())
def test_segments(fault, law, seed):
    made, stage = wide(), 3
    local, *_ = made.local(stage, 1, 0)

    def laws(segments):
        check(joint_graph_is_kept, segments, stage, after="differentiate")
        check(values_are_made_before_they_are_read, segments, local, stage, after="differentiate")
        check(wanted_gradients_are_made, segments, local, made.plan, stage, after="differentiate")

    segments = made.segments(stage, 1, 0)
    laws(segments)
    broken, subject = fault(segments, random.Random(seed))
    with pytest.raises(PlanError, match=rf"pass differentiate: law {law} .*stage 3.*({subject})"):
        laws(broken)


def _collective_faults(graph, rng, kind):
    node = pick(rng, converts(graph, "PS", "RVS"))
    if kind == "dropped":
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    elif kind == "axis":
        node.args = (*node.args[:3], "context" if node.args[3] == "tensor" else "tensor")
    else:
        line = node.args[1:4]
        other = pick(rng, [n for n in converts(graph) if n.args[1:4] != line])
        node.args, other.args = (
            (n.args[0], *m.args[1:]) for n, m in ((node, other), (other, node))
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["dropped", "axis", "misordered"])
def test_collectives_of_one_rank(kind, seed):
    made, rng, stage = wide(), random.Random(seed), 2
    plan, ranks = made.plan, made.plan.stages[stage].ranks
    places = {rank: made.mesh(stage).place(rank, "context") for rank in ranks}
    programs = {rank: _program(made, stage, place) for rank, place in places.items()}
    blank = digests([{}], stage) * len(plan.stages)

    def found(programs):
        rows = [blank] * (max(ranks) + 1)
        size = len(digests([{}], stage))
        for rank in ranks:
            own = digests([{stage: programs[rank]}], stage)
            rows[rank] = blank[: stage * size] + own + blank[(stage + 1) * size :]
        return rows

    ends = [stage.ranks for stage in plan.stages]
    pad = [blank] * (max(map(max, ends)) - max(ranks))
    check(members_call_alike, found(programs) + pad, plan, after="lower")
    wrong = pick(rng, ranks[1:])
    action, name = pick(rng, [("F", "forward"), ("I", "input_grad")])
    segment = getattr(programs[wrong], name)
    changed = changed_segment(segment, lambda graph: _collective_faults(graph, rng, kind))
    broken = {**programs, wrong: replace(programs[wrong], **{name: changed})}
    message = f"lower: law members_call_alike .*rank {wrong}, stage {stage}, action {action}"
    with pytest.raises(PlanError, match=message):
        check(members_call_alike, found(broken) + pad, plan, after="lower")


def _program(made, stage, place) -> StageProgram:
    return lower(made.plan, made.plan.stages[stage], {"context": place, "tensor": 0})


KINDS = ("sends_forward", "receives_forward", "sends_backward", "receives_backward")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", faults_in_graphs.TRANSFERS, ids=named)
@pytest.mark.parametrize("jobs", [lanes, wide, shared], ids=named)
def test_transfers(jobs, fault, seed):
    made, rng = jobs(), random.Random(seed)
    links = Links(made.plans)
    stages = made.plan.stages
    for stage in stages:
        for rank in stage.ranks:
            links.checked(stage.index, rank)
    found = [
        (stage, rank, kind)
        for stage in stages
        for rank in stage.ranks
        for kind in KINDS
        if any(transfer.pieces for transfer in links.of(stage.index, rank)[kind])
    ]
    stage, rank, kind = pick(rng, found)
    broken = fault(links.of(stage.index, rank), kind, rng)
    lane = made.mesh(stage.index).lane(rank)

    def given(at, of):
        return broken if (at, of) == (stage.index, rank) else links.of(at, of)

    def checked(of):
        for boundary in made.plans[stage.module][lane].boundaries:
            if stage.index in (boundary.source, boundary.target):
                check(pieces_pair_up, of, boundary, stage, lane, made.plans, after="transfers")

    checked(links.of)
    with pytest.raises(PlanError, match=r"transfers: law pieces_pair_up .*rank \d") as error:
        checked(given)
    assert f"rank {rank}" in str(error.value)


def _own_count(counted, fed, place):
    return counted[place]


def _one_part_missed(counted, fed, place):
    name = fed[place].program.denominators[0]
    values = fed[place].values
    own = counted[place].values["denominator", name]
    less = {**values, ("denominator", name): values["denominator", name] - own}
    return replace(fed[place], values=less)


def _counted_twice(counted, fed, place):
    name = fed[place].program.denominators[0]
    values = fed[place].values
    return replace(
        fed[place], values={**values, ("denominator", name): 2 * values["denominator", name]}
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [_own_count, _one_part_missed, _counted_twice], ids=named)
def test_denominators(fault, seed):
    made, rng = lanes(), random.Random(seed)
    counted = [made.compiler.programs.get(lane) for mb in made.batches for lane in mb[2]]
    fed = list(with_global_denominators(counted))
    check(totals_are_fed, fed, counted, after="with_global_denominators")
    place = rng.randrange(len(fed))
    fed[place] = fault(counted, fed, place)
    message = f"law totals_are_fed .*part {place}, denominator %denominator_0 at "
    with pytest.raises(PlanError, match=message):
        check(totals_are_fed, fed, counted, after="with_global_denominators")
