import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from mllm_compile.backend import compile_graph
from mllm_compile.graph_breaks import GraphBreakWarning
from tests.families import FAMILIES

SLOW = pytest.mark.slow
ONE_GRAPH = [
    "whisper_llama",
    "custom",
    "gemma3",
    *(pytest.param(name, marks=SLOW) for name in ("qwen2_audio", "llama4", "vision_audio_llm")),
]
IN_PARTS = ["llava", *(pytest.param(name, marks=SLOW) for name in ("internvl", "smolvlm"))]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Spy:
    """The backend, and every graph it was given."""

    def __init__(self, **options):
        self.graphs = []
        self.options = options

    def __call__(self, graph, example_inputs):
        self.graphs.append(compile_graph(graph, example_inputs, options=self.options))
        return self.graphs[-1]

    @property
    def programs(self):
        return [p for graph in self.graphs for kept in graph.programs.values() for p in kept]


def loss_of(output):
    return output if torch.is_tensor(output) else output.loss


def assert_equal_gradients(model, reference, tolerance=1e-10):
    pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
    for (name, ours), plain in pairs:
        frozen = not plain.requires_grad
        assert not frozen or ours.grad is None, name
        if plain.grad is None:  # only results that nobody used are reached from it
            assert ours.grad is None or not ours.grad.any(), name
        else:
            assert ours.grad is not None, name
    total = sum(plain.grad.norm() ** 2 for _, plain in pairs if plain.grad is not None) ** 0.5
    for (name, ours), plain in pairs:
        if plain.grad is not None:
            error = (ours.grad - plain.grad).norm() / max(plain.grad.norm(), 1e-5 * total)
            assert error <= tolerance, (name, error.item())


def family(name, starts=(0,)):
    """The model in float64 after a first eager call (HF builds caches in it), and batches."""
    workload = FAMILIES[name]()
    model = workload.model.double()
    batches = []
    for start in starts:
        batch = workload.collate(list(workload.samples[start : start + 2]))
        double = {
            k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in batch.items()
        }
        batches.append(double)
    with torch.no_grad():
        model(**batches[0])
    return model, batches


def check_family(name, freeze=(), fullgraph=True, **options):
    model, batches = family(name)
    for path, parameter in model.named_parameters():
        if path.startswith(freeze) and freeze:
            parameter.requires_grad_(False)
    reference, spy = copy.deepcopy(model), Spy(**options)
    compiled = torch.compile(model, backend=spy, fullgraph=fullgraph)
    for batch in batches:
        loss, plain = loss_of(compiled(**batch)), loss_of(reference(**batch))
        assert abs(loss - plain) <= 1e-12 * abs(plain)
        assert loss.requires_grad == plain.requires_grad
        if plain.requires_grad:
            loss.backward()
            plain.backward()
        assert_equal_gradients(model, reference)
    return spy


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_a_model_that_dynamo_traces_as_one_graph(name):
    check_family(name)


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_between_graph_breaks_still_give_the_gradients_of_the_whole(name):
    with pytest.warns(GraphBreakWarning) as caught:
        spy = check_family(name, fullgraph=False)
    assert len(spy.graphs) > 1
    message = str(caught[0].message)
    assert ".py:" in message
    assert "mllm_compile.capture" in message


@pytest.mark.parametrize("freeze", [("audio.",), ("llm",), ("audio", "llm")])
def test_frozen_parts_get_no_gradient(freeze):
    check_family("whisper_llama", freeze=freeze)


class Blocks(nn.Module):
    """Batch norm, a counter, a custom output structure; ``limit`` makes the host read a tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleDict({"a b": nn.Linear(4, 1)})
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def hidden(self, x):
        self.calls += 1
        for layer in self.layers:
            x = torch.relu(self.norm(layer(x)))
        return x

    def forward(self, x):
        x = self.hidden(x)
        with torch.no_grad():
            y = x * 2
        return {"loss": self.heads["a b"](x + y).mean(), "logits": (x, y)}


def pair(cls=Blocks):
    model = cls().double()
    return model, copy.deepcopy(model)


def test_several_outputs_and_buffer_updates():
    model, reference = pair()
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.double)
        ours, plain = compiled(x), reference(x)
        assert torch.equal(ours["loss"], plain["loss"])
        assert torch.equal(ours["logits"][1], plain["logits"][1])
        assert not ours["logits"][1].requires_grad
        (ours["loss"] + ours["logits"][0].square().sum()).backward()
        (plain["loss"] + plain["logits"][0].square().sum()).backward()
        assert_equal_gradients(model, reference)
    for ours, plain in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, plain)
    assert model.calls == 3


def test_without_gradients_and_in_evaluation():
    model, reference = pair()
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    x = torch.randn(3, 4, dtype=torch.double)
    with torch.no_grad():
        assert torch.equal(compiled(x)["loss"], reference(x)["loss"])
        assert not compiled(x)["loss"].requires_grad
    reference(x)
    model.eval()
    reference.eval()
    with torch.inference_mode():
        assert torch.equal(compiled(x)["loss"], reference(x)["loss"])
    assert all(p.grad is None for p in model.parameters())


def test_an_input_that_requires_grad_gets_its_gradient():
    model, reference = pair()
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    compiled(x)["loss"].backward()
    reference(z)["loss"].backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-12, atol=1e-14)


def test_an_input_that_the_model_writes_into_is_written():
    def function(x, weight):
        x.mul_(2)
        return (x * weight).sum()

    weight = torch.randn(4, dtype=torch.double, requires_grad=True)
    x = torch.randn(4, dtype=torch.double)
    expected = 2 * x
    torch.compile(function, backend=compile_graph, fullgraph=True)(x, weight).backward()
    assert torch.equal(x, expected)
    assert torch.equal(weight.grad, expected)


def test_the_parameters_of_another_instance_are_used_not_remembered():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.parts[1](self.parts[0](x).relu()).sum()

    model, reference = pair(Twice)
    for part in model.parts:
        part.compile(backend=compile_graph)
    x = torch.randn(2, 4, dtype=torch.double)
    model(x).backward()
    reference(x).backward()
    assert_equal_gradients(model, reference)


def test_a_guarded_value_that_differs_is_captured_again():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.linear(x)[mask].square().sum()

    model, reference = pair(Counts)
    spy = Spy()
    x = torch.randn(5, 4, dtype=torch.double)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend=spy, fullgraph=True)
        for rows in (2, 3, 2, 0):
            mask = torch.arange(5) < rows
            compiled(x, mask).backward()
            reference(x, mask).backward()
            assert_equal_gradients(model, reference)
    assert len(spy.graphs) == 1
    assert len(spy.programs) == 3


def test_shapes_may_change():
    model, reference = pair()
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    for rows in (3, 5, 7, 3):
        x = torch.randn(rows, 4, dtype=torch.double)
        compiled(x)["loss"].backward()
        reference(x)["loss"].backward()
        assert_equal_gradients(model, reference)


def test_nodes_know_their_module_and_source_line():
    model, _ = pair()
    spy = Spy()
    torch.compile(model, backend=spy, fullgraph=True)(torch.randn(3, 4, dtype=torch.double))
    (program,) = spy.programs
    captured = program.captured
    names = {item.name for item in captured.inputs if item.kind == "parameter"}
    assert names == {name for name, _ in model.named_parameters()}
    nodes = [n for n in captured.main.graph.nodes if n.op == "call_function"]
    owners = {node.meta["owner"] for node in nodes}
    assert {"layers.0", "layers.1", "norm", "heads.a b"} <= owners
    assert all(re.match(r"test_backend.py:\d+ (hidden|forward)$", n.meta["where"]) for n in nodes)


def test_a_break_inside_a_loop_names_the_function_that_runs_uncompiled():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(4, 4), Layer(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                if x.sum().item() > 1e9:
                    x = x * 2
            return x.sum()

    model, reference = pair(Breaks)
    x = torch.randn(2, 4, dtype=torch.double)
    with pytest.warns(GraphBreakWarning, match=r"test_backend.py:\d+ forward: .*graph break"):
        torch.compile(model, backend=compile_graph)(x).backward()
    reference(x).backward()
    assert_equal_gradients(model, reference)


def test_one_graph_is_no_break():
    model, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphBreakWarning)
        torch.compile(model, backend=compile_graph)(torch.randn(3, 4, dtype=torch.double))


def test_inductor_compiles_forward_and_backward():
    model, reference = pair()
    options = {"compile": "inductor"}
    compiled = torch.compile(model, backend=compile_graph, options=options, fullgraph=True)
    x = torch.randn(3, 4, dtype=torch.double)
    compiled(x)["loss"].backward()
    reference(x)["loss"].backward()
    assert_equal_gradients(model, reference)


@pytest.mark.parametrize("options", [{"plan": "x"}, {"compile": "nvcc"}])
def test_unknown_options_are_refused(options):
    model, _ = pair()
    compiled = torch.compile(model, backend=compile_graph, options=options)
    with pytest.raises(BackendCompilerFailed, match="options of the backend mllm: expected comp"):
        compiled(torch.randn(3, 4, dtype=torch.double))
