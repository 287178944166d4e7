"""What a captured program says about itself, and that it computes what the model computes."""

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import GuardError
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs, prepare
from tests.captures import Outcome, outcome


class Tied(nn.Module):
    """An embedding tied to the head, a buffer that is updated, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids, labels):
        self.steps.add_(1)
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied_batch(seed, length=6):
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 50, (2, length), generator=g),
        "labels": torch.randint(0, 50, (2, length), generator=g),
    }


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    model = Tied().double()
    return model, capture(model, tied_batch(0))


def test_every_node_says_where_it_comes_from(tied):
    _, program = tied
    calls = [node for node in program.main.graph.nodes if node.op == "call_function"]
    assert {node.op for node in program.main.graph.nodes} == {
        "placeholder",
        "call_function",
        "output",
    }
    for node in calls:
        assert set(node.meta) == {"val", "owner", "grad", "where"}, node
        assert node.meta["where"].startswith("test_capture.py:"), node.meta
    assert {node.meta["owner"] for node in calls} == {"", "embed", "body", "head"}


def test_tied_weights_are_one_parameter_and_buffers_are_updated(tied):
    model, program = tied
    kinds = {item.name: item.kind for item in program.inputs}
    assert "head.weight" not in kinds
    assert kinds["embed.weight"] == "parameter"
    assert program.updates == ("steps",)
    assert model.steps.item() == 0


def test_another_batch_is_exact_and_a_misfit_is_named(tied):
    model, program = tied
    assert outcome(model, program, tied_batch(1)) is Outcome.EXACT
    with pytest.raises(
        GuardError, match=r"batch entry 'ids': expected .*\(2, 6\).* got .*\(2, 7\)"
    ):
        prepare(program, tied_batch(1, 7), dict(model.named_buffers()))


def test_programs_are_captured_once_per_signature(tied):
    programs = Programs(tied[0])
    first = programs.get(tied_batch(0)).program
    assert programs.get(tied_batch(1)).program is first
    assert programs.get(tied_batch(1, 7)).program is not first
    assert len(programs.captured) == 2
