"""The examples: requests fit the models, tasks can be learned, batching changes nothing."""

from pathlib import Path

import pytest
import torch

from mllm_compile.compiler.request import Request
from mllm_compile.verify import verify
from mllm_compile.workload import Workload

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ["llava", "qwen2_5_vl", "vision_audio_llm", "custom_encoder"]
LAYOUTS = ["llava_shared", "llava_context", "llava_experts"]


def load(name):
    request = Request.load(EXAMPLES / f"{name}.toml")
    return request, Workload.load(request.workload)


def uncovered(request, model):
    """Parameters under none or several of the request's paths."""
    paths = [path for module in request.modules for path in module.paths]
    names = [name for name, _ in model.named_parameters()]
    return [n for n in names if sum(n.startswith(path + ".") for path in paths) != 1]


@pytest.mark.parametrize("name", [*NAMES, *LAYOUTS])
def test_request_covers_the_model(name):
    request, workload = load(name)
    assert uncovered(request, workload.model) == []
    assert len(workload.samples) >= request.microbatches * request.microbatch_size


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls(name):
    _, workload = load(name)
    model = workload.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        batch = workload.collate([workload.samples[(8 * step + i) % 48] for i in range(8)])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.4 * sum(losses[:5])


@pytest.mark.parametrize("name", NAMES)
def test_batching_changes_nothing(name):
    """The loss over all samples is the label-weighted mean over any parts of them."""
    _, workload = load(name)
    model, samples = workload.model.double(), list(workload.samples)[:8]

    def run(part):
        batch = {
            key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
            for key, value in workload.collate(part).items()
        }
        valid = int((batch["labels"][:, 1:] != -100).sum())
        return model(**batch).loss.item() * valid, valid

    whole, count = run(samples)
    parts = [run(samples[a : a + n]) for a, n in ((0, 1), (1, 3), (4, 2), (6, 2))]
    assert sum(valid for _, valid in parts) == count
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-6)


def test_large_has_71_billion_parameters_and_no_storage():
    request = Request.load(EXAMPLES / "llava_large.toml")
    assert request.num_ranks == 16
    workload = Workload.load(request.workload)
    assert uncovered(request, workload.model) == []
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    assert 70.5e9 < count < 71.5e9
    assert all(parameter.is_meta for parameter in workload.model.parameters())
    assert workload.collate(list(workload.samples)[:1])["pixel_values"].shape == (1, 3, 336, 336)


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS)]
)
def test_program_equals_plain_model(name):
    request, workload = load(name)
    result = verify(request, workload, in_process=True)
    assert result.passed, result.as_dict()
    assert result.errors
