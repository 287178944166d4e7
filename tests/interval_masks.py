"""Random interval masks, and what they mean pair by pair."""

import torch


def draw(kind, queries, keys, generator, batch=1):
    """int32 [batch, queries, n, 2] of a kind."""
    return torch.stack([KINDS[kind](queries, keys, generator) for _ in range(batch)]).int()


def _pairs(*columns):
    return torch.stack([torch.stack(list(pair), -1) for pair in columns], 1)


def _diagonal(queries, keys):
    return (torch.arange(queries) * keys) // max(queries, 1)


def _causal(queries, keys, generator):
    at = _diagonal(queries, keys)
    return _pairs((torch.zeros_like(at), at + 1))


def _starts(queries, generator, mean=90):
    """Every row's document, as the row it starts at and the row after its last."""
    cuts = torch.rand(queries, generator=generator) < 1 / mean
    cuts[:1] = True
    first = torch.where(cuts, torch.arange(queries), 0).cummax(0).values
    after = torch.where(cuts, torch.arange(queries), queries).roll(-1)
    after[-1:] = queries
    return first, after.flip(0).cummin(0).values.flip(0)


def _scaled(rows, queries, keys):
    return (rows * keys) // max(queries, 1)


def _packed(queries, keys, generator):
    first, _ = _starts(queries, generator)
    return _pairs((_scaled(first, queries, keys), _diagonal(queries, keys) + 1))


def _multimodal(queries, keys, generator):
    """Packed documents of text and segments that see themselves whole."""
    first, _ = _starts(queries, generator, 150)
    begin, after = _starts(queries, generator, 40)
    image = (begin * 7919) % 3 == 0
    end = torch.where(image, _scaled(after, queries, keys), _diagonal(queries, keys) + 1)
    return _pairs((_scaled(first, queries, keys).minimum(end), end))


def _alone(queries, keys, generator):
    """Images see themselves alone, text its document up to itself: key blocks have holes."""
    first, _ = _starts(queries, generator, 200)
    begin, after = _starts(queries, generator, 40)
    image = (begin * 7919) % 3 == 0
    start = torch.where(image, begin, first.minimum(begin))
    end = torch.where(image, _scaled(after, queries, keys), _diagonal(queries, keys) + 1)
    return _pairs((_scaled(start, queries, keys).minimum(end), end))


def _window(queries, keys, generator):
    at = _diagonal(queries, keys)
    return _pairs(((at - 70).clamp_min(0), at + 1))


def _sink(queries, keys, generator):
    """The first keys and a window; the two are one interval where they touch."""
    at = _diagonal(queries, keys)
    start = (at - 60).clamp_min(0)
    sink = torch.full_like(at, min(5, keys)).minimum(at + 1)
    one = start <= sink
    first_end = torch.where(one, at + 1, sink)
    return _pairs((torch.zeros_like(at), first_end), (torch.where(one, at + 1, start), at + 1))


def _random(queries, keys, generator):
    ends = torch.randint(0, keys + 1, (queries, 2), generator=generator).sort(1).values
    return _pairs((ends[:, 0], ends[:, 1]))


def _random_two(queries, keys, generator):
    ends = torch.randint(0, keys + 1, (queries, 4), generator=generator).sort(1).values
    return _pairs((ends[:, 0], ends[:, 1]), (ends[:, 2], ends[:, 3]))


def _holes(queries, keys, generator):
    """Short intervals anywhere, and every third query blind."""
    start = torch.randint(0, keys, (queries,), generator=generator)
    end = (start + 9).clamp_max(keys)
    return _pairs((start, torch.where(torch.arange(queries) % 3 == 0, start, end)))


def _padding(queries, keys, generator):
    """Left padding: the first rows are blind and the first keys hidden."""
    at = _diagonal(queries, keys)
    start = torch.full_like(at, keys // 5)
    blind = at < start
    return _pairs((torch.where(blind, 0, start), torch.where(blind, 0, at + 1)))


def _blind(queries, keys, generator):
    at = torch.full((queries,), keys // 2)
    return _pairs((at, at))


KINDS = {
    "causal": _causal,
    "packed": _packed,
    "multimodal": _multimodal,
    "alone": _alone,
    "window": _window,
    "sink": _sink,
    "random": _random,
    "random_two": _random_two,
    "holes": _holes,
    "padding": _padding,
    "blind": _blind,
}
# Whose rows' intervals overlap from one to the next: runs are exact.
OVERLAPPING = ("causal", "packed", "multimodal", "alone", "window", "padding", "blind")


def dense(intervals, keys):
    """The pairs [B, 1, Q, keys] that an interval tensor allows."""
    at = torch.arange(keys)
    inside = (at >= intervals[..., :1]) & (at < intervals[..., 1:])
    return inside.any(2)[:, None]
