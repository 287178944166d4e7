"""Checkpoints that any plan can load, and a single process too: keyed by original names.

One directory per saved step, written through torch.distributed.checkpoint: every parameter, frozen
ones included (a checkpoint is then complete, whatever the model was first built from), every
buffer, the optimizer's state, each rank's random state, and ``job.json`` with the step and whatever
the job adds, such as its position in the data. Tensors are stored whole: a rank adds its parts to
them, and reads its parts of them. A directory gets its final name only when all is written, so that
an interrupted save is never resumed from; the previous checkpoint is kept.

All ranks must see the same file system.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from mllm_compile.compiler.errors import RequestError, RunError, explain
from mllm_compile.runtime.migrate import is_part
from mllm_compile.runtime.shards import Shards
from mllm_compile.runtime.state import State

_KEPT = 2
_DONE = re.compile(r"step-(\d+)")
_JOB = "job.json"


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says besides tensors.

    ``random_restored`` is False if it was saved with fewer ranks than there are now.
    """

    step: int
    job: Mapping[str, Any]
    random_restored: bool


def save(
    directory: str | Path,
    step: int,
    state: State,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank: int = 0,
    job: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``directory/step-…``; all ranks call it. ``job`` must be JSON, rank 0's is kept.

    Raises:
        RunError: a rank could not write.
    """
    final = Path(directory) / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    current = _without_stale(_model_tensors(state, rank), state, rank)
    tensors = {**current, **_optimizer_tensors(state, optimizer, rank), **_random(rank)}
    writer = FileSystemWriter(partial, sync_files=True)
    try:
        with _single_process_is_fine():
            write_tensors(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise RunError(f"rank {rank}: checkpoint {final}: {error}") from error
    if rank == 0:
        _describe(partial, step, job or {})
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in checkpoints(directory)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints under a directory, oldest first."""
    found = [path for path in Path(directory).glob("step-*") if _DONE.fullmatch(path.name)]
    complete = [path for path in found if (path / _JOB).exists()]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def load(
    path: str | Path,
    state: State,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank: int = 0,
) -> Resumed:
    """Read this rank's share of a checkpoint into ``state`` and ``optimizer``, in place.

    Raises:
        RequestError: the checkpoint lacks a parameter or buffer of this rank, or holds it in
            another shape or dtype.
        RunError: a rank could not read.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    wanted = _model_tensors(state, rank)
    _check_fit(Path(path), wanted, metadata)
    moments = _saved_moments(state, optimizer, metadata)
    for name, entries in moments.items():
        for key, value in entries.items():
            wanted[f"optimizer.{key}/{name}"] = _shared(value, state, name, rank)
    random = {
        key: value for key, value in _random(rank).items() if key in metadata.state_dict_metadata
    }
    wanted.update(random)
    try:
        with _single_process_is_fine():
            read_tensors(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise RunError(f"rank {rank}: checkpoint {path}: {error}") from error
    if optimizer is not None:
        for name, entries in moments.items():
            for key, value in entries.items():
                if value is None:
                    entries[key] = wanted[f"optimizer.{key}/{name}"]
            optimizer.state[state.parameters[name]] = entries
    _set_random(random)
    saved = json.loads((Path(path) / _JOB).read_text())
    return Resumed(saved["step"], saved["job"], bool(random))


def _describe(partial: Path, step: int, job: Mapping[str, Any]) -> None:
    (partial / _JOB).write_text(json.dumps({"step": step, "job": dict(job)}, indent=1))


def _model_tensors(state: State, rank: int) -> dict[str, Any]:
    parameters = state.parameters.items()
    return {
        **{f"parameter/{name}": _shared(value, state, name, rank) for name, value in parameters},
        **{f"buffer/{name}": value for name, value in state.buffers.items()},
    }


def _shared(value: Any, state: State, name: str, rank: int) -> Any:
    """A value of a divided parameter's form with its place in the whole; others as they are."""
    placement, parameter = state.placements.get(name), state.parameters[name]
    if placement is not None and placement.divided and is_part(value, parameter):
        return Shards.of(value, placement.held[rank].region, placement.shape)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _without_stale(tensors: dict[str, Any], state: State, rank: int) -> dict[str, Any]:
    """Leave out buffers of which another rank has the latest copy."""
    if not dist.is_initialized():
        return tensors
    updated: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(updated, state.updated)
    stale = set().union(*updated) - updated[rank]
    return {
        key: value for key, value in tensors.items() if key.removeprefix("buffer/") not in stale
    }


def _optimizer_tensors(
    state: State, optimizer: torch.optim.Optimizer | None, rank: int
) -> dict[str, Any]:
    if optimizer is None:
        return {}
    return {
        f"optimizer.{key}/{name}": _shared(value, state, name, rank)
        for name, parameter in state.parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _saved_moments(
    state: State, optimizer: torch.optim.Optimizer | None, metadata: Metadata
) -> dict[str, dict[str, Any]]:
    """Room for what the checkpoint holds of the optimizer's state of this rank's parameters."""
    moments: dict[str, dict[str, Any]] = {}
    for full, entry in metadata.state_dict_metadata.items():
        kind, _, name = full.partition("/")
        if optimizer is None or not kind.startswith("optimizer.") or name not in state.parameters:
            continue
        if state.parameters[name].requires_grad:
            key = kind.removeprefix("optimizer.")
            moments.setdefault(name, {})[key] = _room(entry, state, name)
    return moments


def _room(entry: object, state: State, name: str) -> torch.Tensor | None:
    """None for what is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    parameter, placement = state.parameters[name], state.placements.get(name)
    whole = parameter.shape if placement is None else torch.Size(placement.shape)
    shape = parameter.shape if entry.size == whole else entry.size
    device = parameter.device if shape else "cpu"
    return torch.empty(shape, dtype=entry.properties.dtype, device=device)


def _check_fit(path: Path, wanted: Mapping[str, torch.Tensor], metadata: Metadata) -> None:
    for key, tensor in wanted.items():
        saved = metadata.state_dict_metadata.get(key)
        expected = f"{tensor.dtype} {list(tensor.size())}"
        got = "nothing"
        if isinstance(saved, TensorStorageMetadata):
            got = f"{saved.properties.dtype} {list(saved.size)}"
        if got != expected:
            raise RequestError(explain(f"checkpoint {path}: {key}", expected=expected, got=got))


def _random(rank: int) -> dict[str, torch.Tensor]:
    states = {f"random.cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_random(states: Mapping[str, torch.Tensor]) -> None:
    for key, value in states.items():
        if key.startswith("random.cpu/"):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    """Without a process group torch warns, although it was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
