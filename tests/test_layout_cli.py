"""Layouts from the command line: real processes, shared ranks, checkpoints under other layouts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from mllm_compile import load_weights
from mllm_compile.cli import main
from mllm_compile.compiler.request import Request
from mllm_compile.model import load_workload, ready_model
from mllm_compile.plain import reference
from mllm_compile.runtime.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parent.parent

HEAD = """
workload = "tests.layout_jobs:small"
dtype = "float64"
microbatches = 2
microbatch_size = 4
[optimizer]
lr = 1e-2
weight_decay = 0.1
clip_norm = 0.5
"""

SHARED = """
[[module]]
path = "vision"
ranks = "0-3"
data = 4
[[module]]
path = "language"
ranks = "0-3"
tensor = 2
context = 2
"""

EXPERTS = """
[[module]]
path = "vision"
ranks = "0"
[[module]]
path = "language"
ranks = "0-1"
expert = 2
"""

PIPELINE = """
[[module]]
path = "vision"
ranks = "0-1"
tensor = 2
[[module]]
path = "language"
ranks = "1-2"
pipeline = 2
"""

MODULES = {"shared": SHARED, "experts": EXPERTS, "pipeline": PIPELINE}


@pytest.fixture(autouse=True)
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, modules in MODULES.items():
        (tmp_path / f"{name}.toml").write_text(HEAD + modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))


def shell(*command: str, **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **more,
    )


def verify(name: str, *sets: str) -> dict:
    assert main(["verify", f"{name}.toml", "--json", "report.json", *_set(*sets)]) == 0
    return json.loads(Path("report.json").read_text())


def run(name: str, *arguments: str) -> list[dict]:
    """The steps that the log holds after a run."""
    assert main(["run", f"{name}.toml", "--log", "run.jsonl", *arguments]) == 0
    return [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]


def plain(steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the unmodified model, its optimizer and its clipping."""
    request = Request.load("shared.toml")
    model = ready_model(request, load_workload(request).model)
    optimizer = make_optimizer(request.optimizer, dict(model.named_parameters()))
    assert optimizer is not None
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = reference(request, model, load_workload(request), step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), request.optimizer.clip_norm or 0.0)
        optimizer.step()
        found.append((loss, float(norm)))
    return found


def _set(*sets: str) -> list[str]:
    return [word for item in sets for word in ("--set", item)]


def test_plan_shows_the_layouts_and_inspect_reads_them_from_the_file(capsys) -> None:
    gather = _set("module.1.kv_exchange=gather")
    assert main(["plan", "shared.toml", "-o", "plan.json", *gather]) == 0
    shown = capsys.readouterr().out
    for word in ("Layouts", "tensor", "context", "FLOPs per rank"):
        assert word in shown
    assert main(["inspect", "plan.json"]) == 0
    assert capsys.readouterr().out == shown
    made = json.loads(Path("plan.json").read_text())["collectives"]
    exchanged = [each["forward"] for each in made if each["axis"] == "context"]
    assert exchanged.count("all-gather") == 4  # keys and values of two layers


def test_attention_that_fetches_its_keys_is_shown_and_agrees(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    needed = _set("module.1.kv_exchange=needed")
    assert main(["inspect", "shared.toml", "--rank", "1", *needed]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    fetched = [row for row in rows if len(row) == 9 and row[3] == "keys needed"]
    assert [row[4:8] for row in fetched] == [["context", "1, 3", "all-to-all", "all-to-all"]] * 2
    again = [row for row in rows if len(row) == 9 and row[3] == "keys again"]
    assert [row[4:8] for row in again] == [["context", "1, 3", "-", "all-to-all"]] * 2
    report = verify("shared", "module.1.kv_exchange=needed")
    assert report["gradients"]["max_relative_error"] < 1e-9


def test_inspect_shows_what_a_rank_exchanges_and_with_whom(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    gather = _set("module.1.kv_exchange=gather")
    assert main(["inspect", "shared.toml", "--rank", "1", *gather]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    found = {(row[4], row[5], row[6]) for row in rows if len(row) == 9}
    assert ("tensor", "0-1", "all-reduce") in found
    assert ("context", "1, 3", "all-gather") in found
    assert "Collectives of stage 0" not in shown


def test_verify_over_processes_on_shared_ranks() -> None:
    report = verify("shared")
    assert report["gradients"]["compared"] == 39
    assert report["gradients"]["max_relative_error"] < 1e-9
    assert report["messages"]["forward"] > 0
    assert len(report["peak_live_bytes_per_rank"]) == 4


def test_a_run_goes_on_under_other_layouts_as_the_plain_model_does() -> None:
    """Losses and norms; then its weights in the plain model."""
    first = run("shared", "--steps", "2", "--checkpoint", "saved")
    then = run("pipeline", "--steps", "3", "--checkpoint", "saved", "--resume")
    steps = [*first, *then[len(first) :]]
    assert [step["step"] for step in steps] == [1, 2, 3]
    expected = plain(3)
    assert [step["loss"] for step in steps] == pytest.approx([x for x, _ in expected], rel=1e-9)
    norms = [norm for _, norm in expected]
    assert min(norms) > 0.5  # so that all steps are clipped
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-9)
    model = load_workload(Request.load("shared.toml")).model.double()
    assert load_weights(model, "saved") == 3


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_parameters_is_refused(name: str, capsys) -> None:
    chosen = _set(f"optimizer.name={name}")
    assert main(["verify", "experts.toml", "--in-process", *chosen]) == 2
    told = capsys.readouterr().err
    assert f"parameters are divided, got {name}" in told
    assert told.count("\n") == 1


def test_frozen_parameters_may_be_divided_whatever_the_optimizer() -> None:
    whole = ("module.0.trainable=false", "module.1.ranks=2", "module.1.pipeline=1")
    chosen = _set("optimizer.name=Adafactor", *whole)
    assert main(["verify", "pipeline.toml", "--in-process", *chosen]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "pipeline"])
def test_more_layouts_over_processes(name: str) -> None:
    assert verify(name)["gradients"]["compared"] == 39


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(dtype: str) -> None:
    report = verify("shared", f"dtype={dtype}")
    assert report["tolerance"] == {"float32": 1e-5, "bfloat16": 5e-2}[dtype]


@pytest.mark.slow
def test_inductor_compiles_graphs_with_collectives() -> None:
    report = verify("shared", "compile=inductor", "module.1.context=1", "module.1.ranks=0-1")
    assert report["gradients"]["max_relative_error"] < 1e-9


@pytest.mark.slow
def test_a_refusal_on_a_rank_is_told_in_one_paragraph() -> None:
    chosen = _set("optimizer.name=Adafactor")
    done = shell("mllm_compile", "run", "experts.toml", *chosen)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mllm-compile run: [optimizer] name: ")


@pytest.mark.slow
def test_under_torchrun() -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = shell(*torchrun, "-m", "mllm_compile", "run", "shared.toml", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("trained 2 steps") == 1


@pytest.mark.slow
def test_a_rank_killed_among_collectives_ends_the_run_in_one_paragraph() -> None:
    command = [sys.executable, "-m", "mllm_compile", "run", "shared.toml", "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline().startswith("step 1/")
    os.kill(_rank_process(started.pid, 3), signal.SIGKILL)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 2
    assert told.splitlines()[-1].startswith("mllm-compile run: rank 3")
    assert "killed by signal 9" in told.splitlines()[-1]


def _rank_process(launcher: int, rank: int) -> int:
    """The process of a rank, by the environment that the launcher gave it."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")
