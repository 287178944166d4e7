"""Losses of microbatches add up to the loss of the whole batch, or the program says they do not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs
from tests.captures import assert_split_is_exact

LENGTH, WIDTH, CLASSES = 10, 8, 12
VALID = (3, 7, 1, 9, 0)  # labels that count, per microbatch of one sample


class Model(nn.Module):
    """Logits of every token, and any loss of them."""

    def __init__(self, loss):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = loss
        self.register_buffer("class_weight", torch.rand(CLASSES) + 0.5)
        self.register_buffer("weight_of_second", torch.tensor(0.5))

    def forward(self, ids, labels, mask):
        hidden = self.norm(torch.tanh(self.embed(ids)))
        return self.loss(self, self.head(hidden), labels, mask)


def samples():
    """One sample per microbatch, with as many valid labels as ``VALID`` says."""
    g = torch.Generator().manual_seed(0)
    made = []
    for count in VALID:
        ids = torch.randint(0, CLASSES, (LENGTH,), generator=g)
        mask = torch.zeros(LENGTH, dtype=torch.bool)
        mask[torch.randperm(LENGTH, generator=g)[:count]] = True
        made.append({"ids": ids, "labels": torch.where(mask, ids, -100), "mask": mask})
    return made


def collate(items):
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def model_of(loss):
    torch.manual_seed(0)
    return Model(loss).double()


def flat(logits, labels):
    return logits.flatten(0, 1), labels.flatten()


def token_losses(logits, labels):
    """[B, S] negative log-likelihood of every token, 0 where the label does not count."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


SPLITTABLE = {}
REFUSED = {}


def splits(function):
    SPLITTABLE[function.__name__] = function
    return function


def refuses(function):
    REFUSED[function.__name__] = function
    return function


@splits
def cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels))


@splits
def weighted_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels), weight=model.class_weight)


@splits
def smoothed_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels), label_smoothing=0.1)


@splits
def smoothed_weighted_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels), weight=model.class_weight, label_smoothing=0.1)


@splits
def spatial_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(logits.transpose(1, 2).unsqueeze(-1), labels.unsqueeze(-1))


@splits
def shifted_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits[:, :-1], labels[:, 1:]))


@splits
def summed_cross_entropy(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels), reduction="sum")


@splits
def masked_mean(model, logits, labels, mask):
    return (token_losses(logits, labels) * mask).sum() / mask.sum()


@splits
def masked_mean_of_clamped_count(model, logits, labels, mask):
    return (token_losses(logits, labels) * mask).sum() / mask.sum().clamp(min=1)


@splits
def masked_mean_with_epsilon(model, logits, labels, mask):
    return (token_losses(logits, labels) * mask).sum() / (mask.to(logits.dtype).sum() + 1e-3)


@splits
def mean_of_selected(model, logits, labels, mask):
    return token_losses(logits, labels)[mask].mean()


@splits
def mean_of_all(model, logits, labels, mask):
    return (logits**2).mean()


@splits
def mean_in_steps(model, logits, labels, mask):
    return (logits**2).mean(-1).mean(0).mean()


@splits
def mean_of_masked_by_mean(model, logits, labels, mask):
    return (token_losses(logits, labels) * mask).mean() / mask.double().mean()


@splits
def squared_error(model, logits, labels, mask):
    return F.mse_loss(logits[..., 0], labels.double().clamp(min=0))


@splits
def huber(model, logits, labels, mask):
    return F.huber_loss(logits[..., 0], labels.double().clamp(min=0), delta=0.7)


@splits
def absolute_error(model, logits, labels, mask):
    return F.l1_loss(logits[..., 0], labels.double().clamp(min=0))


@splits
def binary(model, logits, labels, mask):
    return F.binary_cross_entropy_with_logits(logits[..., 0], mask.double())


@splits
def per_sample_mean_summed(model, logits, labels, mask):
    return (logits**2).mean((1, 2)).sum()


@splits
def per_sample_masked_mean(model, logits, labels, mask):
    counts = mask.sum(1).clamp(min=1)
    return ((token_losses(logits, labels) * mask).sum(1) / counts).mean()


@splits
def scaled_rows(model, logits, labels, mask):
    return (token_losses(logits, labels) * mask / mask.sum()).sum()


@splits
def two_counts(model, logits, labels, mask):
    first = F.cross_entropy(*flat(logits, labels))
    second = (logits**2).mean()
    return first + 0.25 * second - model.weight_of_second * second


@splits
def list_of_losses(model, logits, labels, mask):
    terms = [F.cross_entropy(*flat(logits, labels)), (logits**2).mean(), logits.sum() * 1e-3]
    return torch.stack(terms).mean() * 1.5 + torch.stack(terms).sum()


@splits
def regularised(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels)) + 0.1 * model.head.weight.pow(2).sum() + 0.5


@splits
def nothing_if_no_label(model, logits, labels, mask):
    count = mask.sum()
    total = (token_losses(logits, labels) * mask).sum()
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)


@refuses
def sum_by_elements(model, logits, labels, mask):
    return (logits**2).sum() / logits.numel()


@refuses
def sum_by_part_of_elements(model, logits, labels, mask):
    return (logits**2).sum() * 3 / (logits.numel() - 1)


@refuses
def sum_times_inverse(model, logits, labels, mask):
    return (logits**2).sum() * (1 / logits.numel())


@refuses
def sum_by_tensor(model, logits, labels, mask):
    return (logits**2).sum() / torch.tensor(logits.numel())


@refuses
def sum_by_ones(model, logits, labels, mask):
    return (logits**2).sum() / torch.ones_like(labels).sum()


@refuses
def squared_loss(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits, labels)) ** 2


@refuses
def largest(model, logits, labels, mask):
    return token_losses(logits, labels).max()


@refuses
def log_of_mean(model, logits, labels, mask):
    return (logits**2).mean().log()


@refuses
def balance(model, logits, labels, mask):
    """What a mixture of experts adds: a product of two means over tokens."""
    choice = F.one_hot(logits.argmax(-1), CLASSES).double().mean((0, 1))
    return F.cross_entropy(*flat(logits, labels)) + (choice * logits.softmax(-1).mean((0, 1))).sum()


@refuses
def contrastive(model, logits, labels, mask):
    rows = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(rows @ rows.T, torch.arange(rows.shape[0]))


@refuses
def centred(model, logits, labels, mask):
    return (logits - logits.mean(0)).pow(2).mean()


@refuses
def normalised_over_samples(model, logits, labels, mask):
    return F.cross_entropy(*flat(logits.softmax(0), labels))


@refuses
def pairs(model, logits, labels, mask):
    return torch.cdist(logits.flatten(1), logits.flatten(1)).sum()


@refuses
def neighbours(model, logits, labels, mask):
    return logits.mean((1, 2)).cumsum(0).sum()


@refuses
def computed_weights(model, logits, labels, mask):
    weights = logits[..., 0].sigmoid()
    return (token_losses(logits, labels) * weights).sum() / weights.sum()


@refuses
def divided_by_size(model, logits, labels, mask):
    return token_losses(logits, labels).sum() / labels.shape[0]


@refuses
def divided_by_number_of_tokens(model, logits, labels, mask):
    return token_losses(logits, labels).sum() / labels.numel()


@refuses
def rows_divided_by_size(model, logits, labels, mask):
    return (token_losses(logits, labels) / len(labels)).sum()


@refuses
def divided_by_host_read(model, logits, labels, mask):
    return token_losses(logits, labels).sum() / int(mask.sum())


@refuses
def largest_count(model, logits, labels, mask):
    return token_losses(logits, labels).sum() / mask.sum(1).max()


@pytest.mark.parametrize("name", SPLITTABLE)
@pytest.mark.parametrize(
    "parts", [[[0], [1], [2], [3], [4]], [[0, 1, 2], [3, 4]], [[4, 3, 2, 1, 0]]]
)
def test_microbatches_add_up(name, parts):
    """3, 7, 1 and 9 labels that count, and none."""
    model, made = model_of(SPLITTABLE[name]), samples()
    assert_split_is_exact(model, collate(made), [collate([made[i] for i in p]) for p in parts])


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_says_so(name):
    model, made = model_of(REFUSED[name]), samples()
    program = capture(model, collate(made))
    assert not program.splittable
    assert program.denominators == ()
    (note,) = program.report.notes
    assert note.startswith("one microbatch only: ")
    assert "test_capture_loss.py:" in note


def test_a_size_of_one_is_a_size_too():
    """Divided by 1, the number of samples of this microbatch."""
    model, made = model_of(REFUSED["divided_by_size"]), samples()
    assert not capture(model, collate(made[:1])).splittable
    weighted = model_of(
        lambda model, logits, labels, mask: 1.0 * cross_entropy(model, logits, labels, mask)
    )
    assert capture(weighted, collate(made[:1])).splittable


def test_refusals_are_not_for_nothing():
    """Microbatches of the refused losses really do not add up: the whole batch differs."""
    for name in ("squared_loss", "contrastive", "balance", "divided_by_size", "centred"):
        model, made = model_of(REFUSED[name]), samples()
        whole = model(**collate(made))
        parts = sum(model(**collate(made[i : i + 1])) for i in range(4)) / 4
        assert abs(whole - parts) > 1e-6, name


def test_batch_norm_in_training_couples_samples():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.body(x)).pow(2).mean()

    model, batch = Normed().double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    assert not capture(model, batch).splittable
    assert capture(copy.deepcopy(model).eval(), batch).splittable


def test_every_program_of_a_model_counts_the_same_things():
    """Another length is another program, whose denominators must still mean the same."""
    model, made = model_of(two_counts), samples()
    programs = Programs(model)
    short = {name: value[:, :6] for name, value in collate(made[:2]).items()}
    first, second = programs.get(collate(made)), programs.get(short)
    assert first.program is not second.program
    assert len(first.program.denominators) == len(second.program.denominators) == 2
