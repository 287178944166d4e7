"""Runs of equal values along rows: [B|1, length] where rows differ or are all the same."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runs:
    """Run i of a row is [edges[i], edges[i + 1]); runs behind the last, in shorter rows, are empty.

    ``edges`` is int32 [rows, runs + 1], from 0 to ``length``; ``known`` are ``numbers``, or None.
    """

    edges: Tensor
    length: int
    known: Tensor | None = None

    @property
    def starts(self) -> Tensor:
        """[rows, runs]."""
        return self.edges[:, :-1]

    @property
    def ends(self) -> Tensor:
        """[rows, runs]."""
        return self.edges[:, 1:]

    @cached_property
    def numbers(self) -> Tensor:
        """Which run every place lies in, int32 [rows, length]."""
        return self.over(slice(0, self.length)) if self.known is None else self.known

    def over(self, places: slice) -> Tensor:
        """Which run consecutive places lie in, int32 [rows, places]."""
        if self.known is not None:
            return self.known[:, places]
        lengths = self.edges.clamp(places.start, places.stop).diff()
        size = places.stop - places.start
        rows = [torch.repeat_interleave(row, output_size=size) for row in lengths]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def at(self, places: Tensor) -> Tensor:
        """Which run ``places`` [B|1, n] lie in; those outside are moved to the next inside."""
        return gathered(self.numbers, places.clamp(0, self.length - 1))

    def search(self, places: Tensor) -> Tensor:
        """The same, without ``numbers``: for few places."""
        places = places.clamp(0, self.length - 1)
        rows = max(len(places), len(self.edges))
        ends, places = self.ends.expand(rows, -1), places.expand(rows, -1)
        return torch.searchsorted(
            ends.contiguous(), places.contiguous(), right=True, out_int32=True
        )

    def first_of(self, values: Tensor, by: int = 0) -> Tensor:
        """Values [B|1, length] at the start of every run, or ``by`` places on, [rows, runs]."""
        return gathered(values, (self.starts + by).clamp_max(self.length - 1))


def changes_of(values: Tensor) -> Tensor:
    """Whether another value begins at a place, bool [rows, length]; not at the first."""
    changes = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    torch.ne(values[:, 1:], values[:, :-1], out=changes[:, 1:])
    return changes


def descents_of(values: Tensor) -> Tensor:
    """Whether a smaller value begins at a place, likewise."""
    return torch.nn.functional.pad(values[:, 1:] < values[:, :-1], (1, 0))


def outer_changes(changes: Tensor) -> Tensor:
    """Those that do not stand between two changes, so that there are few of them.

    Between two that follow each other lies one run of equal values, or no two neighbours are equal.
    """
    inner = torch.nn.functional.pad(changes[:, 2:] & changes[:, :-2], (1, 1))
    return changes & ~inner[:, : changes.shape[1]]


def cut_at(flags: Tensor) -> Runs:
    """Runs that start at 0 and where flags [rows, length] are set."""
    if flags.device.type != "cpu":
        return _scanned(flags)
    starts = [_places(row) for row in flags]
    most = max(map(len, starts)) + 1
    edges = torch.full((len(starts), most + 1), flags.shape[1], dtype=torch.int32)
    edges[:, 0] = 0
    for row, places in zip(edges, starts, strict=True):
        row[1 : len(places) + 1] = places
    return Runs(edges, flags.shape[1])


def _places(flags: Tensor) -> Tensor:
    """int32 places where flags are set; reads them on the host."""
    octets = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(torch.int64)
    found = octets.nonzero().squeeze(1)  # most octets have none set
    which, place = octets.view(torch.bool).view(-1, 8)[found].nonzero().unbind(1)
    return (found[which] * 8 + place).int()


def _scanned(flags: Tensor) -> Runs:
    """The same of static shapes, as many as places, without a host read."""
    numbers = flags.cumsum(1, dtype=torch.int32)
    rows, length = flags.shape
    places = torch.arange(length, dtype=torch.int32, device=flags.device).expand(rows, -1)
    edges = torch.full((rows, length + 1), length, dtype=torch.int32, device=flags.device)
    edges.scatter_reduce_(1, numbers.long(), places, "amin")
    return Runs(edges, length, numbers)


def gathered(column: Tensor, places: Tensor) -> Tensor:
    """``column`` [B|1, n] at ``places`` [B|1, m]."""
    rows, length = column.shape
    if rows > 1:
        starts = torch.arange(0, rows * length, length, dtype=places.dtype, device=places.device)
        places = places + starts.unsqueeze(1)
    return column.reshape(-1).index_select(0, places.flatten()).view(places.shape)


@dataclass(frozen=True)
class Equals:
    """Of runs with equal values, [rows, runs]: the end of the last before, the start of the next.

    0 and ``length`` where there is none; and the start of the first and the end of the last of all.
    """

    before: Tensor
    behind: Tensor
    first: Tensor
    last: Tensor


def equals_of(runs: Runs, values: Tensor) -> Equals | None:
    """``values`` are those of the runs. None if no value comes again. Reads them on the host."""
    found = Equals(
        torch.zeros_like(runs.starts), torch.full_like(runs.starts, runs.length),
        runs.starts.clone(), runs.ends.clone(),
    )  # fmt: skip
    again = [_note_equals(runs, row, ones, found) for row, ones in enumerate(values)]
    return found if any(again) else None


def _note_equals(runs: Runs, row: int, values: Tensor, found: Equals) -> bool:
    starts, ends = runs.starts[row], runs.ends[row]
    count = int((starts < runs.length).sum())
    ranked, order = values[:count].sort(stable=True)
    same = ranked[1:] == ranked[:-1]
    earlier, later = order[:-1][same], order[1:][same]
    found.before[row, later], found.behind[row, earlier] = ends[earlier], starts[later]
    groups = cut_at(torch.nn.functional.pad(~same, (1, 0))[None])
    number = groups.over(slice(0, count))[0]
    found.first[row, order] = starts[order[groups.starts[0, number].long()]]
    found.last[row, order] = ends[order[groups.ends[0, number].long() - 1]]
    return len(later) > 0
