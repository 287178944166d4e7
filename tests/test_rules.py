"""Every operator of the zoo has a rule, and every strategy that a rule gives is right."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.graph import is_element
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import prepare
from mllm_compile.passes.sharding import rules
from mllm_compile.passes.sharding.refine import refine
from mllm_compile.passes.sharding.rules import WHOLE, factors_of, name_of
from mllm_compile.passes.sharding.rules_dims import along, reduced
from mllm_compile.passes.sharding.rules_pointwise import linear, pointwise
from mllm_compile.passes.sharding.strategies import Gradients, strategies
from tests.families import FAMILIES
from tests.rule_check import check, continuous, instances
from tests.test_capture_families import doubled

pytest.importorskip("transformers")

# Even parts, and parts of all sizes, none among them, in an order of their own.
AXES = (MeshAxis("tensor", 2), MeshAxis("tensor", 3), MeshAxis("context", 3, "zigzag"))

# Together they have every operator of the zoo.
CHECKED = (
    *("kimi_k25", "phi4_multimodal", "llama4", "mllama", "qwen3_5", "gemma4", "lfm2_vl"),
    *("qwen2_5_omni", "got_ocr2", "smolvlm", "mistral3", "glm4v", "custom"),
)

# Calls of operators that have a rule for others: no shape of the argument stands in the result.
DECLINED = {"aten::new_empty"}


def captured(name):
    """The program of a family's first microbatch, and the values of its inputs."""
    workload = FAMILIES[name]()
    model = workload.model.double()
    batch = doubled(workload.collate(workload.samples[:2]))
    program = capture(model, batch, lift=torch.float64)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    prepared = prepare(program, batch, dict(model.named_buffers()))
    inputs = [
        state[item.name]
        if item.kind in ("parameter", "buffer")
        else prepared.values[item.kind, item.name]
        for item in program.inputs
    ]
    return program, inputs


def wrong_strategies(instance, factors):
    """What the strategies of one call get wrong, and how many were tried."""
    whole = instance.run(instance.values)
    results = tuple(any(instance.gradients) and continuous(result) for result in whole)
    gradients = Gradients(instance.gradients, results)
    found = {s: a for a in reversed(AXES) for s in strategies(factors, a, gradients)}
    values = [value for value in (*instance.values, *whole) if continuous(value)]
    overflow = any(value.abs().max() > 1e100 for value in values if value.numel())
    wrong = []
    for strategy, axis in found.items():
        if overflow and strategy.name == "linear":
            continue
        try:
            check(instance, strategy, axis)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            wrong.append(f"{instance.node.format_node()}\n{axis}\n{strategy}\n{reason}")
    return wrong, len(found)


def kind(instance, factors):
    """What tells calls apart that a rule treats alike: all but the sizes."""
    dtypes = [value.dtype for value in instance.values]
    flags = [argument for argument in instance.node.args if isinstance(argument, bool | str)]
    dims = factors.inputs, factors.results, factors.whole, factors.special, factors.linear
    return str((instance.node.target, dtypes, flags, instance.gradients, dims))


@pytest.fixture(scope="module")
def seen():
    return set()


def assert_rule_or_reason(program):
    for node in program.main.graph.nodes:
        if node.op == "call_function" and not is_element(node) and factors_of(node) is None:
            assert name_of(node) in {*WHOLE, *DECLINED}, node.format_node()


@pytest.mark.parametrize("name", CHECKED)
def test_every_strategy_of_every_operator(name, seen):
    program, inputs = captured(name)
    assert_rule_or_reason(program)
    factors = refine(program.main.graph.nodes).factors
    tried, wrong = 0, []
    for instance in instances(program.main, inputs):
        known = factors.get(instance.node)
        undefined = instance.node.target is torch.ops.aten.empty_like.default
        if known is None or undefined or (key := kind(instance, known)) in seen:
            continue
        seen.add(key)
        errors, count = wrong_strategies(instance, known)
        wrong, tried = [*wrong, *errors], tried + count
    assert not wrong, "\n\n".join(wrong[:10])
    assert tried


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CHECKED])
def test_every_operator_has_a_rule_or_a_reason(name):
    workload = FAMILIES[name]()
    model = workload.model.double()
    program = capture(model, doubled(workload.collate(workload.samples[:2])), lift=torch.float64)
    assert_rule_or_reason(program)


def test_an_unknown_operator_has_no_rule():
    (node,) = [n for n in make_fx(torch.linalg.inv)(torch.eye(2)).graph.nodes if "inv" in n.name]
    assert name_of(node) not in {*WHOLE, *DECLINED}
    assert factors_of(node) is None


WRONG = {
    "a softmax needs the whole row": ("aten::_softmax", pointwise),
    "a running sum needs what is before": ("aten::cumsum", along("dim", "0", " ")),
    "maxima of parts do not add up": ("aten::amax", reduced("")),
    "the root of a sum is not the sum of roots": ("aten::rsqrt", linear("0")),
    "a bias is added once": ("aten::addmm", "n, m k, k n -> m n"),
    "a product is linear in one factor at a time": ("aten::mul", "..., ... -> ... | 0+1"),
    "an index counts from the start": ("aten::index_select", "i h, i -> i h | 0"),
}


def every_operator(x, weight, bias, index):
    rows = torch.addmm(bias, x, weight)
    rows = rows * x + torch.softmax(rows, 1).cumsum(1)
    rows = rows * (rows * rows + 1).sum(1, keepdim=True).rsqrt()
    return rows.index_select(0, index) + rows.amax(1, keepdim=True)


def small_instances(function, *inputs):
    graph = make_fx(function)(*inputs)
    return instances(graph, [x.requires_grad_() if continuous(x) else x for x in inputs])


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


ORDER = torch.tensor([3, 0, 5, 1, 1, 4])
KEPT = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0]]).bool()
aten = torch.ops.aten

# Forms of operators that the families above do not have, and the factors they must leave free.
FORMS = {
    "rows kept by a mask": (
        aten.masked_scatter,
        (normal(2, 6, 4), KEPT[..., None], normal(5, 4)),
        3,
    ),
    "depthwise": (
        lambda x, w, b: aten.convolution(x, w, b, [1], [1], [1], False, [0], 6),
        (normal(2, 6, 5), normal(12, 1, 3), normal(12)),
        3,
    ),
    "one place at a time": (
        lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], False, [0], 1),
        (normal(2, 6, 8), normal(4, 6, 1), normal(4)),
        4,
    ),
    "repeated dims": (lambda x: x.repeat(3, 2, 1), (normal(4, 6),), 2),
    "rows added": (lambda x, s: x.index_add(0, ORDER, s), (normal(6, 4), normal(6, 4)), 2),
    "values added": (
        lambda x, v: aten.index_put(x, [ORDER], v, True),
        (normal(6, 4), normal(6, 4)),
        2,
    ),
    "one dim picked from": (lambda x: x.gather(1, ORDER[None].expand(4, 6)), (normal(4, 8),), 2),
    "indices apart": (lambda x: x[ORDER, :, ORDER], (normal(6, 4, 6),), 2),
    "dims without a common boundary": (lambda x: x.view(2, 10, 6, 2), (normal(2, 4, 15, 2),), 2),
    "a mean over parts": (lambda x: x.mean((0, 2)), (normal(4, 6, 5),), 3),
    "counts": (lambda x: torch.histc(x, 4, -2.0, 2.0), (normal(12),), 1),
    "joined with nothing": (lambda n, x: aten.cat([n, x], 1), (normal(0), normal(4, 6)), 2),
    "joined with nothing and more": (
        lambda n, x, y: aten.cat([n, x, y], 1),
        (normal(0), normal(4, 6), normal(4, 2)),
        1,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_strategy_of_a_form(form):
    function, inputs, free = FORMS[form]
    (instance,) = list(small_instances(lambda *args: function(*args), *inputs))[-1:]
    factors = factors_of(instance.node)
    assert len(factors.sizes.keys() - factors.whole) == free
    assert wrong_strategies(instance, factors)[0] == []


def test_a_mask_of_single_elements_leaves_nothing_free():
    mask = normal(2, 6, 4) > 0
    (instance,) = small_instances(aten.masked_scatter, normal(2, 6, 4), mask, normal(12, 4))
    assert factors_of(instance.node) is None


@pytest.mark.parametrize("reason", [None, *WRONG])
def test_a_wrong_rule_is_caught(reason, monkeypatch):
    target, rule = WRONG.get(reason, ("", None))
    monkeypatch.setitem(rules.RULES, target, rule)
    inputs = normal(6, 6), normal(6, 6) / 2, normal(6), ORDER
    wrong = {
        name_of(instance.node)
        for instance in small_instances(every_operator, *inputs)
        if wrong_strategies(instance, factors_of(instance.node))[0]
    }
    assert wrong == ({target} if reason else set())
