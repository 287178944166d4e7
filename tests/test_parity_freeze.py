"""Freeze patterns: exactly autograd's set of gradients, and nothing computed, sent or kept more."""

from itertools import product

import pytest
from torch import nn

from mllm_compile.compilation import Compiler
from mllm_compile.model import microbatches, ready_model
from mllm_compile.workload import Workload
from tests.families import MODULES
from tests.parity import assert_passed, evenly, request_of, verified, workload_of

PATTERNS = [p for p in product((True, False), repeat=3) if any(p)]


PARTS = {
    name: (*tuple((path,) for paths in MODULES[name][:-1] for path in paths), MODULES[name][-1])
    for name in ("llava", "vision_audio_llm")
}


def _flags(name, encoder, projector, language):
    """One flag for each module: towers, projectors, the language model last."""
    flags = []
    for paths in PARTS[name][:-1]:
        is_projector = any("proj" in path or "connector" in path for path in paths)
        flags.append(projector if is_projector else encoder)
    return [*flags, language]


@pytest.mark.parametrize("name", ["llava", "vision_audio_llm"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_encoder_projector_language(name, pattern):
    flags = _flags(name, *pattern)
    result = verified(name, paths=PARTS[name], trainable=flags)
    assert_passed(result)
    trained = {m for m, flag in enumerate(flags) if flag}
    assert bool(result.as_dict()["messages"]["backward"]) == (
        min(trained) < len(flags) - 1 or flags[-1]
    )


@pytest.mark.parametrize("name", ["llava", "vision_audio_llm"])
def test_no_gradient_crosses_into_frozen_parts(name):
    flags = _flags(name, False, False, True)
    assert_passed(verified(name, paths=PARTS[name], trainable=flags, microbatches=4))
    for plan in _step(name, flags)[1].plans:
        language = plan.stages[-2].index
        assert not any(b.gradients for b in plan.boundaries if b.target <= language)
        assert any(b.gradients for b in plan.boundaries if b.target > language)


@pytest.mark.parametrize("name", ["llava", "vision_audio_llm"])
def test_all_frozen(name):
    result = verified(name, paths=PARTS[name], trainable=[False] * len(PARTS[name]))
    assert result.passed
    assert not result.errors
    assert result.as_dict()["messages"]["backward"] == 0
    assert result.as_dict()["bytes"]["backward"] == 0


@pytest.mark.parametrize("name", ["llava", "vision_audio_llm"])
def test_frozen_stages_have_no_backward(name):
    """No I or W action, no saved value, no gradient message on a stage where nothing flows."""
    flags = _flags(name, False, False, True)
    compiler, step = _step(name, flags)
    for plan in step.plans:
        for stage in plan.stages[:-2]:
            program = compiler.lowered(plan, stage.index)
            assert program.input_grad is None
            assert program.weight_grad is None
            assert not program.sends_backward
            assert not program.receives_backward
            assert not any(n.startswith("s:") for n in program.forward.outputs)
            kinds = {a.kind for rank in stage.ranks for a in step.schedule.actions[rank]}
            assert kinds <= {"F", "RECV_F", "SEND_F"}


def _freeze_all_but(model: nn.Module, wanted):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted(name))


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(lambda n: "layers.1." in n and "language" in n, id="one language layer"),
        pytest.param(lambda n: "layers.0." in n and "vision" in n, id="one vision layer"),
        pytest.param(lambda n: "norm" in n, id="norms"),
        pytest.param(lambda n: n.endswith("bias"), id="biases"),
        pytest.param(lambda n: "lm_head" in n, id="head"),
        pytest.param(lambda n: "embed_tokens" in n, id="embedding"),
    ],
)
def test_partial_freezes(wanted):
    workload = evenly(workload_of("llava"))
    _freeze_all_but(workload.model, wanted)
    assert_passed(verified("llava", [2, 1, 2], workload=workload))


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["llava", "vision_audio_llm"])
def test_lora(name):
    workload = evenly(workload_of(name))
    workload.model.requires_grad_(False)
    replaced = 0
    for module in list(workload.model.modules()):
        for child in ("q_proj", "v_proj"):
            if isinstance(getattr(module, child, None), nn.Linear):
                setattr(module, child, LoRA(getattr(module, child)))
                replaced += 1
    assert replaced >= 8
    result = verified(name, workload=Workload(workload.model, workload.samples, workload.collate))
    assert_passed(result)
    assert all(".up." in error or ".down." in error for error in result.errors)


def _step(name, flags):
    request = request_of(PARTS[name], [*[1] * (len(flags) - 1), 2], trainable=flags)
    workload = evenly(workload_of(name))
    compiler = Compiler(request, ready_model(request, workload.model))
    return compiler, compiler.step(microbatches(request, workload, 0))
