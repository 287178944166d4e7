"""Show a training run: a bar on a terminal, a line now and then elsewhere, a log of JSON lines.

Every rank runs the same loop; rank 0 alone shows and writes.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mllm_compile.runtime.rank_main import RankContext
from mllm_compile.train import Progress, Training, train

TELL_EVERY = 5.0  # seconds between plain lines


@dataclass(frozen=True)
class Run:
    """What the command ``run`` asks of every rank; ``log`` is a file of JSON lines."""

    training: Training
    log: Path | None = None


def rank_main(context: RankContext, run: Run) -> list[Progress]:
    """Train one rank to the end; returns its steps."""
    steps = train(context, run.training)
    return list(_shown(steps, run) if context.rank == 0 else steps)


def tokens_per_second(step: Progress) -> float:
    """Speed of one step over all ranks."""
    return step.tokens / max(step.seconds, 1e-9)


def _shown(steps: Iterator[Progress], run: Run) -> Iterator[Progress]:
    with ExitStack() as stack:
        log = None
        if run.log is not None:
            run.log.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(run.log.open("a" if run.training.resume else "w"))
        console = Console(highlight=False)
        bar = stack.enter_context(_bar(console)) if console.is_terminal else None
        task = bar.add_task("", total=run.training.steps, loss="", speed="") if bar else None
        told = float("-inf")
        for step in steps:
            loss, speed = f"loss {step.loss:.4f}", f"{tokens_per_second(step):.0f} tokens/s"
            if log is not None:
                _write(log, step)
            if bar is not None and task is not None:
                bar.update(task, completed=step.step, loss=loss, speed=speed)
            elif time.monotonic() - told >= TELL_EVERY or step.step == run.training.steps:
                told = time.monotonic()
                print(f"step {step.step}/{run.training.steps}  {loss}  {speed}", flush=True)
            yield step


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _write(log: TextIO, step: Progress) -> None:
    record = {**asdict(step), "tokens_per_second": tokens_per_second(step)}
    log.write(json.dumps(record) + "\n")
    log.flush()
