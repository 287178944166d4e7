"""Everything decided so far about one captured program. Passes return a new Plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.sharding import Layouts, Sharding
from mllm_compile.compiler.stage import Boundary, Stage


@dataclass(frozen=True, slots=True)
class NodeCost:
    """FLOPs of a node's forward, input-gradient and weight-gradient work; bytes of its result.

    One multiply-add counts two FLOPs, as in torch.utils.flop_counter. ``saved_bytes`` are those of
    values that the node's backward keeps and no earlier node's does (0 where nothing flows).
    """

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    bytes: int = 0
    saved_bytes: int = 0

    @property
    def total(self) -> int:
        """F + dI + dW."""
        return self.forward + self.input_grad + self.weight_grad


Site = tuple[str, str, int]
"""Where a parameter is read: (owner path of the reading node, parameter FQN, occurrence).

With an operator in place of the parameter: one of the nodes that read none.
"""


Held = tuple[int, str]
"""A parameter as one module holds it: (index of the module, parameter FQN)."""


@dataclass(frozen=True)
class Plan:
    """The decisions, keyed by node name of ``captured.main``.

    ``needs_grad`` holds every node and placeholder whose value gets a gradient in the backward of
    the loss, ``grad_edges`` the (source, reader) pairs over which it comes. ``module_of`` maps
    every non-replicated node to the request module that runs it. ``placement`` maps every site at
    which a parameter is read to its stage: other programs of the same model (other image counts,
    no images) are cut by it, so that a parameter never moves. It also holds the operators that the
    parameters leave a choice of stages: other programs follow where they can, so that the same
    values cross. ``home`` maps every parameter of the model, used or not, to the one stage that
    accounts for it. ``shardings`` has one entry for every module of the request; ``given_layouts``
    are those that other programs' plans have decided for parameters, which keep them.
    ``intervals``: the keys that queries see in the batches at hand, by the name of the node that
    computes them; where no batch is at hand, nothing is known.
    ``split_notes``: what people should know about a module's token split.
    """

    request: Request
    captured: Captured
    needs_grad: frozenset[str] = frozenset()
    grad_edges: frozenset[tuple[str, str]] = frozenset()
    costs: Mapping[str, NodeCost] = field(default_factory=dict)
    module_of: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    placement: Mapping[Site, int] = field(default_factory=dict)
    home: Mapping[str, int] = field(default_factory=dict)
    given_layouts: Mapping[Held, Layouts] = field(default_factory=dict)
    intervals: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    split_notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    shardings: tuple[Sharding, ...] = ()
    schedule: Schedule | None = None

    @property
    def parameter_layouts(self) -> dict[Held, Layouts]:
        """How every module that this program shards holds the parameters that it reads."""
        names = {
            node.name: item.name
            for node, item in zip(
                self.captured.main.graph.find_nodes(op="placeholder"),
                self.captured.inputs,
                strict=True,
            )
            if item.kind == "parameter"
        }
        return {
            (module, names[name]): layouts
            for module, sharding in enumerate(self.shardings)
            for name, layouts in sharding.layouts.items()
            if name in names
        }
