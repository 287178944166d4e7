"""``mllm-compile kernels``: compile the Triton kernels without a GPU and say what they take."""

import json
from argparse import Namespace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mllm_compile.commands_plan import captured, loaded
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.kernels.attention.gpu.table import TARGETS, largest
from mllm_compile.kernels.attention.site import Site
from mllm_compile.output import Output, write
from mllm_compile.passes.lower.emit import KERNELS, site_of
from mllm_compile.render import new_table

if TYPE_CHECKING:  # imports triton
    from mllm_compile.kernels.attention.gpu.ahead_of_time import Compiled

DTYPES = ("float32", "float16", "bfloat16")


def kernels(options: Namespace) -> int:
    """Compile every configuration of the table, or those of a request's attention sites.

    1 if one of them should not be in the table.
    """
    if find_spec("triton") is None:
        what, remedy = "kernels", 'pip install "triton>=3.6"'
        raise RequestError(explain(what, expected="triton", got="no such package", remedy=remedy))
    from mllm_compile.kernels.attention.gpu.ahead_of_time import compile_variant, of_site, shipped

    sites = _sites(options) if options.path else None
    records, broken = [], 0
    for target in options.target or TARGETS:
        variants = shipped(target) if sites is None else chain(*(of_site(target, x) for x in sites))
        done = [compile_variant(variant) for variant in variants]
        Output().print(_view(target, done))
        records += [_record(each) for each in done]
        broken += sum(bool(each.faults) for each in done)
        for each in done if options.output else ():
            _save(each, Path(options.output))
    if options.json:
        write(Path(options.json), json.dumps(records, indent=1) + "\n")
    return 1 if broken else 0


def _sites(options: Namespace) -> list[Site]:
    """The kinds of attention of a plan or request, each once; RequestError if no kernel has any."""
    if Path(options.path).suffix == ".json":
        named = {node.name: Site.parse(node.site) for node in loaded(options).nodes if node.site}
    else:
        graph = captured(options).main.graph
        named = {node.name: site_of(node) for node in graph.nodes if node.target in KERNELS}
    left = {name: why for name, site in named.items() if (why := _left(site))}
    for name, why in left.items():
        Output().print(f"{name} is computed by definition: {why}")
    if len(left) == len(named):
        got, remedy = f"none in {options.path}", "--set dtype=bfloat16"
        raise RequestError(
            explain("kernels", expected="attention that a kernel computes", got=got, remedy=remedy)
        )
    return sorted({site for name, site in named.items() if name not in left})


def _left(site: Site) -> str:
    """Why no Triton kernel computes a site; "" where one does."""
    if site.dtype not in DTYPES:
        return f"{site.dtype} is none of {', '.join(DTYPES)}"
    most, size = largest(site.bits, site.dense), max(site.size, site.value_size)
    kind = " with a dense mask, a bias or a cap" * site.dense
    told = f"head size {size} in {site.dtype}{kind} exceeds {most}"
    return told if size > most else ""


def _view(target: str, done: list["Compiled"]) -> Table:
    table = new_table(
        target, "kernel", "dtype", "size", "kind", "tile", "warps", "stages", "registers", "stack",
        "spills", "shared KiB", "matrix", "TMA", "atomics", "rejected for",
    )  # fmt: skip
    for each in done:
        variant, config, taken = each.variant, each.variant.config, each.resources
        matrix = ", ".join(f"{count} {name}" for name, count in taken.matrix.items() if count)
        cells = (
            variant.written, variant.dtype, variant.spec.size, variant.kind,
            f"{config.block_q}x{config.block_k}", config.warps, config.stages, taken.registers,
            taken.stack, taken.spills, f"{taken.shared / 1024:.1f}", matrix,
            taken.descriptor_loads, taken.atomics, "; ".join(each.faults),
        )  # fmt: skip
        table.add_row(*map(str, cells))
    return table


def _record(each: "Compiled") -> dict[str, Any]:
    variant, taken = each.variant, each.resources
    return {
        "kernel": variant.written,
        "kind": variant.kind,
        "target": variant.target,
        "dtype": variant.dtype,
        "size": variant.spec.size,
        **variant.config._asdict(),
        **{name: getattr(taken, name) for name in taken.__slots__},
        "faults": each.faults,
    }


def _save(each: "Compiled", folder: Path) -> None:
    """One file a stage: the source, Triton's forms, PTX and code."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in each.stages.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"{each.variant.name}.{suffix}").write_bytes(data)
