"""Token splits planned from the masks of a batch: exact, shown, and never silently another one."""

from copy import deepcopy
from dataclasses import replace

import pytest

from mllm_compile.compilation import Compiler
from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.plan_json import from_json, to_json
from mllm_compile.compiler.request import ModuleSpec, Parallel
from mllm_compile.compiler.split import Split
from mllm_compile.model import ready_model
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.verify import verify
from tests.contexts import check, decoder, documents, multimodal, packed, padded, request, text
from tests.masked_decoder import KINDS, workload
from tests.parity import assert_passed, workload_of

LENGTHS = (20, 45, 7)


@pytest.fixture(scope="module")
def plan():
    asked = request(2, "planned")
    sample = documents(*LENGTHS)
    model = ready_model(asked, deepcopy(decoder("sliding")))
    return Compiler(asked, model).step([{1: (packed([sample]),)}]).plans[0]


def test_the_plan_names_the_tokens_of_every_rank(plan):
    split = Split.parse(plan.request.modules[0].context_split)
    assert (split.length, split.sizes) == (72, (36, 36))
    assert split != Split.contiguous(72, 2)
    (note,) = (n for n in plan.shardings[0].notes if n.startswith("context: 72 tokens"))
    assert "by 2 masks" in note
    assert "of the mean, keys received 0." in note
    assert from_json(to_json(plan), plan.captured) == plan


def test_all_microbatches_of_the_first_step_count():
    """Each of them, but what is alike once."""
    asked = request(2, "planned")
    model = ready_model(asked, deepcopy(decoder("full")))
    samples = [documents(500, 12), documents(12, 500), documents(500, 12)]
    step = Compiler(asked, model).step([{1: (packed([sample]),)} for sample in samples])
    (made,) = step.plans
    (note,) = (n for n in made.shardings[0].notes if n.startswith("context: 512 tokens"))
    assert "by 2 masks: tiles at most 1.000 of the mean" in note


def test_without_a_batch_it_is_zigzag_and_said(plan):
    made = make_plan(request(2, "planned"), plan.captured)
    assert made.request.modules[0].context_split == "zigzag"
    assert any("no batch at hand shows the masks" in note for note in made.shardings[0].notes)


def test_a_split_may_be_written_out():
    module = ModuleSpec(("",), (0, 1), Parallel(context=2), None, "0:2,6:8|2:6")
    assert module.context_split == "0:2,6:8|2:6"
    for wrong in ("0:2|2:6|6:8", "0:2,6:8|3:6", "balanced", 3):
        with pytest.raises(RequestError, match=r"context_split: expected one of .*'0:2,6:8\|2:6'"):
            replace(module, context_split=wrong)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "lengths", "context", "exchange"),
    [
        ("sliding", LENGTHS, 2, "needed"),
        slow("full", (4, 9, 2), 4, "gather"),
        slow("chunked", (11, 30, 6), 4, "needed"),
        slow("full", LENGTHS, 3, "auto"),
    ],
)
def test_packed_documents(name, lengths, context, exchange):
    assert_passed(check(name, [documents(*lengths)], packed, context, "planned", exchange))


def checkered(b, h, q, k):
    return (k <= q) & ((q + k) % 2 == 0)


def test_a_dense_mask_skips_no_work_and_is_planned_as_if_all_were_seen(monkeypatch):
    monkeypatch.setitem(KINDS, "checkered", lambda *ids: checkered)
    asked, work = request(3, "planned"), workload("checkered", 2, (50,))
    model = ready_model(asked, deepcopy(work.model))
    made = Compiler(asked, model).step([{1: (work.collate(work.samples),)}]).plans[0]
    assert Split.parse(made.request.modules[0].context_split).sizes == (17, 17, 16)
    (note,) = (n for n in made.shardings[0].notes if n.startswith("context: 50 tokens"))
    assert "2 attentions have a dense mask, which spares neither work nor keys" in note
    assert_passed(verify(asked, work, in_process=True))


@pytest.mark.slow
def test_samples_with_masks_of_their_own():
    assert_passed(check("full", [text(13, 1), text(6, 2)], padded("right"), 3, "planned"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "context"), [("gemma3", 2), ("gemma3", 4), ("qwen2_5_vl", 2)])
def test_image_blocks(family, context):
    samples = workload_of(family).samples[:2]
    assert_passed(multimodal(family, samples, context, "planned", encoders=2))
