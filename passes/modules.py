"""Decide which module of the request runs every node.

A node of a requested module, or of anything below it, runs there: the longest path wins. All other
nodes are *glue*: they sink to the first module that reads them, but not above their inputs. Glue
that only leads to outputs stays where its inputs are. Weight nodes follow their first reader. A
node without parameters whose module stands before one of its inputs' (an encoder that merges its
features into the text by itself) is glue, too.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import fx

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.plan import Site
from mllm_compile.compiler.request import Request


def module_of_path(request: Request, path: str) -> int | None:
    """Index of the request's module that holds a dotted path; the longest prefix wins."""
    best: tuple[int, int] | None = None
    for index, module in enumerate(request.modules):
        for prefix in module.paths:
            if prefix == "" or path == prefix or path.startswith(f"{prefix}."):
                best = max(best or (-1, 0), (len(prefix), index))
    return best[1] if best else None


def check_paths(graph: Graph, request: Request) -> None:
    """Every path of the request names a module of the model."""
    known = known_paths(graph)
    for module in request.modules:
        for path in module.paths:
            if path and path not in known:
                close = get_close_matches(path, sorted(known), n=3, cutoff=0.5)
                raise RequestError(
                    explain(
                        f"[[module]] path {path!r}",
                        expected="a module of the model",
                        got="none of this name",
                        remedy=f"did you mean {', '.join(close)}?" if close else "see `capture`",
                    )
                )


def known_paths(graph: Graph) -> set[str]:
    """Paths of all modules that compute something or hold a parameter or buffer."""
    names = [node.meta.get("owner", "") for node in graph.nodes]
    names += [
        item.name.rpartition(".")[0]
        for item in graph.input_of.values()
        if item.kind in ("parameter", "buffer")
    ]
    known: set[str] = set()
    for name in names:
        parts = name.split(".")
        known |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return known - {""}


def bound_modules(graph: Graph, request: Request) -> dict[fx.Node, int | None]:
    """The module that every placed node is bound to; None for what sinks to its first reader."""
    bound: dict[fx.Node, int | None] = {}
    latest: dict[fx.Node, int] = {}
    reading = set(graph.sites.values())
    for node in graph.placed:
        own = module_of_path(request, node.meta.get("owner", ""))
        before = max((latest.get(source, -1) for source in node.all_input_nodes), default=-1)
        early = own is not None and before > own and node not in reading
        bound[node] = None if early or graph.reader[node] is not node else own
        latest[node] = max(before, -1 if (module := bound[node]) is None else module)
    return bound


def assign_modules(
    graph: Graph, request: Request, placement: Mapping[Site, int] | None = None
) -> dict[str, int]:
    """``module_of`` of every placed node; sites with a given stage stay in its module."""
    bound = bound_modules(graph, request)
    assigned = {node: module for node, module in bound.items() if module is not None}
    assigned |= _pinned(graph, request, placement or {})
    _sink(graph, assigned)
    for node in graph.placed:  # glue without readers, and glue that would rise above its inputs
        inputs = _modules(node.all_input_nodes, assigned)
        if bound[node] is None and inputs:
            assigned[node] = max([*inputs, *_modules([node], assigned)])
    _sink(graph, assigned)
    for node in graph.placed:
        if is_element(node):
            assigned[node] = assigned[node.all_input_nodes[0]]
        assigned.setdefault(node, len(request.modules) - 1)
    return {node.name: assigned[node] for node in graph.placed}


def _pinned(graph: Graph, request: Request, placement: Mapping[Site, int]) -> dict[fx.Node, int]:
    module_of_stage = [
        module for module, spec in enumerate(request.modules) for _ in range(spec.parallel.pipeline)
    ]
    return {
        node: module_of_stage[placement[site]]
        for site, node in graph.sites.items()
        if site in placement
    }


def _sink(graph: Graph, assigned: dict[fx.Node, int]) -> None:
    """Give every node without a module that of its first reader, if that has one."""
    for node in reversed(graph.placed):
        if node not in assigned:
            modules = _modules(node.users, assigned)
            if modules:
                assigned[node] = min(modules)


def _modules(nodes: Iterable[fx.Node], assigned: dict[fx.Node, int]) -> list[int]:
    return [assigned[node] for node in nodes if node in assigned]
