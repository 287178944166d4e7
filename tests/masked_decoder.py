"""A decoder under any mask predicate, for runs whose ranks divide the tokens."""

from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from mllm_compile.workload import Workload
from tests import drawn_predicates as rules
from tests.samples import Sample, generator

HEADS, VOCABULARY, LAYERS = 8, 32, 2


def itself(b, h, q, k):
    return q == k


def always(b, h, q, k):
    return q >= 0


KINDS: dict[str, Callable] = {
    "all": lambda documents, groups, real: always,
    "causal": lambda documents, groups, real: rules.causal,
    "packed": lambda documents, groups, real: rules.every(rules.causal, rules.same(documents)),
    "window": lambda documents, groups, real: rules.every(rules.causal, rules.window(5)),
    "chunks": lambda documents, groups, real: rules.every(
        rules.causal, rules.chunks(6, documents[:, 0])
    ),
    "prefix": lambda documents, groups, real: rules.either(rules.causal, rules.first_keys(7)),
    "sink": lambda documents, groups, real: rules.every(
        rules.causal, rules.either(rules.window(4), rules.first_keys(2))
    ),
    "images": lambda documents, groups, real: rules.every(
        rules.either(rules.causal, rules.same_group(groups)), rules.same(documents)
    ),
    "images alone": lambda documents, groups, real: rules.by_kind(
        groups, rules.same_group(groups), rules.causal
    ),
    "padded": lambda documents, groups, real: rules.either(
        rules.every(rules.causal, rules.real(real)), itself
    ),
}
"""Predicates over the ids of documents and images (-1: text) [B, S], and which keys are real."""


class Masked(nn.Module):
    """A language model whose mask is of one kind; ``key_heads`` divide its eight heads."""

    def __init__(self, kind: str, key_heads: int) -> None:
        super().__init__()
        self.kind = kind
        self.lm = hf.Qwen2ForCausalLM(
            hf.Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=24,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=key_heads,
                max_position_embeddings=128,
            )
        )

    def forward(
        self, ids: Tensor, labels: Tensor, documents: Tensor, groups: Tensor, real: Tensor
    ) -> Tensor:
        """The loss."""
        embedded = self.lm.model.embed_tokens(ids)
        mask = create_bidirectional_mask(
            self.lm.config,
            embedded,
            None,
            and_mask_function=KINDS[self.kind](documents, groups, real),
        )
        result = self.lm(
            inputs_embeds=embedded, attention_mask={"full_attention": mask}, labels=labels
        )
        return result.loss


@cache
def model(kind: str, key_heads: int) -> Masked:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Masked(kind, key_heads).train()


def sample(length: int, seed: int) -> Sample:
    """Random tokens in documents, some of them in images, some of them padding on the right."""
    g = generator(seed)

    def numbered(share: float) -> Tensor:
        return (torch.rand(length, generator=g) < share).cumsum(0)

    ids = torch.randint(0, VOCABULARY, (length,), generator=g)
    runs = numbered(0.3)
    padding = int(torch.randint(0, length // 3 + 1, (), generator=g))
    return {
        "ids": ids,
        "labels": ids.clone(),
        "documents": numbered(0.15),
        "groups": torch.where(runs % 2 == 1, runs, -1),
        "real": torch.arange(length) < length - padding,
    }


def workload(kind: str, key_heads: int, lengths: tuple[int, ...], seed: int = 0) -> Workload:
    """One sample of every length; those of one microbatch must be equally long."""
    samples = [sample(length, 100 * seed + place) for place, length in enumerate(lengths)]

    def collate(rows: list[Sample]) -> dict[str, Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return Workload(model(kind, key_heads), samples, collate)
