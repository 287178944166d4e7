"""Stages and variants for the schedule tests: chains, encoders before a pipeline, random DAGs."""

import random

from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.compiler.variant import Variant


def stages(count):
    return tuple(Stage(i, 0, i, (i,), (f"n{i}",), (), ()) for i in range(count))


def variant(edges, *, computes=None, trains=None, frozen=()):
    """All stages of the edges compute and train unless said; no gradient over ``frozen`` edges."""
    computes = {end for edge in edges for end in edge} if computes is None else set(computes)
    boundaries = tuple(
        Boundary(a, b, (f"v{a}",), () if (a, b) in frozen else (f"v{a}",)) for a, b in edges
    )
    return Variant(
        frozenset(computes), frozenset(computes if trains is None else trains), boundaries
    )


def chain(first, count):
    return [(i, i + 1) for i in range(first, first + count - 1)]


def encoders(*lengths, llm):
    """Edges of encoders of the given numbers of stages that all feed a pipeline of ``llm``."""
    edges, start, total = [], 0, sum(lengths)
    for length in lengths:
        edges += [*chain(start, length), (start + length - 1, total)]
        start += length
    return edges + chain(total, llm)


def text_only(base, first):
    """The variant in which only the stages from ``first`` on have nodes."""
    return Variant(
        frozenset(s for s in base.computes if s >= first),
        frozenset(s for s in base.trains if s >= first),
        tuple(b for b in base.boundaries if b.source >= first),
    )


def random_step(seed):
    """A random DAG of up to 6 stages and a step of up to 8 microbatches of up to 3 variants."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.45]
    trainable = {stage for stage in range(count) if rng.random() < 0.7}
    variants = [_random_variant(rng, count, edges, trainable) for _ in range(rng.randint(1, 3))]
    return stages(count), [rng.choice(variants) for _ in range(rng.randint(1, 8))]


def _random_variant(rng, count, edges, trainable):
    present = {s for s in range(count) if s == count - 1 or rng.random() < 0.8}
    kept = [(a, b) for a, b in edges if a in present and b in present]
    loss = {count - 1}  # the stages from which the loss, in the last stage, is reached
    for a, b in sorted(kept, reverse=True):
        loss |= {a} if b in loss else set()
    carrying = {s for s in trainable & present}
    for a, b in sorted(kept):
        carrying |= {b} if a in carrying else set()
    frozen = [(a, b) for a, b in kept if a not in carrying or b not in loss]
    return variant(kept, computes=present, trains=trainable & present & loss, frozen=frozen)
