"""An encoder that no library knows, in plain PyTorch, in front of a Llama decoder.

Use this as the start for research models: the encoder reads point clouds, mixes points with torch's
own attention and hands a handful of learned summaries to the decoder. Nothing has to be declared:
the compiler sees operators, not classes. Attention may be written with
``scaled_dot_product_attention``, ``nn.MultiheadAttention`` or by hand.

    mllm-compile plan   examples/custom_encoder.toml
    mllm-compile verify examples/custom_encoder.toml
    mllm-compile run    examples/custom_encoder.toml --steps 30

The model learns to tell whether the points lie on a sphere or in a box.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_compile import Workload

PAD, BOS, EOS, POINTS, SPHERE, BOX, TEXT = range(7)
IGNORED = -100
SUMMARIES, DIM, HEADS = 4, 64, 4

Sample = dict[str, Tensor]


class CrossAttention(nn.Module):
    """``queries`` [B, Q, D] read ``values`` [B, K, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.query = nn.Linear(DIM, DIM)
        self.key_value = nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, queries: Tensor, values: Tensor) -> Tensor:
        """Returns [B, Q, D], the residual included."""
        q = self.query(self.norm(queries)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.key_value(values).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2).chunk(2, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return queries + self.out(mixed.transpose(1, 2).flatten(2))


class PointEncoder(nn.Module):
    """[B, N, 3] points -> [B, SUMMARIES, D]: learned queries read all points, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.queries = nn.Parameter(torch.randn(1, SUMMARIES, DIM))
        self.layers = nn.ModuleList(CrossAttention() for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Summaries of each cloud, independent of the order of its points."""
        values = self.embed(points)
        queries = self.queries.expand(points.shape[0], -1, -1)
        for layer, mlp in zip(self.layers, self.mlps, strict=True):
            queries = layer(queries, values)
            queries = queries + mlp(queries)
        return queries


class PointLanguageModel(nn.Module):
    """The encoder's summaries take the places of the POINTS tokens."""

    def __init__(self, encoder: nn.Module, decoder: LlamaForCausalLM):
        super().__init__()
        self.encoder, self.projector, self.decoder = encoder, nn.Linear(DIM, DIM), decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, points: Tensor
    ) -> Any:
        """``input_ids`` [B, S], ``points`` [clouds, N, 3]; the output has ``.loss``."""
        embeddings = self.decoder.get_input_embeddings()(input_ids)
        summaries = self.projector(self.encoder(points))
        embeddings = embeddings.masked_scatter((input_ids == POINTS).unsqueeze(-1), summaries)
        return self.decoder(
            inputs_embeds=embeddings, attention_mask=attention_mask, labels=labels, use_cache=False
        )


def tiny() -> Workload:
    """0.2 million parameters, 64 clouds of 50 points."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=DIM,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = PointLanguageModel(PointEncoder(), LlamaForCausalLM(config))
    return Workload(model, [_sample(index) for index in range(64)], collate)


def _sample(index: int) -> Sample:
    g = torch.Generator().manual_seed(index)
    sphere = index % 2 == 0
    points = torch.rand(1, 50, 3, generator=g) * 2 - 1
    if sphere:
        points = functional.normalize(points, dim=-1)
    question = [BOS, *[POINTS] * SUMMARIES]
    answer = [*[TEXT] * (1 + index % 3), SPHERE if sphere else BOX, EOS]
    return {
        "input_ids": torch.tensor(question + answer),
        "labels": torch.tensor([IGNORED] * len(question) + answer),
        "points": points,
    }


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Pad text on the right, stack the clouds."""
    ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(row) for row in ids])
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=PAD),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "points": torch.cat([sample["points"] for sample in samples]),
    }
