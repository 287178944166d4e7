"""Seeded samples for tiny multimodal models, and the one collate function that fits them all.

A sample is a dict of tensors. ``PER_TOKEN`` entries have one value per token and are padded to the
right; every other entry begins with a dim of items (images, patches, clips) and is concatenated,
or left out of the batch where no sample has any item.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PAD, START, END, IMAGE, VIDEO, AUDIO, VOCABULARY = 0, 5, 6, 7, 8, 9, 128
FIRST_WORD = 20
COUNT = 8

Sample = dict[str, Tensor]
PER_TOKEN = {
    "input_ids": PAD,
    "labels": -100,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "cross_attention_mask": 0,
}


def generator(index: int, salt: int = 0) -> torch.Generator:
    """The random numbers of sample ``index``."""
    return torch.Generator().manual_seed(1000 * (salt + 1) + index)


def noise(g: torch.Generator, *shape: int) -> Tensor:
    """Pixels or sound: normal values, [*shape]."""
    return torch.randn(*shape, generator=g)


def words(g: torch.Generator, low: int, high: int) -> list[int]:
    """Between ``low`` and ``high`` random text tokens."""
    count = int(torch.randint(low, high + 1, (), generator=g))
    return torch.randint(FIRST_WORD, VOCABULARY, (count,), generator=g).tolist()


def sentence(g: torch.Generator, *spans: Sequence[int]) -> Sample:
    """input_ids and labels: text, then each span of placeholders followed by text.

    The prompt before the first span and all special tokens carry no label.
    """
    ids = words(g, 1, 5)
    prompt = len(ids)
    for span in spans:
        ids += [*span, *words(g, 1, 3)]
    ids += words(g, 3, 9)
    input_ids = torch.tensor(ids)
    labels = input_ids.masked_fill(input_ids < FIRST_WORD, -100)
    labels[:prompt] = -100
    return {"input_ids": input_ids, "labels": labels}


def make(build: Callable[[torch.Generator, int], Sample], count: int = COUNT) -> list[Sample]:
    """``count`` samples; ``build`` gets each one's random numbers and its index."""
    return [build(generator(index), index) for index in range(count)]


def collate(samples: Sequence[Sample]) -> dict[str, object]:
    """One batch: text padded to the right, items of all samples one after another."""
    length = max(len(sample["input_ids"]) for sample in samples)
    batch: dict[str, object] = {"use_cache": False}
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        if name in PER_TOKEN:
            rows = [_pad(part, length, PER_TOKEN[name]) for part in parts]
            batch[name] = torch.stack(rows)
        elif any(len(part) for part in parts):
            batch[name] = torch.cat([part for part in parts if len(part)])
    present = [_pad(torch.ones_like(sample["input_ids"]), length, 0) for sample in samples]
    batch["attention_mask"] = torch.stack(present)
    return batch


def _pad(values: Tensor, length: int, value: int) -> Tensor:
    rest = (0, 0) * (values.dim() - 1)
    return torch.nn.functional.pad(values, (*rest, 0, length - len(values)), value=value)
