"""The laws of a plan. A law raises PlanError with what breaks it; its docstring is the law."""

from collections import Counter
from collections.abc import Iterable

from torch import fx

from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.schedule import variant_of


def require_none(broken: Iterable[object], expected: str) -> None:
    """Raise unless ``broken`` is empty; the first few of it are shown."""
    found = [str(item) for item in broken]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise PlanError(explain(", ".join(found[:3]) + more, expected=expected))


def stage_of_nodes(plan: Plan) -> dict[str, int]:
    """Stage of every node that belongs to one stage alone."""
    return {name: stage.index for stage in plan.stages for name in stage.nodes}


def needs_grad_reaches_loss(plan: Plan) -> None:
    """A value needs a gradient exactly if one comes back from a reader, or it is the loss."""
    graph = Graph(plan.captured)
    sources = {source for source, _ in plan.grad_edges}
    if graph.loss is not None and graph.loss.name in plan.needs_grad:
        sources.add(graph.loss.name)
    require_none(sorted(sources ^ plan.needs_grad), "a gradient exactly where one is returned")


def gradients_follow_edges(plan: Plan) -> None:
    """Gradients flow along edges of the graph only, from readers that have one themselves."""
    nodes = Graph(plan.captured).by_name
    require_none(
        (
            f"{source} <- {reader}"
            for source, reader in sorted(plan.grad_edges)
            if nodes[source] not in nodes[reader].all_input_nodes or reader not in plan.needs_grad
        ),
        "an edge whose reader has a gradient",
    )


def only_trainable_parameters_train(plan: Plan) -> None:
    """No input but a trainable parameter needs a gradient."""
    require_none(
        (
            f"{node.name} ({item.kind} {item.name})"
            for node, item in Graph(plan.captured).input_of.items()
            if node.name in plan.needs_grad and not (item.kind == "parameter" and item.trainable)
        ),
        "no gradient",
    )


def every_node_has_a_cost(plan: Plan) -> None:
    """Every live node has a cost."""
    require_none((n for n in Graph(plan.captured).live if n.name not in plan.costs), "a cost")


def every_node_has_a_module(plan: Plan) -> None:
    """Every live node that is not replicated has a module of the request."""
    modules = range(len(plan.request.modules))
    require_none(
        (
            node
            for node in Graph(plan.captured).placed
            if plan.module_of.get(node.name) not in modules
        ),
        "a module of the request",
    )


def stages_match_request(plan: Plan) -> None:
    """Stages stand in the order of the request's modules, one per pipeline position and ranks."""
    expected = []
    for module, spec in enumerate(plan.request.modules):
        width = len(spec.ranks) // spec.parallel.pipeline
        for position in range(spec.parallel.pipeline):
            ranks = spec.ranks[position * width : (position + 1) * width]
            expected.append((module, position, ranks))
    found = [(stage.module, stage.position, stage.ranks) for stage in plan.stages]
    if found != expected or [stage.index for stage in plan.stages] != list(range(len(found))):
        raise PlanError(explain("stages", expected=str(expected), got=str(found)))


def stages_cover_nodes(plan: Plan) -> None:
    """Stages cover every live node: the placed ones exactly once, free ones as replicas."""
    graph = Graph(plan.captured)
    count = Counter(name for stage in plan.stages for name in stage.nodes)
    placed = {node.name for node in graph.placed}
    require_none(
        sorted(n for n in placed | count.keys() if count[n] != (n in placed)),
        "each placed node in exactly one stage",
    )
    copied = {name for stage in plan.stages for name in stage.replicated}
    free = {node.name for node in graph.free}
    require_none(sorted(copied ^ free), "free nodes, all of them, as replicas")


def replicas_are_free(plan: Plan) -> None:
    """Replicated nodes are computed from inputs alone: no parameter, no random draw upstream."""
    free = {node.name for node in Graph(plan.captured).free}
    require_none(
        (f"{n} in stage {s.index}" for s in plan.stages for n in s.replicated if n not in free),
        "no parameter upstream of a replicated node",
    )


def modules_hold_their_nodes(plan: Plan) -> None:
    """Every node runs in a stage of its module."""
    require_none(
        (
            f"{name} in stage {stage.index}"
            for stage in plan.stages
            for name in stage.nodes
            if plan.module_of.get(name) != stage.module
        ),
        "a stage of the node's module",
    )


def values_flow_upwards(plan: Plan) -> None:
    """Values flow to the same or a higher stage, so every stage is convex and stages are a DAG."""
    require_none(
        (f"{source.name} ({a}) -> {reader.name} ({b})" for source, reader, a, b in _edges(plan)
         if a > b),
        "a reader in the same or a higher stage",
    )  # fmt: skip


def stages_are_complete(plan: Plan) -> None:
    """A stage computes or receives everything that its nodes read."""
    graph = Graph(plan.captured)
    missing = []
    for stage in plan.stages:
        own = {*stage.nodes, *stage.replicated}
        received = {v for b in plan.boundaries if b.target == stage.index for v in b.values}
        for name in (*stage.nodes, *stage.replicated):
            for source in graph.by_name[name].all_input_nodes:
                if source in graph.live and source.name not in own | received:
                    missing.append(f"{source.name} (read by {name} in stage {stage.index})")
    require_none(missing, "the value in the stage, or a boundary that brings it")


def one_boundary_per_target(plan: Plan) -> None:
    """Every crossing value has exactly one boundary per stage that reads it, and no other."""
    crossing = {(a, b, source.name) for source, _, a, b in _edges(plan) if a != b}
    found = Counter((b.source, b.target, value) for b in plan.boundaries for value in b.values)
    require_none(
        (
            f"{value} from stage {source} to {target}"
            for source, target, value in sorted(crossing | found.keys())
            if found[source, target, value] != ((source, target, value) in crossing)
        ),
        "one boundary for every value that a stage reads of another",
    )


def gradients_cross_where_needed(plan: Plan) -> None:
    """A gradient crosses a boundary exactly if a node of the target stage returns one."""
    needed = {
        (a, b, source.name)
        for source, reader, a, b in _edges(plan)
        if a != b and (source.name, reader.name) in plan.grad_edges
    }
    found = {(b.source, b.target, value) for b in plan.boundaries for value in b.gradients}
    require_none(
        (f"d{v} from stage {b} to {a}" for a, b, v in sorted(needed ^ found)),
        "a gradient exactly where one flows",
    )


def stage_parameters_are_read(plan: Plan) -> None:
    """A stage lists exactly the parameters that its nodes read."""
    graph = Graph(plan.captured)
    for stage in plan.stages:
        read = {name for node in stage.nodes for name in graph.parameters_read(graph.by_name[node])}
        require_none(
            (f"{name} in stage {stage.index}" for name in sorted(read ^ set(stage.parameters))),
            "a parameter exactly where it is read",
        )


def parameters_have_one_home(plan: Plan) -> None:
    """Every parameter of the model is accounted for once: at a stage that reads it, if one does."""
    graph = Graph(plan.captured)
    require_none(sorted(plan.home.keys() ^ graph.parameters.keys()), "one home per parameter")
    readers = {name: [s.index for s in plan.stages if name in s.parameters] for name in plan.home}
    placed = {(name, stage) for (_, name, _), stage in plan.placement.items()}
    require_none(
        (
            f"{name} in stage {home}"
            for name, home in plan.home.items()
            if not 0 <= home < len(plan.stages)
            or (readers[name] and home not in readers[name] and (name, home) not in placed)
        ),
        "a home among the stages that read the parameter",
    )


def placement_is_respected(plan: Plan) -> None:
    """Every site at which a parameter is read has its stage in the placement, and runs there."""
    stage_of = stage_of_nodes(plan)
    require_none(
        (
            f"{name} read by {node.name}, stage {stage_of.get(node.name)}"
            for (owner, name, occurrence), node in Graph(plan.captured).sites.items()
            if plan.placement.get((owner, name, occurrence)) != stage_of.get(node.name)
        ),
        "the stage of its placement",
    )


def updated_buffers_stay(plan: Plan) -> None:
    """A buffer that the program updates is read in one stage only."""
    graph = Graph(plan.captured)
    stage_of = stage_of_nodes(plan)
    updated = set(plan.captured.updates)
    readers = {
        item.name: {stage_of[user.name] for user in node.users if user.name in stage_of}
        for node, item in graph.input_of.items()
        if item.kind == "buffer" and item.name in updated
    }
    require_none(
        (f"{name} in stages {sorted(stages)}" for name, stages in readers.items()
         if len(stages) > 1),
        "one stage that reads and updates it",
    )  # fmt: skip


def _edges(plan: Plan) -> list[tuple[fx.Node, fx.Node, int, int]]:
    """Edges between placed nodes, with the stages of both ends."""
    stage_of = stage_of_nodes(plan)
    return [
        (source, reader, stage_of[source.name], stage_of[reader.name])
        for source in Graph(plan.captured).placed
        for reader in source.users
        if source.name in stage_of and reader.name in stage_of
    ]


def schedule_ends(plan: Plan) -> None:
    """The schedule does every action once, pairs its transfers and ends, however little buffers."""
    if plan.schedule is None:
        raise PlanError(explain("schedule", expected="one", got="none"))
    variants = [variant_of(plan)] * plan.request.microbatches
    dry_run(plan.schedule, plan.stages, variants)


def token_splits_are_decided(plan: Plan) -> None:
    """Every module's request says which tokens a context rank holds."""
    open_ones = [spec.name for spec in plan.request.modules if spec.context_split == "planned"]
    require_none(open_ones, "a split other than 'planned'")


ANNOTATE = (
    needs_grad_reaches_loss,
    gradients_follow_edges,
    only_trainable_parameters_train,
    every_node_has_a_cost,
    every_node_has_a_module,
)
PARTITION = (
    stages_match_request,
    stages_cover_nodes,
    replicas_are_free,
    modules_hold_their_nodes,
    values_flow_upwards,
    stages_are_complete,
    one_boundary_per_target,
    gradients_cross_where_needed,
    stage_parameters_are_read,
    parameters_have_one_home,
    placement_is_respected,
    updated_buffers_stay,
)
ATTENTION = (token_splits_are_decided,)
SCHEDULE = (schedule_ends,)
