"""Any layouts, on any ranks: the program's loss and gradients are the plain model's."""

import pytest

from mllm_compile.verify import verify
from tests.families import MODULES
from tests.layout_requests import PLACEMENTS, random_request
from tests.parity import assert_passed, workload_of

NAMES = ("llava", "qwen2_5_vl", "gemma3", "vision_audio_llm", "llama4")
FAST, ALL = 2, 14


def _agrees(name: str, placement: str, seed: int) -> None:
    shallow = [i for i, paths in enumerate(MODULES[name]) if "projector" in paths[0]]
    request = random_request(seed, MODULES[name], placement, shallow)
    assert_passed(verify(request, workload_of(name), in_process=True))


@pytest.mark.parametrize("seed", range(FAST))
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_random_layouts(name: str, placement: str, seed: int) -> None:
    _agrees(name, placement, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST, ALL))
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_more_random_layouts(name: str, placement: str, seed: int) -> None:
    _agrees(name, placement, seed)
