"""Losses of several terms, some of which only some microbatches have."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.verify import verify
from mllm_compile.workload import Workload


class TwoTerms(nn.Module):
    """Words for every sample; sounds, if any, with an error of their own that comes first."""

    def __init__(self, one_line: bool):
        super().__init__()
        self.words, self.sounds = nn.Linear(4, 5), nn.Linear(4, 3)
        self.one_line = one_line

    def mean(self, logits, labels):
        return F.cross_entropy(logits, labels, ignore_index=-100)

    def forward(self, x, labels, sound=None, target=None):
        loss = 0.0
        if sound is not None:
            made = self.sounds(sound)
            loss = self.mean(made, target) if self.one_line else F.cross_entropy(made, target)
        return loss + self.mean(self.words(x), labels)


def _workload(one_line, with_sound):
    torch.manual_seed(0)
    samples = []
    for k, rows in enumerate(with_sound):
        labels = torch.randint(0, 5, (6,))
        labels[k + 1 :] = -100
        sound, target = torch.randn(rows, 4), torch.randint(0, 3, (rows,))
        samples.append({"x": torch.randn(6, 4), "labels": labels, "sound": sound, "target": target})

    def collate(parts):
        batch = {name: torch.cat([part[name] for part in parts]) for name in samples[0]}
        return {name: value for name, value in batch.items() if len(value)}

    return Workload(TwoTerms(one_line), samples, collate)


def _verified(one_line, with_sound):
    module = ModuleSpec(("",), (0,))
    request = Request((module,), dtype="float64", microbatches=4, microbatch_size=1)
    return verify(request, _workload(one_line, with_sound), in_process=True)


@pytest.mark.parametrize("with_sound", [(2, 0, 1, 0), (0, 0, 3, 0), (0, 0, 0, 0)])
def test_a_term_is_averaged_over_the_microbatches_that_have_it(with_sound):
    result = _verified(False, with_sound)
    assert result.passed, result.as_dict()


def test_terms_of_one_line_are_right_where_all_microbatches_have_them():
    result = _verified(True, (2, 1, 1, 3))
    assert result.passed, result.as_dict()


def test_terms_that_cannot_be_told_apart_are_refused():
    with pytest.raises(RequestError, match="the same terms in every microbatch"):
        _verified(True, (2, 0, 1, 0))
