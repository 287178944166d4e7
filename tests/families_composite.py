"""Encoders and a decoder put together by hand, with parts of transformers and without."""

import torch
import transformers as hf
from torch import Tensor, nn

from tests.registry import Made, family, text_config, vision_config
from tests.samples import AUDIO, IMAGE, Sample, make, noise, sentence


class Composite(nn.Module):
    """Optional vision and audio encoders, a projector each, and a causal decoder."""

    def __init__(
        self, llm: nn.Module, vision: nn.Module | None = None, audio: nn.Module | None = None
    ):
        super().__init__()
        self.vision, self.audio, self.llm = vision, audio, llm
        if vision is not None:
            self.vision_projector = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        if audio is not None:
            self.audio_projector = nn.Sequential(
                nn.LayerNorm(128), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 64)
            )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_features: Tensor | None = None,
        use_cache: bool = False,
    ):
        hidden = self.llm.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.vision_projector(self.vision(pixel_values).last_hidden_state)
            hidden = hidden.masked_scatter((input_ids == IMAGE).unsqueeze(-1), seen)
        if input_features is not None:
            heard = self.audio(input_features).last_hidden_state
            heard = self.audio_projector(heard.unflatten(1, (-1, 2)).flatten(2))
            hidden = hidden.masked_scatter((input_ids == AUDIO).unsqueeze(-1), heard)
        return self.llm(
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            labels=labels,
            use_cache=use_cache,
        )


def whisper_encoder() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = hf.WhisperConfig(
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        d_model=64,
        encoder_ffn_dim=128,
        max_source_positions=20,
    )
    return WhisperEncoder(config)


def decoder() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**text_config()))


def siglip() -> nn.Module:
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**vision_config(vision_use_head=False)))


@family("audio", "audio_projector", "llm")
def whisper_llama() -> Made:
    def build(g: torch.Generator, index: int) -> Sample:
        return {**sentence(g, [AUDIO] * 10), "input_features": noise(g, 1, 16, 40)}

    return Composite(decoder(), audio=whisper_encoder()), make(build)


def both(images, clips):
    """Samples with ``images[i]`` images and ``clips[i]`` audio clips, images first."""

    def build(g: torch.Generator, index: int) -> Sample:
        spans = [[IMAGE] * 4] * images[index] + [[AUDIO] * 10] * clips[index]
        return {
            **sentence(g, *spans),
            "pixel_values": noise(g, images[index], 3, 28, 28),
            "input_features": noise(g, clips[index], 16, 40),
        }

    return build


VALM = (("vision", "vision_projector"), ("audio", "audio_projector"), "llm")


@family(*VALM)
def vision_audio_llm() -> Made:
    model = Composite(decoder(), siglip(), whisper_encoder())
    return model, make(both((1,) * 8, (1,) * 8))


@family(*VALM)
def vision_audio_llm_ragged() -> Made:
    """Each modality is missing from some samples, both from one."""
    model = Composite(decoder(), siglip(), whisper_encoder())
    return model, make(both((2, 0, 1, 3, 0, 1, 0, 1), (1, 1, 0, 2, 0, 0, 1, 1)))


class Block(nn.Module):
    """Pre-norm attention and MLP on torch's own attention call."""

    def __init__(self, dim: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Custom(nn.Module):
    """No part of transformers: a convolutional patch encoder and a decoder of one's own."""

    def __init__(self, dim: int = 32, heads: int = 2):
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, dim, 7, stride=7), nn.Flatten(2))
        self.encoder = nn.Sequential(*(Block(dim, heads, causal=False) for _ in range(2)))
        self.connector = nn.Linear(dim, dim)
        self.embed = nn.Embedding(128, dim)
        self.position = nn.Embedding(64, dim)
        self.decoder = nn.Sequential(*(Block(dim, heads, causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            features = self.connector(self.encoder(self.patches(pixel_values).transpose(1, 2)))
            x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), features)
        x = x + self.position(torch.arange(input_ids.shape[1], device=x.device))
        logits = self.head(self.norm(self.decoder(x)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@family(("patches", "encoder"), "connector", ("embed", "position", "decoder", "norm", "head"))
def custom() -> Made:
    def build(g: torch.Generator, index: int) -> Sample:
        return {**sentence(g, [IMAGE] * 4), "pixel_values": noise(g, 1, 3, 14, 14)}

    return Custom(), make(build)
