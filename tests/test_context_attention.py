"""Attention of a divided sequence that fetches the keys it needs, against the whole sequence."""

import itertools

import pytest
import torch

from mllm_compile.compiler.split import Split
from mllm_compile.kernels.attention import op, reference
from mllm_compile.kernels.attention.context import context_attention
from mllm_compile.kernels.attention.key_exchange import key_exchange
from mllm_compile.kernels.attention.runs import visible
from tests.thread_ranks import run_ranks

SCATTERED = Split(
    (((9, 12), (0, 2)), ((2, 3),), (), ((3, 9), (12, 13)))
)  # out of order, one key, none


def drawn(batch, length, count, keys, seed=0):
    """Ascending disjoint intervals, some empty."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, keys + 1, (batch, length, 2 * count), generator=generator)
    found = ends.sort(-1).values.view(batch, length, count, 2).to(torch.int32)
    found[:, ::5] = 0  # rows that see nothing
    return found


def dense(intervals, keys):
    at = torch.arange(keys)
    low, high = intervals[..., 0, None], intervals[..., 1, None]
    return ((low <= at) & (at < high)).any(2)[:, None]


def part(x, split, rank, dim=2):
    rows = [torch.arange(start, stop) for start, stop in split.parts[rank]]
    return x.index_select(dim, torch.cat([torch.arange(0), *rows]))


def divided(q, k, v, intervals, causal, softcap, splits):
    """Out, log-sum-exp and the gradients of q, k, v on all ranks, and each rank's collectives."""
    queries, keys = splits
    weights = torch.randn(q.shape[0], q.shape[1], q.shape[2], v.shape[3], dtype=q.dtype)

    def rank(places):
        own = [
            part(x, split, places["context"]).clone().requires_grad_()
            for x, split in ((q, queries), (k, keys), (v, keys))
        ]
        out, lse = context_attention(
            *own, intervals, causal, 0.3, softcap, "context", str(queries), str(keys)
        )
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        loss = (out * part(weights, queries, places["context"])).sum() + (finite**2).sum()
        return out, lse, *torch.autograd.grad(loss, own)

    results, logs = run_ranks({"context": queries.ranks}, rank)
    return results, logs, weights


def expected(q, k, v, intervals, causal, softcap, weights):
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = None if intervals is None else dense(intervals, k.shape[2])
    out, lse = reference.attention(*own, None, mask, None, causal, 0.3, softcap)
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    loss = (out * weights).sum() + (finite**2).sum()
    return out, lse, *torch.autograd.grad(loss, own)


def compare(q, k, v, intervals, causal, softcap, splits):
    queries, keys = splits
    results, logs, weights = divided(q, k, v, intervals, causal, softcap, splits)
    wanted = expected(q, k, v, intervals, causal, softcap, weights)
    for rank, found in enumerate(results):
        for mine, whole, split in zip(
            found, wanted, (queries, queries, queries, keys, keys), strict=True
        ):
            torch.testing.assert_close(mine, part(whole, split, rank), rtol=1e-12, atol=1e-12)
    assert {tuple(what for _, what, _ in log) for log in logs} == {("all_to_all",) * 3}
    return logs


def tensors(batch, heads, groups, queries, keys, size=4, value=3):
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, size, dtype=torch.float64)
    k = torch.randn(batch, groups, keys, size, dtype=torch.float64)
    return q, k, torch.randn(batch, groups, keys, value, dtype=torch.float64)


SPLITS = [
    (Split.contiguous(13, 2), Split.contiguous(13, 2)),
    (Split.zigzag(13, 3), Split.zigzag(13, 3)),
    (SCATTERED, SCATTERED),
    (Split.contiguous(13, 4), Split.zigzag(10, 4)),
    (Split.contiguous(2, 3), Split.contiguous(2, 3)),
]
MASKS = ["full", "causal", "one", "two", "one, causal"]


CASES = [
    (splits, mask)
    for splits, mask in itertools.product(SPLITS, MASKS)
    if "causal" not in mask or splits[0].length == splits[1].length
]


@pytest.mark.parametrize(("splits", "mask"), CASES)
def test_every_rank_has_its_part_of_the_whole(splits, mask):
    queries, keys = (split.length for split in splits)
    count = {"one": 1, "two": 2, "one, causal": 1}.get(mask)
    for batch, groups, softcap, shared in (
        (1, 4, 0.0, True),
        (2, 2, 0.0, False),
        (2, 1, 5.0, True),
    ):
        intervals = None
        if count is not None:
            intervals = drawn(1 if shared else batch, queries, count, keys)
        q, k, v = tensors(batch, 4, groups, queries, keys)
        compare(q, k, v, intervals, "causal" in mask, softcap, splits)


def test_no_rank_gets_a_key_that_none_of_its_queries_sees():
    """Four documents on four ranks, one of which straddles a border."""
    length, splits = 16, (Split.contiguous(16, 4),) * 2
    starts = torch.tensor([0] * 4 + [4] * 6 + [10] * 2 + [12] * 4, dtype=torch.int32)
    ends = torch.arange(1, length + 1, dtype=torch.int32)
    intervals = torch.stack([starts, ends], -1)[None, :, None]
    logs = compare(*tensors(1, 2, 1, length, length), intervals, False, 0.0, splits)
    assert logs
    made = [key_exchange(intervals[0], *splits, rank) for rank in range(4)]
    assert [each.counts for each in made] == [(0,) * 4, (0,) * 4, (0, 4, 0, 0), (0,) * 4]
    assert [[len(sent) for sent in each.sends] for each in made][1] == [0, 0, 4, 0]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_fetched_is_what_is_seen(seed):
    split = (Split.contiguous, Split.zigzag)[seed % 2](23, 2 + seed % 4)
    intervals = drawn(1, 23, 1 + seed % 2, 23, seed)
    intervals = torch.where(torch.rand(23, generator=torch.manual_seed(seed))[:, None, None] < 0.3,
                            intervals[0], 0)  # fmt: skip
    seen = dense(intervals[None], 23)[0, 0]
    every = [key_exchange(intervals, split, split, rank) for rank in range(split.ranks)]
    for rank, exchange in enumerate(every):
        rows = part(seen, split, rank, 0)
        for other, count in enumerate(exchange.counts):
            needed = part(rows, split, other, 1).any(0)
            assert count == (0 if rank == other else int(needed.sum()))
            assert len(every[other].sends[rank]) == count
        own = part(rows, split, rank, 1)
        if exchange.own_order is not None:
            own = own[:, exchange.own_order]
        assert torch.equal(dense(exchange.own, own.shape[1])[0, 0], own)


def test_a_mask_that_changed_is_looked_at_anew():
    splits = (Split.contiguous(6, 2),) * 2
    q, k, v = tensors(1, 1, 1, 6, 6)
    intervals = visible(None, 6, 6, True, torch.device("cpu")).clone()
    compare(q, k, v, intervals, False, 0.0, splits)
    intervals[..., 0] = intervals[..., 1] - 1
    compare(q, k, v, intervals, False, 0.0, splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_joined_is_rounded_once(dtype, ranks):
    """In low precision as near to float64 as attention on one rank is, gradients too."""
    length = 64
    splits = (Split.zigzag(length, ranks),) * 2
    wide = tensors(1, 4, 2, length, length, 32, 32)
    q, k, v = (x.to(dtype) for x in wide)
    results, _, weights = divided(q, k, v, None, True, 0.0, splits)
    wanted = expected(*(x.double() for x in (q, k, v)), None, True, 0.0, weights.double())
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = op.attention(*alone, None, None, None, True, 0.3, 0.0)
    grads = torch.autograd.grad((out * weights).sum() + (lse**2).sum(), alone)

    def error(found, want):
        assert found.dtype is dtype
        return float((found.detach().double() - want.detach()).norm() / want.detach().norm())

    for place, single in ((0, out), (2, grads[0]), (3, grads[1]), (4, grads[2])):
        whole = torch.empty_like(wanted[place], dtype=dtype)
        for rank, found in enumerate(results):
            part_of(whole, splits[0], rank, found[place])
        assert error(whole, wanted[place]) <= 1.01 * error(single, wanted[place])


def part_of(whole, split, rank, values):
    """Put a rank's part into the whole."""
    rows = [torch.arange(start, stop) for start, stop in split.parts[rank]]
    whole.index_copy_(2, torch.cat(rows), values)
