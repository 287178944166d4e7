"""Token splits for context parallelism: laws of every split, and how good they are."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import token_split
from benchmarks.splitters import planned
from benchmarks.token_split import CASES
from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.deal import Deal
from mllm_compile.passes.token_split.measure import TILE, received, tiles
from mllm_compile.passes.token_split.planner import plan_split
from mllm_compile.passes.token_split.units import Cut, units_of

ROOT = Path(__file__).resolve().parent.parent
Mask = np.ndarray[Any, np.dtype[np.int32]]


def drawn(length: int, slots: int, rng: np.random.Generator) -> Mask:
    """Ragged documents, causal but for groups that see each other; some see parts before them."""
    mask = np.zeros((length, slots, 2), np.int32)
    start = 0
    while start < length:
        end = min(length, start + int(rng.integers(1, max(2, length // 3))))
        rows = np.arange(start, end)
        group = int(rng.integers(1, 40))
        mask[start:end, -1, 0] = start
        mask[start:end, -1, 1] = np.minimum((rows // group + 1) * group, end)
        if slots == 2 and start and rng.random() < 0.5:
            mask[start:end, 0] = sorted(rng.integers(0, start, 2))
        start = end
    mask[rng.random(length) < 0.1] = 0
    return mask


def dense(mask: Mask) -> np.ndarray[Any, np.dtype[np.bool_]]:
    seen = np.zeros((len(mask), len(mask)), bool)
    for row, pairs in enumerate(mask):
        for start, end in pairs:
            seen[row, start:end] = True
    return seen


def positions(split: Split) -> list[list[int]]:
    return [[at for pair in part for at in range(*pair)] for part in split.parts]


@pytest.mark.parametrize("slots", [1, 2])
def test_measures_equal_counting(slots: int) -> None:
    rng = np.random.default_rng(slots)
    for length, ranks in [(1, 1), (2, 3), (130, 2), (300, 3), (515, 4)]:
        mask = drawn(length, slots, rng)
        seen = dense(mask)
        for split in (Split.zigzag(length, ranks), Split.contiguous(length, ranks)):
            for rank, own in enumerate(positions(split)):
                blocks = [
                    seen[own[at : at + TILE], keys : keys + TILE].any()
                    for at in range(0, len(own), TILE)
                    for keys in range(0, length, TILE)
                ]
                assert tiles(mask, split)[rank] == sum(blocks)
                needed = seen[own].any(0)
                needed[own] = False
                assert received(mask, split)[rank] == needed.sum()


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 8, 16])
def test_every_split_is_fair_and_repeats(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    lengths = [1, 7, ranks, ranks + 1, 257, 128 * ranks - 1, 2050, *rng.integers(2, 5000, 2)]
    for length in map(int, lengths):
        count = int(rng.integers(1, 4))
        masks = [drawn(length, int(rng.integers(1, 3)), rng) for _ in range(count)]
        weights = rng.integers(1, 40, count).tolist()
        split = plan_split(masks, weights, ranks)
        assert (split.length, split.ranks) == (length, ranks)
        assert max(split.sizes) - min(split.sizes) <= 1
        assert split == plan_split([mask.copy() for mask in masks], weights, ranks)


def test_other_processes_plan_the_same() -> None:
    """Every rank plans for itself; what it plans depends on nothing but the masks."""
    code = (
        "from benchmarks.token_split import drawn; from benchmarks.splitters import planned;"
        "masks, starts = drawn('gemma', 5000, 3); print(planned(masks, starts, 3))"
    )
    masks, starts = token_split.drawn("gemma", 5000, 3)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == str(planned(masks, starts, 3))


@pytest.mark.parametrize(
    ("name", "tokens", "ranks", "most"),
    [("packed_mm", 12345, 8, 1.05), ("gemma", 9000, 5, 1.05), ("mm", 40000, 12, 1.03)],
)
def test_lengths_that_do_not_divide(name: str, tokens: int, ranks: int, most: float) -> None:
    """Where ranks end within a tile somewhat more tiles are inevitable; they are counted here."""
    masks, starts = token_split.drawn(name, tokens, 1)
    split = planned(masks, starts, ranks)
    assert max(split.sizes) - min(split.sizes) <= 1
    assert token_split.quality(masks, split)[0] <= most


@pytest.mark.parametrize(
    ("name", "tokens", "ranks", "seed"),
    [("ee", 8192, 8, 9), ("packed_mm", 32768, 32, 7), ("ee", 131072, 64, 9)],
)
def test_ranks_that_single_swaps_leave_uneven(
    name: str, tokens: int, ranks: int, seed: int
) -> None:
    masks, starts = token_split.drawn(name, tokens, seed)
    assert token_split.quality(masks, planned(masks, starts, ranks))[0] <= 1.02


def test_masks_that_show_nothing() -> None:
    split = plan_split([np.zeros((1000, 1, 2), np.int32)], [1], 3)
    assert split.sizes == (334, 333, 333)


@pytest.mark.parametrize(("length", "ranks"), [(100, 4), (4096, 4), (3001, 7)])
def test_one_causal_sequence_is_dealt_in_zigzag(length: int, ranks: int) -> None:
    ends = np.arange(1, length + 1, dtype=np.int32)
    mask = np.stack([np.zeros_like(ends), ends], -1)[:, None]
    assert plan_split([mask], [1], ranks) == Split.zigzag(length, ranks)
    seen_whole = mask.copy()
    seen_whole[-2] = 0, length
    assert plan_split([seen_whole], [1], ranks) != Split.contiguous(length, ranks)


@pytest.mark.parametrize("slots", [1, 2])
def test_swaps_are_weighed_exactly(slots: int) -> None:
    rng = np.random.default_rng(7)
    ranks, each = 4, 8
    units = units_of(
        [drawn(700, slots, rng), drawn(700, 1, rng)], Cut(700, 20, ranks * each, ranks)
    )
    owner = rng.permutation(np.repeat(np.arange(ranks), each))[None]
    deal = Deal(units, owner)
    left, right = np.array([0, 2]), np.array([1, 3])
    both = np.concatenate([left, right])
    lose = deal.held[both]
    gain = np.concatenate([lose[2:], lose[:2]])
    change = deal._received_more(deal.users[:, both], lose, gain)
    for at, out, into in product(range(4), range(each), range(each)):
        swapped = owner.copy()
        swapped[0, lose[at, out]] = both[(at + 2) % 4]
        swapped[0, gain[at, into]] = both[at]
        after = Deal(units, swapped).need[:, both[at]]
        assert (after - deal.need[:, both[at]]).tolist() == change[:, at, out, into].tolist()


def test_swapping_is_dealing_anew() -> None:
    rng = np.random.default_rng(3)
    ranks, each = 3, 5
    units = units_of([drawn(470, 2, rng)], Cut(470, 30, ranks * each, ranks))
    deal = Deal(units, np.repeat(np.arange(ranks), each)[None])
    for _ in range(20):
        pair = rng.permutation(ranks)[:2]
        slots = rng.integers(each, size=2)
        units_now = deal.held[pair, slots]
        deal.swap(pair, slots, units_now, units_now[::-1])
    anew = Deal(units, deal.owner)
    assert (anew.need == deal.need).all()
    assert (deal.needs(deal.held, np.arange(ranks)) == deal.need).all()
    assert np.allclose(anew.load, deal.load)


def test_units_that_do_not_divide_give_equal_counts() -> None:
    rng = np.random.default_rng(1)
    for length, size, ranks, each in [
        (10, 1, 3, 2),
        (1000, 128, 3, 2),
        (1001, 8, 7, 16),
        (5, 1, 5, 1),
    ]:
        owner = rng.permutation(np.repeat(np.arange(ranks), each))
        sizes = Cut(length, size, len(owner), ranks).split(owner).sizes
        assert (sum(sizes), max(sizes) - min(sizes) <= 1) == (length, True)


@pytest.mark.parametrize("slots", [1, 2])
def test_work_and_need_of_units_are_those_of_their_split(slots: int) -> None:
    """Whole tiles and pieces of the rest, which begins and ends within tiles: exact."""
    rng = np.random.default_rng(slots)
    ranks, each = 3, 4
    for length in (1536, 1537, 1700, 1919):
        mask = drawn(length, slots, rng)
        owner = rng.permutation(np.repeat(np.arange(ranks), each))
        cut = Cut(length, TILE, ranks * each, ranks)
        units = units_of([mask], cut)
        total = units.work / units.work.sum()
        deal, work = Deal(units, owner[None]), tiles(mask, cut.split(owner))
        assert np.allclose(deal.load[0] / ranks, work / work.sum())
        assert np.isclose(total.sum(), 1)


def packed(length: int, seed: int, window: int = 0) -> Mask:
    """Documents of very different lengths, causal."""
    rng = np.random.default_rng(seed)
    ends = np.arange(1, length + 1)
    starts = np.zeros(length, np.int64)
    at = 0
    while at < length:
        starts[at : at + (size := int(300 * np.exp(rng.normal(0, 1.5))) + 20)] = at
        at += size
    if window:
        starts = np.maximum(starts, ends - window)
    return np.stack([starts, ends], -1)[:, None].astype(np.int32)


@pytest.mark.parametrize("seed", range(2))
def test_two_masks_are_balanced_at_once_with_little_traffic(seed: int) -> None:
    length, ranks = 16384, 4
    masks = [packed(length, seed), packed(length, seed, window=512)]
    split = plan_split(masks, [1, 5], ranks)
    gathered = length * (ranks - 1) / ranks
    for mask, share in zip(masks, (0.2, 0.1), strict=True):
        assert tiles(mask, split).max() * ranks / tiles(mask).sum() <= 1.02
        assert received(mask, split).mean() <= share * gathered
        contiguous = Split.contiguous(length, ranks)
        assert tiles(mask, contiguous).max() * ranks / tiles(mask).sum() > 1.05


def test_ranks_that_need_nothing_are_balanced() -> None:
    """A document each: no keys to receive, but much more work for the one than the other."""
    length = 8192
    ends = np.arange(1, length + 1)
    starts = np.where(ends > 4096, np.maximum(4096, (ends - 1) // 1024 * 1024), 0)
    mask = np.stack([starts, ends], -1)[:, None].astype(np.int32)
    work = tiles(mask, plan_split([mask], [1], 2))
    assert work.max() * 2 / tiles(mask).sum() <= 1.02


def test_where_nothing_is_better_the_best_is_found() -> None:
    """The least that an integer program over the costs of tiles allows: benchmarks/README.md."""
    masks, starts = token_split.drawn("video", 8192, 0)
    assert tiles(masks[0][1], planned(masks, starts, 8)).max() == 316


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("packed_mm", 0.25), ("gemma", 0.22), ("ee", 0.2)])
def test_the_published_masks_are_balanced_with_little_traffic(name: str, most: float) -> None:
    """8k to 128k tokens on 2 to 64 ranks, seeds 0 and 1; other layers and windows at once."""
    shares = []
    for (tokens, ranks), seed in product(CASES, (0, 1)):
        masks, starts = token_split.drawn(name, tokens, seed)
        balance, mean, _ = token_split.quality(masks, planned(masks, starts, ranks))
        assert balance <= 1.02, (tokens, ranks, seed)
        shares.append(mean)
    assert np.mean(shares) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [("packed_mm", 16, 0.115), ("packed_mm", 64, 0.11), ("gemma", 64, 0.035)],
)
def test_a_million_tokens(name: str, ranks: int, most: float) -> None:
    masks, starts = token_split.drawn(name, 1 << 20, 0)
    balance, mean, _ = token_split.quality(masks, planned(masks, starts, ranks))
    assert balance <= 1.02
    assert mean <= most
