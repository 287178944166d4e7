"""Start the ranks as processes of this machine, watch them, and end all when one fails.

Under torchrun nothing is started: this process is one rank already and calls the target itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mllm_compile.compiler import errors
from mllm_compile.compiler.errors import RequestError, RunError, explain
from mllm_compile.runtime.rank_main import RankContext, resolve
from mllm_compile.runtime.status import StatusBoard

_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 0.3
_GRACE_SECONDS = 2.0
_TAIL_LINES = 20

Processes = dict[int, subprocess.Popen[bytes]]


def under_torchrun() -> bool:
    """Whether another launcher has made this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def launch(
    target: str, payload: Any, num_ranks: int, *, show: Collection[int] = (0,)
) -> dict[int, Any]:
    """Call ``target(context, payload)`` on every rank and return the results by rank.

    Args:
        target: ``package.module:function``; takes a RankContext and the payload.
        payload: anything that ``torch.save`` can write; so must be the result.
        num_ranks: number of processes.
        show: ranks whose output goes to this terminal; that of others is kept, and its end is
            printed if they fail.

    Under torchrun only this rank's result is returned.

    Raises:
        RunError: a rank failed or was killed. The error of the rank that failed first, of its own
            class if it is one of ``compiler/errors.py``; its traceback is a note.
    """
    if under_torchrun():
        context = RankContext.from_environment()
        if context.num_ranks != num_ranks:
            got = f"WORLD_SIZE={context.num_ranks}"
            raise RequestError(explain("ranks", expected=str(num_ranks), got=got))
        return {context.rank: resolve(target)(context, payload)}
    with _terminable(), tempfile.TemporaryDirectory(prefix="mllm-compile-") as name:
        directory = Path(name)
        order = {
            "target": target,
            "payload": payload,
            "num_ranks": num_ranks,
            "launcher": os.getpid(),
        }
        torch.save(order, directory / "order.pt")
        board = StatusBoard(directory / "status", num_ranks)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        processes: Processes = {}
        try:
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, store.port)
                processes[rank] = _start(directory, rank, environment, rank in show)
            ended = _wait(processes)
        finally:
            _end(processes)
        if any(ended.values()):
            raise _failure(directory, board, ended)
        return {
            rank: torch.load(directory / f"result-{rank}.pt", weights_only=False)
            for rank in range(num_ranks)
        }


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process like an error: the ranks and the directory go first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables of torchrun, so that ``env://`` finds the store that this process hosts.

    With one seed of hashes, a forward that iterates over a set of names is the same on all ranks.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    return environment


def _start(
    directory: Path, rank: int, environment: dict[str, str], shown: bool
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mllm_compile.runtime.rank_main", str(directory)]
    with (directory / f"rank-{rank}.log").open("wb") as log:
        output = None if shown else log
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _wait(processes: Processes) -> dict[int, int]:
    """Exit codes of the ranks that ended by themselves: all, or those around the first failure."""
    while True:
        ended = {r: p.returncode for r, p in processes.items() if p.poll() is not None}
        if len(ended) == len(processes):
            return ended
        if any(ended.values()):
            time.sleep(_SETTLE_SECONDS)
            return {r: p.returncode for r, p in processes.items() if p.poll() is not None}
        time.sleep(_POLL_SECONDS)


def _end(processes: Processes) -> None:
    """End what still runs: ask first, then kill."""
    for process in processes.values():
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the rank and everything it started: each rank leads a process group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _failure(directory: Path, board: StatusBoard, ended: dict[int, int]) -> Exception:
    """The error of the rank that is to blame: killed, else failed by itself, else the first."""
    reports: dict[int, dict[str, Any]] = {}
    for rank in ended:
        path = directory / f"failure-{rank}.json"
        if path.exists():
            reports[rank] = json.loads(path.read_text())

    def blame(rank: int) -> int:
        if ended[rank] < 0:
            return 0
        if rank in reports and reports[rank]["consequence"]:
            return 2
        return 1

    rank = min((rank for rank, code in ended.items() if code), key=lambda r: (blame(r), r))
    _print_tail(directory / f"rank-{rank}.log", rank)
    if rank not in reports:
        return RunError(_describe_death(rank, ended[rank], *board.read(rank)))
    report = reports[rank]
    kind = getattr(errors, report["type"], RunError) if report["type"] else RunError
    message = report["message"]
    if f"rank {rank}" not in message and kind is RunError:
        label, action = board.read(rank)
        message = f"rank {rank}{_in_brackets(label)} failed during {action}: {message}"
    error: Exception = kind(message)
    error.add_note(f"On rank {rank}:\n{report['traceback']}")
    return error


def _describe_death(rank: int, code: int, label: str, action: str) -> str:
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    else:
        how = f"ended with exit code {code}"
    return f"rank {rank}{_in_brackets(label)} {how} during {action or 'start-up'}"


def _in_brackets(label: str) -> str:
    return f" ({label})" if label else ""


def _print_tail(log: Path, rank: int) -> None:
    for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]:
        print(f"[rank {rank}] {line}", file=sys.stderr)
