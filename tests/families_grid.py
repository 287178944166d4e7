"""Families that take patches of all images in one packed tensor, with a grid per image."""

import torch
import transformers as hf

from tests.registry import Made, family, text_config
from tests.samples import END, IMAGE, START, VIDEO, Sample, make, noise, sentence

ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
QWEN = ("model.visual", ("model.language_model", "lm_head"))
GRIDS = ((4, 4), (4, 4), (2, 4), (4, 6), (4, 2), (4, 4), (6, 4), (2, 2))


def grid_images(patch: int, counts=(1,) * 8, grids=((4, 4),) * 8, frames: int = 2):
    """Samples with ``counts[i]`` images of ``grids[i]`` patches; 2x2 patches make one token."""

    def build(g: torch.Generator, index: int) -> Sample:
        count, (height, width) = counts[index], grids[index]
        span = [START, *[IMAGE] * (height * width // 4), END]
        text = sentence(g, *[span] * count)
        return {
            **text,
            "mm_token_type_ids": (text["input_ids"] == IMAGE).long(),
            "pixel_values": noise(g, count * height * width, 3 * frames * patch * patch),
            "image_grid_thw": torch.tensor([[1, height, width]]).expand(count, 3),
        }

    return build


def vision(**changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 14,
        "out_hidden_size": 64,
    }
    return {**config, **changes}


@family(*QWEN)
def qwen2_vl() -> Made:
    config = hf.Qwen2VLConfig(
        text_config=text_config(rope_parameters=ROPE),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": 14,
        },
        **TOKENS,
    )
    return hf.Qwen2VLForConditionalGeneration(config), make(grid_images(14))


def qwen2_5_model() -> hf.PreTrainedModel:
    config = hf.Qwen2_5_VLConfig(
        text_config=text_config(rope_parameters=ROPE),
        vision_config=vision(window_size=56, fullatt_block_indexes=[1]),
        **TOKENS,
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config)


@family(*QWEN)
def qwen2_5_vl() -> Made:
    return qwen2_5_model(), make(grid_images(14))


@family(*QWEN)
def qwen2_5_vl_ragged() -> Made:
    """0 to 3 images a sample, of different grids."""
    counts = (2, 0, 1, 3, 0, 0, 1, 2)
    return qwen2_5_model(), make(grid_images(14, counts, GRIDS))


def deepstack(**changes: object) -> dict[str, object]:
    """Features of encoder layers 0 and 1 are added in decoder layers 0 and 1."""
    return vision(
        depth=3,
        patch_size=16,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
        **changes,
    )


@family(*QWEN)
def qwen3_vl() -> Made:
    config = hf.Qwen3VLConfig(
        text_config=text_config(head_dim=16, rope_parameters=ROPE, num_hidden_layers=3),
        vision_config=deepstack(),
        **TOKENS,
    )
    return hf.Qwen3VLForConditionalGeneration(config), make(grid_images(16))


@family(*QWEN)
def qwen3_vl_moe() -> Made:
    config = hf.Qwen3VLMoeConfig(
        text_config=text_config(
            head_dim=16,
            rope_parameters=ROPE,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        vision_config=deepstack(),
        **TOKENS,
    )
    return hf.Qwen3VLMoeForConditionalGeneration(config), make(grid_images(16))


@family(*QWEN)
def glm4v() -> Made:
    config = hf.Glm4vConfig(
        text_config=text_config(rope_parameters={**ROPE, "partial_rotary_factor": 1.0}),
        vision_config=vision(image_size=56),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=3,
        video_end_token_id=4,
    )
    return hf.Glm4vForConditionalGeneration(config), make(grid_images(14))


@family("model.vision_tower", "model.mm_projector", ("model.language_model", "lm_head"))
def kimi_k25() -> Made:
    """Latent attention and grouped experts in the text model."""
    from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = hf.DeepseekV3Config(
        **text_config(
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=4,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        )
    )
    encoder = {
        "patch_size": 14,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "pos_emb_time": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    config = Kimi_K25Config(
        text_config=text,
        vision_config=encoder,
        projection_hidden_size=64,
        tie_word_embeddings=False,
        **TOKENS,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {
            **sentence(g, [IMAGE] * 4),
            "pixel_values": noise(g, 16, 3, 14, 14),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }

    return Kimi_K25ForConditionalGeneration(config), make(build)
