"""The zoo itself: parts cover the model, and the plain model's loss splits over microbatches."""

import pytest
import torch

from tests.families import FAMILIES, MODULES


def lifted(batch):
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def plain(workload):
    """The model in float64; experts on the loop that has a float64 kernel."""
    model = workload.model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


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
    model, samples = plain(workload), list(workload.samples)

    def run(parts):
        model.zero_grad(set_to_none=True)
        total = sum(valid_labels(workload.collate(part)) for part in parts)
        value = 0.0
        for part in parts:
            batch = lifted(workload.collate(part))
            loss = loss_of(model(**batch)).double() * (valid_labels(batch) / total)
            loss.backward()
            value += loss.item()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return value, grads

    want, reference = run([samples])
    got, grads = run([samples[i : i + 2] for i in range(0, len(samples), 2)])
    assert got == pytest.approx(want, rel=1e-5)
    everything = torch.stack([g.norm() for g in reference.values()]).norm()
    for parameter, expected in reference.items():
        error = (grads[parameter] - expected).norm() / expected.norm().clamp_min(1e-5 * everything)
        assert error <= 1e-5, (parameter, error.item())
