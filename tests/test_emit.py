"""Lowered graphs name the kernels of their attentions: text, choice, law, operator."""

import pytest
import torch

from mllm_compile.compiler.errors import PlanError
from mllm_compile.kernels.attention import op
from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.attention.gpu.table import Config
from mllm_compile.kernels.attention.kernel import (
    BACKWARD,
    FORWARD,
    Kernel,
    backward_of,
    chosen,
    target_of,
)
from mllm_compile.kernels.attention.site import Site
from mllm_compile.passes.lower.differentiate import differentiate
from mllm_compile.passes.lower.emit import KERNELS, attentions_name_their_kernels, emit, site_of
from mllm_compile.passes.lower.extract import StageGraph

SITES = [
    Site("bfloat16", 128, 128),
    Site("float32", 20, 24, 2, mask=True),
    Site("float16", 64, 64, 1, bias=True, softcap=True),
    Site("float64", 3, 300, 2, True, True, True),
]


def a_call(dtype=torch.bfloat16, size=64, length=40, count=1, mask=False, scale=0.1, softcap=0.0):
    q = torch.zeros(2, 4, length, size, dtype=dtype)
    k = torch.zeros(2, 2, length, size, dtype=dtype)
    intervals = torch.zeros(1, length, count, 2, dtype=torch.int32)
    dense = torch.ones(1, 1, length, length, dtype=torch.bool) if mask else None
    return q, k, k, intervals, dense, None, scale, softcap


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize(
    "tiles",
    [(), (("dq", (Config(128, 64, 8, 2, True), Config(16, 32))), ("dkv", (Config(64, 64, 4, 3),)))],
)
def test_text_is_exact_in_both_directions(site, tiles):
    kernel = Kernel("triton", "sm90", site, tiles)
    assert Kernel.parse(str(kernel)) == kernel
    assert Site.parse(str(site)) == site


@pytest.mark.parametrize("text", ["", "bfloat16", "bfloat16 64x64 i1+sink", "bf 1x2x3 i1"])
def test_other_text_is_no_site(text):
    with pytest.raises(ValueError):  # noqa: PT011  whichever part fails first
        Site.parse(text)


@pytest.mark.parametrize("text", ["64x64", "64x64w4s2tmb", "64x64w4"])
def test_other_text_is_no_configuration(text):
    with pytest.raises(ValueError, match="no kernel configuration"):
        Config.parse(text)


def test_what_is_chosen():
    how = {
        "cpu": chosen("cpu", FORWARD, *a_call(torch.float64)).how,
        "cpu, softcap": chosen("cpu", FORWARD, *a_call(torch.float64, softcap=5.0)).how,
        "sm90": chosen("sm90", FORWARD, *a_call()).how,
        "sm90, float64": chosen("sm90", FORWARD, *a_call(torch.float64)).how,
        "sm90, head size 257": chosen("sm90", FORWARD, *a_call(size=257)).how,
        "sm90, no scale": chosen("sm90", FORWARD, *a_call(scale=0.0)).how,
        "mps": chosen("mps", FORWARD, *a_call()).how,
    }
    assert [name for name, value in how.items() if value == "definition"] == [
        "cpu, softcap",
        "sm90, float64",
        "sm90, head size 257",
        "sm90, no scale",
        "mps",
    ]
    assert (how["cpu"], how["sm90"]) == ("fused", "triton")


@pytest.mark.parametrize("target", table.TARGETS)
def test_kernels_name_their_tilings(target):
    kernel = chosen(target, BACKWARD, *a_call(count=2, mask=True))
    assert kernel.site == Site("bfloat16", 64, 64, 2, mask=True)
    assert [name for name, _ in kernel.tiles] == ["dq", "dkv"]
    assert all(configs for _, configs in kernel.tiles)


def a_stage(frozen=False):
    """Two attentions of one stage: one causal by position, one with two intervals and a mask."""

    def function(q, k, v, intervals, mask):
        first = op.attention(q, k, v, None, None, None, True, 0.5, 0.0)[0]
        return (op.attention(first, k, v, intervals, mask, None, False, 0.5, 0.0)[0],)

    q, k, v, intervals, mask = a_call(torch.float64, 8, 6, 2, mask=True)[:5]
    v = v.clone()
    names = ["%q", "%k", "%v", "x:batch:intervals", "x:batch:mask"]
    graph = _traced(function, q, k, v, intervals, mask)
    trained = () if frozen else ("%q", "%k", "%v")
    down = () if frozen else ("%out",)
    return StageGraph(graph, tuple(names), ("%out",), (), trained, down, None)


def _traced(function, *arguments):
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*arguments)


def attentions(segments):
    return [
        node
        for each in (segments.forward, segments.input_grad, segments.weight_grad)
        if each is not None
        for node in each.graph.graph.nodes
        if node.target in KERNELS
    ]


@pytest.mark.parametrize("target", ["cpu", "sm90", "gfx942"])
def test_every_attention_names_its_kernel_forward_and_backward(target):
    segments = differentiate(emit(a_stage(), target))
    found = attentions(segments)
    assert len(found) == 4
    attentions_name_their_kernels(segments, target, 0)
    assert [str(site_of(node)) for node in found] == [
        "float64 8x8 i1",
        "float64 8x8 i2+mask",
        "float64 8x8 i2+mask",
        "float64 8x8 i1",
    ]


def test_what_does_not_train_names_its_kernels_too():
    segments = differentiate(emit(a_stage(frozen=True), "cpu"))
    assert len(attentions(segments)) == 2
    attentions_name_their_kernels(segments, "cpu", 0)


def test_the_law_refuses_another_kernel_and_none():
    segments = differentiate(emit(a_stage(), "cpu"))
    with pytest.raises(PlanError, match=r"expected definition sm90 .*got fused cpu"):
        attentions_name_their_kernels(segments, "sm90", 0)
    with pytest.raises(PlanError, match="got no kernel"):
        attentions_name_their_kernels(differentiate(a_stage()), "cpu", 3)


def test_the_operator_refuses_a_call_of_another_site():
    q, k, v, intervals, *_ = a_call(torch.float64)
    name = str(chosen("cpu", FORWARD, *a_call(torch.float64)))
    out, _ = op.attention(q, k, v, intervals, None, None, False, 0.1, 0.0, name)
    assert out.shape == q.shape
    for wrong in (
        str(chosen("sm90", FORWARD, *a_call())),
        str(chosen("cpu", FORWARD, *a_call(torch.float64, count=2))),
        str(chosen("cpu", FORWARD, *a_call(torch.float64, softcap=2.0))),
    ):
        with pytest.raises(ValueError, match="lower the program again"):
            op.attention(q, k, v, intervals, None, None, False, 0.1, 0.0, wrong)


def test_the_backward_is_named_after_the_forward():
    call = a_call()
    name = str(chosen("sm90", FORWARD, *call))
    assert backward_of(name, *call) == str(chosen("sm90", BACKWARD, *call))
    assert backward_of("", *call) == ""


def test_targets_of_devices(monkeypatch):
    assert target_of(torch.device("cpu")) == "cpu"
    assert target_of(torch.device("mps")) == "mps"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert target_of(torch.device("cuda")) == "sm90"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert target_of(torch.device("cuda")) == "gfx942"
