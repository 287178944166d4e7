"""Launches of the Triton kernels, and which configuration of the table each one takes.

The first launch of its kind on a device measures the table's configurations and keeps the fastest.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mllm_compile.kernels.attention.gpu import backward, table
from mllm_compile.kernels.attention.gpu.call import Call, streams
from mllm_compile.kernels.attention.gpu.forward import forward_kernel
from mllm_compile.kernels.attention.gpu.spec import rows_of
from mllm_compile.kernels.attention.gpu.table import Config

_FASTEST: dict[Hashable, Config] = {}


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """Fill out [B, H, Q, E] and lse [B, H, Q]."""
    Launch("forward", forward_kernel, call, (call.k, call.v), (rows_of(out), lse)).run()


def delta(
    call: Call, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """rowsum(dO ∘ O) - dlse, [B, H, Q]; 0 where a query sees nothing."""
    result = torch.empty_like(lse)
    programs = -(-call.sizes.queries // table.DELTA.block_q) * call.sizes.heads * out.shape[0]
    backward.delta_kernel[(programs,)](
        rows_of(out),
        rows_of(grad_out),
        lse,
        None if grad_lse is None else grad_lse.contiguous(),
        result,
        call.sizes,
        call.spec(table.DELTA, "ieee"),
        num_warps=table.DELTA.warps,
    )
    return result


def dq(call: Call, grad_out: Tensor, grad_q: Tensor, lse: Tensor, delta: Tensor) -> None:
    """Fill grad_q [B, H, Q, D]."""
    written = (rows_of(grad_out), rows_of(grad_q), lse, delta)
    Launch("dq", backward.dq_kernel, call, (call.k, call.v), written).run()


def dkv(
    call: Call, grad_out: Tensor, grad_k: Tensor, grad_v: Tensor, lse: Tensor, delta: Tensor
) -> None:
    """Fill grad_k [B, G, K, D] and grad_v [B, G, K, E]."""
    written = (rows_of(grad_out), rows_of(grad_k), rows_of(grad_v), lse, delta)
    Launch("dkv", backward.dkv_kernel, call, (call.q, grad_out), written).run()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its arguments, but for what follows from the configuration.

    ``streamed`` are the two tensors whose tiles the inner loop loads, by descriptors if it can.
    """

    name: str
    kernel: Any
    call: Call
    streamed: tuple[Tensor, Tensor]
    tensors: tuple[Any, ...]

    def run(self) -> None:
        """Launch in the fastest configuration of the table."""
        target = _target(self.call.q.device)
        bits = self.call.q.element_size() * 8
        size = max(self.call.q.shape[3], self.call.v.shape[3])
        configs = self.call.tiles.get(self.name) or table.configs(target, self.name, bits, size)
        if not all(map(streams, self.streamed)):
            configs = tuple(config for config in configs if not config.descriptors)
        self.with_config(self._fastest(target, configs))

    def with_config(self, config: Config) -> None:
        """Launch in this configuration."""
        call, sizes, by_keys = self.call, self.call.sizes, self.name == "dkv"
        length, block, heads = (
            (sizes.keys, config.block_k, sizes.key_heads)
            if by_keys
            else (sizes.queries, config.block_q, sizes.heads)
        )
        programs = -(-length // block) * heads * call.q.shape[0]
        dtype = str(call.q.dtype).removeprefix("torch.")
        self.kernel[(programs,)](
            *map(rows_of, (call.q, call.k, call.v)),
            *(self._descriptor(x, config) for x in self.streamed),
            *self.tensors,
            call.visible(config, by_keys),
            sizes,
            call.score,
            call.spec(config, table.precision(_target(call.q.device), dtype)),
            num_warps=config.warps,
            num_stages=config.stages,
            enable_fp_fusion=True,
        )

    def _descriptor(self, x: Tensor, config: Config) -> TensorDescriptor | None:
        if not config.descriptors:
            return None
        rows = config.block_q if self.name == "dkv" else config.block_k
        block = [1, 1, rows, table.wide(x.shape[3])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block)

    def _fastest(self, target: str, configs: tuple[Config, ...]) -> Config:
        """The configuration that measures fastest; in the interpreter nothing is measured."""
        if len(configs) == 1 or target == table.INTERPRETER:
            return configs[0]
        lengths = (self.call.sizes.queries.bit_length(), self.call.sizes.keys.bit_length())
        spec = self.call.spec(Config(0, 0), "")
        key = (self.name, target, self.call.q.dtype, spec, lengths, configs)
        if key not in _FASTEST:
            _FASTEST[key] = min(configs, key=self._time)
        return _FASTEST[key]

    def _time(self, config: Config) -> float:
        """Median milliseconds; infinity where the device has not the resources."""
        try:
            measured = triton.testing.do_bench(
                lambda: self.with_config(config), warmup=10, rep=50, return_mode="median"
            )
        except triton.runtime.errors.OutOfResources:
            return math.inf
        return float(measured)


def _target(device: torch.device) -> str:
    """The table's name of a device's architecture; the interpreter's on a CPU."""
    if device.type == "cpu":
        return table.INTERPRETER
    target = triton.runtime.driver.active.get_current_target()
    return table.target_of(target.backend, target.arch)
