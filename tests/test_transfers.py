"""Transfers by rank: on captured programs, every rank gets what its lane's program computes."""

import pytest
import torch

from tests.families import MODULES
from tests.lane_programs import Lanes, Microbatch, deliver
from tests.parity import workload_of

SIZES = [  # (tensor, data) of the encoders, of the rest, and whether they share ranks
    ((1, 4), (1, 2), False),
    ((1, 4), (2, 1), True),
    ((2, 1), (1, 4), False),
    ((2, 1), (1, 2), True),
    ((2, 2), (1, 2), False),
    ((1, 1), (1, 1), False),
]


def check(lanes: Lanes) -> None:
    """Both ways over every boundary, against what the receiving lane's program computes."""
    crossed = 0
    ends = {(b.source, b.target) for side in lanes.plans for p in side for b in p.boundaries}
    for source, target in ends:
        for start, end in ((source, target), (target, source)):
            for (rank, value), tensor in deliver(lanes, start, end).items():
                expected = lanes.local(end, rank, value)
                torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)
                crossed += tensor.numel()
    assert crossed


def check_family(name: str, count: int = 4) -> None:
    workload = workload_of(name)
    microbatch = Microbatch(workload.model, workload.samples[:count], workload.collate)
    paths = MODULES[name]
    for encoders, rest, shared in SIZES:
        check(microbatch.lanes(paths, [*[encoders] * (len(paths) - 1), rest], shared=shared))


@pytest.mark.parametrize("name", ["llava_ragged", "qwen2_5_vl", "vision_audio_llm_ragged"])
def test_every_rank_gets_the_values_of_its_own_samples(name: str) -> None:
    check_family(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "qwen2_audio", "blip_2", "idefics2", "ovis2"])
def test_every_rank_gets_the_values_of_its_own_samples_in_other_families(name: str) -> None:
    check_family(name)
