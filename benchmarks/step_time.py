"""Step time of a pipeline of two: this project, torch.distributed.pipelining, the plain model.

    python benchmarks/step_time.py [--microbatches M] [--rounds N] [--frozen]

A small image-and-text model in two halves, one on each of two processes over gloo, one thread each.
All three ways compute the gradients of the same global batch, from batch to ``.grad``, and take
turns in the same two processes; printed are medians of wall and of CPU seconds, and ratios. torch's
pipeline is given the halves by hand and runs Schedule1F1B; ours is given the whole model and the
request. The plain model runs on rank 0 alone, on the global batch at once. Gradients are compared
before anything is timed. ``--frozen`` freezes the image encoder.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from mllm_compile.compilation import Compiler
from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.rank import Rank, channels_of
from mllm_compile.runtime.distributed_transport import DistributedTransport
from mllm_compile.runtime.launch import launch

VOCABULARY, WIDTH, HEADS, PATCHES, TOKENS = 2048, 256, 4, 64, 128


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Front(nn.Module):
    """Image encoder, token embedding and the first decoder blocks."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(3 * 64, WIDTH)
        self.encoder = nn.Sequential(*(Block(causal=False) for _ in range(4)))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Sequential(*(Block(causal=True) for _ in range(2)))

    def forward(self, pixels, ids):
        image = self.encoder(self.patches(pixels))
        return self.decoder(torch.cat((image, self.embed(ids)), 1))


class Back(nn.Module):
    """The other decoder blocks and the head: logits of the text tokens."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(*(Block(causal=True) for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.decoder(x)[:, PATCHES:])


def loss_of(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = Front(), Back()

    def forward(self, pixels, ids, labels):
        return loss_of(self.back(self.front(pixels, ids)), labels)


@dataclass(frozen=True)
class Options:
    """What both processes run."""

    microbatches: int = 8
    microbatch_size: int = 2
    rounds: int = 7
    frozen: bool = False


def make_model(options):
    torch.manual_seed(0)
    model = Model()
    model.front.encoder.requires_grad_(not options.frozen)
    model.front.patches.requires_grad_(not options.frozen)
    return model


def make_batch(options):
    rows = options.microbatches * options.microbatch_size
    ids = torch.randint(VOCABULARY, (rows, TOKENS))
    return {"pixels": torch.randn(rows, PATCHES, 3 * 64), "ids": ids, "labels": ids.roll(-1, 1)}


def ours(model, batch, options):
    """A function that runs one step, and one that returns this rank's gradients."""
    modules = (ModuleSpec(("front",), (0,)), ModuleSpec(("back",), (1,)))
    request = Request(modules, microbatches=options.microbatches)
    compiler = Compiler(request, model)
    parts = [value.chunk(options.microbatches) for value in batch.values()]
    batches = [{1: (dict(zip(batch, part, strict=True)),)} for part in zip(*parts, strict=True)]
    channels = channels_of(compiler.step(batches))
    rank = Rank(compiler, DistributedTransport(torch.device("cpu"), channels))

    def step():
        rank.run(compiler.step(batches))
        gradients.update(rank.gradients())

    gradients = {}
    return step, lambda: gradients


def torch_pipelining(model, batch, options):
    """The same of torch: its stages are the model's halves."""
    here = dist.get_rank()
    name = ("front", "back")[here]
    half = getattr(model, name)
    stage = PipelineStage(half, here, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_of)

    def step():
        half.zero_grad(set_to_none=True)
        if here == 0:
            schedule.step(batch["pixels"], batch["ids"])
        else:
            schedule.step(target=batch["labels"], losses=[])

    return step, lambda: {
        f"{name}.{path}": parameter.grad
        for path, parameter in half.named_parameters()
        if parameter.grad is not None
    }


def plain(model, batch):
    """The whole model on rank 0, while rank 1 waits."""

    def step():
        if dist.get_rank() == 0:
            model.zero_grad(set_to_none=True)
            model(**batch).backward()

    return step, lambda: {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def measure(context, given):
    """On every rank: check the gradients, then let the three ways take turns."""
    options = Options(**given)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model(options)
    batch = make_batch(options)
    ways = {
        "ours": ours(copy.deepcopy(model), batch, options),
        "torch 1F1B": torch_pipelining(copy.deepcopy(model), batch, options),
        "plain": plain(copy.deepcopy(model), batch),
    }
    model(**batch).backward()
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    times, works = {name: [] for name in ways}, {name: [] for name in ways}
    for turn in range(options.rounds + 2):
        for name, (step, gradients) in ways.items():
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            step()
            work = torch.tensor(time.process_time() - work)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            dist.all_reduce(work)
            works[name].append(work.item())
            if turn == 0:
                check(name, gradients(), reference, context.rank)
    return {
        name: (statistics.median(times[name][2:]), statistics.median(works[name][2:]))
        for name in ways
    }


def check(name, found, reference, rank):
    """Gradients in float32 agree with the plain model's."""
    part = {0: "front.", 1: "back."}[rank]
    expected = {n: g for n, g in reference.items() if n.startswith(part)}
    if name == "plain":
        expected = reference if rank == 0 else {}
    assert set(found) == set(expected), (name, set(found) ^ set(expected))
    for path, gradient in expected.items():
        error = (found[path] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert error < 1e-3, (name, path, error)


def main() -> None:
    """Print the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=Options.microbatches)
    parser.add_argument("--rounds", type=int, default=Options.rounds)
    parser.add_argument("--frozen", action="store_true")
    medians = launch("benchmarks.step_time:measure", vars(parser.parse_args()), 2)[0]
    table = Table("way", "step s", "ours / it", "CPU s of both ranks", "ours / it")
    for name, pair in medians.items():
        cells = [(f"{b:.3f}", f"{a / b:.2f}") for a, b in zip(medians["ours"], pair, strict=True)]
        table.add_row(name, *cells[0], *cells[1])
    Console().print(table)


if __name__ == "__main__":
    main()
