"""Decide nothing yet: find out where gradients flow, what nodes cost and which module runs them.

``needs_grad`` and ``grad_edges`` are autograd's own answers (compiler/flow.py), ``costs`` are those
of compiler/cost.py, ``module_of`` follows passes/modules.py.
"""

from dataclasses import replace

from mllm_compile.compiler.cost import costs
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.flow import flow
from mllm_compile.compiler.graph import Graph, tensors_of
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.modules import assign_modules, check_paths, module_of_path


def annotate(plan: Plan) -> Plan:
    """Request and graph -> plan with ``needs_grad``, ``grad_edges``, ``costs``, ``module_of``."""
    graph = Graph(plan.captured)
    check_paths(graph, plan.request)
    _check_trainable(graph, plan)
    gradients = flow(graph)
    return replace(
        plan,
        needs_grad=frozenset(node.name for node in gradients.needs),
        grad_edges=frozenset((source.name, reader.name) for source, reader in gradients.edges),
        costs=costs(graph, gradients),
        module_of=assign_modules(graph, plan.request, plan.placement),
    )


def _check_trainable(graph: Graph, plan: Plan) -> None:
    """The program was captured with the freezes that the request asks for."""
    for name, placeholder in graph.parameters.items():
        module = module_of_path(plan.request, name)
        wanted = None if module is None else plan.request.modules[module].trainable
        tensor = tensors_of(placeholder)[0]
        if wanted is None or (tensor is not None and not tensor.is_floating_point()):
            continue
        if graph.input_of[placeholder].trainable != wanted:
            raise RequestError(
                explain(
                    f"parameter {name}",
                    expected=f"trainable = {str(wanted).lower()}, as requested",
                    got=f"a program captured with {str(not wanted).lower()}",
                    remedy="set requires_grad before the model is captured",
                )
            )
