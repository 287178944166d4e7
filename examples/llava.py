"""LLaVA: a CLIP vision tower, a projector and a Llama decoder, straight from transformers.

What a workload is: a model whose call returns an object with ``.loss``, samples, and a ``collate``
that turns some of them into the model's keyword arguments. Nothing in it speaks of ranks; that is
the request's business (``llava.toml`` beside this file).

    mllm-compile plan   examples/llava.toml             # stages, boundaries, schedule
    mllm-compile verify examples/llava.toml             # loss and every gradient are the model's
    mllm-compile run    examples/llava.toml --steps 30  # three processes

``tiny`` learns to name the colour of a square, in seconds on a CPU. ``large`` is a 71B model of the
same architecture; planning it needs neither a GPU nor its weights:

    mllm-compile plan examples/llava_large.toml --meta

To train your own checkpoint, return ``LlavaForConditionalGeneration.from_pretrained(...)`` and
make samples with its processor.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    PreTrainedConfig,
)

from mllm_compile import Workload
from mllm_compile.meta import parameters_on_meta

PAD, BOS, EOS, IMAGE = 0, 1, 2, 3
WORDS = ["what", "colour", "is", "this", "a", "small", "large", "square"]
COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}
TOKENS = {word: 4 + i for i, word in enumerate([*WORDS, *COLOURS])}
IGNORED = -100
TINY_TEXT: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
)

Sample = dict[str, Tensor]


def tiny() -> Workload:
    """A model of 0.2 million parameters and 64 coloured squares."""
    torch.manual_seed(0)
    return _workload(_tiny_vision(), LlamaConfig(**TINY_TEXT), image_size=28, count=64)


def experts() -> Workload:
    """The same with a mixture of four experts in every layer of the decoder."""
    torch.manual_seed(0)
    text = MixtralConfig(**TINY_TEXT, num_local_experts=4, num_experts_per_tok=2)
    return _workload(_tiny_vision(), text, image_size=28, count=64)


def _tiny_vision() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )


def large() -> Workload:
    """CLIP-L at 336 pixels and 80 layers of 8192: 71 billion parameters, for ``plan`` only.

    They have shapes but no storage.
    """
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with parameters_on_meta():
        return _workload(vision, text, image_size=336, count=16)


def _workload(
    vision: CLIPVisionConfig, text: PreTrainedConfig, *, image_size: int, count: int
) -> Workload:
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    image_tokens = (image_size // vision.patch_size) ** 2
    samples = [_sample(i, image_size, image_tokens) for i in range(count)]
    return Workload(LlavaForConditionalGeneration(config), samples, collate)


def _sample(index: int, image_size: int, image_tokens: int) -> Sample:
    """One square: pixels [1, 3, H, W], token ids and labels [length] (only the answer counts)."""
    g = torch.Generator().manual_seed(index)
    name, colour = list(COLOURS.items())[index % len(COLOURS)]
    noise = 0.3 * torch.randn(1, 3, image_size, image_size, generator=g)
    size = (["small"], ["large"], [])[index % 3]
    question = [BOS, *[IMAGE] * image_tokens, *_tokens("what colour is this")]
    answer = [*_tokens(" ".join(["a", *size, name, "square"])), EOS]
    return {
        "pixel_values": noise + torch.tensor(colour)[None, :, None, None],
        "input_ids": torch.tensor(question + answer),
        "labels": torch.tensor([IGNORED] * len(question) + answer),
    }


def _tokens(text: str) -> list[int]:
    return [TOKENS[word] for word in text.split()]


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Pad text to the longest sample, on the right; put the images of all samples in a row."""
    ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(row) for row in ids])
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=PAD),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "pixel_values": torch.cat([sample["pixel_values"] for sample in samples]),
        "use_cache": False,
    }
