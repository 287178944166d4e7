"""A batch as capture sees it: named tensors, and everything else pinned by value.

Containers are looked into: ``images=[a, b]`` gives the entries ``images.0`` and ``images.1``.
"""

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mllm_compile.compiler.captured import Signature, TensorSpec
from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.tracing import storage_key

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class Entries:
    """A flattened batch: the tensors by name, and how to put a batch together again."""

    tensors: dict[str, torch.Tensor]
    others: tuple[tuple[str, str], ...]
    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(batch: Mapping[str, Any]) -> "Entries":
        """Flatten a batch; an entry that is neither data nor a plain value is an error."""
        found, spec = pytree.tree_flatten_with_path(dict(batch))
        tensors, others = {}, [("", str(spec))] if _nested(batch) else []
        for path, leaf in found:
            name = ".".join(_step(step) for step in path)
            if isinstance(leaf, torch.Tensor):
                tensors[name] = _dense(name, leaf)
            else:
                others.append((name, _fingerprint(name, leaf)))
        return Entries(tensors, tuple(others), tuple(leaf for _, leaf in found), spec)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The batch with other tensors (in the order of ``tensors``) in their places."""
        fresh = iter(tensors)
        leaves = [next(fresh) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        batch: dict[str, Any] = pytree.tree_unflatten(leaves, self.spec)
        return batch

    def refuse_shared(self, written: Sequence[str]) -> None:
        """A forward may write into an entry only if no other entry would see it."""
        for name in written:
            memory = storage_key(self.tensors[name])
            for other, tensor in self.tensors.items():
                if other != name and storage_key(tensor) == memory:
                    raise CaptureError(
                        explain(
                            f"batch entries {name!r} and {other!r}",
                            got=f"shared memory, and a forward that writes into {name!r}",
                            remedy="clone one of them in collate",
                        )
                    )

    @property
    def signature(self) -> Signature:
        """What makes two batches candidates for the same program."""
        specs = ((name, _spec(tensor)) for name, tensor in self.tensors.items())
        return Signature(tuple(sorted(specs, key=lambda item: item[0])), tuple(sorted(self.others)))


def _nested(batch: Mapping[str, Any]) -> bool:
    return any(isinstance(value, (dict, list, tuple)) for value in batch.values())


def _step(step: Any) -> str:
    return str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step))))


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CaptureError(
            explain(f"batch entry {name!r}", expected="a dense tensor", got=str(tensor.layout))
        )
    return tensor


def _fingerprint(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"ndarray {value.dtype} {value.shape} {digest}"
    if isinstance(value, (*PLAIN, np.generic)):
        return f"{type(value).__name__} {value!r}"
    raise CaptureError(
        explain(
            f"batch entry {name!r}",
            expected="a tensor, a number, a string, None, or a list, tuple or dict of these",
            got=type(value).__name__,
            remedy="unpack it in collate, so that what it holds can be seen",
        )
    )


def _spec(tensor: torch.Tensor) -> TensorSpec:
    """Strides of dims that hold at most one row mean nothing: put the contiguous ones."""
    spec = TensorSpec.of(tensor)
    usual = torch.empty(spec.shape, device="meta").stride()
    if tensor.numel() == 0:
        return TensorSpec(spec.shape, tuple(usual), spec.dtype)
    stride = zip(spec.shape, spec.stride, usual, strict=True)
    return TensorSpec(spec.shape, tuple(u if n == 1 else s for n, s, u in stride), spec.dtype)
