"""Compiling the kernels for a target that need not be there.

Strides are taken to be multiples of 16 elements, as those of tensors with such a head size are, and
rows of dense masks and biases to be contiguous.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mllm_compile.kernels.attention.gpu import backward, forward, table
from mllm_compile.kernels.attention.gpu.resources import Resources, of_amd, of_nvidia
from mllm_compile.kernels.attention.gpu.spec import (
    Pairs,
    Rows,
    Score,
    Sizes,
    Spec,
    Table,
    Visible,
)
from mllm_compile.kernels.attention.gpu.table import Config
from mllm_compile.kernels.attention.kernel import Site

KERNELS: dict[str, Any] = {
    "delta": backward.delta_kernel,
    "forward": forward.forward_kernel,
    "dq": backward.dq_kernel,
    "dkv": backward.dkv_kernel,
}
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
STREAMED = {"key_tiles": "wide", "value_tiles": "value_wide"}
STREAMED_BY_KEYS = {"query_tiles": "wide", "grad_tiles": "value_wide"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as it is compiled: ``target`` like sm90 or gfx942, ``dtype`` like bfloat16."""

    kernel: str
    target: str
    dtype: str
    config: Config
    spec: Spec

    @property
    def name(self) -> str:
        """A name for files: what differs between variants."""
        size = f"{self.spec.size}x{self.spec.value_size}"
        kinds = [f"i{self.spec.intervals}"]
        kinds += [kind for kind in ("mask", "bias", "softcap") if getattr(self.spec, kind)]
        parts = [self.kernel, self.target, self.dtype, size, *kinds, str(self.config)]
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The text or code of every stage by its usual suffix, and what it takes."""

    variant: Variant
    stages: dict[str, str | bytes]
    resources: Resources

    @property
    def faults(self) -> list[str]:
        """Why the variant may not be in the table.

        Two cases are left the older matrix instructions: float32, whose three products of tf32 want
        the registers, and dk with dv at head size 256, two accumulators of 64 rows of it.
        """
        variant, spec = self.variant, self.variant.spec
        big = variant.kernel == "dkv" and max(spec.size, spec.value_size) > 128
        return self.resources.faults(
            variant.target,
            own_matrix=variant.dtype != "float32" and not big,
            descriptors=variant.config.descriptors,
        )


def compile_variant(variant: Variant) -> Compiled:
    """Compile for the variant's target; RuntimeError in Triton's interpreter, which cannot."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels: TRITON_INTERPRET=1 interprets them; unset it to compile")
    kernel, spec, config = KERNELS[variant.kernel], variant.spec, variant.config
    types = _types(kernel, variant)
    constants: dict[Any, Any] = {(kernel.arg_names.index("spec"),): spec}
    attributes: dict[Any, Any] = {}
    for path, kind in _leaves(tuple(types.values())):
        if kind is None or kind == 1:
            constants[path] = kind
        elif kind[0] == "*" or (kind == "i32" and kernel.arg_names[path[0]] != "sizes"):
            attributes[path] = [["tt.divisibility", 16]]
    signature = {name: _declared(kind) for name, kind in types.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    nvidia = variant.target.startswith("sm")
    number = int(variant.target[2:]) if nvidia else variant.target
    target = GPUTarget("cuda" if nvidia else "hip", number, 32 if nvidia else 64)
    done = triton.compile(source, target=target, options=options)
    asm = done.asm
    code = of_nvidia(asm["cubin"], asm["ptx"]) if nvidia else of_amd(asm["amdgcn"])
    stages = {name: text for name, text in asm.items() if isinstance(text, str | bytes)}
    return Compiled(variant, stages, code.with_shared(done.metadata.shared))


def _types(kernel: Any, variant: Variant) -> dict[str, Any]:
    """The type of every parameter, in the named tuples that it is passed in."""
    spec, dtype = variant.spec, TYPES[variant.dtype]
    rows = Rows("*" + dtype, "i32", "i32", "i32")
    table_ = Table("*i32", "i32")
    dense = {"mask": "*u8", "bias": "*" + dtype}
    held = (kind if getattr(spec, name) else "*i32" for name, kind in dense.items())
    pairs = (Pairs(kind, "i32", "i32", "i32", 1) for kind in held)
    known: dict[str, Any] = {
        "visible": Visible(table_, table_, table_, *pairs),
        "sizes": Sizes(*["i32"] * 4),
        "score": Score("fp32", "fp32"),
        "spec": "constexpr",
        **dict.fromkeys(("lse", "grad_lse", "delta"), "*fp32"),
    }
    for names, count in ((STREAMED, spec.block_k), (STREAMED_BY_KEYS, spec.block_q)):
        for name, wide in names.items():
            block = f"tensordesc<{dtype}[1, 1, {count}, {getattr(spec, wide)}]>"
            known[name] = block if spec.descriptors else None
    return {name: known.get(name, rows) for name in kernel.arg_names}


def _leaves(kind: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(kind, tuple):
        for index, part in enumerate(kind):
            yield from _leaves(part, (*path, index))
    else:
        yield path, kind


def _declared(kind: Any) -> Any:
    """``kind`` as a signature has it: constants are told apart from types."""
    if isinstance(kind, tuple):
        return type(kind)(*map(_declared, kind))
    return kind if isinstance(kind, str) else "constexpr"


def shipped(target: str) -> Iterator[Variant]:
    """Every configuration of the table for a target, for one interval per query."""
    for (at, bits, size), kernels in table.CONFIGS.items():
        if at == target:
            site = Site("float32" if bits == 32 else "bfloat16", size, size)
            yield from of_site(target, site, kernels)


def of_site(
    target: str, site: Site, kernels: Mapping[str, Iterable[Config]] | None = None
) -> Iterator[Variant]:
    """All that the table has for an attention site on a target."""
    bits = 32 if site.dtype == "float32" else 16
    for kernel in ("forward", "dq", "dkv"):
        size = max(site.size, site.value_size)
        configs = kernels[kernel] if kernels else table.configs(target, kernel, bits, size)
        for config in configs:
            yield Variant(kernel, target, site.dtype, config, spec_of(config, target, site))


def spec_of(config: Config, target: str, site: Site) -> Spec:
    """What a kernel is compiled for at a site."""
    return Spec(
        config.block_q,
        config.block_k,
        site.size,
        site.value_size,
        table.wide(site.size),
        table.wide(site.value_size),
        *site[3:],
        descriptors=config.descriptors,
        precision=table.precision(target, site.dtype),
    )
