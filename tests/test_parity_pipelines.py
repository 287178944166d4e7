"""Depths, microbatch counts, cuts inside blocks, transports: always the same gradients."""

import random
from dataclasses import replace

import pytest
import torch

from mllm_compile.compiler.holding import Holding
from mllm_compile.runtime.measures import Measures
from mllm_compile.verify import RankResult, compare, verify
from tests.families import MODULES
from tests.parity import assert_passed, evenly, request_of, verified, workload_of


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_whole_model_as_one_pipeline(stages, microbatches):
    result = verified("llava", [stages], paths=[("",)], microbatches=microbatches, size=1)
    assert_passed(result)


@pytest.mark.parametrize("pipelines", [(1, 1, 1), (2, 1, 3), (1, 1, 4), (3, 1, 2)])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_modules_of_several_stages(pipelines, microbatches):
    assert len(MODULES["llava"]) == 3
    assert_passed(verified("llava", pipelines, microbatches=microbatches))


@pytest.mark.parametrize("language", [1, 2, 3, 4])
def test_deepstack_features_skip_stages(language):
    """Visual features enter after language layers 0 and 1: skip edges over the cuts."""
    paths = MODULES["qwen3_vl"]
    assert_passed(verified("qwen3_vl", [*[1] * (len(paths) - 1), language]))


def test_real_samples_do_not_divide_evenly():
    assert_passed(verified("llava", workload=workload_of("llava"), microbatches=3, size=1))


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed):
    draw = random.Random(seed)
    name = draw.choice(["llava", "vision_audio_llm", "gemma3", "qwen2_5_vl", "qwen3_vl"])
    pipelines = [draw.randint(1, 2) for _ in MODULES[name]]
    result = verified(name, pipelines, microbatches=draw.randint(1, 5), size=draw.randint(1, 2))
    assert_passed(result)


def test_one_path_naming_nothing_else_takes_the_glue():
    """A request may name the towers alone: projector and head go where their values are used."""
    result = verified("llava", [1, 2], paths=[("model.vision_tower",), ("model.language_model",)])
    assert_passed(result)


def test_float32_is_compared_at_its_own_tolerance():
    request = request_of(MODULES["llava"], [1, 1, 2], dtype="float32")
    result = verify(request, evenly(workload_of("llava")), in_process=True)
    assert_passed(result)
    assert result.tolerance == 1e-5
    assert result.max_error > 1e-12, "float32 cannot be this exact: the dtype was not honoured"


def test_bfloat16_is_compared_at_its_own_tolerance():
    request = request_of(MODULES["llava"], [1, 1, 2], dtype="bfloat16")
    result = verify(request, evenly(workload_of("llava")), in_process=True)
    assert_passed(result)
    assert 1e-5 < result.max_error < result.tolerance == 5e-2


def test_a_wrong_gradient_in_bfloat16_is_found():
    request = request_of(MODULES["llava"], [1, 1, 2], dtype="bfloat16")
    gradients = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.full((4,), 1e-2)}
    wrong = {**gradients, "b": gradients["b"] * 1.1}
    for found, passed in ((gradients, True), (wrong, False)):
        assert compare(request, [_result(found)], 1.0, gradients).passed is passed


def test_a_wrong_norm_of_all_gradients_is_found():
    request = request_of(MODULES["llava"], [1, 1, 2])
    gradients = {"a": torch.ones(4, dtype=torch.float64)}
    for norm, passed in ((2.0, True), (2.0 + 1e-6, False)):
        result = replace(_result(gradients), grad_norm=norm)
        assert compare(request, [result], 1.0, gradients).passed is passed


def test_a_shard_that_no_rank_has_is_missing():
    request = request_of(MODULES["llava"], [1, 1, 2])
    gradients = {"a": torch.ones(4, dtype=torch.float64)}
    half = replace(_result({"a": torch.ones(2)}), regions={"a": (((0, 2),),)}, grad_norm=2.0)
    other = replace(half, loss=None, regions={"a": (((2, 4),),)})
    assert compare(request, [half, other], 1.0, gradients).passed
    assert compare(request, [half, replace(half, loss=None)], 1.0, gradients).missing == ("a",)


def _result(gradients):
    """Of one rank that holds everything."""
    regions = {name: Holding.whole(g.shape).region for name, g in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    return RankResult(torch.tensor(1.0), gradients, regions, norm, Measures())
