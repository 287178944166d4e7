"""Ranks as processes that talk through gloo: the plain model's loss and every gradient."""

import pytest

from mllm_compile.verify import verify
from tests.families import MODULES
from tests.parity import assert_passed, request_of

FAST = [("llava", [2], 3), ("vision_audio_llm", [1, 1, 1], 1)]
SLOW = [
    ("llava", [1], 1),
    ("llava", [3], 8),
    ("llava", [4], 1),
    ("llava", [5], 3),
    ("llava", [6], 8),
    ("llava", [1, 1, 2], 3),
    ("vision_audio_llm", [1], 3),
    ("vision_audio_llm", [2], 8),
    ("vision_audio_llm", [3], 1),
    ("vision_audio_llm", [4], 3),
    ("vision_audio_llm", [5], 8),
    ("vision_audio_llm", [6], 3),
    ("vision_audio_llm", [1, 1, 3], 8),
]


@pytest.mark.parametrize(
    ("name", "pipelines", "microbatches"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_gradients_over_gloo(name, pipelines, microbatches):
    """One number is the depth of the whole model; several are those of its modules."""
    paths = MODULES[name] if len(pipelines) > 1 else [("",)]
    keys = {"workload": f"tests.gloo_workloads:{name}", "microbatches": microbatches}
    result = verify(request_of(paths, pipelines, size=1, **keys))
    assert_passed(result)
    assert result.tolerance == 1e-9
    assert len(result.measures) == sum(pipelines)
