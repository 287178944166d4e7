"""The zoo's register: families of tiny models as workloads, and the parts a request names."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mllm_compile.workload import Workload
from tests.samples import Sample, collate

FAMILIES: dict[str, Callable[[], Workload]] = {}
MODULES: dict[str, tuple[tuple[str, ...], ...]] = {}

Made = tuple[nn.Module, Sequence[Sample]]


def family(*modules: str | tuple[str, ...]) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register a function that makes (model, samples) under its own name.

    ``modules`` are the parts of the model in dataflow order, each one path or several.
    """

    def register(build: Callable[[], Made]) -> Callable[[], Made]:
        def workload() -> Workload:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, samples = build()
            return Workload(model.train(), samples, collate)

        FAMILIES[build.__name__] = workload
        MODULES[build.__name__] = tuple((m,) if isinstance(m, str) else m for m in modules)
        return build

    return register


def text_config(**changes: object) -> dict[str, object]:
    """Two tiny decoder layers with grouped heads."""
    config: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def vision_config(**changes: object) -> dict[str, object]:
    """Two tiny encoder layers on images of 2x2 patches of 14 pixels."""
    config: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    return {**config, **changes}
