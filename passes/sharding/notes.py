"""What people should know about a sharding: which work runs whole on every rank, and why."""

from collections import Counter
from collections.abc import Iterator

from torch import fx

from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.plan import NodeCost
from mllm_compile.compiler.sharding import Sharding
from mllm_compile.passes.sharding.choices import Setting
from mllm_compile.passes.sharding.exchange import gathers
from mllm_compile.passes.sharding.price import share_of
from mllm_compile.passes.sharding.ties import pattern


def notes(setting: Setting, sharding: Sharding) -> tuple[str, ...]:
    """One line for every kind of contraction that an axis does not divide; operators unruled."""
    lines = [
        line
        for place, axis in enumerate(sharding.axes)
        for line in _whole(setting, sharding, place, axis)
    ]
    lines += _gathering(setting, sharding)
    missing = Counter(
        str(point.node.target)
        for point in setting.flow.of("node")
        if point.node not in setting.classes.refinement.factors
    )
    if missing:
        listed = ", ".join(f"{name} {count}" for name, count in missing.items())
        lines.append(f"no rule, so whole on every rank: {listed}")
    return tuple(lines)


def _gathering(setting: Setting, sharding: Sharding) -> Iterator[str]:
    """Attention that gathers keys although the request asks for another way."""
    found: Counter[tuple[str, str]] = Counter()
    for point in setting.flow.of("node"):
        factors = setting.classes.refinement.factors.get(point.node)
        pairs = zip(sharding.axes, sharding.strategies[point.name], strict=True)
        for axis, strategy in pairs:
            if why := gathers(point.node, axis, strategy, factors, setting.blocks):
                found[pattern(point.node.meta.get("owner", "")) or "(model)", why] += 1
    for (owner, why), count in found.items():
        yield f"context: {count} attention of {owner} gathers all keys: {why}"


def _whole(setting: Setting, sharding: Sharding, place: int, axis: MeshAxis) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[NodeCost]] = {}
    for point in setting.flow.of("node"):
        cost = setting.plan.costs[point.name]
        strategy = sharding.strategies[point.name][place]
        if cost.total and share_of(strategy, axis) == 1.0 and _concerns(setting, axis, point.node):
            owner = pattern(point.node.meta.get("owner", "")) or "(model)"
            key = str(point.node.target), owner, _reason(setting, axis, point.node)
            groups.setdefault(key, []).append(cost)
    for (operator, owner, reason), costs in groups.items():
        flops = sum(cost.total for cost in costs)
        yield (
            f"{axis.name}: {len(costs)} {operator} of {owner} whole on every rank, "
            f"{flops:.3g} FLOPs: {reason}"
        )


def _concerns(setting: Setting, axis: MeshAxis, node: fx.Node) -> bool:
    """Whether the axis is there to divide such a node: the expert axis divides experts alone."""
    return axis.name != "expert" or node in setting.classes.stacks


def _reason(setting: Setting, axis: MeshAxis, node: fx.Node) -> str:
    factors = setting.classes.refinement.factors.get(node)
    if factors is None:
        return "no rule"
    able = {
        name: size
        for name, size in factors.sizes.items()
        if name not in factors.whole and setting.classes.allowed(axis.name, node, name)
    }
    if not able:
        return f"nothing that {axis.name} divides"
    if axis.name != "context" and all(size % axis.size for size in able.values()):
        sizes = ", ".join(str(size) for size in able.values())
        return f"{axis.size} ranks do not divide {sizes}"
    return "dividing it costs more"
