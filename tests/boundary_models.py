"""Models made for their boundaries: consumers with known gradients, features of any size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.model import microbatches, pair, ready_model
from mllm_compile.passes.lower.crossings import Crossing, crossings
from mllm_compile.rank import Rank
from mllm_compile.runtime.local_transport import run_threads
from mllm_compile.runtime.measures import Measures
from mllm_compile.workload import Workload
from tests.families_composite import Composite
from tests.registry import text_config
from tests.samples import IMAGE, collate, make, noise, sentence


class TwoReaders(nn.Module):
    """A source that two modules read; the gradients of what they read are 1 and 10."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.source = nn.Linear(width, width)
        self.ones, self.tens = nn.Linear(width, 2, bias=False), nn.Linear(width, 2, bias=False)
        with torch.no_grad():
            self.ones.weight.fill_(0.5)
            self.tens.weight.fill_(5.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.source(x)
        return (self.ones(y) + self.tens(y)).sum()


def two_readers() -> Workload:
    def together(samples: list[Tensor]) -> dict[str, Tensor]:
        return {"x": torch.stack(samples)}

    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Workload(TwoReaders(), [noise(g, 3, 8) for _ in range(8)], together)


class Merging(nn.Module):
    """Image features merged into text, and a head: no layer in between."""

    def __init__(self, width: int, reduction: str):
        super().__init__()
        self.vision = nn.Linear(6, width)
        self.embed = nn.Embedding(128, width)
        self.head = nn.Linear(width, 128)
        self.reduction = reduction

    def forward(
        self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor | None = None, **_: object
    ) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            found = self.vision(pixel_values)
            x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), found)
        logits = self.head(x.tanh()).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction=self.reduction)


MERGING = (("vision",), ("embed", "head"))


class Pixels(nn.Module):
    """An encoder of one matrix."""

    def __init__(self, width: int):
        super().__init__()
        self.patches = nn.Linear(6, width)

    def forward(self, pixel_values: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.patches(pixel_values))


def wide_decoder(tokens: int, width: int) -> Workload:
    """Four samples with as many image tokens each, and one layer of a decoder."""
    config = text_config(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_key_value_heads=4,
        max_position_embeddings=2 * tokens,
    )

    def build(g: torch.Generator, index: int):
        return {**sentence(g, [IMAGE] * tokens), "pixel_values": noise(g, 1, tokens, 6)}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Composite(LlamaForCausalLM(LlamaConfig(**config)), Pixels(width))
        model.vision_projector = nn.Identity()
        return Workload(model, make(build, 4), collate)


def merging(tokens: Sequence[int], width: int = 8, reduction: str = "mean") -> Workload:
    """Sample k has ``tokens[k]`` image tokens."""

    def build(g: torch.Generator, index: int):
        count = tokens[index]
        return {**sentence(g, [IMAGE] * count), "pixel_values": noise(g, count, 6)}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Workload(Merging(width, reduction), make(build, len(tokens)), collate)


def request_of(
    paths: Sequence[tuple[str, ...]], sizes: Sequence[Mapping[str, int]], **keys
) -> Request:
    """Modules on ranks of their own, one behind the other."""
    modules, first = [], 0
    for path, own in zip(paths, sizes, strict=True):
        parallel = Parallel(**own)
        modules.append(ModuleSpec(path, tuple(range(first, first + parallel.size)), parallel))
        first += parallel.size
    return Request(tuple(modules), dtype="float64", **keys)


@dataclass(frozen=True)
class Sent:
    """Messages and bytes between ranks, forward and backward."""

    messages: tuple[int, int]
    bytes: tuple[int, int]

    @staticmethod
    def of(measures: Sequence[Measures]) -> "Sent":
        return Sent(
            (
                sum(each.messages_forward for each in measures),
                sum(each.messages_backward for each in measures),
            ),
            (
                sum(each.bytes_forward for each in measures),
                sum(each.bytes_backward for each in measures),
            ),
        )


def compiled(request: Request, workload: Workload) -> tuple[Compiler, Step]:
    compiler = Compiler(request, ready_model(request, workload.model))
    step = compiler.step(microbatches(request, workload, 0), pair(request, workload, 0))
    compiler.lower_all(step)
    return compiler, step


def run(compiler: Compiler, step: Step, ranks: int) -> Sent:
    """What the ranks send in one step."""
    return Sent.of(
        run_threads(ranks, lambda link: Rank(compiler, link, private=True).run(step).measures)
    )


def announced(compiler: Compiler, step: Step) -> tuple[int, int]:
    """The pieces of the transfers of all programs that go to other ranks."""
    counts = [0, 0]
    for microbatch in range(len(step.microbatches)):
        for stage in compiler.plans[0].stages:
            for rank in stage.ranks:
                program = compiler.program(step, microbatch, stage.index, rank)
                sides = program.sends_forward, program.sends_backward
                for way, transfers in enumerate(sides):
                    pieces = [piece for transfer in transfers for piece in transfer.pieces]
                    counts[way] += sum(piece.rank != rank for piece in pieces)
    return counts[0], counts[1]


def least(step: Step) -> tuple[int, int]:
    """The bytes that must go over all boundaries, element by element.

    Forward, what a rank needs and does not hold. Backward, what a rank that held it needs the
    gradient of, unless it read that element itself.
    """
    total = [0, 0]
    for microbatch in step.microbatches:
        for crossing in _crossings(microbatch):
            itemsize = crossing.value.tensor.element_size()
            ends = crossing.sources, crossing.targets
            total[0] += itemsize * _missing(ends[0], ends[1])
            total[1] += itemsize * _missing(ends[1], ends[0]) * crossing.flows
    return total[0], total[1]


def _missing(held: Mapping[int, Holding], needed: Mapping[int, Holding]) -> int:
    return sum(
        len(_elements(holding) - (_elements(held[rank]) if rank in held else set()))
        for rank, holding in needed.items()
    )


def _elements(holding: Holding) -> set[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = [()]
    for indices in holding.region:
        places = [place for start, stop in indices for place in range(start, stop)]
        rows = [(*row, place) for row in rows for place in places]
    return set(rows)


def _crossings(microbatch) -> Iterator[Crossing]:
    """Every crossing of a microbatch once."""
    request = next(iter(microbatch.values()))[0].plan.request
    plans = [
        tuple(lane.plan for lane in microbatch[module.parallel.data]) for module in request.modules
    ]
    stages = plans[0][0].stages
    equal: set[tuple[int, int, int]] = set()
    for stage in stages:
        for lane, plan in enumerate(plans[stage.module]):
            for boundary in plan.boundaries:
                if boundary.target != stage.index:
                    continue
                other = stages[boundary.source].module
                apart = len(plans[other]) == len(plans[stage.module])
                key = boundary.source, boundary.target, lane if apart else 0
                if key not in equal:
                    equal.add(key)
                    yield from crossings(stage, lane, boundary, plans)
