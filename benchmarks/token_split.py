"""How well tokens are split among context ranks: balance, keys received, time to plan.

    python benchmarks/token_split.py [table] [contexts] [million] [time]

Imbalance: tiles of the busiest rank x ranks / tiles of the undivided sequence, 128x128 tiles
counted exactly, the worse mask. Received: keys that ranks need and do not hold, as a share of what
an all-gather brings, averaged over ranks (mean) or of the worst rank; masks weighted by layers.
Masks: ``masks.py``. Other splits: ``splitters.py``.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.masks import NAMES, draw
from benchmarks.masks import masks as masks_of
from benchmarks.splitters import SPLITTERS, Masks
from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.measure import received, tiles

K = 1024
CASES = [
    (tokens * K, ranks)
    for tokens in (8, 32, 128)
    for ranks in (2, 4, 8, 16, 32, 64)
    if tokens * K // ranks >= K
]


def drawn(name: str, tokens: int, seed: int) -> tuple[Masks, list[int]]:
    layout = draw(name, tokens, seed)
    masks = [(layers, mask[:, None]) for layers, mask in masks_of(name, layout)]
    return masks, layout.document_starts


def quality(masks: Masks, split: Split) -> tuple[float, float, float]:
    """(imbalance, mean received, worst received)."""
    gathered = split.length * (split.ranks - 1) / split.ranks
    layers = np.array([count for count, _ in masks]) / sum(count for count, _ in masks)
    shares = [received(mask, split) / gathered for _, mask in masks]
    balance = max(tiles(mask, split).max() * split.ranks / tiles(mask).sum() for _, mask in masks)
    mean, worst = (layers @ [pick(share) for share in shares] for pick in (np.mean, np.max))
    return float(balance), float(mean), float(worst)


def table(seeds: Sequence[int] = (0, 1)) -> None:
    """All splits on all masks: imbalance mean (worst) / received mean / received worst rank."""
    print(f"8k, 32k, 128k; 2 to 64 ranks of 1k tokens or more; seeds {seeds}: {len(CASES)} each")
    print("| mask |", " | ".join(SPLITTERS), "|")
    for name in NAMES:
        cells = []
        for splitter in SPLITTERS.values():
            found = []
            for tokens, ranks in CASES:
                for seed in seeds:
                    masks, starts = drawn(name, tokens, seed)
                    found.append(quality(masks, splitter(masks, starts, ranks)))
            balance, mean, worst = np.array(found).T
            traffic = f"{mean.mean():.3f} / {worst.mean():.2f}"
            cells.append(f"{balance.mean():.3f} ({balance.max():.3f}) / {traffic}")
        print("|", name, "|", " | ".join(cells), "|", flush=True)


def by_context(tokens: int, names: Sequence[str], contexts: Sequence[int]) -> None:
    """All splits of one length, seed 0: imbalance / received mean / received worst rank."""
    print(f"| {tokens // K}k |", " | ".join(SPLITTERS), "|")
    for name in names:
        masks, starts = drawn(name, tokens, 0)
        for ranks in contexts:
            cells = []
            for splitter in SPLITTERS.values():
                balance, mean, worst = quality(masks, splitter(masks, starts, ranks))
                cells.append(f"{balance:.3f} / {mean:.3f} / {worst:.2f}")
            print("|", name, ranks, "|", " | ".join(cells), "|", flush=True)


def plan_times(rounds: int = 9) -> None:
    """Of the planner, warm: least wall and CPU time of some rounds."""
    print("| mask, tokens, ranks | wall s | CPU s |")
    for name in ("packed_mm", "gemma"):
        for tokens, contexts in ((32 * K, (8, 32)), (128 * K, (2, 4, 8, 16, 32, 64))):
            masks, starts = drawn(name, tokens, 0)
            for ranks in contexts:
                walls, cpus = [], []
                for _ in range(rounds):
                    wall, cpu = time.perf_counter(), time.process_time()
                    SPLITTERS["planned"](masks, starts, ranks)
                    walls.append(time.perf_counter() - wall)
                    cpus.append(time.process_time() - cpu)
                print(f"| {name} {tokens // K}k {ranks} | {min(walls):.3f} | {min(cpus):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["table", "contexts", "million", "time"])
    parts = parser.parse_args().parts
    if "table" in parts:
        table()
    if "contexts" in parts:
        by_context(128 * K, ("packed_mm", "gemma"), (4, 8, 16, 32, 64))
    if "million" in parts:
        by_context(K * K, ("packed_mm", "gemma", "ee"), (16, 64))
    if "time" in parts:
        plan_times()


if __name__ == "__main__":
    main()
