"""Every family of the zoo: captured on one microbatch, exact on others or rejected by a guard."""

import copy

import pytest
import torch

from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.programs import prepare
from tests.captures import Outcome, outcome
from tests.families import FAMILIES

pytest.importorskip("transformers")


# These read the size of every clip or image on the host: each order of samples is a program.
READS_SIZES = ("qwen2_5_omni", "lfm2_vl")


def doubled(batch):
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def reference_of(model):
    """The same function with a float64 kernel for its experts."""
    reference = copy.deepcopy(model)
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")
    return reference


def other_batches(workload):
    """Batches of the first one's padded length: other samples, in other places, other padding."""
    length = [len(sample["input_ids"]) for sample in workload.samples]
    longest = max((0, 1), key=length.__getitem__)
    others = [i for i in range(2, len(length)) if length[i] <= length[longest]]
    pairs = [[1, 0], *([longest, i] for i in others), *([i, longest] for i in others)]
    return [doubled(workload.collate([workload.samples[i] for i in pair])) for pair in pairs]


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_on_other_microbatches_or_rejected(name):
    workload = FAMILIES[name]()
    model = workload.model.double()
    reference = reference_of(model)
    first = doubled(workload.collate(workload.samples[:2]))
    program = capture(model, first, lift=torch.float64)
    assert program.splittable, program.report.notes
    done = [
        outcome(model, program, batch, reference=reference, lift=torch.float64)
        for batch in (first, *other_batches(workload)[:5])
    ]
    assert done[0] is Outcome.EXACT
    assert Outcome.EXACT in done[1:] or name in READS_SIZES
    assert len(done) >= 4
    for node in program.main.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if node.op == "call_function":
            assert set(node.meta) == {"val", "owner", "grad", "where"}, node
            assert node.meta["where"], node
            model.get_submodule(node.meta["owner"])


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_lifted_program_agrees_to_the_last_digits(name):
    """Casts to float32 inside the model would leave differences of 1e-8."""
    workload = FAMILIES[name]()
    model = workload.model.double()
    batch = doubled(workload.collate(workload.samples[:2]))
    program = capture(model, batch, lift=torch.float64)
    assert not [n for n in program.main.graph.nodes if torch.float32 in n.kwargs.values()]
    assert outcome(model, program, batch, tolerance=1e-12, lift=torch.float64) is Outcome.EXACT
    with lifted(torch.float64):
        high = model(**batch).loss
    assert abs(high - model(**batch).loss) > 1e-12, "there was nothing to lift"


def test_a_step_of_another_familys_hoisted_values_would_be_noticed():
    """The control: hoisted positions of one batch are wrong for another one."""
    workload = FAMILIES["qwen2_5_vl"]()
    model = workload.model.double()
    first = doubled(workload.collate(workload.samples[:2]))
    program = capture(model, first)
    assert any("get_rope_index" in name for name in program.report.hoisted)
    buffers = dict(model.named_buffers())
    values = [
        prepare(program, batch, buffers).values for batch in (first, other_batches(workload)[0])
    ]
    hoisted = [key for key in values[0] if key[0] == "hoisted"]
    assert any(not torch.equal(values[0][key], values[1][key]) for key in hoisted)
