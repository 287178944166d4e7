"""Training: the plain optimizer's steps, resumed under another layout, ended when a rank dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mllm_compile.compiler.request import ModuleSpec, Optimizer, Parallel, Request
from mllm_compile.model import load_workload, ready_model
from mllm_compile.plain import reference
from mllm_compile.progress import Run
from mllm_compile.runtime.launch import launch
from mllm_compile.runtime.optimizer import make_optimizer
from mllm_compile.train import Progress, Training

ROOT = Path(__file__).resolve().parent.parent
TOWERS = ("model.vision_tower", "model.multi_modal_projector")
DECODER = ("model.language_model", "lm_head")
STEPS, SAVED_AT = 4, 2


def request(*modules: tuple[tuple[str, ...], tuple[int, ...]]) -> Request:
    return Request(
        tuple(ModuleSpec(paths, ranks, Parallel(pipeline=len(ranks))) for paths, ranks in modules),
        workload="examples.llava:tiny",
        dtype="float64",
        microbatches=1,
        microbatch_size=2,
        optimizer=Optimizer("AdamW", lr=3e-3, weight_decay=0.1, clip_norm=1.0),
    )


THREE = request((TOWERS, (0,)), (DECODER, (1, 2)))
TWO = request((("",), (0, 1)))


def losses(steps: list[Progress]) -> list[float]:
    return [step.loss for step in steps]


def plain_losses() -> list[float]:
    """The unmodified model, its optimizer and its clipping, in this process."""
    model = ready_model(TWO, load_workload(TWO).model)
    optimizer = make_optimizer(TWO.optimizer, dict(model.named_parameters()))
    assert optimizer is not None
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = reference(TWO, model, load_workload(TWO), step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss)
    return found


def test_steps_are_the_plain_model_s_and_go_on_under_another_layout(tmp_path: Path) -> None:
    training = Training(THREE, STEPS, checkpoint=str(tmp_path), save_every=SAVED_AT)
    first = launch("mllm_compile.progress:rank_main", Run(training), 3)
    expected = torch.tensor(plain_losses(), dtype=torch.float64)
    assert expected[0] != expected[-1]
    for steps in first.values():
        found = torch.tensor(losses(steps), dtype=torch.float64)
        assert max(abs(found / expected - 1)) < 1e-9
    shutil.rmtree(tmp_path / f"step-{STEPS:08d}")
    resumed = Training(TWO, STEPS, checkpoint=str(tmp_path), resume=True)
    second = launch("mllm_compile.progress:rank_main", Run(resumed), 2)
    for steps in second.values():
        assert [step.step for step in steps] == [3, 4]
        again = torch.tensor(losses(steps), dtype=torch.float64)
        assert max(abs(again / expected[SAVED_AT:] - 1)) < 1e-9


@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank in /proc")
def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    arguments = ["run", "examples/llava.toml", "--set", "microbatches=1", "--steps", "1000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "mllm_compile", *arguments, "--log", str(log)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") > 2):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        ranks = ranks_of(run.pid)
        assert sorted(ranks) == [0, 1, 2]
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = run.communicate(timeout=10)
    assert run.returncode == 2
    said = (
        r"rank 1 \(stage 1, .*model\.language_model.*\) was killed by signal 9 \(SIGKILL\) during "
    )
    assert re.search(said + r"(1[FIWSR]\S+ of|the .*) step \d+\n$", errors), errors
    assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process of the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in children:
        entries = Path(f"/proc/{child}/environ").read_text().split("\0")
        found |= {int(entry[5:]): int(child) for entry in entries if entry.startswith("RANK=")}
    return found
