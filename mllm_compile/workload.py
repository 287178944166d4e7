"""What a user brings: a model, samples and a function that collates samples into a batch."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mllm_compile.compiler.errors import RequestError, explain

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """A training job without any notion of parallelism.

    ``model(**collate(samples))`` returns an object with ``.loss``, or a scalar tensor. Microbatches
    are made by splitting ``samples`` and collating each part, never by cutting packed tensors.
    """

    model: nn.Module
    samples: Sequence[Any]
    collate: Callable[[list[Any]], Batch]

    @staticmethod
    def load(name: str) -> "Workload":
        """Call ``package.module:function``; the working directory is on the import path."""
        module_name, _, function_name = name.partition(":")
        if not module_name or not function_name:
            raise RequestError(
                explain("workload", expected="'package.module:function'", got=repr(name))
            )
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise RequestError(f"workload {name!r}: {error}") from error
        made = function()
        if not isinstance(made, Workload):
            raise RequestError(
                explain(
                    f"workload {name!r}",
                    expected="a mllm_compile.Workload",
                    got=type(made).__name__,
                )
            )
        return made
