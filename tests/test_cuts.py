"""Cuts: the dynamic program against brute force, and the published costs of a frozen encoder."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.simulate import Cost, StageCost, simulate
from mllm_compile.passes.cuts import candidates
from mllm_compile.passes.schedule import make_schedule
from mllm_compile.passes.units import Chain, Unit
from tests.schedules import chain as boundaries
from tests.schedules import stages, variant


def make_chain(work, parts, crossing=None, bounds=None):
    """A chain of units without nodes."""
    count = len(work)
    units = tuple(Unit((), *pair) for pair in bounds or [(0, parts - 1)] * count)
    crossing = np.ones(count + 1) if crossing is None else np.array(crossing, float)
    thirds = np.outer(work, np.ones(3) / 3)
    return Chain("module", units, parts, thirds, crossing, bounds is not None)


def parts_of(work, cuts):
    return [sum(work[a:b]) for a, b in pairwise([0, *cuts, len(work)])]


@pytest.mark.parametrize("seed", range(12))
def test_the_busiest_stage_is_as_small_as_it_can_be(seed):
    draw = np.random.default_rng(seed)
    work = draw.integers(1, 9, 11)
    crossing = draw.integers(1, 9, 12)
    parts = int(draw.integers(2, 5))
    found = candidates(make_chain(work, parts, crossing))
    every = list(combinations(range(1, 11), parts - 1))
    best = min(max(parts_of(work, cuts)) for cuts in every)
    assert min(max(parts_of(work, cuts)) for cuts in found) == best
    assert max(parts_of(work, found[0])) == best
    for cuts in found:
        assert all(a < b for a, b in pairwise([0, *cuts, 11]))


@pytest.mark.parametrize("seed", range(12))
def test_among_equally_balanced_cuts_the_fewest_bytes_win(seed):
    draw = np.random.default_rng(seed)
    work = draw.integers(0, 4, 10)
    crossing = draw.integers(1, 9, 11)
    every = list(combinations(range(1, 10), 2))
    best = min(max(parts_of(work, cuts)) for cuts in every)
    fewest = min(sum(crossing[list(cuts)]) for cuts in every if max(parts_of(work, cuts)) == best)
    found = candidates(make_chain(work, 3, crossing))
    balanced = [cuts for cuts in found if max(parts_of(work, cuts)) == best]
    assert min(sum(crossing[list(cuts)]) for cuts in balanced) == fewest


def test_pinned_units_keep_their_stages():
    bounds = [(0, 0), (0, 1), (0, 1), (1, 1), (1, 2), (2, 2)]
    chain = make_chain([1, 5, 5, 1, 9, 1], 3, [0, 3, 2, 4, 5, 1, 0], bounds)
    assert chain.windows == ((1, 3), (4, 5))
    for cuts in candidates(chain):
        assert all(low <= cut <= high for cut, (low, high) in zip(cuts, chain.windows, strict=True))
    assert candidates(chain)[0] == (2, 4)


def test_pinned_modules_may_have_empty_stages():
    assert candidates(make_chain([1, 1], 3, bounds=[(0, 0), (2, 2)])) == ((1, 1),)
    assert candidates(make_chain([], 3)) == ((0, 0),)


def test_a_module_with_too_few_places_to_cut_is_refused():
    assert candidates(make_chain([1, 1, 1], 3)) == ((1, 2),)
    with pytest.raises(RequestError, match="at most 3, for it has 2 places to cut, got 4"):
        candidates(make_chain([1, 1, 1], 4))


ENCODER, DECODER = 27, 16


def published(pieces, *, aware):
    """Milliseconds (F, dI, dW) of every layer, each divided into ``pieces``.

    A frozen encoder under a trained projector and a frozen decoder; unaware of what is frozen, the
    backward would cost as if everything were trained. arXiv 2503.11367, figure 1.
    """
    if aware:
        encoder = [(44.26 / ENCODER, 0.0)] * (ENCODER - 1) + [(44.26 / ENCODER, 0.5)]
        decoder = [(138.33 / DECODER, 284.5 / DECODER)] * DECODER
    else:
        encoder = [(44.26 / ENCODER, 120.57 / ENCODER)] * ENCODER
        decoder = [(138.33 / DECODER, 375.93 / DECODER)] * DECODER
    return [
        (forward / pieces, backward / pieces, 0.0)
        for forward, backward in (*encoder, *decoder)
        for _ in range(pieces)
    ]


def step(layers, cuts, microbatches):
    """The time of one 1F1B step; layers are (F, dI, dW). The first stage does its dI in W."""
    ends = [0, *cuts, len(layers)]
    count = len(ends) - 1
    costs = {}
    for s, (a, b) in enumerate(pairwise(ends)):
        f, i, w = (sum(layer[k] for layer in layers[a:b]) for k in range(3))
        costs[s] = StageCost(f, i, w) if s else StageCost(f, 0.0, i + w)
    variants = [variant(boundaries(0, count))] * microbatches
    schedule = make_schedule(stages(count), variants)
    return simulate(schedule, stages(count), variants, [Cost(costs)] * microbatches).step_time


def planned(parts, microbatches, pieces, *, aware):
    work = [sum(layer) * 1000 for layer in published(pieces, aware=aware)]
    cuts = candidates(make_chain(work, parts))[0]
    return step(published(pieces, aware=True), cuts, microbatches)


@pytest.mark.parametrize(
    ("parts", "microbatches", "pieces", "unaware", "aware"),
    [
        (4, 64, 1, 10457, 8792),
        (4, 64, 2, 9625, 7960),
        (6, 12, 1, 1630, 1340),
        (8, 12, 1, 1340, 1340),
        (8, 12, 2, 1340, 1194),
        (8, 12, 4, 1254, 1122),
        (8, 24, 2, 2291, 1987),
        (12, 24, 1, 1683, 1683),
        (12, 24, 2, 1683, 1379),
    ],
)
def test_published_costs(parts, microbatches, pieces, unaware, aware):
    """Knowing what is frozen gains as published, ties between cuts (2 %) aside."""
    assert planned(parts, microbatches, pieces, aware=True) == pytest.approx(aware, rel=0.02)
    assert planned(parts, microbatches, pieces, aware=False) == pytest.approx(unaware, rel=0.02)


def test_whole_layers_quantise_the_gain_away():
    whole = [planned(8, 12, 1, aware=aware) for aware in (False, True)]
    half = [planned(8, 12, 2, aware=aware) for aware in (False, True)]
    assert whole[1] > 0.99 * whole[0]
    assert half[1] < 0.9 * half[0]


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 1), (0, 1), (1, 0)])
def test_the_best_candidate_is_near_the_best_of_all_cuts(encoder, decoder):
    """12 + 12 layers, some frozen, in three stages: every cut simulated."""
    layers = [(1.0, float(encoder and k > 0), float(encoder)) for k in range(12)]
    layers += [(1.0, float(encoder or k > 0), float(decoder)) for k in range(12)]
    chain = replace(make_chain(np.zeros(24), 3), work=np.array(layers) * 1000)
    every = (step(layers, cuts, 8) for cuts in combinations(range(1, 24), 2))
    assert min(step(layers, cuts, 8) for cuts in candidates(chain)) <= 1.02 * min(every)
