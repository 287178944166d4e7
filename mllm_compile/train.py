"""Train: the loop that every rank runs, one optimizer step after another."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mllm_compile.compilation import Compiler
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.request import Request
from mllm_compile.model import load_workload, microbatches, pair, ready_model, whole
from mllm_compile.rank import Rank, joined
from mllm_compile.runtime.checkpoint import checkpoints, load, save
from mllm_compile.runtime.device import device_of
from mllm_compile.runtime.executor import StepResult
from mllm_compile.runtime.rank_main import RankContext
from mllm_compile.runtime.transport import Transport


@dataclass(frozen=True)
class Training:
    """What ``run`` asks of every rank.

    ``steps`` is the last step of the job, counted from its first; ``checkpoint`` is a directory,
    written at the end and after every ``save_every`` steps (0: only at the end).
    """

    request: Request
    steps: int
    checkpoint: str = ""
    save_every: int = 0
    resume: bool = False


@dataclass(frozen=True)
class Progress:
    """One finished step, the same on every rank; the loss is that of the global batch."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float


def train(context: RankContext, training: Training) -> Iterator[Progress]:
    """Run the steps of one rank; every rank must exhaust the iterator."""
    request, device = training.request, device_of(context.local_rank)
    workload = load_workload(request)
    compiler = Compiler(request, ready_model(request, workload.model), device)
    compiled = compiler.step(microbatches(request, workload, 0), pair(request, workload, 0))
    with joined(context, device, compiler, compiled) as rank:
        done = _resume(training, rank)
        for number in range(done, training.steps):
            start = time.perf_counter()
            batches = microbatches(request, workload, number)
            compiled = compiler.step(batches)
            result = rank.run(compiled, number + 1)
            norm = rank.update()
            yield Progress(
                step=number + 1,
                loss=_global_loss(result, rank.transport),
                grad_norm=float(norm),
                tokens=sum(tokens_of(batch) for mb in batches for batch in whole(mb)),
                seconds=time.perf_counter() - start,
            )
            last = number + 1 == training.steps
            every = training.save_every and (number + 1) % training.save_every == 0
            if training.checkpoint and (last or every):
                save(training.checkpoint, number + 1, rank.state, rank.optimizer, rank=rank.rank)


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Elements of ``input_ids``, or of the largest integer entry where there is no such entry."""
    integers = [
        value
        for value in batch.values()
        if isinstance(value, torch.Tensor) and not value.is_floating_point()
    ]
    ids = batch.get("input_ids")
    found = [ids] if isinstance(ids, torch.Tensor) else integers
    return max((value.numel() for value in found), default=0)


def _resume(training: Training, rank: Rank) -> int:
    """Load the latest checkpoint; the number of steps that it has behind it."""
    if not training.resume:
        return 0
    found: Sequence[Any] = checkpoints(training.checkpoint) if training.checkpoint else ()
    if not found:
        raise RequestError(
            explain(
                "--resume",
                expected="a finished checkpoint",
                got=f"none in {training.checkpoint!r}"
                if training.checkpoint
                else "no --checkpoint",
                remedy="name the directory of an earlier run with --checkpoint",
            )
        )
    return load(found[-1], rank.state, rank.optimizer, rank=rank.rank).step


def _global_loss(result: StepResult, transport: Transport) -> float:
    """The sum of all microbatches' losses, wherever they were computed."""
    mine = torch.zeros((), dtype=torch.float64, device=transport.device)
    for loss in result.losses.values():
        mine += loss
    return float(torch.stack(transport.all_gather(mine)).sum())
