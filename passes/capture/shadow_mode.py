"""The mode that sees every operator of the forward while it is traced.

It runs what is known on the shadows too, answers host reads with guards, makes dynamic shapes
static, replaces operators that cannot be captured as they are, and labels the recorded nodes.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture import replacements, static_shapes
from mllm_compile.passes.capture.candidates import Candidates
from mllm_compile.passes.capture.guards import Reads
from mllm_compile.passes.capture.memory_writes import MemoryWrites
from mllm_compile.passes.capture.provenance import Provenance, source_line
from mllm_compile.passes.capture.randomness import RANDOM, is_random
from mllm_compile.passes.capture.shadows import Shadows, tensors_in
from mllm_compile.passes.capture.tracing import FakeTensor, last_node, nodes_after

aten, prim = torch.ops.aten, torch.ops.prim
OURS = "mllm"


PATIENCE = 400  # calls of torch to go on for after a host read, in case another one follows


class NewCandidates(BaseException):
    """Ends a trace that is to be repeated anyway, unseen by the model's own error handling."""


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One trace of one model: its shadows, its host reads, its random operators."""

    def __init__(
        self,
        provenance: Provenance,
        lift: torch.dtype | None = None,
        known: Candidates | None = None,
    ):
        """``known`` candidates were tried to hoist; a read that finds others ends the trace soon.

        Without them the trace goes on to its end.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.provenance = provenance
        self.lift = lift
        self.shadows = Shadows()
        self.reads = Reads()
        self.writes = MemoryWrites()
        self.random: list[str] = []
        self.hoisted: list[str] = []
        self._num_reads = 0
        self._calls_since = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, then label whatever it recorded."""
        if func is prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are this one
        mark = last_node()
        grad = self.provenance.caller_grad if func.namespace == OURS else torch.is_grad_enabled()
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self.provenance.label(nodes_after(mark), grad)

    def give_up_early(self) -> None:
        """Called wherever the model calls torch: no C++ code lies between here and the model."""
        if self._num_reads != len(self.reads.log):
            self._num_reads, self._calls_since = len(self.reads.log), 0
        self._calls_since += 1
        if self._calls_since == PATIENCE and self.will_be_repeated:
            raise NewCandidates

    @property
    def will_be_repeated(self) -> bool:
        """Whether a host read has found candidates that no trace has tried yet."""
        return self.known is not None and not self.reads.candidates.keys() <= self.known.keys()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == OURS:
            return func(*args, **kwargs)
        tags = func.tags
        if torch.Tag.data_dependent_output in tags:
            return self._host_read(func, args, kwargs)
        rule = static_shapes.RULES.get(func)
        if rule is None and torch.Tag.dynamic_output_shape in tags:
            rule = static_shapes.opaque
        if rule is None:
            rule = replacements.RULES.get(func)
        if rule is not None:
            out = rule(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        written = self.writes.check(func, args, kwargs, inputs)
        out = func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self.random.append(f"{RANDOM}{func} at {source_line()}")
        elif func.namespace in ("aten", "prims") and self.shadows.known(inputs):
            real = self.shadows.compute(func, args, kwargs)
            for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
                self.shadows.put(fake, value)
            return out
        for tensor in written:
            self.shadows.forget(tensor)
        return out

    def _host_read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.require_known(func, (args, kwargs))
        value = self.shadows.compute(func, args, kwargs)
        with self:
            if func is aten._local_scalar_dense.default:
                self.reads.add("item", args[0], value)
            elif func is aten.equal.default:
                self._read_equality(args[0], args[1], value)
            elif func is aten.is_nonzero.default:
                self.reads.add("item", args[0].ne(0), value)
            elif func is aten.allclose.default:
                close = aten.isclose.default(*args, **kwargs)
                self.reads.add("item", aten.all.default(close), value)
            else:
                raise CaptureError(
                    explain(
                        f"{func} at {source_line()}",
                        got="a host read that has no guard",
                        remedy="compute it with tensor operators",
                    )
                )
        return value

    def assume(self, truth: torch.Tensor) -> None:
        """Let the program rest on a truth value of our own, which is true for this batch."""
        self.reads.note("item", truth, True)

    def _read_equality(self, one: torch.Tensor, other: torch.Tensor, value: bool) -> None:
        if one.shape == other.shape:  # shapes are part of the signature
            self.reads.add("item", aten.all.default(aten.eq.Tensor(one, other)), value)

    def require_known(self, func: Any, value: Any) -> None:
        """Refuse an operator whose result steers the program but depends on parameters."""
        if not self.shadows.known(tensors_in(value)):
            raise CaptureError(
                explain(
                    f"{func} at {source_line()}",
                    expected="control flow and shapes that depend on the batch alone",
                    got="a value computed from parameters or random numbers",
                    remedy="use torch.where or a mask instead of reading the value on the host",
                )
            )
