"""What lowering hands to the runtime: per stage, graphs that read and write named values.

A rank keeps one table of live values per (stage, microbatch). A segment reads its ``inputs`` from
the table and writes its ``outputs`` into it; a value is dropped after its last use. Names:

=============  ======================================================================
``%name``      a node of the captured graph (boundary values, the loss, outputs)
``d%name``     the gradient of that value
``p:fqn``      a parameter          ``g:fqn``   its gradient, of this microbatch alone
``b:fqn``      a buffer             ``u:fqn``   its new value
``x:kind:n``   a batch, constant, hoisted or denominator input
``s:n``        a value that the backward segments need (n is unique within the stage)
=============  ======================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.regions import Region


@dataclass(frozen=True)
class Segment:
    """One graph of a stage: placeholders take ``inputs``, its flat tuple gives ``outputs``."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of the local tensor of ``value`` that goes to, or comes from, rank ``rank``."""

    rank: int
    value: str
    region: Region


@dataclass(frozen=True)
class Transfer:
    """The values (in order) that cross one boundary of this stage in one direction.

    ``peer`` is the stage at the other end. ``values`` are names as in the segments: ``%name``
    forward, ``d%name`` backward; ``specs`` are those of this rank's local tensors. ``pieces`` say
    what goes to, or comes from, each rank of the peer, this rank itself where it runs both stages.
    The pieces between two ranks stand in the same order at both ends.
    """

    peer: int
    values: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class StageProgram:
    """One stage of one captured program, lowered for one rank.

    ``input_grad`` is None where no gradient leaves the stage, ``weight_grad`` where it trains
    nothing. A gradient that several consumers send is summed in the order of ``receives_backward``.
    """

    stage: int
    forward: Segment
    input_grad: Segment | None
    weight_grad: Segment | None
    sends_forward: tuple[Transfer, ...] = ()
    receives_forward: tuple[Transfer, ...] = ()
    sends_backward: tuple[Transfer, ...] = ()
    receives_backward: tuple[Transfer, ...] = ()
    loss: str | None = None
    updates: Mapping[str, str] | None = None
