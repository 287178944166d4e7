"""What the host hands to the Triton kernels: tensors with their strides, and what is compiled in.

Named tuples are the one structure that Triton takes apart in arguments and constants alike. Nothing
here needs Triton.
"""

from typing import Any, NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """A tensor [batch, heads, rows, size] whose last dim is dense; strides in elements."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Pairs(NamedTuple):
    """A tensor that broadcasts to [batch, heads, queries, keys]; a stride of 0 repeats."""

    data: Any
    batch: Any
    head: Any
    row: Any
    column: Any


class Table(NamedTuple):
    """An int32 tensor [batch or 1, …], dense but for the batch, whose stride may be 0."""

    data: Any
    batch: Any


class Visible(NamedTuple):
    """Who sees whom: intervals [B, Q, n, 2], their tiles, and dense tensors.

    ``tiles`` are the runs [B, query blocks, n, 4]. Read only where they are wanted: ``bounds``
    [B, key blocks, 2] for dk and dv, ``mask`` and ``bias`` where ``Spec`` says so.
    """

    intervals: Table
    tiles: Table
    bounds: Table
    mask: Pairs
    bias: Pairs


class Sizes(NamedTuple):
    """Heads of q, of k and v; lengths of q, of k and v."""

    heads: Any
    key_heads: Any
    queries: Any
    keys: Any


class Score(NamedTuple):
    """softcap·tanh(q·kᵀ·scale / softcap); a softcap of 0 means none."""

    scale: Any
    softcap: Any


class Spec(NamedTuple):
    """What a kernel is compiled for.

    ``size`` and ``value_size`` are the last dims of q and v, ``wide`` and ``value_wide`` the powers
    of two that hold them. ``intervals`` is 1 or 2; ``mask``, ``bias`` and ``softcap`` say whether
    there is one. ``descriptors`` loads what is streamed by tensor descriptors (TMA). In the
    ``precision`` bf16x6 inputs are ``operands.split``, and six products of their parts count.
    ``dk`` and ``dv`` say which of the two their kernel makes.
    """

    block_q: int
    block_k: int
    size: int
    value_size: int
    wide: int
    value_wide: int
    intervals: int = 1
    mask: bool = False
    bias: bool = False
    softcap: bool = False
    descriptors: bool = False
    precision: str = "ieee"
    dk: bool = True
    dv: bool = True


def wide(size: int) -> int:
    """The least power of two that holds a head size and that a tensor core can take."""
    return max(16, 1 << (size - 1).bit_length())


def rows_of(x: Tensor) -> Rows:
    """``x`` [B, H, S, D] as an argument; its last dim must be dense."""
    return Rows(x, *x.stride()[:3])


def table_of(x: Tensor, batch: int) -> Table:
    """``x`` [batch or 1, …] as an argument; a single entry is every sample's."""
    return Table(x, x.stride(0) if x.shape[0] == batch else 0)


def pairs_of(x: Tensor | None, shape: tuple[int, int, int, int], unread: Table) -> Pairs:
    """``x``, which broadcasts to [batch, heads, queries, keys], as an argument.

    Where there is none, any tensor stands for it: Triton 3.6 miscounts what follows a None.
    """
    if x is None:
        return Pairs(unread.data, 0, 0, 0, 0)
    return Pairs(x, *x.expand(shape).stride())
