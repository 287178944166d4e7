"""Runs of tiles against counting every pair, on masks of every kind."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from mllm_compile.kernels.attention import runs, shared_runs
from tests.interval_masks import KINDS, OVERLAPPING, dense, draw

SIZES = [(57, 57), (283, 283), (335, 1000), (1000, 335), (512, 512), (1, 90), (90, 1)]


def tiles_of(table, key_blocks):
    """(kept, full) [B, query blocks, key blocks], and how often each tile is in a run."""
    at = torch.arange(key_blocks)

    def inside(first, end):
        return (at >= table[..., first, None]) & (at < table[..., end, None])

    kept = inside(runs.FIRST, runs.END)
    return kept.any(2), inside(runs.FIRST_FULL, runs.END_FULL).any(2), kept.sum(2)


def counted(pairs, block_q, block_k):
    """(kept, full) of every tile by looking at its pairs; short key tiles are never full."""
    kept, full = [], []
    for rows in pairs[:, 0].split(block_q, 1):
        tiles = rows.split(block_k, 2)
        kept.append(torch.stack([tile.flatten(1).any(1) for tile in tiles], 1))
        full.append(
            torch.stack([tile.flatten(1).all(1) & (tile.shape[2] == block_k) for tile in tiles], 1)
        )
    return torch.stack(kept, 1), torch.stack(full, 1)


def case(kind, queries, keys, blocks, seed=0):
    generator = torch.Generator().manual_seed(seed * 7 + queries + keys)
    intervals = draw(kind, queries, keys, generator, batch=2)
    table = runs.query_runs(intervals, *blocks)
    return intervals, table, counted(dense(intervals, keys), *blocks)


@pytest.mark.parametrize("blocks", [(16, 16), (64, 32), (32, 64), (128, 128)])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_cover_what_is_seen_and_trust_only_full_tiles(kind, queries, keys, blocks):
    _, table, (kept, full) = case(kind, queries, keys, blocks)
    key_blocks = -(-keys // blocks[1])
    assert table.dtype == torch.int32
    in_runs, full_in_runs, times = tiles_of(table, key_blocks)
    assert not (kept & ~in_runs).any()
    assert not (full_in_runs & ~full).any()
    assert times.max() <= 1
    assert (table[..., 1:] >= table[..., :-1]).all()
    assert table[..., runs.END].max() <= key_blocks
    if kind in OVERLAPPING and queries == keys:
        assert torch.equal(in_runs, kept)
        assert torch.equal(full_in_runs, full)


@pytest.mark.parametrize("blocks", [(16, 16), (64, 32)])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_every_query_block_that_visits_a_key_block(kind, queries, keys, blocks):
    _, table, (kept, _) = case(kind, queries, keys, blocks)
    key_blocks = -(-keys // blocks[1])
    bounds = runs.key_bounds(table, key_blocks)
    assert bounds.dtype == torch.int32
    at = torch.arange(table.shape[1])[:, None]
    inside = (at >= bounds[:, None, :, 0]) & (at < bounds[:, None, :, 1])
    assert not (kept & ~inside).any()
    assert (bounds[..., 0] <= bounds[..., 1]).all()
    if kind in ("causal", "packed", "window", "blind") and queries == keys:
        assert torch.equal(inside, kept)


@pytest.mark.parametrize("kind", [*OVERLAPPING, "sink"])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_a_block_mask(kind, seed):
    length, block = 1024, 128
    intervals, table, _ = case(kind, length, length, (block, block), seed)
    pairs = dense(intervals, length)

    def rule(b, h, q, k):
        return pairs[b, 0, q, k]

    mask = create_block_mask(rule, 2, 1, length, length, device="cpu", BLOCK_SIZE=block)
    full = (table[..., runs.END_FULL] - table[..., runs.FIRST_FULL]).sum((1, 2))
    kept = (table[..., runs.END] - table[..., runs.FIRST]).sum((1, 2))
    counts = mask.full_kv_num_blocks.sum((1, 2))
    assert torch.equal(kept, counts + mask.kv_num_blocks.sum((1, 2)))
    assert torch.equal(full, counts)


def test_no_interval_is_every_key_and_causal_cuts():
    device = torch.device("cpu")
    whole = runs.visible(None, 5, 9, False, device)
    assert dense(whole, 9).all()
    assert torch.equal(
        dense(runs.visible(None, 5, 3, True, device), 3)[0, 0], torch.ones(5, 3).tril().bool()
    )
    two = draw("random_two", 90, 70, torch.Generator().manual_seed(3))
    both = dense(two, 70) & torch.ones(90, 70).tril().bool()
    assert torch.equal(dense(runs.visible(two, 90, 70, True, device), 70), both)


def test_nothing_to_visit():
    assert runs.query_runs(torch.zeros(2, 0, 1, 2, dtype=torch.int32), 16, 16).shape == (2, 0, 1, 4)
    table = runs.query_runs(torch.zeros(2, 40, 1, 2, dtype=torch.int32), 16, 16)
    assert not table.any()
    assert not runs.key_bounds(table, 4).any()


def test_a_million_tokens_take_little_memory():
    length = 1 << 20
    intervals = draw("packed", length, length, torch.Generator().manual_seed(0))
    table = runs.query_runs(intervals, 128, 128)
    bounds = runs.key_bounds(table, length // 128)
    assert sum(x.numel() * x.element_size() for x in (intervals, table, bounds)) <= 16 << 20


def test_runs_are_made_once_and_again_after_a_write():
    intervals = draw("packed", 90, 90, torch.Generator().manual_seed(0))
    tiles = shared_runs.tiles_of(intervals, 16, 16)
    bounds = shared_runs.bounds_of(intervals, 16, 16, 6)
    assert shared_runs.tiles_of(intervals, 16, 16) is tiles
    assert shared_runs.bounds_of(intervals, 16, 16, 6) is bounds
    assert shared_runs.tiles_of(intervals, 32, 16) is not tiles
    intervals[:, 50:] = 0
    again = shared_runs.tiles_of(intervals, 16, 16)
    assert torch.equal(again, runs.query_runs(intervals, 16, 16))
    assert not torch.equal(again, tiles)
    with torch.inference_mode():
        made = draw("packed", 90, 90, torch.Generator().manual_seed(0))
        assert torch.equal(shared_runs.tiles_of(made, 16, 16), tiles)


def test_runs_go_with_their_intervals():
    before = len(shared_runs._MADE)
    intervals = draw("packed", 90, 90, torch.Generator().manual_seed(0))
    shared_runs.tiles_of(intervals, 16, 16)
    assert len(shared_runs._MADE) == before + 1
    del intervals
    assert len(shared_runs._MADE) == before


def test_calls_without_intervals_share_one_tensor():
    device = torch.device("cpu")
    one = shared_runs.visible(None, 9, 7, True, device)
    assert shared_runs.visible(None, 9, 7, True, device) is one
    assert torch.equal(one, runs.visible(None, 9, 7, True, device))
    assert shared_runs.visible(None, 9, 7, False, device) is not one
    mine = draw("packed", 9, 7, torch.Generator().manual_seed(0))
    assert shared_runs.visible(mine, 9, 7, False, device) is mine
