"""One operator of a captured graph on a loop of ranks: is a strategy right, forward and adjoint?"""

from dataclasses import dataclass

import torch
from torch import fx

import mllm_compile.kernels.collective.divided  # noqa: F401
from mllm_compile.compiler.graph import is_element
from mllm_compile.compiler.layout import R
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.lower.masked_rows import divides_rows, masked_rows
from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.local_call import local_call
from mllm_compile.passes.sharding.rules_index import numbered_dims
from tests.layout_forms import Form
from tests.thread_ranks import run_ranks

aten, ours = torch.ops.aten, torch.ops.mllm
SPECIAL = {
    aten.embedding.default: ours.divided_embedding,
    aten._softmax.default: ours.divided_softmax,
    aten._log_softmax.default: ours.divided_log_softmax,
    aten.nll_loss_forward.default: ours.divided_nll_loss,
    ours.grouped_mm.default: ours.divided_grouped_mm,
}


@dataclass(frozen=True)
class Instance:
    """A node with real operands; ``gradients`` says which of them get one."""

    node: fx.Node
    values: tuple[torch.Tensor, ...]
    gradients: tuple[bool, ...]

    def run(self, values, results=None, special="", queries=None, rows=None):
        """The results for whole operands, or for parts where ``results`` gives the local shapes.

        ``special`` is the axis along which the special operator runs; ``queries`` are the places
        of those at hand in a causal attention, ``rows`` (dim, places) of those written by a mask.
        """
        rest = iter(values)
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda _: next(rest))
        if queries is not None and self.node.target is ours.attention.default and args[6]:
            assert args[3] is None
            ends = (queries + 1).to(torch.int32).clamp(max=args[1].shape[2])
            seen = torch.stack([torch.zeros_like(ends), ends], -1)[None, :, None]
            args = (*args[:3], seen, *args[4:6], False, *args[7:])
        if special:
            known = self.node.target._schema.arguments
            args = (*args, *(a.default_value for a in known[len(args) :] if a.name != "start"))
            return as_list(SPECIAL[self.node.target](*args, special))
        if results is None:
            return as_list(self.node.target(*args, **kwargs))

        def emit(target, args, kwargs):
            return target(*args, **kwargs)

        shapes = [tuple(value.shape) for value in values]
        if rows is not None:
            dim, places, count = rows

            def part(whole, _):
                return whole.index_select(dim, torch.as_tensor(places))

            return as_list(masked_rows(emit, part, values, shapes, self.values[0].shape[:count]))
        return as_list(local_call(emit, self.node, args, kwargs, shapes, results))

    def leaves(self, values):
        pairs = zip(values, self.gradients, strict=True)
        return [value.detach().clone().requires_grad_(flag) for value, flag in pairs]


def as_list(value):
    return list(value) if isinstance(value, tuple | list) else [value]


def continuous(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor):
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return tensor.to(wide.get(tensor.dtype, tensor.dtype))


def gradients_of(leaves, results, cotangents):
    """The gradient of every leaf that wants one, zero if there is none; None for the others."""
    pairs = [
        (result, cotangent)
        for result, cotangent in zip(results, cotangents, strict=True)
        if cotangent is not None and result.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
    outs, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, wanted, seeds, allow_unused=True, materialize_grads=True)
    rest = iter(found)
    return [next(rest) if leaf.requires_grad else None for leaf in leaves]


def check(instance: Instance, strategy: Strategy, axis: MeshAxis) -> None:
    """AssertionError if the ranks of ``axis`` together do not do what the operator does."""

    def form(layout):
        return Form(layout, axis.split(layout.size) if layout.divided else None)

    torch.manual_seed(0)
    whole = instance.leaves(instance.values)
    expected = instance.run(whole)
    cotangents = [torch.randn_like(r) if r.requires_grad else None for r in expected]
    want = gradients_of(whole, expected, cotangents)
    have, gives = list(map(form, strategy.inputs)), list(map(form, strategy.outputs))
    shapes = [f.parts(r.detach(), axis.size) for f, r in zip(gives, expected, strict=True)]
    values = [f.parts(v, axis.size) for f, v in zip(have, instance.values, strict=True)]
    seeds = [
        [None] * axis.size if c is None else f.dual.parts(c, axis.size)
        for f, c in zip(gives, cotangents, strict=True)
    ]

    def rows(rank):
        layouts = tuple(f.layout for f in have)
        if not divides_rows(instance.node, layouts[:1]):
            return None
        places = have[0].indices(whole[0].shape[layouts[0].dim], rank)
        return layouts[0].dim, places, numbered_dims(Call.of(instance.node))

    def body(places):
        rank = places[axis.name]
        leaves = instance.leaves([parts[rank] for parts in values])
        results = [tuple(parts[rank].shape) for parts in shapes]
        special = axis.name if strategy.special else ""
        first = have[0].layout if have else R
        queries = (
            have[0].indices(whole[0].shape[2], rank) if first.divided and first.dim == 2 else None
        )
        outs = instance.run(leaves, results, special, queries, rows(rank))
        return outs, gradients_of(leaves, outs, [parts[rank] for parts in seeds])

    if strategy.special:
        done, _ = run_ranks({axis.name: axis.size}, body)
    else:
        done = [body({axis.name: rank}) for rank in range(axis.size)]
    for index, (f, dense) in enumerate(zip(gives, expected, strict=True)):
        f.check([outs[index].detach() for outs, _ in done], dense.detach(), 1e-9)
    for index, (f, dense) in enumerate(zip(have, want, strict=True)):
        if dense is not None:
            f.dual.check([grads[index] for _, grads in done], dense, 1e-9)


def instances(main, inputs):
    """Every computing node with real operands; gradients flow where autograd follows them."""
    recording = fx.Interpreter(main, garbage_collect_values=False)
    recording.run(*inputs)
    for node in main.graph.nodes:
        if node.op == "call_function" and not is_element(node):
            sources = []
            fx.map_arg((node.args, node.kwargs), sources.append)
            values = [recording.env[source] for source in sources]
            follows = any(result.requires_grad for result in as_list(recording.env[node]))
            yield Instance(
                node,
                tuple(widened(value.detach()) for value in values),
                tuple(value.requires_grad and follows for value in values),
            )
