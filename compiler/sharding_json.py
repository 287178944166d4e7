"""A sharding as a table of plain values, and back."""

from collections.abc import Mapping
from typing import Any

from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Layouts, Sharding, Strategy


def to_table(sharding: Sharding) -> dict[str, Any]:
    """Plain values; layouts by their text, strategies as [name, inputs, results, special]."""
    return {
        "axes": [[axis.name, axis.size, axis.policy, axis.exchange] for axis in sharding.axes],
        "strategies": {
            name: [[x.name, texts(x.inputs), texts(x.outputs), x.special] for x in own]
            for name, own in sharding.strategies.items()
        },
        "layouts": {name: texts(own) for name, own in sharding.layouts.items()},
        "sent": {name: texts(own) for name, own in sharding.sent.items()},
        "notes": list(sharding.notes),
    }


def from_table(table: Mapping[str, Any]) -> Sharding:
    """The inverse of ``to_table``."""
    return Sharding(
        axes=tuple(MeshAxis(*axis) for axis in table["axes"]),
        strategies={
            name: tuple(
                Strategy(each, parsed(inputs), parsed(results), special)
                for each, inputs, results, special in own
            )
            for name, own in table["strategies"].items()
        },
        layouts={name: parsed(own) for name, own in table["layouts"].items()},
        sent={name: parsed(own) for name, own in table["sent"].items()},
        notes=tuple(table["notes"]),
    )


def texts(layouts: Layouts) -> list[str]:
    """The texts of layouts."""
    return list(map(str, layouts))


def parsed(layouts: list[str]) -> Layouts:
    """The inverse of ``texts``."""
    return tuple(map(Layout.parse, layouts))
