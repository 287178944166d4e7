"""Compiling the kernels for a target that need not be there.

Strides are taken to be multiples of 16 elements, as those of tensors with such a head size are, and
rows of dense masks and biases to be contiguous.
"""

import os
from collections.abc import Iterator
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
from mllm_compile.kernels.attention.site import Site

KERNELS: dict[str, Any] = {
    "delta": backward.delta_kernel,
    "forward": forward.forward_kernel,
    "dq": backward.dq_kernel,
    "dkv": backward.dkv_kernel,
}
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
KINDS = (  # intervals, then whether there is a dense mask, a bias, a cap; a bias takes up the mask
    (1, False, False, False),
    (2, False, False, False),
    (2, True, False, True),
    (2, False, True, True),
)
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
    def written(self) -> str:
        """The kernel, or of dk and dv the one that it makes."""
        if self.spec.dk and self.spec.dv:
            return self.kernel
        return "dk" if self.spec.dk else "dv"

    @property
    def name(self) -> str:
        """A name for files: what differs between variants."""
        size = f"{self.spec.size}x{self.spec.value_size}"
        kind = self.kind.replace("+", "-")
        return "-".join([self.written, self.target, self.dtype, size, kind, str(self.config)])

    @property
    def kind(self) -> str:
        """What masks its scores, and what is done to them, as ``Site.kind``."""
        spec = self.spec
        sizes = spec.size, spec.value_size
        return Site(self.dtype, *sizes, spec.intervals, spec.mask, spec.bias, spec.softcap).kind


@dataclass(frozen=True, slots=True)
class Compiled:
    """The text or code of every stage by its usual suffix, and what it takes."""

    variant: Variant
    stages: dict[str, str | bytes]
    resources: Resources

    @property
    def faults(self) -> list[str]:
        """Why the variant may not be in the table; delta multiplies no matrices."""
        return self.resources.faults(
            self.variant.target,
            products=self.variant.kernel != "delta",
            descriptors=self.variant.config.descriptors,
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
    options = table.options(config, variant.target)
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
    split = spec.precision == table.IN_PARTS and variant.kernel != "delta"
    read = Rows("*bf16", "i32", "i32", "i32") if split else rows
    table_ = Table("*i32", "i32")
    dense = {"mask": "*u8", "bias": "*" + dtype}
    held = (kind if getattr(spec, name) else "*i32" for name, kind in dense.items())
    pairs = (Pairs(kind, "i32", "i32", "i32", 1) for kind in held)
    known: dict[str, Any] = {
        "visible": Visible(table_, table_, table_, *pairs),
        "sizes": Sizes(*["i32"] * 4),
        "score": Score("fp32", "fp32"),
        "spec": "constexpr",
        **dict.fromkeys(("q", "k", "v", "grad_out"), read),
        **dict.fromkeys(("lse", "grad_lse", "delta"), "*fp32"),
    }
    for names, count in ((STREAMED, spec.block_k), (STREAMED_BY_KEYS, spec.block_q)):
        for name, wide in names.items():
            block = (
                f"tensordesc<{'bf16' if split else dtype}[1, 1, {count}, {getattr(spec, wide)}]>"
            )
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


def shipped(target: str) -> list[Variant]:
    """Every configuration of the table for a target, for every kind in which it is chosen."""
    found: dict[Variant, None] = {}
    for at, bits, size in table.CONFIGS:
        for kind in KINDS if at == target else ():
            site = Site("float32" if bits == 32 else "bfloat16", size, size, *kind)
            if size <= table.largest(bits, site.dense):
                found.update(dict.fromkeys(of_site(target, site)))
    return list(found)


def of_site(target: str, site: Site) -> Iterator[Variant]:
    """All that the table has for an attention site on a target."""
    spec = table.spec_of(table.DELTA, target, Site(*site[:3]))
    yield Variant("delta", target, site.dtype, table.DELTA, spec)
    for kernel in ("forward", "dq", "dkv"):
        for config in table.configs(kernel, target, site):
            for spec in table.specs_of(config, target, site):
                yield Variant(kernel, target, site.dtype, config, spec)
