"""Small decoders under context parallelism: packed documents, windows, chunks, padding, images."""

from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad

from mllm_compile.compilation import Compiler
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.model import microbatches, pair, ready_model
from mllm_compile.rank import Rank
from mllm_compile.runtime.local_transport import run_threads
from mllm_compile.verify import Verification, verify
from mllm_compile.workload import Workload
from tests.families import MODULES
from tests.parity import workload_of
from tests.samples import IMAGE, Sample, collate, generator, noise

VOCABULARY = 32
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
DECODERS: dict[str, Callable[[], torch.nn.Module]] = {
    "full": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
    "sliding": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**TEXT, **LAYERS, head_dim=8)),
    "chunked": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **TEXT,
            head_dim=8,
            intermediate_size_mlp=24,
            num_local_experts=2,
            attention_chunk_size=4,
            no_rope_layers=[1, 0],
        )
    ),
}


@cache
def decoder(name: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DECODERS[name]().train()


def text(length: int, seed: int = 0) -> Sample:
    """Words; the first one may stand behind padding, and is predicted from there."""
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def documents(*lengths: int, seed: int = 0) -> Sample:
    """Several texts in one row; positions begin anew with each of them."""
    parts = [text(length, seed + place) for place, length in enumerate(lengths)]
    row = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {**row, "position_ids": torch.cat([torch.arange(length) for length in lengths])}


def packed(samples: list[Sample]) -> dict[str, object]:
    """Rows of equal length; transformers finds the documents in the positions."""
    rows = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**rows, "use_cache": False}


def padded(side: str) -> Callable[[list[Sample]], dict[str, object]]:
    def made(samples: list[Sample]) -> dict[str, object]:
        length = max(len(sample["input_ids"]) for sample in samples)

        def row(values: Tensor, value: int) -> Tensor:
            missing = length - len(values)
            return pad(values, (missing, 0) if side == "left" else (0, missing), value=value)

        return {
            "input_ids": torch.stack([row(sample["input_ids"], 0) for sample in samples]),
            "labels": torch.stack([row(sample["labels"], -100) for sample in samples]),
            "attention_mask": torch.stack(
                [row(torch.ones_like(sample["input_ids"]), 0) for sample in samples]
            ),
            "use_cache": False,
        }

    return made


def request(
    context: int, split: str = "contiguous", size: int = 1, exchange: str = "auto"
) -> Request:
    parallel = Parallel(context=context)
    module = ModuleSpec(("",), tuple(range(context)), parallel, None, split, exchange)
    return Request((module,), microbatches=1, microbatch_size=size, dtype="float64")


def check(
    name: str,
    samples: list[Sample],
    made,
    context: int,
    split: str = "contiguous",
    exchange: str = "auto",
) -> Verification:
    """Verify one microbatch of all samples."""
    workload = Workload(decoder(name), samples, made)
    return verify(request(context, split, len(samples), exchange), workload, in_process=True)


def multimodal(
    family: str,
    samples: list[Sample],
    context: int,
    split: str,
    encoders: int = 1,
    exchange: str = "auto",
    tensor: int = 1,
) -> Verification:
    """A family's last module on ``context`` ranks, its encoders on the first ``encoders`` ones."""
    *paths, last = MODULES[family]
    ranks = tuple(range(encoders))
    modules = (
        *(
            ModuleSpec(path, ranks, Parallel(context=encoders), None, split, exchange)
            for path in paths
        ),
        ModuleSpec(
            last,
            tuple(range(context * tensor)),
            Parallel(context=context, tensor=tensor),
            None,
            split,
            exchange,
        ),
    )
    model = workload_of(family).model
    made = Request(modules, microbatches=1, microbatch_size=len(samples), dtype="float64")
    return verify(made, Workload(model, samples, collate), in_process=True)


def with_images(before: int, after: int, images: int = 1, seed: int = 0) -> Sample:
    """``before`` words, the placeholders of the images (four each), ``after`` words."""
    g = generator(seed)
    words = torch.randint(20, 128, (before + after,), generator=g)
    places = torch.full((4 * images,), IMAGE)
    ids = torch.cat([words[:before], places, words[before:]])
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": noise(g, images, 3, 28, 28)}


Outcome = dict[str, Tensor]
"""A loss and the gradients of one rank."""


def outcomes(name: str, samples: list[Sample], context: int, split: str) -> list[list[Outcome]]:
    """Of every sample, a step of its own by the same programs: what every rank computes."""
    made = request(context, split)
    workload = Workload(decoder(name), samples, packed)
    compiler = Compiler(made, ready_model(made, workload.model))
    found = []
    for place in range(len(samples)):
        step = compiler.step(microbatches(made, workload, place), pair(made, workload, place))
        compiler.lower_all(step)

        def run(transport, step=step) -> Outcome:
            rank = Rank(compiler, transport, private=True)
            losses = rank.run(step).losses
            return {**{f"loss {k}": v for k, v in losses.items()}, **rank.gradients()}

        found.append(run_threads(context, run))
    return found
