"""The law of a localized graph. Layouts are found here anew, from the inputs to the results.

Nothing is believed that localize kept: which value a node has, and in which layouts, follows from
what it reads. Of its metadata ``of`` alone is taken, the node of the stage that it claims to be,
and then held to it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any, NoReturn

import torch
from torch import fx

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import is_element
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, P, R, V
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Layouts, Sharding
from mllm_compile.passes.lower.extract import StageGraph
from mllm_compile.passes.lower.local_calls import INTERVALS, Made, Operand, Part, calls
from mllm_compile.passes.lower.local_graph import CONVERT
from mllm_compile.passes.lower.local_states import Held, Rows, cut, holding, rows_of, stands
from mllm_compile.passes.lower.local_values import LocalRank
from mllm_compile.passes.sharding.exchange import SEQUENCE

aten = torch.ops.aten
State = Held | Rows


def ranks_hold_what_is_planned(
    local: StageGraph, whole: StageGraph, plan: Plan, index: int, places: Mapping[str, int]
) -> None:
    """Conversions, operators and results take every value in the layout that it has on the rank."""
    sharding = plan.shardings[plan.stages[index].module] if plan.shardings else Sharding()
    if not sharding.axes:
        return
    follower = _Follower(whole, plan, sharding, LocalRank.of(sharding.axes, places))
    if (local.inputs, local.outputs) != (whole.inputs, whole.outputs):
        raise PlanError(explain(f"stage {index}", expected="the inputs and outputs of the stage"))
    for node in local.graph.graph.nodes:
        follower.follow(node)


class _Follower:
    def __init__(self, whole: StageGraph, plan: Plan, sharding: Sharding, rank: LocalRank) -> None:
        self.whole, self.plan, self.sharding, self.rank = whole, plan, sharding, rank
        self.nodes = {node.name: node for node in whole.graph.graph.nodes}
        self.inputs = iter(whole.graph.graph.find_nodes(op="placeholder"))
        self.states: dict[fx.Node, State] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}
        self.expected: dict[fx.Node, list[Any]] = {}
        self.made: dict[fx.Node, list[fx.Node]] = {}
        self.wanted: dict[tuple[str, int], dict[Layout, None]] = {}
        for node in whole.graph.graph.nodes:
            self._note_wanted(node)

    def _note_wanted(self, node: fx.Node) -> None:
        """Into which divisions a value may be converted: those that its readers ask for."""
        for name, layouts in self._asked(node):
            for at, layout in enumerate(layouts):
                if layout.divided:
                    self.wanted.setdefault((name, at), {})[layout] = None

    def _asked(self, node: fx.Node) -> Iterator[tuple[str, Layouts]]:
        for place, source in enumerate(_sources(node) if node.op == "call_function" else ()):
            yield source.name, self._layouts(node, place, "inputs")
        if node.name in self.sharding.sent:
            yield node.name, self.sharding.sent[node.name]

    def _layouts(self, node: fx.Node, place: int, side: str) -> Layouts:
        """Of one argument or result of a node by its strategies; R where the plan has none."""
        own = self.sharding.strategies.get(node.name, ())
        found = tuple(getattr(each, side)[place] for each in own if getattr(each, side))
        return found or self.sharding.whole

    def _held(self, node: fx.Node, layouts: Layouts) -> Held:
        """V is R where no gradient flows."""
        if node.name not in self.plan.needs_grad:
            layouts = tuple(R if layout == V else layout for layout in layouts)
        return Held(node.name, tuple(node.meta["val"].shape), layouts)

    def follow(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            source = next(self.inputs, None)
            if source is None or source.name != node.name:
                _refuse(node, f"the input %{source}", f"%{node.name}")
            layouts = self.sharding.layouts.get(node.name, self.sharding.whole)
            self._keep(node, self._held(source, layouts))
        elif node.op == "output":
            self._results(node)
        elif node.target is CONVERT:
            self._conversion(node)
        elif "of" in node.meta:
            self._call(node)
        else:
            self.states[node] = self._rows(node)

    def _keep(self, node: fx.Node, held: Held) -> None:
        expected = self.rank.shape(held.shape, held.layouts)
        if (found := tuple(node.meta["val"].shape)) != expected:
            _refuse(node, f"{held}: {list(expected)} here", str(list(found)))
        self.states[node] = held

    def _conversion(self, node: fx.Node) -> None:
        source, have, want, axis, split_have, split_want, unit_have, unit_want = node.args
        names = [each.name for each in self.rank.axes]
        if axis not in names or not isinstance(source, fx.Node):
            _refuse(node, f"a conversion along one of {names}", str(axis))
        at, state = names.index(str(axis)), self.states.get(source)
        before: Any = (have, split_have, unit_have)
        after: Any = (want, split_want, unit_want)
        if isinstance(state, Rows) and have == "R":
            self.states[node] = replace(state, positions=cut(self.rank, state.positions, at, after))
            return
        if not isinstance(state, Held):
            _refuse(node, "a value to convert", str(state))
        if not stands(self.rank, state.shape, state.layouts, at, before):
            got = f"{have} with split {split_have!r} and unit {unit_have} on {axis}"
            _refuse(node, f"a conversion from {state}, as its operand stands", got)
        for layout in self._candidates(state.value, at, str(want)):
            layouts = (*state.layouts[:at], layout, *state.layouts[at + 1 :])
            if stands(self.rank, state.shape, layouts, at, after):
                self._keep(node, Held(state.value, state.shape, layouts))
                return
        got = f"{want} with split {split_want!r} and unit {unit_want} on {axis}"
        _refuse(node, f"a layout that a reader of %{state.value} asks for", got)

    def _candidates(self, value: str, at: int, text: str) -> Iterable[Layout]:
        """The layout itself first: parts without elements fit several."""
        known = [R, V, P, *self.wanted.get((value, at), ())]
        return sorted(known, key=lambda layout: str(layout) != text)

    def _call(self, node: fx.Node) -> None:
        """One of the calls that stand for a node of the stage."""
        whole = self.nodes.get(node.meta["of"])
        if whole is None:
            _refuse(node, "a node of the stage", f"%{node.meta['of']}")
        if is_element(whole):
            self._element(node, whole)
            return
        if whole not in self.expected:
            self.expected[whole] = calls(whole, self.rank, self.sharding)
            self.made[whole] = []
        expected, made = self.expected[whole], self.made[whole]
        if len(made) == len(expected):
            _refuse(node, f"%{whole.name} once", "it once more")
        self._compare(node, whole, expected[len(made)])
        made.append(node)
        if len(made) < len(expected):
            self.states[node] = Rows(Holding.whole(node.meta["val"].shape))
            return
        if isinstance(whole.meta["val"], torch.Tensor):
            self._keep(node, self._held(whole, self._layouts(whole, 0, "outputs")))
        else:
            self.tuples[node] = whole

    def _element(self, node: fx.Node, whole: fx.Node) -> None:
        source, place = node.args
        made: Any = whole.args[0]
        if node.target is not getitem or (self.tuples.get(source), place) != whole.args:  # type: ignore[arg-type]
            _refuse(node, f"element {whole.args[1]} of %{made.name}", f"{node.format_node()}")
        self._keep(node, self._held(whole, self._layouts(made, place, "outputs")))  # type: ignore[arg-type]

    def _compare(self, node: fx.Node, whole: fx.Node, expected: tuple[Any, ...]) -> None:
        found = (node.target, *_leaves((node.args, node.kwargs)))
        wanted = (expected[0], *_leaves(expected[1:]))
        if len(found) != len(wanted):
            _refuse(node, f"a call of {len(wanted) - 1} arguments", f"{len(found) - 1}")
        for own, other in zip(found, wanted, strict=True):
            if isinstance(other, Operand):
                state = self._held(_sources(whole)[other.place], other.layouts)
                if self.states.get(own) != state:
                    _refuse(node, f"argument {other.place}: {state}", str(self.states.get(own)))
            elif isinstance(other, Made):
                if self.made[whole][other.place] is not own:
                    _refuse(node, f"%{self.made[whole][other.place].name}", str(own))
            elif isinstance(other, Part):
                self._part(node, own, self.made[whole][other.place], other)
            elif other is INTERVALS:
                self._intervals(node, whole, self.states.get(own))
            elif own is not other and (type(own) is not type(other) or own != other):
                _refuse(node, str(other), str(own))

    def _part(self, node: fx.Node, own: Any, source: fx.Node, part: Part) -> None:
        """What this rank has of an intermediate result."""
        expected, root = Rows(holding(self.rank, part.shape, part.layouts)), own
        while isinstance(root, fx.Node) and root.target is CONVERT:
            root = root.args[0]
        if root is not source or self.states.get(own) != expected:
            _refuse(node, f"of %{source.name} {expected}", f"%{root}: {self.states.get(own)}")

    def _intervals(self, node: fx.Node, whole: fx.Node, state: State | None) -> None:
        """Up to this rank's own queries, within the intervals of the model or all keys."""
        query, key, *_ = _sources(whole)
        held = self._held(query, self._layouts(whole, 0, "inputs"))
        within: Held | int = key.meta["val"].shape[SEQUENCE]
        if isinstance(whole.args[3], fx.Node):
            within = self._held(whole.args[3], self._layouts(whole, 3, "inputs"))
        expected = Rows(rows_of(self.rank, held, SEQUENCE), 1, within)
        if state != expected:
            _refuse(node, str(expected), str(state))

    def _rows(self, node: fx.Node) -> Rows:
        """A node of the intervals that lowering makes of a rule by position."""
        first, second = [*map(self._state, node.args), None, None][:2]
        if node.target is aten.arange.default:
            return Rows(Holding.whole(node.args))  # type: ignore[arg-type]
        if node.target is aten.unsqueeze.default and isinstance(first, Rows):
            return first
        if node.target is aten.add.Tensor and isinstance(first, Rows) and second == 1:
            return replace(first, end=first.end + 1)
        if node.target is aten.mul.Tensor and first == Rows(Holding.whole((2,))):
            return Rows(first.positions, within=second)
        if node.target is aten.minimum.default and isinstance(second, Rows):
            return replace(second, within=first.within if isinstance(first, Rows) else first)
        _refuse(node, "a node of the stage, a conversion or causal intervals", str(node.target))

    def _state(self, argument: Any) -> Any:
        return self.states.get(argument) if isinstance(argument, fx.Node) else argument

    def _results(self, node: fx.Node) -> None:
        """Sent values leave as the plan says, all others whole."""
        ends: Any = self.whole.graph.graph.output_node().args[0]
        results: Any = node.args[0]
        for name, own, source in zip(self.whole.outputs, results, ends, strict=True):
            sent = name.startswith("%") and name != self.whole.loss
            layouts = self.sharding.sent.get(name[1:]) if sent else None
            state = self._held(source, layouts or self.sharding.whole)
            if self.states.get(own) != state:
                got = str(self.states.get(own))
                raise PlanError(explain(f"result {name}", expected=str(state), got=got))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments, in the order of the strategies' inputs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, list | tuple):
        for each in item:
            yield from _leaves(each)
    elif isinstance(item, Mapping):
        for key, each in item.items():
            yield key
            yield from _leaves(each)
    else:
        yield item


def _refuse(node: fx.Node, expected: str, got: str) -> NoReturn:
    where = node.meta.get("where", "")
    subject = f"%{node.name} = {node.target}" + (f" ({where})" if where else "")
    raise PlanError(explain(subject, expected=expected, got=got))
