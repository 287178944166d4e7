"""Random mask predicates of the algebra, over random documents, images and padding."""

import functools
import random

import torch

BATCH, LENGTH = 2, 48


def causal(b, h, q, k):
    return k <= q


def window(size):
    return lambda b, h, q, k: q - k < size


def distance(size):
    return lambda b, h, q, k: (q - k).abs() <= size


def first_keys(count):
    return lambda b, h, q, k: k < count


def later_queries(count):
    return lambda b, h, q, k: q >= count


def chunks(size, start):
    return lambda b, h, q, k: (k - start[b]) // size == (q - start[b]) // size


def same(ids):
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def same_group(ids):
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (ids[b, k] >= 0)


def up_to(ids):
    return lambda b, h, q, k: ids[b, q] >= ids[b, k]


def within(ids, places):
    """A window of positions that begin anew with every document."""
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (places[b, k] > places[b, q] - 5)


def real(keys):
    return lambda b, h, q, k: keys[b, k]


def by_kind(kind, one, other):
    """Some queries see what one rule says, the rest what the other does."""

    def rule(b, h, q, k):
        return torch.where(kind[b, q] >= 0, one(b, h, q, k), other(b, h, q, k))

    return rule


def every(*rules):
    return lambda *at: functools.reduce(torch.logical_and, [rule(*at) for rule in rules])


def either(*rules):
    return lambda *at: functools.reduce(torch.logical_or, [rule(*at) for rule in rules])


def negated(rule):
    return lambda *at: ~rule(*at)


def tables(rng):
    """Values for every tensor a predicate may use; images may be cut by the end of a document."""
    documents, groups, places = (torch.zeros(BATCH, LENGTH, dtype=torch.long) for _ in range(3))
    groups -= 1
    for row in range(BATCH):
        cuts = sorted(rng.sample(range(1, LENGTH), rng.randint(0, 4)))
        for number, (a, e) in enumerate(zip([0, *cuts], [*cuts, LENGTH], strict=True)):
            documents[row, a:e], places[row, a:e] = number, torch.arange(e - a)
        at = 0
        for number in range(rng.randint(0, 4)):
            at += rng.randint(1, 8)
            groups[row, at : at + rng.randint(1, 9)] = number
            at = int((groups[row] >= 0).nonzero().max()) + 1 if number == 0 else at + 9
    keys = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    for row in range(BATCH):
        missing = rng.randint(0, 20)
        keys[row, rng.choice([slice(0, missing), slice(LENGTH - missing, LENGTH)])] = False
    start = torch.tensor([rng.randint(0, 6) for _ in range(BATCH)])
    return documents, groups, places, keys, start


def draw(rng):
    """A function from the tensors of ``tables`` to a predicate over them."""
    size, count = rng.randint(2, 20), rng.randint(1, 12)
    leaves = {
        "causal": lambda *t: causal,
        "window": lambda *t: window(size),
        "distance": lambda *t: distance(size),
        "first": lambda *t: first_keys(count),
        "queries": lambda *t: later_queries(count),
        "chunks": lambda d, g, p, keys, start: chunks(size, start),
        "documents": lambda d, *t: same(d),
        "groups": lambda d, g, *t: same_group(g),
        "up to": lambda d, *t: up_to(d),
        "places": lambda d, g, p, *t: within(d, p),
        "real": lambda d, g, p, keys, start: real(keys),
    }

    def combined(depth):
        if not depth or rng.random() < 0.2:
            return leaves[rng.choice(list(leaves))]
        parts = [combined(depth - 1) for _ in range(rng.randint(2, 3))]
        kind = rng.choice(["every", "every", "either", "kind", "negated"])
        if kind == "negated":
            return lambda *t: every(parts[0](*t), negated(parts[1](*t)))
        if kind == "kind":
            return lambda *t: by_kind(t[1], parts[0](*t), parts[1](*t))
        join = every if kind == "every" else either
        return lambda *t: join(*(part(*t) for part in parts))

    return combined(rng.randint(1, 2))


def generator(seed):
    return random.Random(seed)
