"""The command line as a user meets it: exit codes, one-paragraph errors, files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mllm_compile import Workload, load_weights
from mllm_compile.cli import main
from mllm_compile.compiler.errors import RequestError
from mllm_compile.output import check_writable

ROOT = Path(__file__).resolve().parent.parent

WORKLOADS = """
import torch
from torch import nn
from mllm_compile import Workload


class Model(nn.Module):
    def __init__(self, broken=False):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.broken = broken

    def forward(self, input_ids, x, labels):
        h = self.decoder(self.encoder(x))
        if self.broken:
            h = h * h.sum().item()
        return nn.functional.cross_entropy(h, labels)


def collate(samples):
    return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


def make(broken=False):
    torch.manual_seed(0)
    samples = [
        {"x": torch.randn(4), "labels": torch.tensor(k % 4), "input_ids": torch.tensor([k])}
        for k in range(8)
    ]
    return Workload(Model(broken), samples, collate)


def good():
    return make()


def uncapturable():
    return make(broken=True)


def no_workload():
    return 3


def failing():
    raise ValueError("the disk\\nis full")


def without_model():
    return Workload(None, [1], collate)


def without_samples():
    return Workload(Model(), None, collate)


def without_collate():
    return Workload(Model(), [1], None)


def list_of_batches():
    return Workload(Model(), [1] * 8, lambda samples: samples)


def wrong_samples():
    return Workload(Model(), [{"x": torch.ones(k)} for k in range(8)], collate)


class Logits(Model):
    def forward(self, **batch):
        return {"logits": self.encoder(batch["x"])}


def without_loss():
    made = make()
    return Workload(Logits(), made.samples, collate)


def tied():
    made = make()
    made.model.decoder = nn.Linear(4, 8)
    made.model.decoder.weight = made.model.encoder.weight
    return made
"""

REQUEST = """
workload = "jobs:good"
dtype = "float64"
microbatches = 2
microbatch_size = 4
[[module]]
path = "encoder"
ranks = "0"
trainable = false
[[module]]
path = "decoder"
ranks = "1-2"
pipeline = 2
"""


@pytest.fixture
def request_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs.py").write_text(WORKLOADS)
    path = tmp_path / "request.toml"
    path.write_text(REQUEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    return path


def test_plan_prints_tables_and_writes_a_plan_that_inspect_reads(request_file, capsys) -> None:
    assert main(["plan", str(request_file), "-o", "out/plan.json", "--dump", "out/passes"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "Modules",
        "Stages",
        "Boundaries",
        "Schedule",
        "decoder",
        "nothing to train up to here",
    ):
        assert word in shown
    dumped = sorted(path.name for path in Path("out/passes").iterdir())
    assert dumped[0] == "00-capture.json"
    assert dumped[-1].endswith("schedule.json")
    assert main(["inspect", "out/plan.json"]) == 0
    assert capsys.readouterr().out == shown
    plan = json.loads(Path("out/plan.json").read_text())
    assert len(plan["stages"]) == 3


def test_inspect_views(request_file, capsys) -> None:
    assert main(["plan", str(request_file), "-o", "plan.json"]) == 0
    name = json.loads(Path("plan.json").read_text())["boundaries"][0]["values"][0]
    capsys.readouterr()
    assert main(["inspect", "plan.json", "--explain", name]) == 0
    assert "crosses" in capsys.readouterr().out
    assert main(["inspect", "plan.json", "--rank", "2", "--graph", "decoder"]) == 0
    assert "actions of rank 2" in capsys.readouterr().out
    assert main(["inspect", str(request_file), "--diff", "annotate", "partition"]) == 0
    assert "+++ partition" in capsys.readouterr().out


def test_plan_stops_after_a_pass(request_file, capsys) -> None:
    assert main(["plan", str(request_file), "--stop-after", "annotate"]) == 0
    shown = capsys.readouterr().out
    assert "Modules" in shown
    assert "Stages" not in shown


def test_plan_on_meta_equals_the_real_one(request_file, capsys) -> None:
    assert main(["plan", str(request_file)]) == 0
    real = capsys.readouterr().out
    assert main(["plan", str(request_file), "--meta"]) == 0
    assert capsys.readouterr().out == real


def test_capture_reports_the_graph_and_the_difference_to_eager(request_file, capsys) -> None:
    assert main(["capture", str(request_file)]) == 0
    shown = capsys.readouterr().out
    assert "one graph of" in shown
    assert "difference 0.0e+00" in shown


def test_verify_passes_and_writes_the_report(request_file, capsys) -> None:
    assert main(["verify", str(request_file), "--in-process", "--json", "report.json"]) == 0
    assert "agrees with" in capsys.readouterr().out
    report = json.loads(Path("report.json").read_text())
    assert report["passed"] is True
    assert report["loss"].keys() == {"eager", "program", "relative_error"}
    assert report["gradients"]["compared"] == 4
    assert report["gradients"]["missing"] == report["gradients"]["unexpected"] == []
    assert report["messages"].keys() == report["bytes"].keys() == {"forward", "backward"}
    assert report["messages"] == {"forward": 4, "backward": 2}
    assert len(report["peak_live_bytes_per_rank"]) == 3
    assert report["host_reads"] == 0


def test_verify_exits_with_1_where_a_gradient_differs(request_file, monkeypatch, capsys) -> None:
    from mllm_compile import verify

    reference = verify.reference

    def wrong(*arguments):
        loss, gradients = reference(*arguments)
        gradients["decoder.2.bias"] = gradients["decoder.2.bias"] * (1 + 1e-6)
        return loss, gradients

    monkeypatch.setattr(verify, "reference", wrong)
    assert main(["verify", str(request_file), "--in-process"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown
    assert "decoder.2.bias" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "nowhere.toml"], ["nowhere.toml"]),
        (["plan", "request.toml", "--set", "microbatch=3"], ["request.toml", "'microbatch'"]),
        (["plan", "request.toml", "--set", "module.0.path=enkoder"], ["enkoder", "encoder"]),
        (["plan", "request.toml", "--set", "module.1.ranks='1-3'"], ["decoder: ranks", "got 3"]),
        (["plan", "request.toml", "--set", "workload=jobs:nothing"], ["jobs:nothing"]),
        (["plan", "request.toml", "--set", "workload=nothing:here"], ["nothing:here"]),
        (["plan", "request.toml", "--set", "workload=jobs"], ["package.module:function"]),
        (["plan", "request.toml", "--set", "workload=jobs:no_workload"], ["Workload", "int"]),
        (
            ["plan", "request.toml", "--set", "workload=jobs:failing"],
            ["ValueError", "disk is full", "jobs.py:47 failing", "--debug"],
        ),
        (
            ["plan", "request.toml", "--set", "workload=jobs:without_model"],
            ["jobs:without_model", "nn.Module", "NoneType"],
        ),
        (["plan", "request.toml", "--set", "workload=jobs:without_samples"], ["samples", "len()"]),
        (["plan", "request.toml", "--set", "workload=jobs:without_collate"], ["collate", "None"]),
        (
            ["plan", "request.toml", "--set", "workload=jobs:list_of_batches"],
            ["collate", "a dict of the model's keyword arguments", "got list"],
        ),
        (
            ["plan", "request.toml", "--set", "workload=jobs:wrong_samples"],
            ["collate raised RuntimeError", "jobs.py:22 <dictcomp>", "equal size"],
        ),
        (["plan", "request.toml", "--set", "workload=jobs:without_loss"], ["a scalar loss"]),
        (
            [
                *("plan", "request.toml", "--set", "workload=jobs:tied"),
                *("--set", "module.1.trainable=true"),
            ],
            ["decoder.weight, a weight that encoder and decoder share", "got false and true"],
        ),
        (["plan", "request.toml", "-o", "jobs.py/plan.json"], ["--output", "jobs.py", "folder"]),
        (["plan", "request.toml", "-o", "."], ["--output", "got a folder"]),
        (["plan", "request.toml", "--dump", "jobs.py"], ["--dump", "jobs.py", "not a folder"]),
        (["verify", "request.toml", "--json", "jobs.py/a/b.json"], ["--json", "jobs.py"]),
        (["run", "request.toml", "--log", "jobs.py/a.jsonl"], ["--log", "jobs.py"]),
        (["run", "request.toml", "--checkpoint", "jobs.py/a"], ["--checkpoint", "jobs.py"]),
        (
            ["plan", "request.toml", "--set", "workload=jobs:uncapturable"],
            ["jobs.py:17", "torch.where"],
        ),
        (["plan", "request.toml", "--stop-after", "lunch"], ["lunch", "annotate"]),
        (["inspect", "request.toml", "--explain", "nothing"], ["'nothing'"]),
        (["inspect", "request.toml", "--rank", "9"], ["rank 9"]),
        (["inspect", "request.toml", "--diff", "annotate", "lunch"], ["'lunch'"]),
        (["inspect", "request.json"], ["request.json"]),
        (["run", "request.toml", "--resume"], ["--checkpoint"]),
        (["verify", "request.toml", "--in-process", "--set", "microbatches=0"], ["microbatches"]),
    ],
)
def test_errors_are_one_paragraph_and_exit_with_2(request_file, capsys, arguments, words) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mllm-compile {arguments[0]}: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err


def test_a_folder_that_may_not_be_written_is_refused_before_the_run(request_file, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "sealed" not in str(path) and allowed(path, mode)
    )
    Path("sealed").mkdir()
    with pytest.raises(RequestError, match=r"--checkpoint sealed/a: .*sealed, which is not writ"):
        check_writable("--checkpoint", Path("sealed/a"), folder=True)
    check_writable("--checkpoint", Path("new/a"), folder=True)
    check_writable("--json", Path("new/a.json"))


def test_a_request_finds_the_workload_beside_it_from_anywhere(request_file, capsys) -> None:
    done = shell("plan", str(request_file), cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("verify", str(request_file), cwd="/")
    assert (done.returncode, done.stderr) == (0, "")


def test_debug_shows_the_traceback(request_file, capsys) -> None:
    assert main(["plan", "request.toml", "--set", "workload=jobs:failing", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["plan"], ["fly", "x"], ["run", "x", "--steps", "many"]])
def test_wrong_arguments_exit_with_2_in_one_line(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("every", "message"), [("-1", "at least 0"), ("2", "--checkpoint DIR, to save there")]
)
def test_saving_now_and_then_wants_a_number_and_a_place(request_file, capsys, every, message):
    assert main(["run", "request.toml", "--save-every", every]) == 2
    assert f"--save-every: expected {message}" in capsys.readouterr().err


def shell(*arguments: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mllm_compile", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, **more
    )


def run(*arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run the request; returns also the steps that the log holds afterwards."""
    done = shell("run", "request.toml", "--log", "log/run.jsonl", *arguments)
    assert done.returncode == 0, done.stderr
    return done, [json.loads(line) for line in Path("log/run.jsonl").read_text().splitlines()]


def test_run_trains_in_processes_of_its_own_and_resumes(request_file) -> None:
    done, whole = run("--steps", "4")
    assert [step["step"] for step in whole] == [1, 2, 3, 4]
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert "step 4/4" in done.stdout
    assert "trained 4 steps" in done.stdout
    run("--steps", "2", "--checkpoint", "saved")
    _, parts = run("--steps", "4", "--checkpoint", "saved", "--resume")
    assert [step["loss"] for step in parts] == [step["loss"] for step in whole]
    trained = Workload.load("jobs:good").model.double()
    before = trained.decoder[0].weight.clone()
    assert load_weights(trained, "saved") == 4
    assert not torch.equal(before, trained.decoder[0].weight)


def test_a_rank_that_fails_ends_the_run_in_one_paragraph(request_file) -> None:
    broken = WORKLOADS.replace("for k in range(8)", "for k in range(2)").replace(
        "torch.stack([s[name] for s in samples])", "torch.stack([s[name] for s in samples[5:]])"
    )
    (request_file.parent / "jobs.py").write_text(broken)
    done = shell("run", "request.toml", "--steps", "2", timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("mllm-compile run: ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_leaves_nothing(request_file, number, code) -> None:
    Path("scratch").mkdir()
    command = [sys.executable, "-m", "mllm_compile", "run", "request.toml", "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(Path("scratch").resolve())}
    started = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline().startswith("step 1/")
    started.send_signal(number)
    _, told = started.communicate(timeout=20)
    assert (started.returncode, told) == (code, "")
    assert not list(Path("scratch").glob("mllm-compile-*"))


def test_a_reader_that_stops_early_is_no_error(request_file) -> None:
    plan = f"{sys.executable} -m mllm_compile plan request.toml"
    script = f"set -o pipefail; {plan} --set microbatches=64 | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jobs:good")


@pytest.mark.slow
def test_run_is_one_rank_of_torchrun(request_file) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "-m", "mllm_compile", "run", "request.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("trained 2 steps") == 1
