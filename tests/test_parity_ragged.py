"""Microbatches that differ: images per sample, no image at all, valid labels, none at all."""

import pytest
import torch

from mllm_compile.workload import Workload
from tests.families import FAMILIES, MODULES
from tests.parity import assert_passed, verified, workload_of

RAGGED = sorted(name for name in FAMILIES if name.endswith("_ragged"))


def test_there_are_ragged_families():
    assert len(RAGGED) >= 3


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("microbatches", [2, 8])
def test_images_per_sample_differ(name, microbatches):
    workload = workload_of(name)
    size = 8 // microbatches
    assert_passed(verified(name, workload=workload, microbatches=microbatches, size=size))


def _with_labels(name, counts):
    """Sample k keeps the first ``counts[k]`` of its labels."""
    workload = workload_of(name)
    samples = []
    for count, sample in zip(counts, workload.samples, strict=False):
        labels = torch.full_like(sample["labels"], -100)
        places = list(range(1, len(labels)))[-count:] if count else []
        labels[places] = sample["input_ids"][places]
        samples.append({**sample, "labels": labels})
    return Workload(workload.model, samples, workload.collate)


@pytest.mark.parametrize("counts", [(3, 7, 1, 4), (3, 0, 1, 5), (0, 0, 2, 0)])
def test_mean_over_labels_is_global(counts):
    """Not a mean of means; a microbatch without any label contributes nothing, not NaN."""
    workload = _with_labels("llava", counts)
    assert_passed(verified("llava", workload=workload, microbatches=4, size=1))


def test_a_mean_of_means_would_be_noticed():
    """The reference really differs from the mean of microbatch means in this test's data."""
    workload = _with_labels("llava", (3, 7, 1, 4))
    model = workload.model.double()
    losses = []
    for sample in workload.samples[:4]:
        batch = workload.collate([sample])
        batch["pixel_values"] = batch["pixel_values"].double()
        losses.append(float(model(**batch).loss))
    batch = workload.collate(workload.samples[:4])
    batch["pixel_values"] = batch["pixel_values"].double()
    assert abs(float(model(**batch).loss) - sum(losses) / 4) > 1e-4


def test_modules_of_ragged_families_are_those_of_their_family():
    assert all(MODULES[name] for name in RAGGED)
