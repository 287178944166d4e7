"""Layouts where something is uneven: images per lane, tied weights, experts, tiny sequences.

The faults that these inputs show elsewhere stand in the issue trackers of Megatron-LM, torchtitan
and their kin: lanes without images that hang or scale gradients, tied weights that are summed after
they were divided, sizes that do not divide.
"""

import pytest

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.verify import verify
from tests.families import MODULES
from tests.parity import assert_passed, workload_of

Sizes = dict[str, int]
Case = tuple[str, list[tuple[int, Sizes]]]
"""A family; for each of its parts the first rank and the sizes."""

FAST: list[Case] = [
    # lanes of two samples, some without an image, before lanes of four
    ("llava_ragged", [(0, {"data": 4}), (0, {"data": 4}), (0, {"data": 2})]),
    # a tied embedding and head on two stages, on two lanes
    ("gemma3", [(0, {}), (0, {}), (0, {"pipeline": 2, "data": 2})]),
    # experts, tokens and matrices at once
    ("qwen3_vl_moe", [(0, {}), (0, {"expert": 2, "context": 2, "tensor": 2})]),
]
SLOW: list[Case] = [
    ("llava_ragged", [(0, {"data": 4}), (0, {"data": 4}), (0, {"data": 3})]),
    ("llava_ragged", [(0, {"data": 2}), (0, {"data": 2}), (2, {"tensor": 2, "pipeline": 2})]),
    ("qwen2_5_vl_ragged", [(0, {"data": 4}), (0, {"tensor": 2, "data": 2})]),
    ("qwen2_5_vl_ragged", [(0, {"data": 3}), (3, {"context": 2, "pipeline": 2})]),
    (
        "vision_audio_llm_ragged",
        [(0, {"tensor": 2}), (2, {"tensor": 2}), (4, {"data": 2, "context": 2})],
    ),
    ("qwen3_vl", [(0, {"data": 2}), (2, {"tensor": 2, "pipeline": 3})]),
    ("phi4_multimodal", [(0, {"data": 2}), (2, {"tensor": 2})]),
    ("gemma3", [(0, {}), (0, {}), (0, {"pipeline": 2, "tensor": 2, "context": 2})]),
    ("gemma3", [(0, {"data": 2}), (0, {}), (0, {"pipeline": 2, "tensor": 4})]),
    ("kimi_k25", [(0, {}), (0, {}), (1, {"expert": 2, "context": 2})]),
    ("qwen3_vl_moe", [(0, {"tensor": 2}), (0, {"expert": 2, "data": 2, "pipeline": 2})]),
    ("llama4", [(0, {}), (0, {}), (0, {"expert": 2, "tensor": 2, "data": 2})]),
    ("aria", [(0, {"data": 2}), (0, {}), (0, {"expert": 2, "context": 2})]),
    ("qwen2_audio", [(0, {"data": 2}), (0, {"data": 2}), (0, {"context": 2})]),
    ("internvl", [(0, {"context": 2}), (0, {}), (2, {"context": 4})]),
    ("mllama", [(0, {"tensor": 2}), (0, {}), (2, {"tensor": 2, "context": 2})]),
]


TIED: list[tuple[Sizes, tuple[int, ...], Sizes]] = [
    ({"tensor": 2}, (0,), {}),  # on common ranks
    ({"tensor": 2}, (2,), {}),
    ({"context": 2}, (0, 1), {"tensor": 2}),
]


@pytest.mark.parametrize(("decoder", "ranks", "head"), TIED)
def test_a_weight_of_two_modules_of_other_sizes(
    decoder: Sizes, ranks: tuple[int, ...], head: Sizes
) -> None:
    """Embedding and head are one weight, in modules whose meshes have other axes."""
    modules = (
        ModuleSpec(("model.vision_tower", "model.multi_modal_projector"), (0,)),
        ModuleSpec(("model.language_model",), (0, 1), Parallel(**decoder)),
        ModuleSpec(("lm_head",), ranks, Parallel(**head)),
    )
    request = Request(modules, microbatches=2, microbatch_size=2, dtype="float64")
    assert_passed(verify(request, workload_of("gemma3"), in_process=True))


CUT: list[tuple[str, list[Sizes], int]] = [
    # a normalisation, a product and the views around them, in other programs on every side
    ("gemma3", [{}, {"pipeline": 2}, {"data": 2}], 4),
    # lanes of two samples and of one: a product and its bias are one operator or two
    ("llava", [{}, {"pipeline": 2, "data": 2}, {}], 3),
]


@pytest.mark.parametrize(("name", "sizes", "samples"), CUT)
def test_lanes_with_other_programs_are_cut_alike(
    name: str, sizes: list[Sizes], samples: int
) -> None:
    modules, first = [], 0
    for paths, axes in zip(MODULES[name], sizes, strict=True):
        parallel = Parallel(**axes)
        modules.append(ModuleSpec(paths, tuple(range(first, first + parallel.size)), parallel))
        first += parallel.size
    request = Request(tuple(modules), microbatch_size=samples, dtype="float64")
    assert_passed(verify(request, workload_of(name), in_process=True))


def agrees(name: str, parts: list[tuple[int, Sizes]]) -> None:
    modules = []
    for paths, (first, sizes) in zip(MODULES[name], parts, strict=True):
        parallel = Parallel(**sizes)
        ranks = tuple(range(first, first + parallel.size))
        modules.append(ModuleSpec(paths, ranks, parallel, context_split="zigzag"))
    request = Request(tuple(modules), microbatches=2, microbatch_size=4, dtype="float64")
    assert_passed(verify(request, workload_of(name), in_process=True))


@pytest.mark.parametrize(("name", "parts"), FAST)
def test_agrees(name: str, parts: list[tuple[int, Sizes]]) -> None:
    agrees(name, parts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), SLOW)
def test_more_agree(name: str, parts: list[tuple[int, Sizes]]) -> None:
    agrees(name, parts)
