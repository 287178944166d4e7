"""Stages that share ranks: one schedule, interleaved, with a bounded window."""

from collections import Counter
from dataclasses import replace

import pytest

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.simulate import Cost, StageCost, simulate
from mllm_compile.compiler.stage import Stage, representatives
from mllm_compile.compiler.variant import Variant, union
from mllm_compile.passes.schedule import make_schedule
from tests.schedules import encoders, text_only, variant


def on_ranks(*ranks: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(i, 0, i, held, (f"n{i}",), (), ()) for i, held in enumerate(ranks))


COLOCATED = on_ranks((0, 1, 2, 3), (0, 1), (2, 3))
MIXED = on_ranks((0, 1, 2, 3), (4,), (0, 1), (2, 3))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(
    ("stages", "edges"),
    [(COLOCATED, encoders(1, llm=2)), (MIXED, encoders(1, 1, llm=2))],
    ids=["colocated", "mixed"],
)
def test_shared_ranks_pass_the_dry_run(stages, edges, microbatches: int) -> None:
    variants = [variant(edges)] * microbatches
    schedule = make_schedule(stages, variants)
    dry_run(schedule, stages, variants)
    assert Counter(map(len, schedule.actions.values()))


def test_encoder_work_interleaves_and_stays_within_its_window() -> None:
    """At most as many encoder microbatches live as the pipeline is deep, however many there are."""
    variants = [variant(encoders(1, llm=2))] * 16
    schedule = make_schedule(COLOCATED, variants)
    in_flight = peak = 0
    for action in schedule.actions[0]:
        if action.stage == 0 and action.kind in "FW":
            in_flight += 1 if action.kind == "F" else -1
            peak = max(peak, in_flight)
    assert peak == schedule.windows[0] == 3
    costs = [Cost({0: StageCost(1, 0, 2), 1: StageCost(1, 1, 1), 2: StageCost(1, 1, 1)})] * 16
    result = simulate(schedule, COLOCATED, variants, costs)
    assert result.peak_microbatches[0] == 3


def test_all_encoder_forwards_first_would_be_refused() -> None:
    variants = [variant(encoders(1, llm=2))] * 8
    schedule = make_schedule(COLOCATED, variants)
    actions = {
        rank: tuple(sorted(todo, key=lambda a: (a.stage, a.kind) != (0, "F")))
        for rank, todo in schedule.actions.items()
    }
    with pytest.raises(PlanError, match="its window is 3"):
        dry_run(Schedule(actions, schedule.windows), COLOCATED, variants)


def test_ranks_of_one_stage_in_different_order_are_refused() -> None:
    variants = [variant(encoders(1, llm=2))] * 2
    schedule = make_schedule(COLOCATED, variants)
    swapped = list(schedule.actions[1])
    places = [i for i, a in enumerate(swapped) if a.stage == 1 and a.kind == "SEND_F"]
    swapped[places[0]], swapped[places[1]] = swapped[places[1]], swapped[places[0]]
    broken = replace(schedule, actions={**schedule.actions, 1: tuple(swapped)})
    with pytest.raises(PlanError, match="rank 1"):
        dry_run(broken, COLOCATED, variants)


def test_one_rank_stands_for_those_with_the_same_stages() -> None:
    assert [stage.ranks for stage in representatives(COLOCATED)] == [(0, 2), (0,), (2,)]


def test_lanes_without_a_modality_join_those_with_it() -> None:
    full = variant(encoders(1, llm=2))
    text = text_only(full, 1)
    every = frozenset(range(3))
    assert union([(text, every), (full, every), (text, every)]) == full
    assert union([(text, every), (text, every)]) == text
    frozen = variant(encoders(1, llm=2), frozen=[(0, 1)], trains={1, 2})
    joined = union([(frozen, every), (full, every)])
    assert joined == Variant(full.computes, full.trains, full.boundaries)


def test_a_program_counts_for_the_stages_that_run_it() -> None:
    """Stages 0 and 1 run whole microbatches, stage 2 lanes that are cut otherwise."""
    whole, lane = variant([(0, 1), (1, 2)]), variant([(0, 2), (1, 2)])
    joined = union([(whole, frozenset({0, 1})), (lane, frozenset({2}))])
    assert [(b.source, b.target) for b in joined.boundaries] == [(0, 1), (0, 2), (1, 2)]
    other = variant([(0, 1), (0, 2), (1, 2)])
    joined = union([(whole, frozenset({0, 1, 2})), (other, frozenset())])
    assert joined == whole


def test_receives_that_overtake_each_other_between_two_ranks_are_refused() -> None:
    """Two boundaries between the same two ranks share a channel: their messages keep one order."""
    stages = on_ranks((0,), (0,), (1,))
    variants = [variant([(0, 2), (1, 2)])] * 2
    schedule = make_schedule(stages, variants)
    dry_run(schedule, stages, variants)
    todo = list(schedule.actions[1])
    first, second = (i for i, a in enumerate(todo) if a.kind == "RECV_F" and a.microbatch == 0)
    todo[first], todo[second] = todo[second], todo[first]
    broken = replace(schedule, actions={**schedule.actions, 1: tuple(todo)})
    with pytest.raises(PlanError, match=r"rank 0 sends .* to this rank before"):
        dry_run(broken, stages, variants)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_gradients_of_one_stage_to_two_stages_of_a_rank_keep_their_order(microbatches: int) -> None:
    """Stages 0 and 1 are of unequal depth and share rank 0; stage 2 reads both."""
    stages = on_ranks((0,), (0,), (1,))
    variants = [variant([(0, 1), (0, 2), (1, 2)])] * microbatches
    dry_run(make_schedule(stages, variants), stages, variants)
