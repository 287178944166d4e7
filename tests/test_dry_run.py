import random
import re
from dataclasses import replace

import pytest

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.stage import Stage
from mllm_compile.passes.schedule import make_schedule
from tests.schedules import chain, encoders, random_step, stages, text_only, variant

STAGES = stages(4)
STEP = [variant(encoders(1, llm=3))] * 6
GOOD = make_schedule(STAGES, STEP)


def moved(rank, action, *, before, schedule=GOOD):
    """The schedule with one action of a rank moved to before another ("" = the end)."""
    row = [a for a in schedule.actions[rank] if str(a) != action]
    place = [str(a) for a in row].index(before) if before else len(row)
    row.insert(place, Action.parse(action))
    return replace(schedule, actions={**schedule.actions, rank: tuple(row)})


def changed(rank, action, *into):
    """GOOD with one action of a rank replaced by any number of others."""
    row = [str(a) for a in GOOD.actions[rank]]
    place = row.index(action)
    row[place : place + 1] = into
    return replace(GOOD, actions={**GOOD.actions, rank: tuple(map(Action.parse, row))})


def refusal(schedule, a_stages=STAGES, step=STEP):
    with pytest.raises(PlanError) as caught:
        dry_run(schedule, a_stages, step)
    message = str(caught.value)
    rank = re.match(r"schedule: rank (\d+), step (\d+), ", message).group(1)
    marked = [line for line in message.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert marked[0].split()[1] == rank
    assert re.search(r"\[\S+\]", marked[0])
    return message


def test_the_good_one_passes():
    dry_run(GOOD, STAGES, STEP)


CORRUPTED = {
    "dropped forward": (changed(1, "1F2"), 1, "missing: 1F2"),
    "dropped receive": (changed(2, "2RECV_F3<1"), 2, "missing: 2RECV_F3<1"),
    "dropped weight gradient": (changed(3, "3W5"), 3, "missing: 3W5"),
    "doubled forward": (changed(1, "1F2", "1F2", "1F2"), 1, "before"),
    "doubled send": (changed(2, "2SEND_B0>1", "2SEND_B0>1", "2SEND_B0>1"), 2, "before"),
    "other stage": (changed(1, "1F2", "2F2"), 1, "nothing asks"),
    "other microbatch": (changed(1, "1F2", "1F6"), 1, "nothing asks"),
    "other target": (changed(0, "0SEND_F1>1", "0SEND_F1>2"), 0, "nothing asks"),
    "other source": (changed(2, "2RECV_F1<1", "2RECV_F1<0"), 2, "nothing asks"),
    "other direction": (changed(1, "1SEND_F1>2", "1SEND_B1>2"), 1, "nothing asks"),
    "input gradient nobody wants": (changed(0, "0W0", "0I0", "0W0"), 0, "nothing asks"),
    "send before its forward": (moved(1, "1SEND_F2>2", before="1F2"), 1, "needs 1F2"),
    "gradient sent too early": (moved(2, "2SEND_B1>1", before="2I1"), 2, "needs 2I1"),
    "W before I": (moved(2, "2W1", before="2I1"), 2, "needs 2I1"),
    "backward before forward": (moved(3, "3I2", before="3F2"), 3, "needs 3F2"),
    "receive after its use": (moved(1, "1RECV_F2<0", before="1SEND_F2>2"), 1, "1RECV_F2<0"),
    "receive at the end": (moved(0, "0RECV_B3<1", before=""), 0, "0RECV_B3<1"),
    "receives swapped": (moved(1, "1RECV_F1<0", before="1RECV_F0<0"), 1, "0SEND_F0>1 is sent"),
    "sends swapped": (
        moved(0, "0SEND_F1>1", before="0SEND_F3>1"),
        1,
        "0SEND_F2>1 is sent",
    ),
    "forward too early": (moved(3, "3F1", before="3I0"), 3, "2 microbatches in flight"),
    "window too small": (replace(GOOD, windows={1: 2}), 1, "window is 2"),
    "window of nothing": (replace(GOOD, windows={0: 0}), 0, "window is 0"),
    "rank missing": (
        replace(GOOD, actions={r: a for r, a in GOOD.actions.items() if r != 2}),
        2,
        "missing",
    ),
    "rank too many": (replace(GOOD, actions={**GOOD.actions, 4: GOOD.actions[3]}), 4, "nothing"),
    "rows exchanged": (
        replace(GOOD, actions={**GOOD.actions, 0: GOOD.actions[1], 1: GOOD.actions[0]}),
        0,
        "nothing",
    ),
}


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_schedule_is_refused(name):
    schedule, rank, reason = CORRUPTED[name]
    message = refusal(schedule)
    assert message.startswith(f"schedule: rank {rank}, ")
    assert reason in message


def test_a_deadlock_names_the_ranks_that_wait_for_each_other():
    pair = stages(2)
    step = [variant(chain(0, 2))] * 2
    schedule = Schedule.from_text(
        "0: 0F0,0SEND_F0>1,0RECV_B0<1,0W0,0F1,0SEND_F1>1,0RECV_B1<1,0W1\n"
        "1: 1RECV_F0<0,1RECV_F1<0,1F0,1F1,1I0,1SEND_B0>0,1W0,1I1,1SEND_B1>0,1W1"
    )
    message = refusal(schedule, pair, step)
    assert "deadlock: rank 0 at 0W0 waits for 1SEND_B0>0 of rank 1" in message
    assert "rank 1 at 1F1 waits for 0SEND_F1>1 of rank 0" in message


def test_sends_that_only_end_with_buffers_are_refused():
    pair = stages(2)
    step = [variant(chain(0, 2))] * 2
    schedule = Schedule.from_text(
        "0: 0F0,0SEND_F0>1,0F1,0SEND_F1>1,0RECV_B0<1,0W0,0RECV_B1<1,0W1\n"
        "1: 1RECV_F0<0,1F0,1I0,1SEND_B0>0,1W0,1RECV_F1<0,1F1,1I1,1SEND_B1>0,1W1"
    )
    assert "waits for 1RECV_F1<0 of rank 1" in refusal(schedule, pair, step)


def test_the_ranks_of_one_stage_go_in_one_order():
    wide = (Stage(0, 0, 0, (0, 1), ("n",), (), ()),)
    step = [variant([], computes={0})] * 2
    good = make_schedule(wide, step)
    dry_run(good, wide, step)
    rows = {**good.actions, 1: tuple(map(Action.parse, ("0F1", "0W1", "0F0", "0W0")))}
    assert "rank 0 of the same stage" in refusal(replace(good, actions=rows), wide, step)


def test_the_grid_shows_the_surroundings():
    message = refusal(changed(1, "1F2", "1F6"))
    assert message.splitlines()[1].split()[0] == "rank"
    assert len(message.splitlines()) == 2 + len(STAGES)
    assert "[1F6]" in message


def test_steps_of_mixed_variants_end():
    base = variant(encoders(1, 2, llm=3))
    text = text_only(base, 3)
    for pattern in range(2**6):
        step = [text if pattern >> k & 1 else base for k in range(6)]
        for zero_bubble in (False, True):
            schedule = make_schedule(stages(6), step, zero_bubble=zero_bubble)
            dry_run(schedule, stages(6), step)


@pytest.mark.parametrize("depth", range(1, 7))
def test_every_depth_and_number_of_microbatches_ends(depth):
    for microbatches in range(1, 9):
        step = [variant(chain(0, depth), computes=range(depth))] * microbatches
        dry_run(make_schedule(stages(depth), step), stages(depth), step)


@pytest.mark.parametrize("block", range(8))
def test_random_steps_end_and_their_corruptions_are_refused(block):
    for seed in range(100 * block, 100 * block + 100):
        a_stages, step = random_step(seed)
        schedule = make_schedule(a_stages, step, zero_bubble=seed % 2 == 0)
        dry_run(schedule, a_stages, step)
        assert Schedule.from_text(schedule.to_text()) == schedule
        rng = random.Random(seed)
        for corrupt in (drop, double, retarget, renumber, postpone):
            bad = corrupt(schedule, rng)
            if bad is not None:
                refusal(bad, a_stages, step)


def picked(schedule, rng, wanted=lambda action: True):
    places = [
        (rank, position)
        for rank, actions in schedule.actions.items()
        for position, action in enumerate(actions)
        if wanted(action)
    ]
    return rng.choice(places) if places else None


def put(schedule, place, *into):
    rank, position = place
    row = schedule.actions[rank]
    return replace(
        schedule,
        actions={**schedule.actions, rank: (*row[:position], *into, *row[position + 1 :])},
    )


def drop(schedule, rng):
    return put(schedule, picked(schedule, rng))


def double(schedule, rng):
    rank, position = picked(schedule, rng)
    action = schedule.actions[rank][position]
    return put(schedule, (rank, position), action, action)


def retarget(schedule, rng):
    place = picked(schedule, rng, lambda action: action.peer is not None)
    if place is None:
        return None
    action = schedule.actions[place[0]][place[1]]
    return put(schedule, place, replace(action, peer=action.peer + rng.choice([1, 2, 7])))


def renumber(schedule, rng):
    place = picked(schedule, rng)
    action = schedule.actions[place[0]][place[1]]
    return put(schedule, place, replace(action, microbatch=action.microbatch + rng.randint(1, 9)))


def postpone(schedule, rng):
    """Move a receive to the end of its list, behind the action that consumes it."""
    place = picked(schedule, rng, lambda action: action.kind.startswith("RECV"))
    if place is None:
        return None
    action = schedule.actions[place[0]][place[1]]
    without = put(schedule, place)
    row = without.actions[place[0]]
    return replace(without, actions={**without.actions, place[0]: (*row, action)})
