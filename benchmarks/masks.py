"""Masks of multimodal training, drawn from a seed: layouts of tokens, and who sees whom.

    python benchmarks/masks.py [--tokens S] [--seed N]

``draw(name, tokens, seed)`` makes a ``TokenLayout``: documents, each a row of segments, which are
text (causal) or images and audio (bidirectional). ``masks(name, layout)`` gives the masks of a
model's layers on it, as one half-open key interval per query [S, 2], with the share of layers that
have each. ``token_ids`` gives the same layout per token, from which predicates are written.

The script prints, for every generator, how many 128x128 blocks of the square its masks touch.
"""

import argparse
from dataclasses import dataclass

import numpy as np

TEXT, IMAGE, AUDIO = range(3)
WINDOW = 1024
BLOCK = 128


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one document of one kind; all but text sees in both directions."""

    document_start: int
    start: int
    length: int
    kind: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TokenLayout:
    """Segments that cover ``tokens`` in order."""

    tokens: int
    segments: tuple[Segment, ...]

    def token_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Per token the number of its document, and of its segment if it is not text, else -1."""
        documents = np.zeros(self.tokens, np.int64)
        groups = np.full(self.tokens, -1, np.int64)
        starts = {start: at for at, start in enumerate(self.document_starts)}
        for number, segment in enumerate(self.segments):
            documents[segment.start : segment.end] = starts[segment.document_start]
            if segment.kind != TEXT:
                groups[segment.start : segment.end] = number
        return documents, groups

    @property
    def document_starts(self) -> list[int]:
        return sorted({segment.document_start for segment in self.segments})


NAMES = ("causal", "packed", "mm", "packed_mm", "video", "ee", "gemma", "EP", "EE", "MP")


def draw(name: str, tokens: int, seed: int = 0) -> TokenLayout:
    """A layout of the generator of this name; the same seed gives the same layout."""
    rng = np.random.default_rng(seed)
    if name in BLOCKWISE:
        return TokenLayout(tokens, tuple(BLOCKWISE[name](0, tokens, rng)))
    documents, kind = GENERATORS[name]
    segments: list[Segment] = []
    start = 0
    for length in _documents(documents, tokens, rng):
        segments += _fill(start, length, kind, rng)
        start += length
    return TokenLayout(tokens, tuple(segments))


def masks(name: str, layout: TokenLayout) -> list[tuple[int, np.ndarray]]:
    """(number of layers, intervals [S, 2] int32) of every kind of layer."""
    if name == "ee" or name in BLOCKWISE:
        return [(1, intervals(layout, own_segment=True))]
    if name == "gemma":
        return [(1, intervals(layout)), (5, intervals(layout, window=WINDOW))]
    return [(1, intervals(layout))]


def intervals(
    layout: TokenLayout, window: int | None = None, own_segment: bool = False
) -> np.ndarray:
    """[S, 2] int32: text sees its document up to itself; the rest also the rest of its segment.

    With ``window`` the last ``window`` keys and, for the rest, its segment. With ``own_segment`` an
    image or audio sees its segment alone.
    """
    made = np.empty((layout.tokens, 2), np.int32)
    for segment in layout.segments:
        rows = np.arange(segment.start, segment.end)
        first = np.full_like(rows, segment.document_start)
        if window is not None:
            first = np.maximum(first, rows - window + 1)
        if segment.kind == TEXT:
            end = rows + 1
        else:
            first = np.minimum(first, segment.start)
            end = np.full_like(rows, segment.end)
            if own_segment:
                first = np.full_like(rows, segment.start)
        made[segment.start : segment.end] = np.stack([first, end], -1)
    return made


GENERATORS = {
    "causal": ("single", "text"),
    "packed": ("packed", "text"),
    "mm": ("single", "mm"),
    "packed_mm": ("packed", "mm"),
    "video": ("single", "video"),
    "ee": ("packed", "mm"),
    "gemma": ("packed", "mm"),
}


def _documents(kind: str, tokens: int, rng: np.random.Generator) -> list[int]:
    if kind == "single":
        return [tokens]
    lengths: list[int] = []
    at = 0
    while at < tokens:
        length = int(min(tokens - at, max(64, 1500 * np.exp(rng.normal(0, 1.5)))))
        lengths.append(min(length, tokens // 2))
        at += lengths[-1]
    return lengths


def _fill(start: int, length: int, kind: str, rng: np.random.Generator) -> list[Segment]:
    made: list[Segment] = []
    at, end = start, start + length
    while at < end:
        drawn, size = _next_segment(kind, length, first=at == start, rng=rng)
        made.append(Segment(start, at, min(size, end - at), drawn))
        at = made[-1].end
    return made


def _next_segment(kind: str, length: int, first: bool, rng: np.random.Generator) -> tuple[int, int]:
    """(kind, length) of the segment that comes next in a document of this length."""
    if kind == "text":
        return TEXT, length
    if kind == "video":
        return (TEXT, int(rng.integers(30, 200))) if first else (IMAGE, 1536)
    share = rng.random()
    if share < 0.45:
        return TEXT, int(rng.integers(20, 400))
    if share < 0.8:
        return IMAGE, int(rng.choice([256, 576, 1024, 2880], p=[0.4, 0.3, 0.2, 0.1]))
    return AUDIO, int(rng.integers(50, 750))


def _prefixed(start: int, length: int, rng: np.random.Generator) -> list[Segment]:
    """EP: one image in front of the text."""
    image = int(rng.integers(length // 10, int(0.9 * length)))
    return [
        Segment(start, start, image, IMAGE),
        Segment(start, start + image, length - image, TEXT),
    ]


def _embedded(start: int, length: int, rng: np.random.Generator) -> list[Segment]:
    """EE: images and texts by turns, up to 90 % of the document; text before and after."""
    least, most = max(length // 64, 1), max(length // 16, 2)
    made = [Segment(start, start, int(rng.integers(int(0.1 * length), int(0.3 * length))), TEXT)]
    kind = IMAGE
    while made[-1].end < start + 0.9 * length:
        at = made[-1].end
        size = min(int(rng.integers(least, most + 1)), start + length - at)
        made.append(Segment(start, at, size, kind))
        kind = TEXT if kind == IMAGE else IMAGE
    at = made[-1].end
    rest = start + length - at
    return [*made, Segment(start, at, rest, TEXT)] if rest else made


def _several(start: int, length: int, rng: np.random.Generator) -> list[Segment]:
    """MP: four documents, each EP or EE."""
    drawn = rng.integers(length // 10, length // 4, 4)
    ends = np.round(np.cumsum(drawn) * (length / drawn.sum())).astype(int)
    made: list[Segment] = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        fill = _prefixed if rng.random() < 0.5 else _embedded
        made += fill(start + int(first), int(end - first), rng)
    return made


BLOCKWISE = {"EP": _prefixed, "EE": _embedded, "MP": _several}


def touched_blocks(rows: np.ndarray) -> int:
    """How many 128x128 blocks hold a pair that [S, 2] intervals allow."""
    total = 0
    for at in range(0, len(rows), BLOCK):
        block = rows[at : at + BLOCK]
        change = np.zeros(len(rows) // BLOCK + 2, np.int64)
        seen = block[block[:, 0] < block[:, 1]]
        np.add.at(change, seen[:, 0] // BLOCK, 1)
        np.add.at(change, (seen[:, 1] - 1) // BLOCK + 1, -1)
        total += int((np.cumsum(change) > 0).sum())
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    square = (-(-options.tokens // BLOCK)) ** 2
    for name in NAMES:
        layout = draw(name, options.tokens, options.seed)
        for layers, rows in masks(name, layout):
            share = touched_blocks(rows) / square
            print(f"{name:10} {len(layout.segments):5} segments, {layers} layers: {share:6.1%}")


if __name__ == "__main__":
    main()
