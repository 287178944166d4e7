from itertools import groupby

import pytest
from torch.distributed.pipelining.schedules import _Action

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.stage import Boundary
from mllm_compile.compiler.variant import Variant, depths
from mllm_compile.passes.schedule import make_schedule
from tests.schedules import chain, encoders, stages, text_only, variant


def order(schedule, rank):
    """The rank's forwards and backwards, "F" and "B" (a backward may be I, W or both)."""
    kinds = [a for a in schedule.actions[rank] if a.kind in "FIW"]
    merged = [key for key, _ in groupby(kinds, lambda a: ("BF"[a.kind == "F"], a.microbatch))]
    return "".join(kind for kind, _ in merged)


@pytest.mark.parametrize("microbatches", [4, 8, 12])
def test_one_encoder_stage_before_three_llm_stages(microbatches):
    schedule = make_schedule(stages(4), [variant(encoders(1, llm=3))] * microbatches)
    for rank in range(4):
        lead = 4 - rank
        expected = "F" * lead + "BF" * (microbatches - lead) + "B" * lead
        assert order(schedule, rank) == expected


@pytest.mark.parametrize("microbatches", [6, 12, 24])
def test_encoders_of_one_and_two_stages_before_three_llm_stages(microbatches):
    schedule = make_schedule(stages(6), [variant(encoders(1, 2, llm=3))] * microbatches)
    for rank, lead in enumerate([4, 5, 4, 3, 2, 1]):
        expected = "F" * lead + "BF" * (microbatches - lead) + "B" * lead
        assert order(schedule, rank) == expected


@pytest.mark.parametrize("microbatches", range(1, 6))
def test_fewer_microbatches_than_the_depth(microbatches):
    schedule = make_schedule(stages(6), [variant(chain(0, 6))] * microbatches)
    for rank in range(6):
        lead = min(6 - rank, microbatches)
        assert order(schedule, rank) == "F" * lead + "BF" * (microbatches - lead) + "B" * lead


def test_a_one_stage_pipeline_has_no_transfers():
    schedule = make_schedule(stages(1), [variant([], computes={0})] * 2)
    assert schedule.to_text() == "0: 0F0,0W0,0F1,0W1\nwindow: 0=1"


def test_the_actions_of_one_pipeline_read_as_expected():
    schedule = make_schedule(stages(2), [variant(chain(0, 2))] * 2)
    assert schedule.to_text() == (
        "0: 0F0,0SEND_F0>1,0RECV_B0<1,0F1,0SEND_F1>1,0RECV_B1<1,0W0,0W1\n"
        "1: 1RECV_F0<0,1RECV_F1<0,1F0,1I0,1SEND_B0>0,1W0,1F1,1I1,1SEND_B1>0,1W1\n"
        "window: 0=2,1=1"
    )


def test_a_frozen_encoder_has_no_backward_and_no_gradient_messages():
    frozen = variant(chain(0, 3), trains={1, 2}, frozen=[(0, 1)])
    text = make_schedule(stages(3), [frozen] * 4).to_text().splitlines()
    assert text[0] == "0: " + ",".join(f"0F{k},0SEND_F{k}>1" for k in range(4))
    assert ">0" not in text[1]
    assert "1I" not in text[1]
    assert "1W3" in text[1]


def test_text_only_microbatches_leave_the_encoder_out():
    base = variant(encoders(2, llm=2))
    text = text_only(base, 2)
    schedule = make_schedule(stages(4), [text, base, text, base, base, text])
    ran = [a.microbatch for a in schedule.actions[0] if a.kind == "F"]
    assert ran == [1, 3, 4]
    received = [a.microbatch for a in schedule.actions[2] if a.kind == "RECV_F"]
    assert received == [1, 3, 4]
    assert order(schedule, 3) == "FB" * 6


def test_a_step_of_text_alone():
    text = text_only(variant(encoders(1, llm=2)), 1)
    schedule = make_schedule(stages(3), [text] * 3)
    assert schedule.actions[0] == ()
    assert order(schedule, 1) == "FFBFBB"


def test_zero_bubble_puts_w_off_to_the_drain():
    schedule = make_schedule(stages(2), [variant(chain(0, 2))] * 4, zero_bubble=True)
    compute = [str(a) for a in schedule.actions[1] if a.kind in "FIW"]
    assert ",".join(compute) == "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3"


def test_text_round_trips_and_says_what_is_wrong():
    schedule = make_schedule(stages(6), [variant(encoders(1, 2, llm=3))] * 5)
    assert Schedule.from_text(schedule.to_text()) == schedule
    for text, word in [
        ("0: 0F0\n0: 0F1", "rank 0"),
        ("x: 0F0", "'x'"),
        ("0: 0F", "0F"),
        ("window: 0", "window"),
    ]:
        with pytest.raises(PlanError, match=word):
            Schedule.from_text(text)


def test_torch_reads_the_csv():
    schedule = make_schedule(stages(3), [variant(chain(0, 3))] * 4)
    rows = schedule.to_csv().splitlines()
    assert len(rows) == 3
    for rank, row in enumerate(rows):
        actions = [_Action.from_str(cell) for cell in row.split(",")]
        assert {a.stage_index for a in actions} == {rank}
        assert len(actions) == (12 if rank else 8)


def test_depth_is_the_longest_path():
    assert depths(range(4), [variant([(0, 1), (1, 2), (2, 3), (0, 3)])]) == {0: 4, 1: 3, 2: 2, 3: 1}
    assert depths(range(2), []) == {0: 1, 1: 1}


def test_a_variant_refuses_boundaries_of_empty_stages():
    with pytest.raises(PlanError, match=r"stages \[0\]"):
        Variant(frozenset({1}), frozenset(), (Boundary(0, 1, ("v",), ()),))
    with pytest.raises(PlanError, match=r"stages \[2\]"):
        Variant(frozenset({1}), frozenset({2}), ())
