"""``torch.compile(model, backend="mllm")``: Dynamo's graph, captured as any model, in one process.

Dynamo hands over a forward graph whose inputs are the model's parameters and buffers, the batch,
and, behind a graph break, activations. The graph is run once more under ``capture``: so host reads
become guards, writes become buffer updates, and every node gets its module and source line, which
here come from Dynamo's metadata. AOTAutograd then derives the backward of what is trainable;
Inductor may compile both. A call whose guarded values differ is captured again, never run wrongly.
As with every compiled graph, a trained parameter from which only unused results are reached gets a
gradient of zeros, where eager leaves None.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._inductor.compile_fx import compile_fx

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.errors import GuardError, RequestError, explain
from mllm_compile.dynamo_graph import DynamoGraph, DynamoModule, Inputs
from mllm_compile.graph_breaks import warn_of_break
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import prepare

log = logging.getLogger(__name__)
COMPILERS = ("", "inductor")
Arguments = Sequence[Any]


def compile_graph(
    graph: fx.GraphModule, example_inputs: Arguments, *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend: Dynamo's graph -> a function of the same inputs.

    ``options={"compile": "inductor"}`` compiles forward and backward with Inductor. The first call
    captures, with the values it is given.
    """
    compiler = _compiler(options or {})
    warn_of_break(graph)
    if not any(isinstance(value, torch.Tensor) for value in example_inputs):
        return graph.forward  # it only makes constants
    return CompiledGraph(DynamoGraph(graph), compiler)


def _compiler(options: Mapping[str, Any]) -> str:
    """The value of the one option there is."""
    subject = "options of the backend mllm"
    unknown = sorted(set(options) - {"compile"})
    if unknown:
        raise RequestError(explain(subject, expected="compile", got=", ".join(unknown)))
    compiler = options.get("compile", "")
    if compiler not in COMPILERS:
        expected = f"compile to be one of {COMPILERS}"
        raise RequestError(explain(subject, expected=expected, got=repr(compiler)))
    return str(compiler)


@dataclass(frozen=True)
class _Program:
    """One captured program, compiled; ``numbers`` are the results that are no tensors, by place."""

    captured: Captured
    function: Callable[..., Sequence[torch.Tensor]]
    numbers: Mapping[int, Any]


class CompiledGraph:
    """What Dynamo calls. Programs are kept by shapes, then by the values of their guards."""

    def __init__(self, source: DynamoGraph, compiler: str) -> None:
        self.source = source
        self.compiler = compiler
        self.programs: dict[Any, list[_Program]] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Run the program that fits the arguments; capture one if there is none."""
        inputs = self.source.bind(arguments)
        key = (torch.is_grad_enabled(), *map(_likeness, arguments))
        known = self.programs.setdefault(key, [])
        for program in known:
            try:
                values = _values(program.captured, inputs)
            except GuardError as misfit:
                log.info("captured once more: %s", misfit)
            else:
                return _run(program, values, inputs)
        known.append(self._compile(inputs))
        return _run(known[-1], _values(known[-1].captured, inputs), inputs)

    def _compile(self, inputs: Inputs) -> _Program:
        model = DynamoModule(self.source, inputs)
        returned: list[tuple[Any, ...]] = []

        def tensors_of(result: tuple[Any, ...]) -> Sequence[torch.Tensor]:
            returned.append(result)
            return [value for value in result if isinstance(value, torch.Tensor)]

        captured = capture(model, inputs.numbers, outputs=tensors_of)
        values = _values(captured, inputs)
        log.info(
            "captured %d nodes and %d guards; %d of %d parameters get a gradient",
            len(captured.main.graph.nodes),
            len(captured.guards),
            sum(value.requires_grad for value in inputs.parameters.values()),
            len(inputs.parameters),
        )
        compiler = compile_fx if self.compiler == "inductor" else aot_autograd(fw_compiler=_as_is)
        function: Any = compiler(copy.deepcopy(captured.main), values)
        numbers = {
            place: value
            for place, value in enumerate(returned[-1])
            if not isinstance(value, torch.Tensor)
        }
        return _Program(captured, function, numbers)


def _values(captured: Captured, inputs: Inputs) -> list[torch.Tensor]:
    """The inputs of the main graph; GuardError if they do not fit the program."""
    prepared = prepare(captured, inputs.numbers, inputs.buffers)
    state = {**inputs.parameters, **inputs.buffers}
    return [
        state[item.name]
        if item.kind in ("parameter", "buffer")
        else prepared.values[item.kind, item.name]
        for item in captured.inputs
    ]


def _run(program: _Program, values: list[torch.Tensor], inputs: Inputs) -> tuple[Any, ...]:
    count = program.captured.num_outputs
    results = program.function(*values)
    with torch.no_grad():
        for name, value in zip(program.captured.updates, results[count:], strict=True):
            inputs.buffers[name].copy_(value)
    tensors = iter(results[:count])
    places = range(count + len(program.numbers))
    return tuple(program.numbers[p] if p in program.numbers else next(tensors) for p in places)


def _as_is(graph: fx.GraphModule, example_inputs: Arguments) -> Any:
    return make_boxed_func(graph.forward)


def _likeness(value: Any) -> Any:
    """What two inputs must share for one program to fit both, apart from guarded values."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
