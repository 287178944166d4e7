"""Context parallelism is exact for every mask, wherever tokens fall, and however few there are."""

import pytest
import torch

from mllm_compile.kernels import host_copies
from mllm_compile.runtime import executor
from tests.contexts import (
    VOCABULARY,
    check,
    documents,
    multimodal,
    outcomes,
    packed,
    padded,
    text,
    with_images,
)
from tests.parity import assert_passed, workload_of

SIZES = [(ranks, split) for ranks in (2, 3, 4) for split in ("contiguous", "zigzag")]


def cases(subjects, fast):
    """Every subject on every number of ranks, split both ways; those not ``fast`` are slow."""
    every = [(subject, *size) for subject in subjects for size in SIZES]
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in every]


PACKED = [("sliding", 4, "contiguous"), ("chunked", 2, "contiguous")]


@pytest.mark.parametrize(
    ("name", "context", "split"), cases(["full", "sliding", "chunked"], PACKED)
)
def test_packed_documents_of_unequal_length(name, context, split):
    """15 tokens divide by neither 2 nor 4; documents begin inside of ranks' parts."""
    assert_passed(check(name, [documents(4, 9, 2)], packed, context, split))


def labelled(row, lengths, document):
    """The same row with the labels of one document alone."""
    start = sum(lengths[:document])
    own = torch.arange(len(row["labels"])).sub(start)
    inside = (own > 0) & (own < lengths[document])
    return {**row, "labels": row["labels"].where(inside, -100)}


def perturbed(row, lengths, document):
    """Other tokens in one document."""
    start = sum(lengths[:document])
    ids = row["input_ids"].clone()
    ids[start : start + lengths[document]] = VOCABULARY - ids[start : start + lengths[document]]
    return {**row, "input_ids": ids}


@pytest.mark.parametrize(
    ("name", "context", "split"), cases(["full", "sliding", "chunked"], [("sliding", 3, "zigzag")])
)
def test_perturbing_a_document_changes_nothing_outside_of_it(name, context, split):
    """Bitwise: the loss of a document, and its gradients."""
    lengths, watched = (4, 9, 2), 1
    row = labelled(documents(*lengths), lengths, watched)
    rows = [row, *(perturbed(row, lengths, document) for document in range(3))]
    same, before, inside, after = outcomes(name, rows, context, split)
    for rank, expected in enumerate(same):
        for key, value in expected.items():
            assert torch.equal(before[rank][key], value), key
            assert torch.equal(after[rank][key], value), key
            assert not torch.equal(inside[rank][key], value), key


@pytest.mark.parametrize(
    ("side", "context", "split"), cases(["left", "right"], [("left", 3, "zigzag")])
)
def test_padding(side, context, split):
    samples = [text(13, 1), text(6, 2)]
    assert_passed(check("sliding", samples, padded(side), context, split))


@pytest.mark.parametrize(
    ("tokens", "context", "split"),
    [
        (3, 4, "zigzag"),
        pytest.param(3, 4, "contiguous", marks=pytest.mark.slow),
        pytest.param(2, 3, "contiguous", marks=pytest.mark.slow),
    ],
)
def test_fewer_tokens_than_ranks(tokens, context, split):
    assert_passed(check("full", [text(tokens)], packed, context, split))


PLACES = {"across a border": 6, "on the first rank": 1, "on the last rank": 11}
IMAGES = [("across a border", 4, "zigzag")]


@pytest.mark.parametrize(("place", "context", "split"), cases(PLACES, IMAGES))
def test_image_tokens_anywhere(place, context, split):
    """Of 16 tokens, four of an image: on two ranks, or all on one and none on the others."""
    image = with_images(PLACES[place], 12 - PLACES[place])
    assert_passed(multimodal("llava", [image], context, split))


FAMILIES = [("gemma3", 3, "zigzag"), ("qwen2_5_vl", 2, "contiguous")]


@pytest.mark.parametrize(
    ("family", "context", "split"), cases(["gemma3", "qwen2_5_vl", "llama4"], FAMILIES)
)
def test_masks_and_positions_of_families(family, context, split):
    """Image tokens that see each other, 3-D positions, chunks and experts."""
    assert_passed(multimodal(family, workload_of(family).samples[:2], context, split))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "gemma3", "phi4_multimodal", "qwen3_vl_moe"])
def test_encoders_under_context_too(family):
    samples = workload_of(family).samples[:2]
    assert_passed(multimodal(family, samples, 2, "zigzag", encoders=2))


EXCHANGES = [
    ("sliding", 4, "contiguous", "needed"),
    ("full", 3, "zigzag", "auto"),
]


@pytest.mark.parametrize(
    ("name", "context", "split", "exchange"),
    EXCHANGES
    + [
        pytest.param(name, *size, exchange, marks=pytest.mark.slow)
        for name in ("full", "sliding", "chunked")
        for size in SIZES
        for exchange in ("needed", "auto")
        if (name, *size, exchange) not in EXCHANGES
    ],
)
def test_keys_of_packed_documents_are_exchanged(name, context, split, exchange):
    assert_passed(check(name, [documents(4, 9, 2)], packed, context, split, exchange))


@pytest.mark.parametrize("exchange", ["needed", "auto"])
def test_keys_of_padded_samples_are_exchanged(exchange):
    """Two samples with masks of their own."""
    samples = [text(13, 1), text(6, 2)]
    assert_passed(check("full", samples, padded("right"), 3, "zigzag", exchange))


def test_which_keys_are_exchanged_is_known_without_a_look_at_the_device(monkeypatch):
    """Of a mask the exchange uses the host's copy: that on the device holds anything here."""
    seen = []

    def moved(x, device):
        there = x.clone()
        if x.dtype is torch.int32 and x.dim() == 4:
            seen.append(there.fill_(-1))
        host_copies.keep(there, x)
        return there

    monkeypatch.setattr(executor, "moved", moved)
    samples = [text(13, 1), text(6, 2)]
    assert_passed(check("full", samples, padded("right"), 3, "zigzag", "needed"))
    assert seen


EXCHANGED = [("gemma3", "needed", 1), ("gemma3", "heads", 1), ("llava", "needed", 2)]


@pytest.mark.parametrize(
    ("family", "exchange", "tensor"),
    EXCHANGED
    + [
        pytest.param(family, exchange, tensor, marks=pytest.mark.slow)
        for family in ("llava", "qwen2_5_vl", "gemma3", "llama4", "qwen3_vl_moe")
        for exchange in ("needed", "heads", "auto")
        for tensor in (1, 2)
        if (family, exchange, tensor) not in EXCHANGED
    ],
)
def test_keys_of_families_are_exchanged(family, exchange, tensor):
    samples = workload_of(family).samples[:2]
    assert_passed(multimodal(family, samples, 2, "zigzag", 2, exchange, tensor))
