"""What a captured program says about itself, and that it computes what the model computes."""

import gc
import threading

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import CaptureError, GuardError
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs, prepare, run
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


class Any(nn.Module):
    """A model of any forward over any batch."""

    def __init__(self, forward):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = forward

    def forward(self, **batch):
        return self.call(self, **batch)


def rows(seed=0, count=3):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, dtype=torch.float64, generator=g)


def test_entries_of_every_kind_are_told_apart():
    """Tensors may change in value; numbers, strings, None and structure are part of the program."""

    def forward(model, x, images, mode, factor, flags, mask=None, unused=None):
        hidden = model.linear(x).relu() if mode == "relu" else model.linear(x)
        hidden = hidden * factor + images[0] + images[1].sum() + flags["shift"]
        return hidden.pow(2).mean() if mask is None else hidden[mask].pow(2).mean()

    def batch(seed, **changes):
        made = {
            "x": rows(seed),
            "images": [rows(seed + 1), rows(seed + 2, 2)],
            "mode": "relu",
            "factor": 2.5,
            "flags": {"shift": True, "name": None},
            "unused": rows(seed + 3, 0),
        }
        return {**made, **changes}

    model = Any(forward).double()
    program = capture(model, batch(0))
    names = {item.name for item in program.inputs if item.kind == "batch"}
    assert names == {"x", "images.0", "images.1", "unused"}
    assert outcome(model, program, batch(5)) is Outcome.EXACT
    misfits = {
        "mode": {"mode": "none"},
        "factor": {"factor": 3.5},
        "mask": {"mask": rows() > 0},
        "flags.shift": {"flags": {"shift": 1, "name": None}},
        "images.1": {"images": [rows(), rows(0, 3)]},
        "x": {"x": rows().float()},
    }
    for name, change in misfits.items():
        with pytest.raises(GuardError, match=name):
            prepare(program, batch(5, **change), {})
    with pytest.raises(CaptureError, match="'mode': expected a tensor, a number"):
        capture(model, batch(0, mode=object()))


def test_strides_are_part_of_the_signature_where_they_mean_something():
    model = Any(lambda model, x: model.linear(x.reshape(-1, 4)).pow(2).mean()).double()
    transposed = rows(0, 4).T
    program = capture(model, {"x": transposed})
    assert outcome(model, program, {"x": rows(1, 4).T}) is Outcome.EXACT
    assert outcome(model, program, {"x": rows(1, 4)}) is Outcome.REJECTED
    one = capture(model, {"x": rows(0, 1)})
    assert outcome(model, one, {"x": rows(1, 8)[3:4]}) is Outcome.EXACT


def test_a_guard_names_its_kind_line_inputs_and_both_values():
    def forward(model, x, ids):
        return model.linear(x[ids == 3]).pow(2).mean()

    model = Any(forward).double()
    program = capture(model, {"x": rows(), "ids": torch.tensor([3, 1, 3])})
    (guard,) = program.guards
    assert (guard.kind, guard.value, guard.inputs) == ("size", 2, ("ids",))
    message = r"size read at test_capture\.py:\d+ forward from ids: expected 2, got 1"
    with pytest.raises(GuardError, match=message):
        prepare(program, {"x": rows(), "ids": torch.tensor([3, 1, 2])}, {})


def test_entries_that_share_memory_may_not_be_written():
    def forward(model, x, y):
        x.mul_(2)
        return model.linear(x + y).pow(2).mean()

    model, shared = Any(forward).double(), rows()
    with pytest.raises(CaptureError, match="'x' and 'y': got shared memory"):
        capture(model, {"x": shared, "y": shared})
    assert outcome(model, capture(model, {"x": shared, "y": rows(1)}), {"x": rows(2), "y": rows(3)})


def test_several_outputs_on_request():
    def forward(model, x):
        hidden = model.linear(x)
        return hidden, hidden.pow(2).mean()

    model = Any(forward).double()
    program = capture(model, {"x": rows()}, outputs=lambda result: result)
    assert program.num_outputs == 2
    assert not program.splittable
    state = dict(model.named_parameters())
    made = run(program, state, prepare(program, {"x": rows(1)}, {}))
    for got, want in zip(made, model(x=rows(1)), strict=True):
        torch.testing.assert_close(got, want)


def test_a_model_without_data_gives_the_same_program():
    torch.manual_seed(0)
    real = Tied().double()
    with torch.device("meta"):
        empty = Tied().double()
    programs = [capture(model, tied_batch(0)) for model in (real, empty)]
    listings = [[node.format_node() for node in item.main.graph.nodes] for item in programs]
    assert listings[0] == listings[1]
    assert outcome(real, programs[1], tied_batch(1)) is Outcome.EXACT


def test_programs_stay_valid_after_later_captures_and_between_threads():
    def forward(model, ids):
        return model.linear(rows_by_loop(ids)).pow(2).mean()

    model = Any(forward).double()
    batches = [{"ids": torch.tensor([seed, 2, 3])} for seed in range(4)]
    programs = []
    threads = [
        threading.Thread(target=lambda: programs.append(capture(model, batches[0])))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(programs) == 3
    for program in programs:
        assert all(outcome(model, program, batch) is Outcome.EXACT for batch in batches)
        assert program.report.hoisted == ("test_capture.rows_by_loop",)


def rows_by_loop(ids):
    return torch.tensor([[float(i * k) for k in range(4)] for i in ids.tolist()]).double()


def test_a_changed_constant_is_noticed_and_guards_are_compared_over_samples():
    def forward(model, x):
        return model.linear(x).pow(2).mean() * (2 if model.switch[0] > 0 else 1)

    model = Any(forward).double()
    model.switch = torch.ones(1)
    programs = Programs(model)
    assert programs.get({"x": rows()}).program is programs.get({"x": rows(1)}).program
    model.switch.zero_()
    assert programs.get({"x": rows()}).program is programs.captured[1]
    ((label, values),) = programs.varying_guards()
    assert "constant_0" in label
    assert values == (True, False)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled):
    before = gc.isenabled()
    if not enabled:
        gc.disable()
    try:
        capture(Tied().double(), tied_batch(0))
        assert gc.isenabled() is enabled
        with pytest.raises(CaptureError):
            capture(nn.Linear(2, 2), {"input": torch.ones(2, 2)})  # no loss
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_a_helper_that_took_the_place_of_another_is_hoisted_too():
    def make(factor):
        def helper(ids):
            return torch.tensor([[float(i * k * factor) for k in range(4)] for i in ids.tolist()])

        return helper

    model = Any(lambda model, ids: model.linear(model.helper(ids).double()).pow(2).mean()).double()
    batch, other = ({"ids": torch.tensor([seed, 2, 3])} for seed in (1, 4))
    for factor in (1.0, 2.0):
        model.helper = make(factor)
        program = capture(model, batch)
        assert len(program.report.hoisted) == 1
        assert outcome(model, program, other) is Outcome.EXACT
