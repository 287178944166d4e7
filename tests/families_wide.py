"""Families with unusual parts: resamplers, codebooks, convolutional and linear-attention layers."""

import torch
import transformers as hf

from tests.families_audio import AUDIO_LLM
from tests.families_grid import QWEN, ROPE, TOKENS, grid_images, vision
from tests.families_image import LLAVA, one_image, tiled_image
from tests.registry import Made, family, text_config, vision_config
from tests.samples import AUDIO, IMAGE, VIDEO, Sample, make, noise, sentence


@family("model.vision_model", "model.connector", ("model.text_model", "lm_head"))
def idefics2() -> Made:
    """A perceiver resampler of four latents between tower and decoder."""
    perceiver = {
        "hidden_size": 64,
        "resampler_n_latents": 4,
        "resampler_depth": 1,
        "resampler_n_heads": 4,
        "resampler_head_dim": 16,
        "num_key_value_heads": 2,
    }
    config = hf.Idefics2Config(
        vision_config=vision_config(image_size=56),
        perceiver_config=perceiver,
        text_config=hf.MistralConfig(**text_config(sliding_window=None)),
        image_token_id=IMAGE,
    )
    return hf.Idefics2ForConditionalGeneration(config), make(tiled_image)


@family(*LLAVA)
def aria() -> Made:
    """Learned queries per patch count, and a mixture of experts."""
    text = text_config(
        num_key_value_heads=4, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    )
    config = hf.AriaConfig(
        vision_config=hf.Idefics3VisionConfig(**vision_config(image_size=56)),
        text_config=hf.AriaTextConfig(**text),
        projector_patch_to_query_dict={16: 4},
        image_token_index=IMAGE,
    )
    return hf.AriaForConditionalGeneration(config), make(one_image(1, 3, 56, 56, tokens=4))


@family(
    ("model.vision_tower", "model.visual_embeddings_table"), ("model.language_model", "lm_head")
)
def ovis2() -> Made:
    """The tower gives distributions over visual words, which read an embedding table."""
    encoder = vision_config(
        image_size=56, vocab_size=32, hidden_stride=2, num_visual_indicator_tokens=2
    )
    config = hf.Ovis2Config(
        vision_config=encoder,
        text_config=hf.Qwen2Config(**text_config()),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[10, 11],
        vocab_size=128,
        hidden_size=64,
        tie_word_embeddings=False,
    )
    return hf.Ovis2ForConditionalGeneration(config), make(one_image(1, 3, 56, 56, tokens=4))


@family(
    "model.vision_model",
    "model.aligner",
    (
        "model.vqmodel",
        "model.generation_embeddings",
        "model.generation_aligner",
        "model.generation_head",
        "model.language_model",
        "lm_head",
    ),
)
def janus() -> Made:
    """A part for image generation that takes no part in the loss."""
    encoder = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "mlp_ratio": 2.0,
        "projection_dim": 64,
        "num_image_tokens": 4,
    }
    codes = {
        "embed_dim": 4,
        "num_embeddings": 16,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "num_patches": 4,
        "projection_dim": 64,
        "num_hidden_layers": 1,
        "image_token_embed_dim": 64,
    }
    config = hf.JanusConfig(
        vision_config=encoder,
        vq_config=codes,
        text_config=hf.LlamaConfig(**text_config()),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return hf.JanusForConditionalGeneration(config), make(one_image(1, 3, 28, 28, tokens=4))


@family(*LLAVA)
def lfm2_vl() -> Made:
    """Images of varying size in padded patches; a decoder of short convolutions and attention."""
    encoder = hf.Siglip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_patches=16,
        patch_size=14,
        vision_use_head=False,
    )
    text = hf.Lfm2Config(
        **text_config(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    )
    config = hf.Lfm2VlConfig(
        vision_config=encoder,
        text_config=text,
        image_token_id=IMAGE,
        projector_hidden_size=64,
        tie_word_embeddings=False,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        rows = (4, 2)[index % 2]
        return {
            **sentence(g, [IMAGE] * rows),
            "pixel_values": noise(g, 1, 16, 3 * 14 * 14),
            "spatial_shapes": torch.tensor([[rows, 4]]),
            "pixel_attention_mask": (torch.arange(16) < rows * 4).long()[None],
        }

    return hf.Lfm2VlForConditionalGeneration(config), make(build)


@family(*QWEN)
def qwen3_5() -> Made:
    """A decoder that alternates linear attention with full attention."""
    text = text_config(
        head_dim=16,
        rope_parameters={**ROPE, "partial_rotary_factor": 1.0},
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    encoder = vision(patch_size=16, num_position_embeddings=16)
    config = hf.Qwen3_5Config(text_config=text, vision_config=encoder, **TOKENS)
    return hf.Qwen3_5ForConditionalGeneration(config), make(grid_images(16))


@family(
    ("model.video_tower", "model.image_tower"),
    "model.multi_modal_projector",
    ("model.language_model", "lm_head"),
)
def video_llava() -> Made:
    """Two towers of one kind: images in one, eight frames in the other."""
    encoder = hf.CLIPVisionConfig(**vision_config())
    config = hf.VideoLlavaConfig(
        vision_config=encoder,
        text_config=hf.LlamaConfig(**text_config()),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_seq_length=4,
        video_seq_length=40,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {
            **sentence(g, [IMAGE] * 4, [VIDEO] * 40),
            "pixel_values_images": noise(g, 1, 3, 28, 28),
            "pixel_values_videos": noise(g, 1, 8, 3, 28, 28),
        }

    return hf.VideoLlavaForConditionalGeneration(config), make(build)


@family(*AUDIO_LLM)
def glmasr() -> Made:
    audio = {
        "num_mel_bins": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "hidden_size": 64,
        "max_position_embeddings": 20,
    }
    config = hf.GlmAsrConfig(
        audio_config=audio,
        text_config=hf.LlamaConfig(**text_config()),
        audio_token_id=AUDIO,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        frames = 40 - 8 * (index % 3)
        mask = (torch.arange(40) < frames).long()
        return {
            **sentence(g, [AUDIO] * (frames // 8)),
            "input_features": noise(g, 1, 16, 40) * mask,
            "input_features_mask": mask[None],
        }

    return hf.GlmAsrForConditionalGeneration(config), make(build)


@family("model.vision_tower", "model.embed_vision", ("model.language_model", "lm_head"))
def gemma4() -> Made:
    """Per-layer embeddings, shared keys and values, patches with positions."""
    text = text_config(
        head_dim=16,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
    )
    encoder = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "patch_size": 8,
        "position_embedding_size": 16,
    }
    config = hf.Gemma4Config(
        text_config=text,
        vision_config=encoder,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        tie_word_embeddings=False,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        text = sentence(g, [IMAGE] * 4)
        rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        return {
            **text,
            "mm_token_type_ids": (text["input_ids"] == IMAGE).long(),
            "pixel_values": noise(g, 1, 16, 3 * 8 * 8),
            "image_position_ids": torch.stack([columns, rows], -1).reshape(1, 16, 2),
        }

    return hf.Gemma4ForConditionalGeneration(config), make(build)
