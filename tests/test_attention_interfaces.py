"""Models that are routed to the attention operator compute what the unmodified ones do."""

import functools
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile.compiler.errors import CaptureError
from mllm_compile.kernels.attention import mask as predicates
from mllm_compile.kernels.attention.reference import in_intervals
from mllm_compile.passes.capture.attention import attention_interfaces
from mllm_compile.passes.capture.attention_sites import TORCH_SDPA, AttentionSites
from mllm_compile.passes.capture.lift import lifted
from tests.families import FAMILIES
from tests.test_families import doubled, loss_of, plain

TOLERANCE = 1e-12


class Calls(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def run(model, batch):
    """(logits or loss, gradients) in float64."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = loss_of(output)
    loss.backward()
    value = output if torch.is_tensor(output) else output.logits
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), grads


def batch_of(workload, size=4):
    """Samples of different lengths, so right padding."""
    return doubled(workload.collate(list(workload.samples)[:size]))


def configs(model):
    return [m.config for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_computes_the_same(name):
    workload = FAMILIES[name]()
    batch = batch_of(workload)
    with plain(workload) as model:
        before = [getattr(c, "_attn_implementation", None) for c in configs(model)]
        want, reference = run(model, batch)
        with Calls() as calls, attention_interfaces(model) as sites:
            got, grads = run(model, batch)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert grads.keys() == reference.keys()
    everything = torch.stack([g.norm() for g in reference.values()]).norm()
    for parameter, expected in reference.items():
        error = (grads[parameter] - expected).norm() / expected.norm().clamp_min(1e-5 * everything)
        assert error <= 1e-11, (parameter, error.item())
    learned = sum("plain operators" in line for line in sites.lines)
    assert calls.names.count("mllm.attention") == len(sites.lines) - learned > 0
    assert not [name for name in calls.names if "scaled_dot_product" in name]
    assert [getattr(c, "_attn_implementation", None) for c in configs(model)] == before


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_equal_transformers_own(name, monkeypatch):
    """Every mask that transformers asks for, against its own dense one, and so are intervals."""
    from transformers.masking_utils import sdpa_mask

    compared = []
    original = AttentionSites.make_mask

    def both(self, *args, **kwargs):
        made = original(self, *args, **kwargs)
        want = sdpa_mask(
            *args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        if made is not None:
            assert torch.equal(made, want)
            seen, reason = self._origins[made].intervals, self._origins[made].reason
            assert (seen is None) == bool(reason)
            if seen is not None:
                assert torch.equal(in_intervals(seen, 0, want.shape[-1]).expand_as(want), want)
        compared.append(made)
        return made

    monkeypatch.setattr(AttentionSites, "make_mask", both)
    workload = FAMILIES[name]()
    batch = batch_of(workload)
    with plain(workload) as model, Calls() as calls, attention_interfaces(model) as sites:
        model(**batch)
    segments = {id(made) for *_, made in sites._segments}
    masks = sum(made is not None for made in compared)
    assert calls.names.count("mllm.mask") == masks + len(segments)


def test_equal_predicates_share_a_key():
    """Captures again and again leave one entry for a rule."""
    workload = FAMILIES["gemma3"]()
    sizes = []
    for size in (2, 4):
        with plain(workload) as model, attention_interfaces(model):
            model(**batch_of(workload, size))
        sizes.append(len(predicates.PREDICATES))
    assert sizes[0] == sizes[1]


def same_group(ids, other):
    return lambda batch, head, query, key: ids[batch, query] == other[batch, key]


def at_least(distance, batch, head, query, key):
    return query - key >= distance


def both_rules(*rules):
    def rule(*indices):
        return functools.reduce(torch.logical_and, [r(*indices) for r in rules])

    return rule


def test_predicate_tensors_are_taken_out_and_put_back():
    ids = torch.tensor([[0, 0, 1, 1]])
    rule = both_rules(same_group(ids, ids), functools.partial(at_least, 1))
    template, tensors = predicates.separate(rule)
    assert len(tensors) == 1
    assert tensors[0] is ids
    assert predicates.separate(template)[1] == []
    other = torch.tensor([[0, 1, 1, 1]])
    key = predicates.register(predicates.Predicate(template, 1))
    got = predicates.mask([other], key, 1, 4, 4, torch.device("cpu"))
    q, k = torch.arange(4)[:, None], torch.arange(4)[None]
    assert torch.equal(got[0, 0], (other[0][:, None] == other[0][None]) & (q - k >= 1))


class Keeper:
    def __init__(self):
        self.table = torch.zeros(3)

    def rule(self, batch, head, query, key):
        return self.table[query] >= self.table[key]


@pytest.mark.parametrize("bound", [True, False])
def test_hidden_tensors_are_refused(bound):
    keeper = Keeper()
    rule = keeper.rule if bound else lambda *indices: keeper.rule(*indices)
    with pytest.raises(ValueError, match="Keeper keeps tensors"):
        predicates.separate(rule)


def test_static_caches_are_refused():
    arguments = {**mask_arguments(None, False), "q_offset": torch.tensor(0)}
    with pytest.raises(CaptureError, match="use_cache=False"):
        AttentionSites().make_mask(**arguments)


def test_constants_tell_predicates_apart():
    def keyed(distance):
        rule = functools.partial(at_least, distance)
        return predicates.register(predicates.Predicate(predicates.separate(rule)[0], 0))

    assert keyed(1) == keyed(1) != keyed(2)


def test_scalar_predicate_is_mapped_with_offsets_and_padding():
    table = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]])

    def rule(batch, head, query, key):  # reduces over a row: not an index-wise function
        return table[batch, :2].sum() + table[batch, query] >= table[batch, key]

    template, tensors = predicates.separate(rule)
    padding = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1]])
    key = predicates.register(predicates.Predicate(template, 1, 2, 1, True, False))
    got = predicates.mask([*tensors, padding], key, 2, 3, 4, torch.device("cpu"))
    for b in range(2):
        for q in range(3):
            for k in range(4):
                want = rule(b, 0, q + 2, k + 1) and padding[b, k + 1] == 1
                assert got[b, 0, q, k] == want


def test_mask_operator_passes_opcheck():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    template, tensors = predicates.separate(same_group(ids, ids))
    key = predicates.register(predicates.Predicate(template, 1))
    torch.library.opcheck(predicates.mask, (tensors, key, 2, 4, 4, torch.device("cpu")))


# ------------------------------------------------------------ models outside of transformers


class Torch(nn.Module):
    """torch's own attention in its several spellings."""

    def __init__(self):
        super().__init__()
        self.heads = nn.MultiheadAttention(16, 4, batch_first=True)
        self.bias = nn.Parameter(torch.randn(1, 4, 6, 6) * 0.1)

    def forward(self, x, mask):
        sdpa = nn.functional.scaled_dot_product_attention
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        wide = sdpa(heads, heads[:, :2], heads[:, 2:], attn_mask=mask, enable_gqa=True)
        learned = sdpa(heads, heads, heads, attn_mask=self.bias, scale=0.3)
        single = sdpa(x, x, x, is_causal=True)
        shared = sdpa(heads[:1], heads, heads, attn_mask=mask.expand(2, 1, 6, 6))
        five = sdpa(heads[None], heads[None], heads[None])[0]
        mha = self.heads(x, x, x, need_weights=False)[0]
        parts = [wide, learned, single, shared, five, mha]
        return sum((part.square().mean() for part in parts), torch.zeros((), dtype=x.dtype))


def test_torch_attention_is_the_operator_too():
    torch.manual_seed(0)
    model = Torch().double()
    x, mask = torch.randn(2, 6, 16, dtype=torch.float64), torch.rand(6, 6) > 0.3
    want, reference = run(model, {"x": x, "mask": mask})
    with Calls() as calls, attention_interfaces(model) as sites:
        got, grads = run(model, {"x": x, "mask": mask})
    assert torch.allclose(got, want, rtol=TOLERANCE)
    for name, expected in reference.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-11, atol=1e-14)
    assert calls.names.count("mllm.attention") == 4
    assert sum("learned bias" in line for line in sites.lines) == 1
    assert nn.functional.scaled_dot_product_attention is TORCH_SDPA


def test_everything_is_put_back_after_an_error():
    from transformers import AttentionInterface, AttentionMaskInterface

    model = FAMILIES["llava"]().model
    registered = [dict(r._global_mapping) for r in (AttentionInterface, AttentionMaskInterface)]
    before = [c._attn_implementation for c in configs(model)]
    with pytest.raises(RuntimeError, match="stop"), attention_interfaces(model):
        raise RuntimeError("stop")
    assert [c._attn_implementation for c in configs(model)] == before
    assert registered == [
        dict(r._global_mapping) for r in (AttentionInterface, AttentionMaskInterface)
    ]
    assert nn.functional.scaled_dot_product_attention is TORCH_SDPA


# ------------------------------------------------------------ rules of transformers, one by one


class Module(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.is_causal = causal
        self.num_key_value_groups = 2
        self.layer_idx = 0


def heads(queries=6, keys=6):
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


def through_transformers(causal, padding, bidirectional, **extra):
    """What transformers' sdpa does with the mask it makes itself."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    made = sdpa_mask(**mask_arguments(padding, bidirectional))
    return sdpa_attention_forward(Module(causal), *heads(), made, scaling=0.3, **extra)[0]


def mask_arguments(padding, bidirectional):
    from transformers import masking_utils as hf

    rule = hf.bidirectional_mask_function if bidirectional else hf.causal_mask_function
    return {
        "batch_size": 2,
        "q_length": 6,
        "kv_length": 6,
        "mask_function": rule,
        "attention_mask": padding,
        "allow_is_causal_skip": not bidirectional,
        "allow_is_bidirectional_skip": bidirectional,
    }


FULL = torch.ones(2, 6, dtype=torch.bool)
SHORT = FULL.clone().index_put_((torch.tensor(1), torch.tensor([4, 5])), torch.tensor(False))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("padding", [None, FULL, SHORT], ids=["none", "full", "short"])
def test_dropped_masks_follow_the_module(causal, bidirectional, padding):
    """A trivial mask is dropped, and then ``is_causal`` alone decides; with padding it stays."""
    sites = AttentionSites()
    made = sites.make_mask(**mask_arguments(padding, bidirectional))
    got, _ = sites.attend(Module(causal), *heads(), made, scaling=0.3)
    want = through_transformers(causal, padding, bidirectional)
    assert (got - want).abs().max() <= 1e-14


@pytest.mark.parametrize("causal", [False, True])
def test_position_bias_as_transformers(causal):
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    for padding in (None, SHORT):
        sites = AttentionSites()
        made = sites.make_mask(**mask_arguments(padding, False))
        got, _ = sites.attend(Module(causal), *heads(), made, scaling=0.3, position_bias=bias)
        want = through_transformers(causal, padding, False, position_bias=bias)
        assert (got - want).abs().max() <= 1e-14
        (grad,) = torch.autograd.grad(got.square().sum(), bias)
        assert torch.allclose(grad, torch.autograd.grad(want.square().sum(), bias)[0])


def test_packed_segments_and_causal():
    """One call over packed segments is a call per segment."""
    q, k, v = (x[:1] for x in heads(10, 10))
    ends = torch.tensor([0, 3, 7, 10], dtype=torch.int32)
    for causal in (False, True):
        sites = AttentionSites()
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "is_causal": causal}
        got = sites.attend(Module(True), q, k, v, None, scaling=0.3, **packed)[0]
        pieces = [
            sites.attend(
                Module(True),
                *(x[:, :, a:b] for x in (q, k, v)),
                None,
                scaling=0.3,
                is_causal=causal,
            )[0]
            for a, b in itertools.pairwise(ends)
        ]
        assert (got - torch.cat(pieces, 1)).abs().max() <= 1e-14
    assert len(sites._segments) == 1


def test_sinks_and_softcap_as_in_eager_attention():
    """Extra logits in the softmax, and scores behind tanh: honoured, with their gradients."""
    q, k, v = heads()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    got, _ = AttentionSites().attend(
        Module(True), q, k, v, None, scaling=0.3, s_aux=sinks, softcap=0.9
    )
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 0.9 * torch.tanh(q @ keys.transpose(-1, -2) * 0.3 / 0.9)
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 6, 1)], -1)
    want = (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)
    assert (got - want).abs().max() <= 1e-14
    variables = (q, k, v, sinks)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def through_eager(module, padding, bidirectional, variables, dropout=0.0, softcap=None, dense=None):
    """What transformers' eager attention does with the mask it makes itself."""
    from transformers.masking_utils import eager_mask
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    arguments = mask_arguments(padding, bidirectional)
    made = eager_mask(**arguments, dtype=torch.float64) if dense is None else dense
    with lifted(torch.float64):
        return eager_attention_forward(
            module, *variables, made, scaling=0.3, dropout=dropout, softcap=softcap
        )[0]


LEFT = SHORT.flip(1)
NOTHING = SHORT.clone().index_fill_(0, torch.tensor(1), False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize(
    "padding", [None, FULL, SHORT, LEFT, NOTHING], ids=["none", "full", "short", "left", "nothing"]
)
def test_eager_attention_as_in_transformers(causal, bidirectional, softcap, padding):
    """It knows masks alone; a query that sees nothing sees all keys alike, with gradients."""
    sites, variables = AttentionSites(), heads()
    made = sites.make_mask(**mask_arguments(padding, bidirectional), eager=True)
    got, _ = sites.attend(
        Module(causal), *variables, made, scaling=0.3, softcap=softcap, eager=True
    )
    want = through_eager(Module(causal), padding, bidirectional, variables, softcap=softcap)
    assert (got - want).abs().max() <= 1e-14
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    nothing_seen = padding is NOTHING or (padding is LEFT and not bidirectional)
    assert ("see no key" in sites.lines[0]) == nothing_seen


@pytest.mark.parametrize("rank", [2, 4])
def test_masks_of_the_models_own_in_eager_attention(rank):
    """Which keys are real, or numbers to add: of them, too, nothing may be left for a query."""
    sites, variables = AttentionSites(), heads()
    lowest = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    numbers = torch.where(NOTHING, 0.0, lowest)[:, None, None, :].expand(2, 1, 6, 6)
    mask = NOTHING if rank == 2 else numbers
    got, _ = sites.attend(Module(False), *variables, mask, scaling=0.3, eager=True)
    want = through_eager(Module(False), None, True, variables, dense=numbers)
    assert (got - want).abs().max() <= 1e-14
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("narrow", ["heads", "values", "nothing"])
def test_lowest_numbers_throughout_a_row_of_torchs_attention(narrow):
    """Where torch computes by its definition, so must the backward; fused ones lose the row's sum.

    The sum of equal weights vanishes in a log-sum-exp of the lowest number.
    """
    q, k, v = (x.detach() for x in heads())
    k, v = (x[:, :1] if narrow == "heads" else x.repeat_interleave(2, 1) for x in (k, v))
    v = v[..., :5] if narrow == "values" else v
    variables = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    mask[1, :, :2] = 0.0 if narrow == "nothing" else torch.finfo(torch.float64).min
    sites = AttentionSites()
    got, want = (attend(*variables, mask) for attend in (sites.from_sdpa, TORCH_SDPA))
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert ("plain operators" in sites.lines[0]) == (narrow != "nothing")


def test_dropout_becomes_plain_operators():
    sites = AttentionSites()
    q, k, v = heads()
    with Calls() as calls:
        torch.manual_seed(3)
        out, _ = sites.attend(Module(True), q, k, v, None, dropout=0.5)
    assert "mllm.attention" not in calls.names
    assert "dropout" in sites.lines[0]
    torch.manual_seed(4)
    assert not torch.equal(out, sites.attend(Module(True), q, k, v, None, dropout=0.5)[0])


def test_two_dimensional_mask_hides_keys():
    """What a model hands to flash kernels."""
    q, k, v = heads()
    got, _ = AttentionSites().attend(Module(False), q, k, v, SHORT.long(), scaling=0.3)
    want, _ = AttentionSites().attend(Module(False), q, k, v, SHORT[:, None, None, :], scaling=0.3)
    assert torch.equal(got, want)


def test_class_without_interface_keeps_its_operators():
    """Its own attention expects the mask of its own implementation."""
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import create_causal_mask

    class Own(PreTrainedModel):
        config_class = PreTrainedConfig

        def forward(self, x):
            mask = create_causal_mask(self.config, x, torch.ones(x.shape[:2]), None)
            return (x @ x.transpose(-1, -2) + mask[:, 0]).softmax(-1) @ x

    config = PreTrainedConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Own(config)
    x = torch.randn(1, 3, 4)
    want = model(x)
    with attention_interfaces(model):
        assert config._attn_implementation == "eager"
        assert torch.equal(model(x), want)
