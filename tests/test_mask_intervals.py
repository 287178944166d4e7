"""Predicates as key intervals: equal to the dense mask, or refused with a reason."""

from collections import Counter

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils as hf

from benchmarks.masks import draw as draw_layout
from benchmarks.masks import masks as masks_of
from mllm_compile.kernels.attention import columns, per_query, pieces, values
from mllm_compile.kernels.attention import mask as predicates
from mllm_compile.kernels.attention.intervals import (
    intervals_needed,
    mask_fits,
    mask_intervals,
    rests_on_values,
    rule_of,
)
from mllm_compile.kernels.attention.reference import in_intervals
from mllm_compile.kernels.attention.runs import query_runs
from mllm_compile.kernels.attention.symbolic import OutsideAlgebra
from tests import drawn_predicates

CPU = torch.device("cpu")


def registered(function, offsets=(0, 0), padding=None):
    """(key, tensors) of a predicate."""
    template, tensors = predicates.separate(function)
    rule = predicates.Predicate(template, len(tensors), *offsets, padding is not None)
    return predicates.register(rule), tensors + ([] if padding is None else [padding])


def assert_equal(function, batch, queries, keys, offsets=(0, 0), padding=None):
    """How many intervals it takes; they are the dense mask, and in the promised form."""
    key, tensors = registered(function, offsets, padding)
    count = intervals_needed(tensors, key, batch, queries, keys)
    assert bool(mask_fits(tensors, key, count, batch, queries, keys))
    made = mask_intervals(tensors, key, count, batch, queries, keys, CPU)
    want = predicates.mask(tensors, key, batch, queries, keys, CPU)
    assert torch.equal(in_intervals(made, 0, keys).expand_as(want), want)
    flat = made.flatten(2)
    assert made.shape[1:] == (queries, count, 2)
    assert bool((flat.diff(dim=-1) >= 0).all())
    assert bool(((flat >= 0) & (flat <= keys)).all())
    return count


def refused(function, batch=2, queries=8, keys=8, **more):
    key, tensors = registered(function, **more)
    with pytest.raises(OutsideAlgebra) as error:
        intervals_needed(tensors, key, batch, queries, keys)
    return str(error.value)


def runs_in(dense):
    """The most separate runs of keys that a query sees."""
    opened = dense & ~torch.nn.functional.pad(dense, (1, 0))[..., :-1]
    return int(opened.sum(-1).max())


@pytest.mark.parametrize("device", ["cpu", "any other"])
def test_random_masks_are_their_intervals(monkeypatch, device):
    """A thousand masks that have intervals, and none that has some is refused for having more.

    On a CPU with sections wherever there are ids, and several blocks of queries; or as elsewhere.
    """
    monkeypatch.setattr(values, "LENGTH", 1 if device == "cpu" else 10**9)
    monkeypatch.setattr(per_query, "BLOCK", 29 if device == "cpu" else 1 << 16)
    if device != "cpu":
        monkeypatch.setattr(pieces, "cut_at", columns._scanned)
    rng, found = drawn_predicates.generator(0), Counter()
    length, batch = drawn_predicates.LENGTH, drawn_predicates.BATCH
    while found[1] + found[2] < 1000:
        made = drawn_predicates.draw(rng)
        for _ in range(20):
            function = made(*drawn_predicates.tables(rng))
            try:
                found[assert_equal(function, batch, length, length)] += 1
            except OutsideAlgebra as error:
                reason = str(error)
                found["refused"] += 1
                if "separate runs of keys" in reason and "holds" not in reason:
                    key, tensors = registered(function)
                    dense = predicates.mask(tensors, key, batch, length, length, CPU)
                    assert runs_in(dense) > 2, reason
    assert found[2] > 50
    assert found["refused"] < 1000, found


# ---------------------------------------------------------------- laws, one by one

IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 3, 3, 3, 3]])
APART = torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2], [0, 0, 0, 0, 3, 3, 3, 3]])
GROUPS = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, -1], [-1] * 8])
PLACES = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]])
JUMPS = torch.tensor([[0, 1, 0, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
HOLES = torch.tensor([[1, 0, 1, 0, 1, 1, 0, 1], [1] * 8])


def looked_up(rule, *tables):
    """A predicate over tensors that it closes over."""
    return lambda b, h, q, k: rule(*tables, b, q, k)


LAWS = {
    "bound": (looked_up(lambda b, q, k: (k <= q) & (k > q - 3)), 1),
    "multiple": (looked_up(lambda b, q, k: (3 * k <= 2 * q) & (4 * k >= q + 1)), 1),
    "equal": (looked_up(lambda b, q, k: k == q), 1),
    "unequal": (looked_up(lambda b, q, k: k != q), 2),
    "distance": (looked_up(lambda b, q, k: (k - q).abs() > 2), 2),
    "most": (looked_up(lambda b, q, k: torch.maximum(k, q) < 5), 1),
    "least": (looked_up(lambda b, q, k: torch.minimum(k + 2, q) <= 4), 1),
    "floor": (looked_up(lambda b, q, k: (k - 1) // 3 == (q - 1) // 3), 1),
    "floor order": (looked_up(lambda b, q, k: k // 3 < q // 3), 1),
    "condition": (looked_up(lambda ids, b, q, k: (ids[b, q] > 0) & (k <= q), IDS), 1),
    "same": (looked_up(lambda ids, b, q, k: ids[b, q] == ids[b, k], IDS), 1),
    "others": (looked_up(lambda ids, b, q, k: ids[b, q] != ids[b, k], IDS), 2),
    "ordered": (looked_up(lambda ids, b, q, k: ids[b, k] < ids[b, q], IDS), 1),
    "above": (looked_up(lambda ids, b, q, k: ids[b, k] >= ids[b, q], IDS), 1),
    "same, said twice": (
        looked_up(
            lambda ids, b, q, k: (ids[b, q] == ids[b, k]) & (ids[b, k] - ids[b, q] == 0), IDS
        ),
        1,
    ),
    "groups": (looked_up(lambda g, b, q, k: (g[b, q] == g[b, k]) & (g[b, k] >= 0), GROUPS), 1),
    "kept": (looked_up(lambda real, b, q, k: (real[b, k] != 0) & (k <= q), LEFT), 1),
    "climbing": (
        looked_up(
            lambda ids, at, b, q, k: (ids[b, q] == ids[b, k]) & (at[b, k] >= at[b, q] - 1),
            IDS, PLACES,
        ),
        1,
    ),
    "union": (looked_up(lambda b, q, k: (k < 2) | ((k <= q) & (q - k < 2))), 2),
    "exclusive": (looked_up(lambda b, q, k: (k < 2) ^ (k < 5)), 1),
    "choice": (looked_up(lambda ids, b, q, k: torch.where(ids[b, q] == 0, k < 3, k > q), IDS), 1),
    "not both": (looked_up(lambda b, q, k: torch.logical_xor(k < 2, k < 5)), 1),
    "product": (looked_up(lambda b, q, k: (k <= q) * (k > q - 3)), 1),
    "one of two numbers": (looked_up(lambda b, q, k: k <= torch.where(q > 3, q, q + 2)), 1),
    "one of two keys": (looked_up(lambda b, q, k: torch.where(k > 3, k, k + 1) <= q), 1),
    "one of two places": (
        looked_up(lambda ids, b, q, k: k <= ids[b, torch.where(q > 3, q, 0)], IDS),
        1,
    ),
    "clamped": (looked_up(lambda b, q, k: (k.clamp(max=3) <= q) & (k >= (q - 2).clamp(0, 4))), 1),
    "clamped below": (looked_up(lambda b, q, k: k.clamp_min(3) <= q.clamp_max(5)), 1),
    "towards zero": (
        looked_up(lambda b, q, k: torch.div(q - 4, 3, rounding_mode="trunc") >= k - 1),
        1,
    ),
    "endless": (looked_up(lambda b, q, k: (k < float("inf")) & (k <= q)), 1),
    "nowhere": (looked_up(lambda b, q, k: k < -float("inf")), 1),
    "truth as number": (looked_up(lambda b, q, k: ((k <= q).int() == 1) & (k > q - 3)), 1),
    "no such number": (looked_up(lambda b, q, k: (k <= q).int() == 2), 1),
    "truth like a number": (
        looked_up(lambda ids, b, q, k: ids[b, q] == (k <= q), IDS),
        1,
    ),
    "prefix and padding": (
        looked_up(
            lambda ids, real, b, q, k: (
                ((ids[b, q] == ids[b, k]) & (ids[b, k] == 0) | (k <= q)) & (real[b, k] != 0)
            ),
            torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]),
            torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]),
        ),
        1,
    ),
    "constant": (looked_up(lambda b, q, k: torch.tensor(True) & (k <= q)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("queries", "offsets"), [(8, (0, 0)), (5, (3, 0)), (3, (2, 1))])
def test_law_accepts(name, queries, offsets):
    function, count = LAWS[name]
    keys = 8 - offsets[1]
    assert assert_equal(function, 2, queries, keys, offsets) <= count
    if offsets == (0, 0):
        assert assert_equal(function, 2, queries, keys) == count


REFUSED = {
    "same": (looked_up(lambda ids, b, q, k: ids[b, q] == ids[b, k], APART), "not contiguous"),
    "same before": (
        looked_up(lambda ids, b, q, k: (ids[b, q] == ids[b, k]) & (k <= q), APART),
        "not contiguous",
    ),
    "same behind": (
        looked_up(lambda ids, b, q, k: (ids[b, q] == ids[b, k]) & (k >= q), APART),
        "not contiguous",
    ),
    "same but for a gap": (
        looked_up(lambda ids, b, q, k: (ids[b, q] == ids[b, k]) | (k < 2), APART),
        "not contiguous",
    ),
    "bits": (looked_up(lambda b, q, k: ~(k <= q).int()), "bits"),
    "alternatives": (
        looked_up(
            lambda ids, b, q, k: (
                ((k < 1) | (k == q) | (k > 6))
                & ((k < 2) | (k == 3) | (k > 5))
                & ((k < 3) | (k == q) | (k > 4))
                & (ids[b, q] != ids[b, k])
            ),
            IDS,
        ),
        "54 alternatives",
    ),
    "ordered": (looked_up(lambda ids, b, q, k: ids[b, k] < ids[b, q], APART), "descend"),
    "kept": (looked_up(lambda real, b, q, k: real[b, k] != 0, HOLES), "holds for more than 2"),
    "climbing": (
        looked_up(
            lambda ids, at, b, q, k: (ids[b, q] == ids[b, k]) & (at[b, k] >= at[b, q] - 1),
            IDS, JUMPS,
        ),
        "do not go up by one",
    ),
    "union": (
        looked_up(lambda b, q, k: (k < 1) | (k == q) | (k == q - 2)),
        "more than 2 separate runs",
    ),
    "floor": (looked_up(lambda b, q, k: k % 3 == q % 3), "floor"),
    "multiple": (looked_up(lambda b, q, k: k * q <= 5), "<= 0"),
    "pairs": (looked_up(lambda ids, b, q, k: ids[b, (k + q) // 2] == 0, IDS), "pairs"),
    "division": (looked_up(lambda b, q, k: k / 2 <= q), "not round"),
    "choice": (looked_up(lambda b, q, k: torch.where(k > 3, k <= q, 1)), "a choice"),
    "numbers": (looked_up(lambda b, q, k: (k <= q) + (k < 3) > 1), "as numbers"),
    "whole rows": (looked_up(lambda ids, b, q, k: ids[b, q] >= ids[b].min(), IDS), "rows"),
    "heads": (lambda b, h, q, k: k <= q + h, "heads"),
    "floats": (looked_up(lambda x, b, q, k: x[b, k] > 0, IDS / 2), "no integer tensor"),
    "operator": (looked_up(lambda b, q, k: k <= q**2), "aten.pow"),
    "host": (looked_up(lambda b, q, k: (k <= q) if q[0] else (k > q)), "aten"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_law_rejects(name):
    function, reason = REFUSED[name]
    assert reason in refused(function)


def test_every_rule_has_a_law():
    """The table above covers all kinds of rules."""
    seen = set()

    def visit(rule):
        seen.add(type(rule).__name__)
        for part in getattr(rule, "parts", ()):
            visit(part)

    for function, _ in LAWS.values():
        visit(rule_of(*registered(function)))
    assert seen == {
        "Where", "Below", "From", "Same", "Ordered", "Kept", "Climbing", "All", "Either",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bound", "floor", "condition", "same", "union"])
def test_what_rests_on_no_value_needs_no_guard(name):
    assert rests_on_values(*registered(LAWS[name][0])) == (name in ("same", "union"))


# ---------------------------------------------------------------- masks of transformers


def packed(function):
    """As transformers packs: positions begin anew, and documents do not see each other."""
    return hf.and_masks(
        hf.remap_positions_for_packed_sequence(function, PLACES),
        hf.packed_sequence_mask_function(IDS),
    )


def third(places):
    return torch.div(places, 3, rounding_mode="trunc")


def within_chunks(difference):
    return (difference >= 0) & (difference <= 1)


BLOCKS = hf.blockwise_overlay(GROUPS)
HUGGING_FACE = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "sliding": hf.sliding_window_causal_mask_function(3),
    "sliding both ways": hf.sliding_window_bidirectional_mask_function(2),
    "chunked": hf.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "blockwise": hf.or_masks(hf.causal_mask_function, BLOCKS),
    "blockwise in a window": hf.and_masks(
        hf.or_masks(hf.causal_mask_function, BLOCKS), hf.sliding_window_overlay(4)
    ),
    "packed": packed(hf.causal_mask_function),
    "packed window": packed(hf.sliding_window_causal_mask_function(2)),
    "packed blockwise": hf.and_masks(
        hf.or_masks(
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, PLACES), BLOCKS
        ),
        hf.packed_sequence_mask_function(IDS),
    ),
    "everything": lambda *args: torch.tensor(True),
    "chunks of streamed audio": lambda b, h, q, k: within_chunks(third(q) - third(k)),
    "windows to both sides": lambda b, h, q, k: (
        ((q - k >= 0) & (q - k < 3)) | ((q - k < 0) & (k - q < 2))
    ),
    "before an endless prefill": hf.or_masks(
        hf.sliding_window_causal_mask_function(3),
        hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k < float("inf")),
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_masks_of_transformers(name, padding):
    keys = {"none": None, "left": LEFT, "right": LEFT.flip(1)}[padding]
    assert assert_equal(HUGGING_FACE[name], 2, 8, 8, padding=keys) == 1


# ---------------------------------------------------------------- blocks and sizes


def mask_mod(documents, groups, own_segment, window):
    """A generator's mask as FlexAttention takes it."""

    def rule(b, h, q, k):
        same = (groups[q] == groups[k]) & (groups[q] >= 0)
        causal = (k <= q) if window is None else (k <= q) & (q - k < window)
        seen = torch.where(groups[q] >= 0, same, causal) if own_segment else causal | same
        return seen & (documents[q] == documents[k])

    return rule


BLOCK_CASES = [
    *((name, 2048, False, None) for name in ("causal", "packed", "mm", "packed_mm", "video")),
    ("ee", 2048, True, None),
    ("gemma", 2048, False, 256),
    ("packed_mm", 1500, False, None),
    ("packed_mm", 4096, False, None),
]


@pytest.mark.parametrize(("name", "tokens", "own_segment", "window"), BLOCK_CASES)
def test_blocks_are_those_of_flex_attention(name, tokens, own_segment, window):
    """From the predicate through intervals and runs: kept and full blocks, query block by block."""
    layout = draw_layout(name, tokens)
    documents, groups = map(torch.as_tensor, layout.token_ids())
    rule = mask_mod(documents, groups, own_segment, window)
    assert_equal(rule, 1, tokens, tokens)
    key, tensors = registered(rule)
    made = mask_intervals(tensors, key, 1, 1, tokens, tokens, CPU)
    runs = query_runs(made, 128, 128)
    want = create_block_mask(rule, 1, 1, tokens, tokens, device="cpu", BLOCK_SIZE=128)
    full = want.full_kv_num_blocks[0, 0]
    whole = tokens // 128  # FlexAttention has no full block in a query block that is shorter
    assert torch.equal((runs[..., 2] - runs[..., 1]).sum(-1)[0, :whole], full.int()[:whole])
    kept = want.kv_num_blocks[0, 0] + full
    assert torch.equal((runs[..., 3] - runs[..., 0]).sum(-1)[0], kept.int())


def test_drawn_masks_are_what_their_predicate_says():
    layout = draw_layout("packed_mm", 3000, seed=5)
    documents, groups = map(torch.as_tensor, layout.token_ids())
    key, tensors = registered(mask_mod(documents, groups, False, None))
    made = mask_intervals(tensors, key, 1, 1, 3000, 3000, CPU)
    assert torch.equal(made[0, :, 0], torch.as_tensor(masks_of("packed_mm", layout)[0][1]))


def test_a_million_tokens_take_eight_mebibytes():
    tokens = 1 << 20
    layout = draw_layout("packed_mm", tokens)
    documents, groups = map(torch.as_tensor, layout.token_ids())
    key, tensors = registered(mask_mod(documents, groups, False, None))
    made = mask_intervals(tensors, key, 1, 1, tokens, tokens, CPU)
    assert made.numel() * made.element_size() == 8 << 20
    assert torch.equal(made[0, :, 0], torch.as_tensor(masks_of("packed_mm", layout)[0][1]))


@pytest.mark.parametrize("length", [1, 2, 57])
@pytest.mark.parametrize("kinds", [1, 2, 9])
def test_runs_without_host_reads_are_those_with(length, kinds):
    g = torch.Generator().manual_seed(length + kinds)
    changes = columns.changes_of(torch.randint(0, kinds, (3, length), generator=g))
    listed, scanned = columns.cut_at(changes), columns._scanned(changes)
    places = torch.arange(-2, length + 2, dtype=torch.int32).expand(3, -1)
    for one, other in ((listed, scanned), (scanned, listed)):
        for read in (columns.Runs.at, columns.Runs.search):
            for edges in ("starts", "ends"):
                found, want = (
                    columns.gathered(getattr(runs, edges), number)
                    for runs, number in ((one, read(one, places)), (other, other.at(places)))
                )
                assert torch.equal(found, want)
                assert found.dtype == torch.int32
    for runs in (listed, scanned):
        assert torch.equal(runs.over(slice(0, length)), runs.at(places)[:, 2:-2])


def test_places_of_flags():
    for length in range(40):
        flags = torch.rand(length, generator=torch.Generator().manual_seed(length)) < 0.3
        assert torch.equal(columns._places(flags), flags.nonzero().squeeze(1).int())


def test_operators_pass_opcheck():
    key, tensors = registered(HUGGING_FACE["packed blockwise"], padding=LEFT)
    torch.library.opcheck(mask_intervals, (tensors, key, 1, 2, 8, 8, CPU))
    torch.library.opcheck(mask_fits, (tensors, key, 1, 2, 8, 8))
    key, tensors = registered(hf.causal_mask_function)
    torch.library.opcheck(mask_intervals, (tensors, key, 1, 2, 8, 8, CPU))


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (4, 0)])
def test_nothing_to_see(queries, keys):
    assert assert_equal(hf.causal_mask_function, 2, queries, keys) == 1
