"""Every way to get at other ranks' keys gives the plain model's loss and gradients, by any mask."""

import random
from itertools import pairwise, product

import pytest

from mllm_compile.compiler.request import EXCHANGES, ModuleSpec, Parallel, Request
from mllm_compile.compiler.split import Split
from mllm_compile.verify import verify
from tests.masked_decoder import HEADS, KINDS, workload
from tests.parity import assert_passed

SPLITS = ("contiguous", "zigzag", "planned", "given")
GROUPS = (1, 2, 4, 8)


def case(kind, exchange, seed):
    """(module, microbatches, key heads, lengths) drawn for a kind of mask and an exchange."""
    rng = random.Random(f"{kind}/{exchange}/{seed}")
    context, tensor = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    length = rng.choice([9, 15, 23, 37])
    split = rng.choice(SPLITS)
    if split == "given":  # any tokens on any rank, in runs
        cuts = [0, *sorted(rng.sample(range(1, length), 2 * context - 1)), length]
        runs = list(pairwise(cuts))
        rng.shuffle(runs)
        split = str(Split(tuple(tuple(runs[place::context]) for place in range(context))))
    ranks = tuple(range(context * tensor))
    parallel = Parallel(context=context, tensor=tensor)
    spec = ModuleSpec(("",), ranks, parallel, context_split=split, kv_exchange=exchange)
    microbatches, size = rng.choice([(1, 2), (2, 1)])
    made = Request((spec,), microbatches=microbatches, microbatch_size=size, dtype="float64")
    return made, HEADS // rng.choice(GROUPS), (length,) * (microbatches * size)


CASES = list(product(KINDS, EXCHANGES, range(2)))
FAST = [
    (kind, EXCHANGES[place % len(EXCHANGES)], 0) for place, kind in enumerate(KINDS)
]  # every mask once, every exchange several times


@pytest.mark.parametrize(
    ("kind", "exchange", "seed"),
    [each if each in FAST else pytest.param(*each, marks=pytest.mark.slow) for each in CASES],
)
def test_any_mask_by_any_exchange(kind, exchange, seed):
    request, key_heads, lengths = case(kind, exchange, seed)
    assert_passed(verify(request, workload(kind, key_heads, lengths, seed), in_process=True))


@pytest.mark.parametrize("exchange", ["needed", "auto"])
def test_every_microbatch_is_exchanged_by_its_own_mask(exchange):
    """One program for masks that need other keys each: what was made for one serves no other."""
    spec = ModuleSpec(
        ("",), (0, 1, 2), Parallel(context=3), context_split="zigzag", kv_exchange=exchange
    )
    request = Request((spec,), microbatches=4, microbatch_size=1, dtype="float64")
    assert_passed(verify(request, workload("images", 2, (23,) * 4), in_process=True))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_in_processes_of_their_own(exchange):
    parallel = Parallel(context=2, tensor=2)
    spec = ModuleSpec(("",), (0, 1, 2, 3), parallel, None, "zigzag", exchange)
    workload = "tests.gloo_workloads:masked"
    request = Request(
        (spec,), microbatches=2, microbatch_size=1, dtype="float64", workload=workload
    )
    assert_passed(verify(request))
