"""Time to one graph: this project's capture, torch.export (non-strict), Dynamo full-graph.

    python benchmarks/capture_time.py [FAMILY ...] [--rounds N]

All three capture the same tiny model on the same batch, in turn, in one process; printed are
medians of CPU seconds after one warm-up round, and ratios of them. The first capture of a model may
trace twice to find helpers to hoist; later ones, which are timed, know them. The products differ:
ours is a functional ATen graph below autograd with owners, guards and a prologue; export's is its
training graph, not yet made functional (``run_decompositions`` is not timed); Dynamo's holds torch
calls. "fails" means that it raises on this model. Dynamo captures scalars and dynamic shapes.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from mllm_compile.passes.capture.capture import capture
from tests.families import FAMILIES

DEFAULT = ("llava", "gemma3", "internvl", "smolvlm", "qwen2_audio", "whisper_llama", "qwen2_5_vl")


class Loss(torch.nn.Module):
    """The model as torch.export wants it: tensors in, a tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        result = self.model(**batch)
        return result if torch.is_tensor(result) else result.loss


class Captured(Exception):
    """Dynamo has handed over its graph: what comes after is not timed."""


def stop(graph, example_inputs):
    raise Captured


def ours(model, batch):
    capture(model, batch)


def export(model, batch):
    torch.export.export(Loss(model), (), batch, strict=False)


def dynamo(model, batch):
    torch._dynamo.reset()
    compiled = torch.compile(Loss(model), backend=stop, fullgraph=True)
    try:
        compiled(**batch)
    except Exception as error:
        if not isinstance(error.__cause__, Captured) and "Captured" not in str(error):
            raise


WAYS: dict[str, Callable] = {"ours": ours, "export": export, "dynamo": dynamo}


def measure(name: str, rounds: int) -> dict[str, float | None]:
    """Median CPU seconds of each way; None where it fails."""
    workload = FAMILIES[name]()
    batch = workload.collate(list(workload.samples[:2]))
    with torch.no_grad():
        workload.model(**batch)  # Hugging Face builds caches in its first forward
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    broken: set[str] = set()
    for _ in range(rounds + 1):
        for way, function in WAYS.items():
            if way in broken:
                continue
            start = time.process_time()
            try:
                function(workload.model, batch)
            except Exception:
                broken.add(way)
                continue
            times[way].append(time.process_time() - start)
    return {
        way: None if way in broken else statistics.median(seconds[1:])
        for way, seconds in times.items()
    }


def main() -> None:
    """Print one row per family, and the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._logging.set_logs(all=50)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    columns = ("family", "ours s", "export s", "dynamo s", "ours / export", "ours / dynamo")
    table = Table(*columns)
    ratios: dict[str, list[float]] = {"export": [], "dynamo": []}
    for name in options.families:
        seconds = measure(name, options.rounds)
        mine = seconds["ours"]
        cells = [f"{s:.2f}" if s is not None else "fails" for s in seconds.values()]
        for other, found in ratios.items():
            theirs = seconds[other]
            if mine is not None and theirs is not None:
                found.append(mine / theirs)
            cells.append(f"{found[-1]:.2f}" if theirs is not None and mine is not None else "")
        table.add_row(name, *cells)
    medians = [f"{statistics.median(found):.2f}" if found else "" for found in ratios.values()]
    table.add_row("median", "", "", "", *medians)
    Console().print(table)


if __name__ == "__main__":
    main()
