"""Qwen2.5-VL: images of any size and number per sample, packed into one tensor of patches.

Nothing is padded on the vision side: ``pixel_values`` holds the patches of all images one after
another and ``image_grid_thw`` says how many rows and columns each has. Microbatches come from
collating fewer samples, so each carries exactly its own patches, and samples without an image are
as good as any other.

    mllm-compile plan   examples/qwen2_5_vl.toml
    mllm-compile verify examples/qwen2_5_vl.toml
    mllm-compile run    examples/qwen2_5_vl.toml --steps 30

The model learns to say how bright each image is. For a checkpoint of your own return
``Qwen2_5_VLForConditionalGeneration.from_pretrained(...)``, and let its processor make the samples.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mllm_compile import Workload

PAD, EOS, START, END, IMAGE, VIDEO, DARK, BRIGHT, TEXT = range(9)
IGNORED = -100
PATCH = 14
GRIDS = [[(4, 4)], [(2, 4), (4, 4)], [], [(4, 6)], [(4, 2), (2, 2), (4, 4)], [(6, 4)]]

Sample = dict[str, Tensor]


def tiny() -> Workload:
    """Two vision layers, three decoder layers; samples of 0 to 3 images in six layouts."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": PAD,
            "bos_token_id": TEXT,
            "eos_token_id": EOS,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 10000.0,
            },
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    samples = [_sample(index) for index in range(48)]
    return Workload(Qwen2_5_VLForConditionalGeneration(config), samples, collate)


def _sample(index: int) -> Sample:
    """Each image is followed by its answer; a sample without images is a line of text."""
    g = torch.Generator().manual_seed(index)
    grids = GRIDS[index % len(GRIDS)]
    ids, labels, patches = [TEXT], [IGNORED], [torch.zeros(0, 3 * 2 * PATCH * PATCH)]
    for rows, columns in grids:
        bright = bool(torch.rand((), generator=g) > 0.5)
        span = [START, *[IMAGE] * (rows * columns // 4), END]
        ids += [*span, BRIGHT if bright else DARK]
        labels += [*[IGNORED] * len(span), BRIGHT if bright else DARK]
        noise = torch.randn(rows * columns, 3 * 2 * PATCH * PATCH, generator=g)
        patches.append(0.5 * noise + (1.0 if bright else -1.0))
    ending = [*range(TEXT + 1, TEXT + 3 + index % 4), EOS]
    return {
        "input_ids": torch.tensor(ids + ending),
        "labels": torch.tensor(labels + ending),
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], dtype=torch.long).reshape(
            -1, 3
        ),
    }


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Pad text on the right; put the patches of all images one after another.

    ``mm_token_type_ids`` tells image tokens (1) from text (0), as the model's processor does. A
    batch without any image has no vision entries at all.
    """
    ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(ids, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in ids])
    batch = {
        "input_ids": input_ids,
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        "mm_token_type_ids": (input_ids == IMAGE).long(),
        "use_cache": False,
    }
    if any(len(sample["image_grid_thw"]) for sample in samples):
        for key in ("pixel_values", "image_grid_thw"):
            batch[key] = torch.cat([sample[key] for sample in samples])
    return batch
