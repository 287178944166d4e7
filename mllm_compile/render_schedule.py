"""A schedule as a grid of ranks and time, every compute action one tick wide.

Ticks show the order and the waiting. How busy each rank is comes from a second replay, in which an
action takes as long as its FLOPs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from rich.text import Text

from mllm_compile.compiler.action import COMPUTE, Schedule
from mllm_compile.compiler.simulate import Cost, Simulation, StageCost, simulate
from mllm_compile.compiler.variant import Variant
from mllm_compile.document import Document
from mllm_compile.quantities import numbers
from mllm_compile.render import actions_of, stage_nodes

STYLES = {"F": "blue", "I": "green", "W": "yellow"}
TITLE = "Schedule: F forward, I input gradients, W weight gradients, by microbatch"
MAX_ROWS = 48


def schedule_grid(document: Document, width: int) -> Text:
    """A row for ranks of the same stages, folded into blocks that fit ``width`` characters."""
    assert document.schedule is not None
    ticks = _replay(document, document.schedule, lambda stage: StageCost(1, 1, 1))
    work = _replay(document, document.schedule, lambda stage: _cost(document, stage))
    alike = _alike(document)
    names = {first: numbers(ranks) for first, ranks in alike.items()}
    cells = _cells(document, ticks, alike)
    margin = max(5, *map(len, names.values()))
    cell = 1 + max((len(label) for row in cells.values() for label, _ in row.values()), default=1)
    per_block = max(1, (width - margin - 2) // cell)
    total = round(ticks.step_time)
    text = Text(f"{TITLE}\n", "bold")
    blocks = range(0, total, per_block)
    shown = blocks[: max(1, MAX_ROWS // (len(cells) + 1))]
    for first in shown:
        text.append(f"ticks {first} to {min(first + per_block, total) - 1}\n", "dim")
        for rank, row in sorted(cells.items()):
            text.append(f"{names[rank]:>{margin}} ")
            for tick in range(first, min(first + per_block, total)):
                label, style = row.get(tick, (".", "dim"))
                text.append(label.ljust(cell), style)
            text.append("\n")
    if len(shown) < len(blocks):
        text.append(f"and {total - shown[-1] - per_block} ticks more\n", "dim")
    return text.append(_busy(work, alike))


def _alike(document: Document) -> dict[int, list[int]]:
    """Ranks of the same stages, which have one list of actions, by the first of them."""
    stages: dict[int, tuple[int, ...]] = {}
    for stage in document.stages:
        for rank in stage.ranks:
            stages[rank] = (*stages.get(rank, ()), stage.index)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, own in sorted(stages.items()):
        ranks.setdefault(own, []).append(rank)
    return {found[0]: found for found in ranks.values()}


def _cells(
    document: Document, ticks: Simulation, firsts: Collection[int]
) -> dict[int, dict[int, tuple[str, str]]]:
    """(label, style) of every compute action by rank and tick; labels tell stages on one rank."""
    cells: dict[int, dict[int, tuple[str, str]]] = {rank: {} for rank in firsts}
    held = [rank for stage in document.stages for rank in stage.ranks]
    several = len(set(held)) < len(held)
    for span in ticks.spans:
        action = span.action
        if action.kind in COMPUTE:
            name = f"{action.kind}{action.microbatch}"
            label = f"{action.stage}{name}" if several else name
            for rank in cells.keys() & document.stages[action.stage].ranks:
                cells[rank][round(span.start)] = (label, STYLES[action.kind])
    return cells


def _busy(work: Simulation, alike: Mapping[int, Sequence[int]]) -> str:
    """How much of the step each rank computes, and how many microbatches each stage holds."""
    busy = {
        rank: f"{1 - work.bubble(first):.0%}"
        for first in sorted(work.busy)
        for rank in alike[first]
    }
    held = {stage: f"{number}" for stage, number in work.peak_microbatches.items()}
    return f"busy, by FLOPs: {_grouped('rank', busy)}\nin flight: {_grouped('stage', held)}"


def _grouped(what: str, values: Mapping[int, str]) -> str:
    """``stage 0: 3; stage 1-4: 2``: indices of equal value together."""
    groups: dict[str, list[int]] = {}
    for index, value in values.items():
        groups.setdefault(value, []).append(index)
    return "; ".join(f"{what} {numbers(found)}: {value}" for value, found in groups.items())


def _replay(document: Document, schedule: Schedule, cost: Callable[[int], StageCost]) -> Simulation:
    actions = [action for row in schedule.actions.values() for action in row]
    variant = Variant(
        computes=frozenset(action.stage for action in actions if action.kind == "F"),
        trains=frozenset(action.stage for action in actions if action.kind == "W"),
        boundaries=document.boundaries,
    )
    count = 1 + max(action.microbatch for action in actions)
    costs = Cost({stage.index: cost(stage.index) for stage in document.stages})
    return simulate(schedule, document.stages, [variant] * count, [costs] * count)


def _cost(document: Document, index: int) -> StageCost:
    """What one rank of a stage computes, FLOPs as seconds.

    A stage that sends no gradients up does all its backward work in W.
    """
    stage = document.stages[index]
    nodes = stage_nodes(document, stage)
    mine = _part(document, stage.module)
    costs = {
        name: mine * sum(getattr(node, name) for node in nodes)
        for name in ("forward", "input_grad", "weight_grad")
    }
    if "I" not in actions_of(document, stage)[0]:
        costs["weight_grad"] += costs.pop("input_grad")
    return StageCost(**costs)


def _part(document: Document, module: int) -> float:
    """How much of what the document counts one rank of a module does."""
    divided = [row.work for row in document.shardings if row.module == module]
    lanes = document.request.modules[module].parallel.data
    return (divided[0] if divided else 1.0) * min(document.request.lane_counts) / lanes
