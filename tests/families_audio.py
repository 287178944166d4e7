"""Families that hear: audio alone, or audio and images."""

import torch
import transformers as hf

from tests.registry import Made, family, text_config, vision_config
from tests.samples import AUDIO, IMAGE, Sample, make, noise, sentence

FRAMES = 40  # mel frames: 20 after the strided convolution, 10 after pooling
AUDIO_LLM = (
    "model.audio_tower",
    "model.multi_modal_projector",
    ("model.language_model", "lm_head"),
)


def one_clip(mask_name: str):
    """Samples of one clip each, of different real lengths inside the same frames."""

    def build(g: torch.Generator, index: int) -> Sample:
        frames = FRAMES - 8 * (index % 3)
        mask = (torch.arange(FRAMES) < frames).long()
        return {
            **sentence(g, [AUDIO] * (frames // 4)),
            "input_features": noise(g, 1, 16, FRAMES) * mask,
            mask_name: mask[None],
        }

    return build


@family(*AUDIO_LLM)
def qwen2_audio() -> Made:
    audio = hf.Qwen2AudioEncoderConfig(
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        d_model=64,
        max_source_positions=20,
    )
    config = hf.Qwen2AudioConfig(
        audio_config=audio,
        text_config=hf.Qwen2Config(**text_config()),
        audio_token_index=AUDIO,
    )
    model = hf.Qwen2AudioForConditionalGeneration(config)
    return model, make(one_clip("feature_attention_mask"))


@family(*AUDIO_LLM)
def audioflamingo3() -> Made:
    audio = {
        "num_mel_bins": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "hidden_size": 64,
        "max_source_positions": 20,
    }
    config = hf.AudioFlamingo3Config(
        audio_config=audio,
        text_config=hf.Qwen2Config(**text_config()),
        audio_token_id=AUDIO,
    )
    model = hf.AudioFlamingo3ForConditionalGeneration(config)
    return model, make(one_clip("input_features_mask"))


@family(
    ("model.embed_tokens_extend.image_embed", "model.embed_tokens_extend.audio_embed"),
    ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
)
def phi4_multimodal() -> Made:
    """Images in crops, and audio with a learned relative position bias."""
    vision = vision_config(num_hidden_layers=3, image_size=56, crop_size=56, image_token_id=IMAGE)
    audio = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_blocks": 2,
        "num_attention_heads": 4,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "input_size": 16,
        "nemo_conv_channels": 16,
        "audio_token_id": AUDIO,
        "bias_max_distance": 20,
        "time_reduction": 8,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = hf.Phi4MultimodalConfig(
        **text_config(num_key_value_heads=4, rope_parameters=rope),
        vision_config=vision,
        audio_config=audio,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        # two crops of 2x2 features: 4 + 2 line ends, a separator, 4 + 2 line ends
        return {
            **sentence(g, [IMAGE] * 13, [AUDIO] * 5),
            "image_pixel_values": noise(g, 1, 2, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
            "image_attention_mask": torch.ones(1, 2, 4, 4),
            "audio_input_features": noise(g, 1, 40, 16),
            "audio_embed_sizes": torch.tensor([5]),
        }

    return hf.Phi4MultimodalForCausalLM(config), make(build)
