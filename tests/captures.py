"""Comparing a captured program with the model it was captured from."""

import copy
import enum

import torch

from mllm_compile.compiler.captured import Prepared
from mllm_compile.compiler.errors import GuardError
from mllm_compile.passes.capture.capture import loss_of
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.programs import Programs, prepare, run


class Outcome(enum.Enum):
    """How a program did on a batch. There is no third."""

    EXACT = "exact"
    REJECTED = "rejected"


def outcome(model, program, batch, tolerance=1e-9, reference=None, lift=None):
    """EXACT if loss, gradients, missing gradients and buffers are the model's, else an error.

    REJECTED if a guard refuses the batch. ``reference`` is the model to compare with, if another;
    it runs with float32 lifted to ``lift``, as the program was captured.
    """
    theirs, ours = copy.deepcopy(reference or model), copy.deepcopy(model)
    torch.manual_seed(0)
    with lifted(lift):
        expected = loss_of(theirs(**_copied(batch)))[0]
    expected.backward()
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    torch.manual_seed(0)
    try:
        prepared = prepare(program, _copied(batch), dict(ours.named_buffers()))
    except GuardError:
        return Outcome.REJECTED
    loss, *updates = run(program, state, prepared)
    loss.backward()
    assert abs(loss.item() - expected.item()) <= tolerance, (loss.item(), expected.item())
    compare_gradients(theirs, ours, tolerance)
    for name, value in zip(program.updates, updates, strict=True):
        torch.testing.assert_close(value, theirs.get_buffer(name), rtol=tolerance, atol=tolerance)
    untouched = set(dict(model.named_buffers())) - set(program.updates)
    for name in untouched:
        assert torch.equal(theirs.get_buffer(name), model.get_buffer(name)), name
    return Outcome.EXACT


def compare_gradients(theirs, ours, tolerance):
    """Relative to each norm, with a floor for gradients that are zero in exact arithmetic."""
    gradients = {name: item.grad for name, item in theirs.named_parameters()}
    present = [gradient for gradient in gradients.values() if gradient is not None]
    floor = 1e-5 * torch.stack([g.norm() for g in present]).norm().item() if present else 0.0
    for name, item in ours.named_parameters():
        expected = gradients[name]
        assert (expected is None) == (item.grad is None), f"{name}: a gradient too many or too few"
        if expected is not None:
            error = (item.grad - expected).norm().item()
            assert error <= tolerance * max(expected.norm().item(), floor), (name, error)


def _copied(batch):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def assert_split_is_exact(model, whole, parts, tolerance=1e-9):
    """Programs of ``parts`` with common denominators add up to the plain model on ``whole``."""
    theirs = copy.deepcopy(model)
    expected = loss_of(theirs(**_copied(whole)))[0]
    expected.backward()
    ours = copy.deepcopy(model)
    programs = Programs(ours)
    prepared = [programs.get(part) for part in parts]
    names = prepared[0].program.denominators
    totals = {n: sum(p.values["denominator", n] for p in prepared) for n in names}
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    total = 0.0
    for item in prepared:
        assert item.program.splittable, item.program.report.notes
        assert item.program.denominators == names
        values = {**item.values, **{("denominator", n): v for n, v in totals.items()}}
        loss = run(item.program, state, Prepared(item.program, values))[0]
        loss.backward()
        total += loss.item()
    assert abs(total - expected.item()) <= tolerance * max(abs(expected.item()), 1.0)
    compare_gradients(theirs, ours, tolerance)
