"""The main function of a rank's process, for ``python -m mllm_compile.runtime.rank_main DIR``.

DIR is the launcher's directory: it holds what to call, and takes the result or the failure. A rank
never outlives its launcher: the kernel kills it (Linux), and a thread waits for the end of a pipe
that only the launcher holds open.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile.compiler.errors import CompileError
from mllm_compile.runtime.status import StatusBoard
from mllm_compile.runtime.transport import PeerLostError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankContext:
    """Who this process is. ``board`` is None under torchrun, where nobody reads it."""

    rank: int
    num_ranks: int
    local_rank: int
    board: StatusBoard | None = None

    def label(self, text: str) -> None:
        """Name the rank's stage and module for messages about it."""
        if self.board is not None:
            self.board.label(self.rank, text)

    def publish(self, text: str) -> None:
        """Name what the rank does now for messages about it."""
        if self.board is not None:
            self.board.publish(self.rank, text)

    @staticmethod
    def from_environment(board: StatusBoard | None = None) -> "RankContext":
        """Read RANK, WORLD_SIZE and LOCAL_RANK."""
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return RankContext(rank, num_ranks, int(os.environ.get("LOCAL_RANK", rank)), board)


def resolve(target: str) -> Callable[[RankContext, Any], Any]:
    """The function that ``package.module:function`` names."""
    module, _, name = target.partition(":")
    function: Callable[[RankContext, Any], Any] = getattr(importlib.import_module(module), name)
    return function


def main(directory: Path) -> int:
    """Call the target; write ``result-RANK.pt`` or ``failure-RANK.json``."""
    order = torch.load(directory / "order.pt", weights_only=False)
    _end_with(order["launcher"])
    board = StatusBoard(directory / "status", order["num_ranks"])
    context = RankContext.from_environment(board)
    context.publish("start-up")
    try:
        result = resolve(order["target"])(context, order["payload"])
        torch.save(result, directory / f"result-{context.rank}.pt")
    except (Exception, SystemExit) as error:
        _report(error, directory / f"failure-{context.rank}.json")
        return 1
    return 0


def _report(error: Exception | SystemExit, path: Path) -> None:
    failure = {
        "type": type(error).__name__ if isinstance(error, CompileError) else "",
        "message": str(error) if isinstance(error, CompileError) else repr(error),
        "traceback": traceback.format_exc(),
        "consequence": isinstance(error, PeerLostError),
    }
    path.with_suffix(".part").write_text(json.dumps(failure))
    path.with_suffix(".part").rename(path)


def _end_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
    threading.Thread(target=_watch, name="launcher watch", daemon=True).start()


def _watch() -> None:
    """Standard input is the pipe: it ends when the launcher does."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the destructors of a broken process group, which can hang
