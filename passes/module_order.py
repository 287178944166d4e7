"""Check that values flow through the request's modules in their order, whatever glue lies between.

Glue has no place of its own, so that only modules count: one module reads another if a value gets
from it to there through glue alone.
"""

from collections import defaultdict
from collections.abc import Mapping

import networkx as nx
from torch import fx

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.request import Request
from mllm_compile.passes.modules import bound_modules

Flows = Mapping[tuple[int, int], list[fx.Node]]


def check_order(graph: Graph, request: Request) -> None:
    """Raise RequestError if a module reads a later one; it names both and the values."""
    flows = module_flows(graph, request)
    order = nx.DiGraph(flows.keys())
    for (source, reader), values in sorted(flows.items()):
        if source > reader:
            back = source in order and nx.has_path(order, reader, source)
            _refuse(request, (source, reader), values, flows.get((reader, source), []), back)


def check_glue(graph: Graph, request: Request, module_of: Mapping[str, int]) -> None:
    """Raise RequestError if another program fixed glue where this program cannot have it."""
    for node in graph.placed:
        for reader in node.users:
            if module_of.get(reader.name, len(request.modules)) < module_of[node.name]:
                late, early = (request.modules[module_of[n.name]].name for n in (node, reader))
                path = node.meta.get("owner", "") or "the model itself"
                raise RequestError(
                    explain(
                        f"%{node.name} ({path}), which no module of the request holds",
                        expected=f"to run before {early}, which reads it",
                        got=f"parameters that another program needed with {late} only",
                        remedy="name its module in the request, or plan the fullest program first",
                    )
                )


def module_flows(graph: Graph, request: Request) -> Flows:
    """(module, module that reads it) -> the values that get from the one to the other."""
    flows: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    origins: dict[fx.Node, dict[fx.Node, int]] = {}
    bound = bound_modules(graph, request)
    for node in graph.placed:
        if node in graph.weights:
            continue
        own = bound[node]
        found = {
            k: v for source in node.all_input_nodes for k, v in origins.get(source, {}).items()
        }
        if own is None:
            origins[node] = found
            continue
        origins[node] = {node: own}
        for value, module in found.items():
            if module != own and value not in flows[module, own]:
                flows[module, own].append(value)
    return {pair: values for pair, values in flows.items() if values}


def _refuse(
    request: Request,
    pair: tuple[int, int],
    values: list[fx.Node],
    returned: list[fx.Node],
    circular: bool,
) -> None:
    source, reader = (request.modules[module].name for module in pair)
    got = f"{reader} reads {_names(values)} of {source}"
    if returned:
        got += f", which in turn reads {_names(returned)} of {reader}"
    raise RequestError(
        explain(
            f"modules {reader} and {source}",
            expected="values to flow from a module to later ones of the request only",
            got=got,
            remedy="put both under one [[module]], its path a list"
            if circular
            else f"list {source} before {reader}",
        )
    )


def _names(values: list[fx.Node]) -> str:
    names = [f"%{node.name} ({node.meta.get('owner', '')})" for node in values[:3]]
    return ", ".join(names) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
