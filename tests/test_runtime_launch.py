"""Processes: how they start, end, and what is said when one of them dies."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mllm_compile.compiler.errors import GuardError, RunError
from mllm_compile.runtime.launch import launch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 10.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word in the environment of everything that the test starts."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("MLLM_TEST_MARK", word)
    yield word
    assert not marked(word, wait=LIMIT_SECONDS), "processes were left behind"


def marked(word: str, wait: float = 0.0) -> list[int]:
    """Processes started under the mark, zombies not counted; waits for them to vanish."""
    deadline = time.monotonic() + wait
    while True:
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _has(path, word)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _has(process: Path, word: str) -> bool:
    try:
        return (
            int(process.name) != os.getpid() and word.encode() in (process / "environ").read_bytes()
        )
    except OSError:
        return False


def test_results_come_back_by_rank(capfd: pytest.CaptureFixture[str]) -> None:
    results = launch("tests.rank_targets:echo", {"a": 1}, 3)
    assert [results[rank]["rank"] for rank in range(3)] == [0, 1, 2]
    assert results[2]["payload"] == {"a": 1}
    assert results[2]["tensor"].tolist() == [2, 2]
    assert capfd.readouterr().out == "hello from 0\n"


def test_all_ranks_iterate_over_sets_in_one_order() -> None:
    names = [f"layer_{k}" for k in range(50)]
    first, second = launch("tests.rank_targets:order_of_a_set", names, 2).values()
    assert first == second


@linux
@pytest.mark.parametrize(
    ("how", "at", "message"),
    [
        ("kill", "1F1", r"was killed by signal 9 \(SIGKILL\) during 1F1 of step 7"),
        ("raise", "1W0", r"failed during 1W0 of step 7: ValueError\('a broken sample'\)"),
    ],
)
def test_one_rank_of_a_pipeline_ends_all(mark: str, how: str, at: str, message: str) -> None:
    with pytest.raises(RunError, match=rf"^rank 1 \(stage 1, model.part1\) {message}"):
        launch("tests.rank_targets:fails", {"rank": 1, "at": at, "how": how}, 3)
    assert not marked(mark)


@linux
def test_a_rank_killed_inside_a_collective_ends_the_others(mark: str) -> None:
    said = r"rank 1 \(stages 0 and 1\) was killed by signal 9 \(SIGKILL\) during 1F1 of step 7"
    start = time.monotonic()
    with pytest.raises(RunError, match=f"^{said}"):
        launch("tests.rank_targets:wide", {"dies_at": "1F1", "kill": True}, 2)
    assert time.monotonic() - start < 6 * LIMIT_SECONDS  # starting included
    assert not marked(mark)


@linux
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("exit", RunError, r"^rank 1 \(a part\) ended with exit code 3 during its work$"),
        ("leave", RunError, r"^rank 1 \(a part\) failed during its work: SystemExit\(0\)"),
        ("guard", GuardError, "^microbatch 1: expected 3 images, got 4"),
    ],
)
def test_one_rank_that_ends_ends_all(
    mark: str, how: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        launch("tests.rank_targets:misbehaves", how, 2)
    assert not marked(mark)
    assert capfd.readouterr().err == ("[rank 1] about to leave\n" if how == "exit" else "")


@linux
def test_a_rank_killed_from_outside_while_others_hang(mark: str) -> None:
    launcher = _launcher("fails", "{'rank': 0, 'at': '0F1', 'how': 'hang'}", 3)
    ranks = _wait_for_ranks(mark, 3)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "hanging\n"
    time.sleep(2.0)
    start = time.monotonic()
    os.kill(ranks[2], signal.SIGKILL)
    output, _ = launcher.communicate(timeout=2 * LIMIT_SECONDS)
    assert time.monotonic() - start < LIMIT_SECONDS
    assert launcher.returncode != 0
    said = (
        r"rank 2 \(stage 2, model.part2\) was killed by signal 9 \(SIGKILL\) during 2\S+ of step 7"
    )
    assert re.search(said, output)


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphans_when_the_launcher_ends(
    mark: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launcher = _launcher("sleeps", "None", 2)
    _wait_for_ranks(mark, 2)
    launcher.send_signal(number)
    launcher.communicate(timeout=LIMIT_SECONDS)
    assert launcher.returncode != 0
    assert not marked(mark, wait=LIMIT_SECONDS)
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("mllm-compile-*"))


def _launcher(target: str, payload: str, num_ranks: int) -> subprocess.Popen[str]:
    code = (
        "from mllm_compile.runtime.launch import launch; "
        f"launch('tests.rank_targets:{target}', {payload}, {num_ranks})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_ranks(mark: str, num_ranks: int) -> dict[int, int]:
    """Process by rank, once all have started."""
    deadline = time.monotonic() + 6 * LIMIT_SECONDS
    while time.monotonic() < deadline:
        found = {}
        for process in marked(mark):
            text = (Path("/proc") / str(process) / "environ").read_bytes().split(b"\0")
            rank = [entry for entry in text if entry.startswith(b"RANK=")]
            if rank:
                found[int(rank[0][5:])] = process
        if len(found) == num_ranks:
            return found
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _torchrun(
    target: str, num_ranks: int, payload: object = (2, 3)
) -> subprocess.CompletedProcess[str]:
    code = (
        "from mllm_compile.runtime.launch import launch; "
        f"print(launch('tests.rank_targets:{target}', {payload!r}, {num_ranks}))"
    )
    script = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [sys.executable, *script, "--no-python", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_under_torchrun_this_process_is_a_rank() -> None:
    done = _torchrun("pipeline", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("messages_forward") == 3


def test_under_torchrun_the_survivors_name_the_peer_and_the_action() -> None:
    done = _torchrun("survives", 3)
    said = "rank 2 (stage 2) failed during 2F2 of step 7: rank 1 does not answer (Connection"
    assert said in done.stdout


def test_under_torchrun_the_survivors_name_the_peer_and_the_collective() -> None:
    done = _torchrun("wide", 2, {"dies_at": "1F1"})
    said = (
        "rank 0 (stage 1) failed during 1F1 of step 7: all_reduce of ranks 0, 1: rank 1 does not "
        "answer (Connection"
    )
    assert said in done.stdout, done.stderr
