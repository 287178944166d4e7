"""What the user asks for: which module runs on which ranks, in which sizes.

Pure values, read from TOML or built in Python. Laws about a single request are checked here;
laws that need the model (do the paths exist?) are checked by the passes.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from operator import index
from pathlib import Path
from typing import Any, TypeVar

from mllm_compile.compiler.errors import PlanError, RequestError, explain
from mllm_compile.compiler.overrides import override
from mllm_compile.compiler.split import Split

T = TypeVar("T")
DTYPES = ("float64", "float32", "bfloat16")
SPLITS = ("contiguous", "zigzag", "planned")
EXCHANGES = ("gather", "needed", "heads", "auto")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of one module's mesh axes; their product is the number of its ranks."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise RequestError(
                    explain(axis.name, expected="a whole number >= 1", got=repr(size))
                )

    @property
    def size(self) -> int:
        """Number of ranks that a module with these sizes occupies."""
        return self.tensor * self.context * self.pipeline * self.data * self.expert


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module of the request: path prefixes of the model, the ranks they run on, their sizes.

    ``paths`` are dotted module paths; the empty path names the whole model. ``ranks`` stand in the
    order pipeline, data, expert, context, tensor, the last one fastest. ``trainable`` set to True
    or False overrides ``requires_grad`` of every parameter under the paths; None leaves it.
    ``context_split`` says which tokens of a sequence each context rank holds, ``kv_exchange`` how
    its attention gets at the keys of the others.
    """

    paths: tuple[str, ...]
    ranks: tuple[int, ...]
    parallel: Parallel = field(default_factory=Parallel)
    trainable: bool | None = None
    context_split: str = "contiguous"
    kv_exchange: str = "auto"

    def __post_init__(self) -> None:
        if not self.paths:
            raise RequestError("a [[module]] needs a path")
        if len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise RequestError(
                explain(f"{self.name}: ranks", expected="distinct, >= 0", got=str(self.ranks))
            )
        if self.trainable is not None and not isinstance(self.trainable, bool):
            raise RequestError(
                explain(
                    f"{self.name}: trainable", expected="true or false", got=repr(self.trainable)
                )
            )
        self._check_context()
        if len(self.ranks) != self.parallel.size:
            raise RequestError(
                explain(
                    f"{self.name}: ranks",
                    expected=f"{self.parallel.size}, the product of its sizes",
                    got=f"{len(self.ranks)} ({', '.join(map(str, self.ranks))})",
                    remedy="change ranks or the sizes (tensor, context, pipeline, data, expert)",
                )
            )

    def _check_context(self) -> None:
        if (
            self.context_split not in SPLITS
            and _ranks_of(self.context_split) != self.parallel.context
        ):
            raise RequestError(
                explain(
                    f"{self.name}: context_split",
                    expected=f"one of {SPLITS}, or tokens of every context rank like '0:2,6:8|2:6'",
                    got=repr(self.context_split),
                )
            )
        if self.kv_exchange not in EXCHANGES:
            raise RequestError(
                explain(
                    f"{self.name}: kv_exchange",
                    expected=f"one of {EXCHANGES}",
                    got=repr(self.kv_exchange),
                )
            )

    @property
    def name(self) -> str:
        """The paths, for tables and messages."""
        return " + ".join(path or "(model)" for path in self.paths)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The ``[optimizer]`` table: a class of torch.optim, its rate, the global clip norm."""

    name: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            missing = value is None and name == "clip_norm"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not missing and not (number and 0 <= value < inf):
                raise RequestError(
                    explain(f"[optimizer] {name}", expected="a number >= 0", got=repr(value))
                )


@dataclass(frozen=True, slots=True)
class Request:
    """The whole request. Modules stand in dataflow order.

    A step is ``microbatches`` of ``microbatch_size`` samples; a module of ``data`` lanes divides
    the samples of every microbatch among them. Modules may share ranks.
    """

    modules: tuple[ModuleSpec, ...]
    workload: str = ""
    dtype: str = "float32"
    microbatches: int = 1
    microbatch_size: int = 1
    compile: str = ""
    seed: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        if not self.modules:
            raise RequestError("a request needs at least one [[module]]")
        if not isinstance(self.workload, str):
            expected = "'package.module:function'"
            raise RequestError(explain("workload", expected=expected, got=repr(self.workload)))
        if self.dtype not in DTYPES:
            raise RequestError(explain("dtype", expected=f"one of {DTYPES}", got=repr(self.dtype)))
        if self.compile not in ("", "inductor"):
            raise RequestError(
                explain("compile", expected="'inductor' or ''", got=repr(self.compile))
            )
        for name in ("microbatches", "microbatch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(explain(name, expected="a whole number >= 1", got=repr(value)))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise RequestError(explain("seed", expected="a whole number", got=repr(self.seed)))
        self._check_paths()
        self._check_ranks()

    def _check_paths(self) -> None:
        paths = [path for module in self.modules for path in module.paths]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise RequestError(
                explain("module paths", expected="each path once", got=f"{twice} twice")
            )

    def _check_ranks(self) -> None:
        used = sorted({rank for module in self.modules for rank in module.ranks})
        if used != list(range(len(used))):
            raise RequestError(
                explain("ranks", expected=f"0 to {len(used) - 1} without a gap", got=str(used))
            )
        for module in self.modules:
            if module.parallel.data > self.microbatch_size:
                raise RequestError(
                    explain(
                        f"{module.name}: data",
                        expected=f"at most {self.microbatch_size}, the samples of a microbatch",
                        got=str(module.parallel.data),
                        remedy="raise microbatch_size: data lanes divide a microbatch's samples",
                    )
                )

    @property
    def num_ranks(self) -> int:
        """Number of processes that the request needs; modules may share ranks."""
        return len({rank for module in self.modules for rank in module.ranks})

    @property
    def lane_counts(self) -> tuple[int, ...]:
        """The different data sizes of the modules, ascending."""
        return tuple(sorted({module.parallel.data for module in self.modules}))

    @staticmethod
    def load(path: str | Path, overrides: Sequence[str] = ()) -> "Request":
        """Read a TOML request and apply overrides; every fault names the file and the key."""
        try:
            table = tomllib.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise RequestError(f"{path}: {error}") from error
        try:
            return Request.from_dict(override(table, overrides))
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> "Request":
        """Build a request from the keys of a TOML file; unknown keys are refused."""
        entries = table.get("module", ())
        if not isinstance(entries, list | tuple):
            raise RequestError(explain("module", expected="[[module]] tables", got=repr(entries)))
        modules = tuple(_module(entry) for entry in entries)
        optimizer = _build(Optimizer, table.get("optimizer", {}), "[optimizer]")
        rest = {key: value for key, value in table.items() if key not in ("module", "optimizer")}
        return _build(Request, rest, "request", modules=modules, optimizer=optimizer)


def _ranks_of(split: object) -> int:
    """Number of ranks of a split that is written out; 0 of anything else."""
    try:
        return Split.parse(split).ranks if isinstance(split, str) else 0
    except (ValueError, PlanError):
        return 0


def parse_ranks(text: str | int | Sequence[int]) -> tuple[int, ...]:
    """``"0-1,4"`` -> (0, 1, 4); a number or a list of numbers is taken as it is."""
    ranks: list[int] = []
    try:
        if not isinstance(text, str):
            given: Sequence[Any] = text if isinstance(text, Sequence) else [text]
            if any(isinstance(rank, bool) for rank in given):
                raise TypeError(text)
            return tuple(map(index, given))
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found = range(int(first), int(last if dash else first) + 1)
            if not found:
                raise ValueError(part)
            ranks.extend(found)
    except (TypeError, ValueError) as error:
        raise RequestError(explain("ranks", expected="like '0-1,4'", got=repr(text))) from error
    return tuple(ranks)


def _module(entry: Mapping[str, Any]) -> ModuleSpec:
    axes = {axis.name for axis in fields(Parallel)}
    path = entry.get("path", ()) if isinstance(entry, Mapping) else entry
    paths = (path,) if isinstance(path, str) else path
    if not isinstance(paths, list | tuple) or not all(isinstance(p, str) for p in paths):
        raise RequestError(explain("[[module]] path", expected="a dotted path", got=repr(path)))
    where = f"[[module]] {' + '.join(paths)}"
    parallel = _build(Parallel, {k: v for k, v in entry.items() if k in axes}, where)
    rest = {k: v for k, v in entry.items() if k not in axes and k not in ("path", "ranks")}
    if "ranks" not in entry:
        raise RequestError(explain(where, expected="a key 'ranks'", got="none"))
    ranks = parse_ranks(entry["ranks"])
    return _build(ModuleSpec, rest, where, paths=tuple(paths), ranks=ranks, parallel=parallel)


ELSEWHERE = {
    ModuleSpec: ("path", "ranks", *(axis.name for axis in fields(Parallel))),
    Request: ("module", "optimizer"),
}
"""Keys of a table that are read by other means."""


def _build(cls: type[T], table: Mapping[str, Any], where: str, **more: Any) -> T:
    known = [name for name in cls.__dataclass_fields__ if name not in more]  # type: ignore[attr-defined]
    legal = [*known, *ELSEWHERE.get(cls, ())]
    if not isinstance(table, Mapping):
        raise RequestError(explain(where, expected="a table", got=repr(table)))
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise RequestError(explain(f"{where}: key {unknown[0]!r}", expected=f"one of {legal}"))
    return cls(**table, **more)
