"""Columns of values, one per key: [B|1, keys] where rows differ or are all the same."""

import torch
from torch import Tensor

Piece = tuple[Tensor, Tensor]


def runs(values: Tensor) -> Piece:
    """The run [first, last) of equal values around every key, int32 [rows, keys] for the same."""
    change = values[:, 1:] != values[:, :-1]
    scan = _counted_runs if values.device.type == "cpu" else _scanned_runs
    return scan(change)


def _counted_runs(change: Tensor) -> Piece:
    """Runs by listing their ends, which takes a host read."""
    keys = change.shape[1] + 1
    rows = [_counted_row(row, keys) for row in change]
    if len(rows) == 1:
        return rows[0][0].unsqueeze(0), rows[0][1].unsqueeze(0)
    first, last = zip(*rows, strict=True)
    return torch.stack(first), torch.stack(last)


def _counted_row(change: Tensor, keys: int) -> Piece:
    inner = change.nonzero().squeeze(1).int()
    edges = torch.nn.functional.pad(inner.add_(1), (1, 1))
    edges[-1] = keys
    which = torch.repeat_interleave(edges.diff(), output_size=keys)
    return edges[:-1].index_select(0, which), edges[1:].index_select(0, which)


def _scanned_runs(change: Tensor) -> Piece:
    """Runs by scans of static shapes."""
    keys = change.shape[1] + 1
    places = torch.arange(1, keys, dtype=torch.int32, device=change.device)
    first, last = torch.where(change, places, 0), torch.where(change, places, keys)
    first = torch.nn.functional.pad(first, (1, 0)).cummax(1).values
    return first, with_end(last, keys).flip(1).cummin(1).values.flip(1)


def with_end(column: Tensor, end: int) -> Tensor:
    """[rows, keys + 1]: the column and one more value."""
    return torch.nn.functional.pad(column, (0, 1), value=end)


def gathered(column: Tensor, places: Tensor) -> Tensor:
    """``column`` [B|1, K] at ``places`` [B|1, Q|1]."""
    if column.shape[0] == 1:
        return column[0].index_select(0, places.flatten()).view(places.shape)
    return column.gather(1, places.expand(column.shape[0], -1).long())


def neighbours(values: Tensor) -> Piece:
    """[B|1, K]: where the last run of the same value ends before, the next one starts behind.

    0 and K where there is none. Reads values on the host.
    """
    rows = [torch.stack(_neighbours_of_row(row)) for row in values]
    before, behind = torch.stack(rows, 1)
    return before, behind


def _neighbours_of_row(values: Tensor) -> Piece:
    ones, lengths = torch.unique_consecutive(values, return_counts=True)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    ranked, order = ones.sort(stable=True)
    again = (ranked[1:] == ranked[:-1]).nonzero().squeeze(1)
    earlier, later = order[again], order[again + 1]
    before, behind = torch.zeros_like(ends), torch.full_like(ends, len(values))
    before[later], behind[earlier] = ends[earlier], starts[later]
    return before.repeat_interleave(lengths), behind.repeat_interleave(lengths)
