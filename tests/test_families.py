"""The zoo itself: parts cover the model, and the plain model's loss splits over microbatches."""

from contextlib import contextmanager

import pytest
import torch

from mllm_compile.kernels.grouped_mm import GroupedProducts
from mllm_compile.passes.capture.lift import lifted
from tests.families import FAMILIES, MODULES


def doubled(batch):
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


@contextmanager
def plain(workload):
    """The unmodified model in float64, its casts to float32 lifted, its experts in float64 too."""
    with lifted(torch.float64), GroupedProducts():
        yield workload.model.double()


def loss_of(output):
    return output if torch.is_tensor(output) else output.loss


def valid_labels(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_cover_every_parameter_once(name):
    """Except parameters that a module around the parts holds itself, such as a line-end vector."""
    model = FAMILIES[name]().model
    paths = [path for part in MODULES[name] for path in part]
    for path in paths:
        model.get_submodule(path)
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        holder = parameter.rpartition(".")[0]
        owners = [path for path in paths if f"{holder}.".startswith(f"{path}.")]
        around = any(f"{path}.".startswith(f"{holder}." if holder else "") for path in paths)
        assert len(owners) == (0 if around and holder not in paths else 1), (parameter, owners)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_are_seeded_and_differ(name):
    first, second = FAMILIES[name](), FAMILIES[name]()
    assert len(first.samples) >= 8
    assert len({len(sample["input_ids"]) for sample in first.samples}) > 2
    for a, b in zip(first.samples, second.samples, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m.p for m in first.model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_the_label_weighted_mean_of_microbatches(name):
    """What the plain model computes does not depend on how samples are batched."""
    workload = FAMILIES[name]()
    samples = list(workload.samples)
    with plain(workload) as model:
        want, reference = weighted(model, workload, [samples])
        parts = [samples[i : i + 2] for i in range(0, len(samples), 2)]
        got, grads = weighted(model, workload, parts)
    assert got == pytest.approx(want, rel=1e-9)
    everything = torch.stack([g.norm() for g in reference.values()]).norm()
    assert grads.keys() <= reference.keys()
    for parameter, expected in reference.items():
        difference = grads.get(parameter, torch.zeros_like(expected)) - expected
        error = difference.norm() / expected.norm().clamp_min(1e-5 * everything)
        assert error <= 1e-9, (parameter, error.item())


def weighted(model, workload, parts):
    """Loss and gradients summed over parts, each weighted by its share of the labels."""
    batches = [doubled(workload.collate(part)) for part in parts]
    total = sum(map(valid_labels, batches))
    model.zero_grad(set_to_none=True)
    value = 0.0
    for batch in batches:
        loss = loss_of(model(**batch)) * (valid_labels(batch) / total)
        loss.backward()
        value += loss.item()
    return value, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
