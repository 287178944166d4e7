"""Families with one vision tower on images of fixed size."""

import torch
import transformers as hf

from tests.registry import Made, family, text_config, vision_config
from tests.samples import END, IMAGE, START, Sample, make, noise, sentence

LLAVA = (
    "model.vision_tower",
    "model.multi_modal_projector",
    ("model.language_model", "lm_head"),
)


def one_image(*pixels: int, tokens: int):
    """Builds samples of one image each, ``tokens`` placeholders for it."""

    def build(g: torch.Generator, index: int) -> Sample:
        return {**sentence(g, [IMAGE] * tokens), "pixel_values": noise(g, *pixels)}

    return build


def llava_model() -> hf.PreTrainedModel:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**vision_config(projection_dim=64)),
        text_config=hf.LlamaConfig(**text_config()),
        image_token_index=IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return hf.LlavaForConditionalGeneration(config)


@family(*LLAVA)
def llava() -> Made:
    return llava_model(), make(one_image(1, 3, 28, 28, tokens=4))


@family(*LLAVA)
def llava_ragged() -> Made:
    """0 to 3 images a sample, two text-only samples in a row."""
    counts = (2, 0, 1, 3, 0, 0, 1, 2)

    def build(g: torch.Generator, index: int) -> Sample:
        spans = [[IMAGE] * 4 for _ in range(counts[index])]
        return {**sentence(g, *spans), "pixel_values": noise(g, counts[index], 3, 28, 28)}

    return llava_model(), make(build)


@family(*LLAVA)
def llava_next() -> Made:
    """Five crops an image; the features of 56x56 pixels are 4 + 4·4 + 4 line ends."""
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**vision_config(projection_dim=64)),
        text_config=hf.LlamaConfig(**text_config()),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        vision_feature_layer=-2,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {
            **sentence(g, [IMAGE] * 24),
            "pixel_values": noise(g, 1, 5, 3, 28, 28),
            "image_sizes": torch.tensor([[56, 56]]),
        }

    return hf.LlavaNextForConditionalGeneration(config), make(build)


@family(*LLAVA)
def internvl() -> Made:
    config = hf.InternVLConfig(
        vision_config=vision_config(image_size=[56, 56], patch_size=[14, 14]),
        text_config=hf.Qwen2Config(**text_config()),
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    model = hf.InternVLForConditionalGeneration(config)
    return model, make(one_image(1, 3, 56, 56, tokens=4))


@family(*LLAVA)
def gemma3() -> Made:
    """Image tokens see each other; one sliding layer, one full layer."""
    layers = ["sliding_attention", "full_attention"]
    config = hf.Gemma3Config(
        text_config=text_config(
            head_dim=16, query_pre_attn_scalar=16, sliding_window=8, layer_types=layers
        ),
        vision_config=vision_config(image_size=56, vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        text = sentence(g, [START, *[IMAGE] * 4, END])
        kinds = (text["input_ids"] == IMAGE).long()
        return {**text, "token_type_ids": kinds, "pixel_values": noise(g, 1, 3, 56, 56)}

    return hf.Gemma3ForConditionalGeneration(config), make(build)


@family("model.vision_model", "model.connector", ("model.text_model", "lm_head"))
def smolvlm() -> Made:
    config = hf.SmolVLMConfig(
        vision_config=vision_config(image_size=56),
        text_config=hf.LlamaConfig(**text_config()),
        image_token_id=IMAGE,
        scale_factor=2,
    )
    return hf.SmolVLMForConditionalGeneration(config), make(tiled_image)


def tiled_image(g: torch.Generator, index: int) -> Sample:
    """One image per sample in a row of images, with its map of real pixels."""
    return {
        **sentence(g, [IMAGE] * 4),
        "pixel_values": noise(g, 1, 1, 3, 56, 56),
        "pixel_attention_mask": torch.ones(1, 1, 56, 56, dtype=torch.long),
    }


@family("vision_model", "multi_modal_projector", "language_model")
def llama4() -> Made:
    """Chunked attention and experts in the text model."""
    vision = vision_config(
        intermediate_size=256,
        image_size=56,
        vision_output_dim=64,
        projector_input_dim=64,
        projector_output_dim=64,
        pixel_shuffle_ratio=0.5,
    )
    text = text_config(
        head_dim=16, intermediate_size_mlp=128, num_local_experts=2, attention_chunk_size=8
    )
    config = hf.Llama4Config(
        vision_config=vision,
        text_config=text,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )
    _give_text_outputs_an_image_attribute()
    model = hf.Llama4ForConditionalGeneration(config)
    return model, make(one_image(1, 3, 56, 56, tokens=4))


def _give_text_outputs_an_image_attribute() -> None:
    """transformers 5.24 reads ``image_outputs`` from a text output that has no such field."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Output

    if not hasattr(Output, "image_outputs"):
        Output.image_outputs = None


@family(*LLAVA)
def mistral3() -> Made:
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**vision_config(image_size=56)),
        text_config=hf.MistralConfig(**text_config(head_dim=16)),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )

    def build(g: torch.Generator, index: int) -> Sample:
        return {
            **sentence(g, [IMAGE] * 4),
            "pixel_values": noise(g, 1, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        }

    return hf.Mistral3ForConditionalGeneration(config), make(build)


@family(*LLAVA)
def aya_vision() -> Made:
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**vision_config(image_size=56, vision_use_head=False)),
        text_config=hf.Cohere2Config(**text_config(tie_word_embeddings=True)),
        image_token_index=IMAGE,
    )
    model = hf.AyaVisionForConditionalGeneration(config)
    return model, make(one_image(1, 3, 56, 56, tokens=4))
