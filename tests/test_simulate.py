from itertools import pairwise
from math import inf

import pytest

from mllm_compile.compiler.simulate import Cost, Link, StageCost, simulate
from mllm_compile.passes.schedule import make_schedule
from tests.schedules import chain, random_step, stages, variant


def whole(forward, backward, *, saved_bytes=0):
    """Stages whose backward is one block: I where there is one, W in the first stage."""
    return [
        StageCost(f, b if i else 0.0, 0.0 if i else b, saved_bytes)
        for i, (f, b) in enumerate(zip(forward, backward, strict=True))
    ]


def play(a_stages, step, stage_costs, *, boundaries=None, link=None, zero_bubble=False):
    schedule = make_schedule(a_stages, step, zero_bubble=zero_bubble)
    cost = Cost(dict(enumerate(stage_costs)), boundaries or {})
    return simulate(schedule, a_stages, step, [cost] * len(step), link)


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_equal_stages_take_the_closed_form_of_1f1b(depth, microbatches):
    step = [variant(chain(0, depth), computes=range(depth))] * microbatches
    result = play(stages(depth), step, whole([1.0] * depth, [2.0] * depth, saved_bytes=10))
    assert result.step_time == pytest.approx((microbatches + depth - 1) * 3.0)
    for rank in range(depth):
        assert result.busy[rank] == pytest.approx(microbatches * 3.0)
        assert result.bubble(rank) == pytest.approx((depth - 1) / (microbatches + depth - 1))
        assert result.peak_microbatches[rank] == min(depth - rank, microbatches)
        assert result.peak_bytes[rank] == 10 * min(depth - rank, microbatches)


@pytest.mark.parametrize("depth", range(2, 7))
def test_gradients_that_leave_before_w_shorten_the_drain(depth):
    step = [variant(chain(0, depth))] * 8
    costs = [StageCost(1.0, 0.0, 2.0), *[StageCost(1.0, 1.25, 0.75)] * (depth - 1)]
    # warm-up (K - 1) F, then M (F + dI + dW) at the last stage, then (K - 1) dI
    assert play(stages(depth), step, costs).step_time == pytest.approx(8 * 3 + (depth - 1) * 2.25)


def test_transfers_add_latency_and_bytes_over_bandwidth():
    step = [variant(chain(0, 2))]
    result = play(
        stages(2),
        step,
        [StageCost(1.0, 0, 2.0), StageCost(1.0, 1.0, 1.0)],
        boundaries={(0, 1): (100, 50)},
        link=Link(bandwidth=100.0, latency=0.25),
    )
    # F0, 0.25 + 1 of transfer, F1, I1, 0.25 + 0.5 of transfer beside W1, W0
    assert result.step_time == pytest.approx(1 + 1.25 + 1 + 1 + 0.75 + 2)
    assert {str(s.action): s.end - s.start for s in result.spans}["0SEND_F0>1"] == 1.25


def test_a_slow_channel_carries_one_transfer_after_another():
    frozen = variant(chain(0, 2), trains={1}, frozen=[(0, 1)])
    costs = [StageCost(1.0), StageCost(1.0, 0, 1.0)]
    link = Link(bandwidth=10.0)
    result = play(stages(2), [frozen] * 4, costs, boundaries={(0, 1): (100, 0)}, link=link)
    assert result.step_time == pytest.approx(1 + 4 * 10 + 2)


def test_a_frozen_encoder_runs_ahead_only_as_far_as_its_window():
    frozen = variant(chain(0, 3), trains={1, 2}, frozen=[(0, 1)])
    costs = [StageCost(0.01, saved_bytes=7), *[StageCost(1.0, 1.0, 1.0)] * 2]
    result = play(stages(3), [frozen] * 12, costs)
    assert result.peak_microbatches[0] == 3
    assert result.peak_bytes[0] == 21


def test_zero_bubble_is_never_slower_and_shortens_equal_stages():
    step = [variant(chain(0, 4))] * 8
    costs = [StageCost(1.0, 1.0, 1.0)] * 4
    plain = play(stages(4), step, costs)
    zero = play(stages(4), step, costs, zero_bubble=True)
    assert zero.step_time < plain.step_time
    assert max(zero.peak_microbatches.values()) <= 4


def test_zero_bubble_reaches_the_optimum_of_the_toy():
    """Four stages of F = dI = dW = 6, M = 8: 162 is what an exact solver finds."""
    costs = [StageCost(6.0, 0.0, 12.0), *[StageCost(6.0, 6.0, 6.0)] * 3]
    step = [variant(chain(0, 4))] * 8
    assert play(stages(4), step, costs, zero_bubble=True).step_time == 162
    assert play(stages(4), step, costs).step_time == 180


def test_random_steps_take_at_least_the_work_of_the_busiest_rank():
    for seed in range(100):
        a_stages, step = random_step(seed)
        costs = [StageCost(1.0 + i, 1.0, 0.5) for i in range(len(a_stages))]
        result = play(a_stages, step, costs)
        assert result.step_time >= max(result.busy.values())
        depth = len(a_stages)
        assert max(result.peak_microbatches.values()) <= depth


def balanced(costs, parts):
    """Ends of ``parts`` contiguous parts that minimise the largest sum (arXiv 2503.11367 §4.1)."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[(total[i], 0)] for i in range(len(total))]
    for part in range(1, parts):
        for i in range(len(total)):
            best[i].append(
                min(
                    ((max(best[j][part - 1][0], total[i] - total[j]), j) for j in range(part, i)),
                    default=(inf, 0),
                )
            )
    ends = [len(costs)]
    for part in range(parts - 1, 0, -1):
        ends.append(best[ends[-1]][part][1])
    return [0, *reversed(ends)]


ENCODER, LLM = 27, 16
TABLE = [
    # stages, microbatches, pieces per layer, unaware ms, aware ms
    (4, 64, 1, 10457, 8792),
    (4, 64, 2, 9625, 7960),
    (4, 64, 4, 9208, 7953),
    (6, 12, 1, 1630, 1340),
    (6, 12, 2, 1485, 1340),
    (6, 12, 4, 1485, 1340),
    (8, 12, 1, 1340, 1340),
    (8, 12, 2, 1340, 1194),
    (8, 12, 4, 1254, 1122),
    (8, 24, 1, 2291, 2291),
    (8, 24, 2, 2291, 1987),
    (8, 24, 4, 2126, 1835),
    (12, 24, 1, 1683, 1683),
    (12, 24, 2, 1683, 1379),
    (12, 24, 4, 1531, 1379),
]


@pytest.mark.parametrize(("parts", "microbatches", "pieces", "unaware", "aware"), TABLE)
def test_frozen_aware_cuts_give_the_published_times(parts, microbatches, pieces, unaware, aware):
    """arXiv 2503.11367, figure 1: frozen encoder of 27 layers, trainable projector, LLM of 16."""
    forward = [44.26 / ENCODER / pieces] * (ENCODER * pieces) + [138.33 / LLM / pieces] * (
        LLM * pieces
    )
    backward = [0.0] * (ENCODER * pieces) + [284.5 / LLM / pieces] * (LLM * pieces)
    backward[ENCODER * pieces - 1] = 0.5
    assumed = [120.57 / ENCODER / pieces] * (ENCODER * pieces) + [375.93 / LLM / pieces] * (
        LLM * pieces
    )
    for believed, expected in ((assumed, unaware), (backward, aware)):
        cut = balanced([f + b for f, b in zip(forward, believed, strict=True)], parts)
        parts_of = [slice(a, b) for a, b in pairwise(cut)]
        costs = whole([sum(forward[p]) for p in parts_of], [sum(backward[p]) for p in parts_of])
        step = [variant(chain(0, parts))] * microbatches
        assert play(stages(parts), step, costs).step_time == pytest.approx(expected, abs=0.51)
