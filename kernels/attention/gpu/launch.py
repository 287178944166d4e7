"""Launches of the Triton kernels, and which configuration of the table each one takes.

The first launch of its kind on a device measures the table's configurations and keeps the fastest
of those that the compiler fitted into registers and the device into its memory.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mllm_compile.kernels.attention.gpu import backward as kernels
from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.attention.gpu.call import Call
from mllm_compile.kernels.attention.gpu.forward import forward_kernel
from mllm_compile.kernels.attention.gpu.operands import readable
from mllm_compile.kernels.attention.gpu.spec import rows_of, wide
from mllm_compile.kernels.attention.gpu.table import Config

_FASTEST: dict[Hashable, Config] = {}


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """Fill out [B, H, Q, E] and lse [B, H, Q]."""
    q, k, v = map(call.read, (call.q, call.k, call.v))
    Launch("forward", forward_kernel, call, (q, k, v), (k, v), (rows_of(out), lse)).run()


def delta(
    call: Call, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """rowsum(dO ∘ O) - dlse, [B, H, Q]; 0 where a query sees nothing."""
    result = torch.empty_like(lse)
    programs = -(-call.sizes.queries // table.DELTA.block_q) * call.sizes.heads * out.shape[0]
    kernels.delta_kernel[(programs,)](
        rows_of(readable(out)),
        rows_of(readable(grad_out)),
        lse,
        None if grad_lse is None else grad_lse.contiguous(),
        result,
        call.sizes,
        table.spec_of(table.DELTA, call.target, call.site),
        **table.options(table.DELTA, call.target),
    )
    return result


def backward(
    call: Call, grad_out: Tensor, grads: tuple[Tensor, Tensor, Tensor], lse: Tensor, delta: Tensor
) -> None:
    """Fill the gradients of q, k and v, each shaped like its input."""
    q, k, v, above = map(call.read, (call.q, call.k, call.v, grad_out))
    grad_q, grad_k, grad_v = map(rows_of, grads)
    made = rows_of(above), grad_q, lse, delta
    Launch("dq", kernels.dq_kernel, call, (q, k, v), (k, v), made).run()
    written = rows_of(above), grad_k, grad_v, lse, delta
    Launch("dkv", kernels.dkv_kernel, call, (q, k, v), (q, above), written).run()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its arguments, but for what follows from the configuration.

    ``streamed`` are the two tensors whose tiles the inner loop loads, by descriptors if it can.
    """

    name: str
    kernel: Any
    call: Call
    inputs: tuple[Tensor, Tensor, Tensor]
    streamed: tuple[Tensor, Tensor]
    tensors: tuple[Any, ...]

    def run(self) -> None:
        """Launch in the fastest configuration of those to try."""
        list(self.with_config(self._fastest(self.call.configs(self.name))))

    def with_config(self, config: Config) -> Iterator[Any]:
        """Launch in this configuration, in one part or more, each of which is given compiled."""
        call, sizes, by_keys = self.call, self.call.sizes, self.name == "dkv"
        length, block, heads = (
            (sizes.keys, config.block_k, sizes.key_heads)
            if by_keys
            else (sizes.queries, config.block_q, sizes.heads)
        )
        programs = -(-length // block) * heads * call.q.shape[0]
        arguments = (
            *map(rows_of, self.inputs),
            *(self._descriptor(x, config) for x in self.streamed),
            *self.tensors,
            call.visible(config, by_keys),
            sizes,
            call.score,
        )
        for spec in table.specs_of(config, call.target, call.site):
            yield self.kernel[(programs,)](
                *arguments,
                spec,
                **table.options(config, call.target),
            )

    def _descriptor(self, x: Tensor, config: Config) -> TensorDescriptor | None:
        if not config.descriptors:
            return None
        rows = config.block_q if self.name == "dkv" else config.block_k
        block = [1, 1, rows, wide(x.shape[3])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block)

    def _fastest(self, configs: tuple[Config, ...]) -> Config:
        """The fastest sound configuration; in the interpreter nothing is compiled or measured."""
        if self.call.target == table.INTERPRETER:
            return configs[0]
        lengths = (self.call.sizes.queries.bit_length(), self.call.sizes.keys.bit_length())
        key = (self.name, self.call.target, self.call.site, lengths, configs)
        if key not in _FASTEST:
            sound = self._sound(configs)
            _FASTEST[key] = sound[0] if len(sound) == 1 else min(sound, key=self._time)
        return _FASTEST[key]

    def _sound(self, configs: tuple[Config, ...]) -> tuple[Config, ...]:
        """Those without faults; RuntimeError where there is none."""
        faults = {config: self._fault(config) for config in configs}
        sound = tuple(config for config, fault in faults.items() if not fault)
        if not sound:
            told = "; ".join(f"{config}: {fault}" for config, fault in faults.items())
            raise RuntimeError(
                f"attention: {self.name} for {self.call.site} on {self.call.target} has no sound "
                f"configuration under triton {triton.__version__} ({told}); install the version "
                "of triton that `mllm-compile kernels` finds no fault with"
            )
        return sound

    def _fault(self, config: Config) -> str:
        """What the compiled kernel or the device has against a configuration; "" for nothing."""
        try:
            spills = [done.n_spills for done in self.with_config(config)]
        except triton.runtime.errors.OutOfResources as error:
            return str(error)
        return f"{max(spills)} spilled registers" if any(spills) else ""

    def _time(self, config: Config) -> float:
        """Median milliseconds."""
        measured = triton.testing.do_bench(
            lambda: list(self.with_config(config)), warmup=10, rep=50, return_mode="median"
        )
        return float(measured)


def target_of(device: torch.device) -> str:
    """The table's name of a device's architecture; the interpreter's on a CPU."""
    if device.type == "cpu":
        return table.INTERPRETER
    target = triton.runtime.driver.active.get_current_target()
    return table.target_of(target.backend, target.arch)
