"""Families of other shapes: prefix masks, cross-attention, learned queries, no encoder at all."""

import torch
import transformers as hf

from tests.families_audio import AUDIO_LLM
from tests.families_image import LLAVA, one_image, tiled_image
from tests.registry import Made, family, text_config, vision_config
from tests.samples import AUDIO, IMAGE, START, Sample, make, noise, sentence


def siglip(**changes: object) -> hf.SiglipVisionConfig:
    return hf.SiglipVisionConfig(**vision_config(image_size=56, vision_use_head=False, **changes))


@family("model.vision_model", "model.connector", ("model.text_model", "lm_head"))
def idefics3() -> Made:
    config = hf.Idefics3Config(
        vision_config=vision_config(image_size=56),
        text_config=hf.LlamaConfig(**text_config()),
        image_token_id=IMAGE,
        scale_factor=2,
    )
    return hf.Idefics3ForConditionalGeneration(config), make(tiled_image)


@family(*LLAVA)
def paligemma() -> Made:
    """The prompt with its image is a bidirectional prefix; output embeddings are tied."""
    config = hf.PaliGemmaConfig(
        vision_config=siglip(),
        text_config=hf.GemmaConfig(**text_config(head_dim=16, tie_word_embeddings=True)),
        image_token_index=IMAGE,
        vocab_size=128,
        projection_dim=64,
        hidden_size=64,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        text = sentence(g, [IMAGE] * 16)
        answer = (text["labels"] != -100).long()
        return {**text, "token_type_ids": answer, "pixel_values": noise(g, 1, 3, 56, 56)}

    return hf.PaliGemmaForConditionalGeneration(config), make(build)


@family("model.vision_model", "model.aligner", ("model.language_model", "lm_head"))
def deepseek_vl() -> Made:
    config = hf.DeepseekVLConfig(
        vision_config=siglip(),
        text_config=hf.LlamaConfig(**text_config()),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return hf.DeepseekVLForConditionalGeneration(config), make(one_image(1, 3, 56, 56, tokens=16))


@family(*LLAVA)
def cohere2_vision() -> Made:
    config = hf.Cohere2VisionConfig(
        vision_config=siglip(),
        text_config=hf.Cohere2Config(**text_config(sliding_window=8)),
        image_token_id=IMAGE,
        alignment_intermediate_size=128,
        tie_word_embeddings=False,
    )
    model = hf.Cohere2VisionForConditionalGeneration(config)
    return model, make(one_image(1, 3, 56, 56, tokens=4))


@family(*LLAVA)
def llava_onevision() -> Made:
    """A square image without crops: its 16 features and a line-end vector."""
    config = hf.LlavaOnevisionConfig(
        vision_config=siglip(),
        text_config=hf.Qwen2Config(**text_config()),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[56, 56]],
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {
            **sentence(g, [IMAGE] * (16 + 16 + 4)),
            "pixel_values": noise(g, 1, 2, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        }

    return hf.LlavaOnevisionForConditionalGeneration(config), make(build)


@family(*LLAVA)
def got_ocr2() -> Made:
    """Windowed vision attention with learned relative positions."""
    vision = {
        "hidden_size": 64,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 128,
        "patch_size": 16,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 128,
    }
    config = hf.GotOcr2Config(
        vision_config=vision,
        text_config=hf.Qwen2Config(**text_config()),
        image_token_index=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    model = hf.GotOcr2ForConditionalGeneration(config)
    return model, make(one_image(1, 3, 128, 128, tokens=4))


@family("model.vision_embed_tokens", ("model.language_model", "lm_head"))
def fuyu() -> Made:
    """No encoder: patches are projected straight into the decoder's embeddings."""
    config = hf.FuyuConfig(
        image_size=28,
        patch_size=14,
        image_token_id=IMAGE,
        text_config=hf.PersimmonConfig(**text_config(num_key_value_heads=4)),
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {**sentence(g, [IMAGE] * 4), "image_patches": noise(g, 1, 4, 3 * 14 * 14)}

    return hf.FuyuForCausalLM(config), make(build)


@family("model.vision_model", "model.multi_modal_projector", ("model.language_model", "lm_head"))
def mllama() -> Made:
    """Images enter by cross-attention; text before the image does not see it."""
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 128,
        "vision_output_dim": 128,
        "image_size": 28,
        "patch_size": 14,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = hf.models.mllama.MllamaTextConfig(
        **text_config(num_hidden_layers=3, cross_attention_layers=[1], rope_parameters=rope)
    )
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)

    def build(g: torch.Generator, index: int) -> Sample:
        text = sentence(g, [IMAGE])
        tiles = 1 + index % 2
        sees = (text["input_ids"] == IMAGE).cumsum(0)
        mask = sees[:, None, None] * (torch.arange(2) < tiles)
        return {
            **text,
            "cross_attention_mask": mask,
            "pixel_values": noise(g, 1, 1, 2, 3, 28, 28),
            "aspect_ratio_ids": torch.tensor([[tiles]]),
            "aspect_ratio_mask": torch.tensor([[[1, tiles - 1]]]),
        }

    return hf.MllamaForConditionalGeneration(config), make(build)


@family("vision_model", ("qformer", "language_projection"), "language_model")
def blip_2() -> Made:
    """Learned queries read the image in a query transformer."""
    vision = vision_config(attention_dropout=0.0)
    qformer = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "encoder_hidden_size": 64,
    }
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 128,
        "dropout": 0.0,
        "pad_token_id": 0,
    }
    config = hf.Blip2Config(
        vision_config=vision,
        qformer_config=qformer,
        text_config=hf.OPTConfig(**text),
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    model = hf.Blip2ForConditionalGeneration(config)
    return model, make(one_image(1, 3, 28, 28, tokens=4))


@family(*AUDIO_LLM)
def voxtral() -> Made:
    audio = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_mel_bins": 16,
        "max_source_positions": 20,
    }
    config = hf.VoxtralConfig(
        audio_config=audio,
        text_config=hf.LlamaConfig(**text_config()),
        audio_token_id=AUDIO,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {**sentence(g, [AUDIO] * 5), "input_features": noise(g, 1, 16, 40)}

    return hf.VoxtralForConditionalGeneration(config), make(build)


@family("model.visual", "model.audio_tower", ("model.language_model", "lm_head"))
def qwen2_5_omni() -> Made:
    """Images by grid and audio by length in one decoder with three-part positions."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = hf.Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 40,
            "n_window": 10,
            "output_dim": 64,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 14,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config=text_config(rope_parameters=rope),
        image_token_index=IMAGE,
        audio_token_index=AUDIO,
        video_token_index=8,
        vision_start_token_id=START,
        vision_end_token_id=6,
        audio_start_token_id=3,
        audio_end_token_id=4,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        frames = 40 - 8 * (index % 3)
        mask = (torch.arange(40) < frames).long()
        return {
            **sentence(g, [START, *[IMAGE] * 4, 6], [3, *[AUDIO] * (frames // 4), 4]),
            "pixel_values": noise(g, 16, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "input_features": noise(g, 1, 16, 40),
            "feature_attention_mask": mask[None],
        }

    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config), make(build)


@family(*LLAVA)
def florence2() -> Made:
    """Encoder and decoder over text, channel attention in the vision tower."""
    vision = {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [32, 64],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
        "window_size": 4,
        "drop_path_rate": 0.0,
        "projection_dim": 64,
        "max_temporal_embeddings": 4,
        "max_position_embeddings": 8,
    }
    text = {
        "vocab_size": 128,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    config = hf.Florence2Config(
        vision_config=vision,
        text_config=hf.BartConfig(**text),
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )
    model = hf.Florence2ForConditionalGeneration(config)
    return model, make(one_image(1, 3, 32, 32, tokens=17))
