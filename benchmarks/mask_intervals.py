"""From a mask predicate to key intervals: time of one core, and bytes, up to a million tokens.

    python benchmarks/mask_intervals.py [--tokens S ...] [--rounds N]

Masks are compositions of transformers' own predicates over drawn documents, images and padding, as
it hands them over. ``build`` is ``mllm::mask_intervals``, ``check`` is ``mllm::mask_fits``, medians
of CPU time; ``dense`` is what the boolean mask of one sample would take.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from transformers import masking_utils as hf

from benchmarks.masks import WINDOW, draw
from mllm_compile.kernels.attention import mask as predicates
from mllm_compile.kernels.attention.intervals import intervals_needed, mask_fits, mask_intervals
from mllm_compile.kernels.attention.runs import key_bounds, query_runs


def compositions(tokens):
    """(name, predicate, 2-D padding or None)."""
    layout = draw("packed_mm", tokens)
    documents, groups = (torch.as_tensor(ids)[None] for ids in layout.token_ids())
    edges = [*layout.document_starts, tokens]
    places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(edges)])[None]
    padding = (torch.arange(tokens) < tokens - 100)[None]

    def packed(rule, *more):
        own = hf.remap_positions_for_packed_sequence(rule, places)
        joined = hf.or_masks(own, *more) if more else own
        return hf.and_masks(joined, hf.packed_sequence_mask_function(documents))

    images = hf.blockwise_overlay(groups)
    window = hf.sliding_window_causal_mask_function(WINDOW)
    sinks = hf.or_masks(window, hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k < 4))
    yield "causal, padded", hf.causal_mask_function, padding
    yield "images in one text", hf.or_masks(hf.causal_mask_function, images), None
    yield "packed documents", packed(hf.causal_mask_function), None
    yield "packed, window", packed(window), None
    yield "packed, images", packed(hf.causal_mask_function, images), None
    yield "packed, images, padded", packed(hf.causal_mask_function, images), padding
    yield "window and sinks", sinks, None


def timed(run, rounds):
    times = []
    for _ in range(rounds):
        start = time.process_time()
        made = run()
        times.append(time.process_time() - start)
    return made, min(times) * 1e3


def runs_of(intervals):
    tiles = query_runs(intervals, 128, 128)
    return tiles, key_bounds(tiles, -(-intervals.shape[1] // 128))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 20])
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("tokens", "mask", "intervals", "build", "runs", "check", "size", "dense")
    for tokens in options.tokens:
        for name, function, padding in compositions(tokens):
            template, tensors = predicates.separate(function)
            rule = predicates.Predicate(template, len(tensors), padded=padding is not None)
            key, shape = predicates.register(rule), (1, tokens, tokens)
            tensors += [] if padding is None else [padding]
            count = intervals_needed(tensors, key, *shape)
            arguments = (tensors, key, count, *shape)
            made, build = timed(
                lambda given=arguments: mask_intervals(*given, torch.device("cpu")), options.rounds
            )
            _, check = timed(lambda given=arguments: mask_fits(*given), options.rounds)
            tiles, derive = timed(lambda given=made: runs_of(given), options.rounds)
            size = sum(x.numel() * x.element_size() for x in (made, *tiles)) / 2**20
            table.add_row(
                f"{tokens >> 10}k", name, f"{count}", f"{build:.1f} ms", f"{derive:.1f} ms",
                f"{check:.1f} ms", f"{size:.1f} MiB", f"{tokens**2 / 2**30:.0f} GiB",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
