"""Caption real photographs: a small model of the LLaVA architecture, its weights drawn at random.

The photographs come with scikit-image, the captions stand below, text is tokenised by byte, and the
images go through CLIP's own processor. Nothing is downloaded. The vision tower stays frozen; the
projector and the language model learn to caption.
"""

from pathlib import Path
from typing import Any

import skimage
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mllm_compile import Workload

CAPTIONS = {
    "astronaut.png": "An astronaut in an orange suit smiles before a flag and a shuttle model.",
    "brick.png": "A wall of evenly laid bricks, seen from straight ahead.",
    "camera.png": "A man in a dark coat looks through a camera on a tripod.",
    "chelsea.png": "A ginger cat looks past the camera with green eyes.",
    "clock_motion.png": "A round clock, blurred because the camera moved.",
    "coffee.png": "A cup of coffee on a saucer with a spoon, on a wooden table.",
    "coins.png": "Rows of old coins from Pompeii on a dark cloth.",
    "grass.png": "A lawn of short grass fills the whole picture.",
    "gravel.png": "Many small grey stones lie close together.",
    "hubble_deep_field.jpg": "Hundreds of distant galaxies on the black of the night sky.",
    "ihc.png": "Tissue under a microscope, stained blue and brown.",
    "moon.png": "The grey surface of the moon with a crater in the middle.",
    "motorcycle_left.png": "A motorcycle stands in a garage beside shelves and tools.",
    "page.png": "A printed page of a textbook, unevenly lit.",
    "retina.jpg": "The back of a human eye with its blood vessels.",
    "rocket.jpg": "A rocket stands on its launch pad at dusk, lit by lamps.",
}
PROMPT = "What is in the picture? "
BOS, EOS, PAD, IMAGE = 256, 257, 258, 259
IMAGE_SIZE, PATCH_SIZE = 112, 14
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
IGNORED = -100
MAX_CAPTION = 90


def model() -> LlavaForConditionalGeneration:
    """CLIP, a projector and Llama: 2.1 million parameters."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = LlamaConfig(
        vocab_size=260,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    )


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample per photograph: pixels, token ids, labels; padded to the longest caption."""
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    folder = Path(skimage.__file__).parent / "data"
    images = [Image.open(folder / name).convert("RGB") for name in CAPTIONS]
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    prompt = [BOS, *[IMAGE] * IMAGE_TOKENS, *PROMPT.encode()]
    answers = [[*caption.encode(), EOS] for caption in CAPTIONS.values()]
    length = len(prompt) + max(map(len, answers))
    return [
        _sample(image, prompt, answer, length)
        for image, answer in zip(pixels, answers, strict=True)
    ]


@torch.no_grad()
def caption(trained: LlavaForConditionalGeneration, name: str) -> str:
    """What a model says about the photograph called ``name``."""
    sample = samples()[list(CAPTIONS).index(name)]
    prompt = sample["input_ids"][(sample["labels"] == IGNORED) & (sample["input_ids"] != PAD)]
    said = trained.eval().generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        pixel_values=sample["pixel_values"][None],
        max_new_tokens=MAX_CAPTION,
        do_sample=False,
    )
    answer = said[0, len(prompt) :].tolist()
    return bytes(token for token in answer if token < BOS).decode(errors="replace")


def _sample(
    image: torch.Tensor, prompt: list[int], answer: list[int], length: int
) -> dict[str, torch.Tensor]:
    padding = length - len(prompt) - len(answer)
    return {
        "pixel_values": image,
        "input_ids": torch.tensor([*prompt, *answer, *[PAD] * padding]),
        "attention_mask": torch.tensor([1] * (length - padding) + [0] * padding),
        "labels": torch.tensor([*[IGNORED] * len(prompt), *answer, *[IGNORED] * padding]),
    }


def collate(parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Stack samples of equal length into one batch."""
    batch = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {**batch, "use_cache": False}


def workload() -> Workload:
    """What the request names: sixteen photographs, each with its caption."""
    return Workload(model=model(), samples=samples(), collate=collate)
