"""Two encoders and a decoder, put together in an ordinary module: SigLIP, Whisper and Llama.

The model is yours: no base class, no hooks, no registration. Both encoders run beside each other
on ranks of their own and feed the decoder; which features go where is read from the model's graph.

    mllm-compile plan   examples/vision_audio_llm.toml
    mllm-compile verify examples/vision_audio_llm.toml
    mllm-compile run    examples/vision_audio_llm.toml --steps 30

A sample may have an image, a clip, both or neither; a batch without one modality does not run that
encoder. The model learns to say whether the image is bright and whether the clip is loud.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mllm_compile import Workload

PAD, BOS, EOS, IMAGE, AUDIO, DARK, BRIGHT, SILENT, LOUD, TEXT = range(10)
IGNORED = -100
IMAGE_TOKENS, AUDIO_TOKENS = 4, 10
HIDDEN = 64

Sample = dict[str, Tensor]


class VisionAudioLanguageModel(nn.Module):
    """Image and audio features take the places of their placeholder tokens."""

    def __init__(self, vision: nn.Module, audio: nn.Module, language: LlamaForCausalLM):
        super().__init__()
        self.vision = vision
        self.vision_projector = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)
        )
        self.audio = audio
        self.audio_projector = nn.Sequential(
            nn.LayerNorm(2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN), nn.SiLU()
        )
        self.language = language

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        pixel_values: Tensor | None = None,
        input_features: Tensor | None = None,
    ) -> Any:
        """Tokens [B, S], ``pixel_values`` [images, 3, H, W], ``input_features`` [clips, mel, T]."""
        embeddings = self.language.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.vision_projector(self.vision(pixel_values).last_hidden_state)
            embeddings = embeddings.masked_scatter((input_ids == IMAGE).unsqueeze(-1), seen)
        if input_features is not None:
            heard = self.audio(input_features).last_hidden_state
            pairs = heard.unflatten(1, (-1, 2)).flatten(2)  # two frames make one token
            heard = self.audio_projector(pairs)
            embeddings = embeddings.masked_scatter((input_ids == AUDIO).unsqueeze(-1), heard)
        return self.language(
            inputs_embeds=embeddings, attention_mask=attention_mask, labels=labels, use_cache=False
        )


def tiny() -> Workload:
    """Two layers in each encoder, three in the decoder, 48 samples."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "intermediate_size": 128}
    vision = SiglipVisionConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        image_size=28,
        patch_size=14,
        vision_use_head=False,
        **sizes,
    )
    audio = WhisperConfig(
        num_mel_bins=16,
        d_model=HIDDEN,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        max_source_positions=2 * AUDIO_TOKENS,
    )
    language = LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **sizes,
    )
    model = VisionAudioLanguageModel(
        SiglipVisionModel(vision), WhisperEncoder(audio), LlamaForCausalLM(language)
    )
    return Workload(model, [_sample(index) for index in range(48)], collate)


def _sample(index: int) -> Sample:
    """Pixels [0 or 1, 3, 28, 28], mel frames [0 or 1, 16, 40], tokens and labels [length]."""
    g = torch.Generator().manual_seed(index)
    has_image, has_clip = index % 4 != 1, index % 4 != 2
    bright, loud = (torch.rand(2, generator=g) > 0.5).tolist()
    question = [BOS, *[IMAGE] * (IMAGE_TOKENS * has_image), *[AUDIO] * (AUDIO_TOKENS * has_clip)]
    answer = [TEXT] * (1 + index % 3)
    answer += [BRIGHT if bright else DARK] * has_image + [LOUD if loud else SILENT] * has_clip
    answer += [EOS]
    pixels = torch.randn(int(has_image), 3, 28, 28, generator=g)
    sound = torch.randn(int(has_clip), 16, 4 * AUDIO_TOKENS, generator=g)
    return {
        "input_ids": torch.tensor(question + answer),
        "labels": torch.tensor([IGNORED] * len(question) + answer),
        "pixel_values": 0.5 * pixels + (1.0 if bright else -1.0),
        "input_features": sound * (2.0 if loud else 0.2),
    }


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Pad text on the right; stack the images and clips there are, leave out what nobody has."""
    ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(row) for row in ids])
    batch = {
        "input_ids": pad(ids, batch_first=True, padding_value=PAD),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }
    for key in ("pixel_values", "input_features"):
        items = torch.cat([sample[key] for sample in samples])
        if len(items):
            batch[key] = items
    return batch
