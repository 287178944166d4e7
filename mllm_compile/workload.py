"""What a user brings: a model, samples and a function that collates samples into a batch."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.users_code import users_code

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
        """Call ``package.module:function``; found from the working directory first."""
        module_name, _, function_name = name.partition(":")
        if not module_name or not function_name:
            raise RequestError(
                explain("workload", expected="'package.module:function'", got=repr(name))
            )
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        with users_code(f"workload {name!r}"):
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if not f"{module_name}.".startswith(f"{error.name}."):
                    raise
                raise RequestError(
                    f"workload {name!r}: {error}; run where it can be found"
                ) from error
            function = getattr(module, function_name, None)
            if function is None:
                raise RequestError(
                    explain(f"workload {name!r}", expected=f"a function {function_name!r} there")
                )
            made = function()
        _check(name, made)
        workload: Workload = made
        return workload


def _check(name: str, made: Any) -> None:
    if not isinstance(made, Workload):
        _refuse(f"workload {name!r}", "a mllm_compile.Workload", made)
    if not isinstance(made.model, nn.Module):
        _refuse(f"workload {name!r}: model", "an nn.Module", made.model)
    if not (hasattr(made.samples, "__len__") and hasattr(made.samples, "__getitem__")):
        _refuse(
            f"workload {name!r}: samples", "a list, or anything with len() and [k]", made.samples
        )
    if not callable(made.collate):
        _refuse(f"workload {name!r}: collate", "a function of a list of samples", made.collate)


def _refuse(subject: str, expected: str, got: Any) -> NoReturn:
    raise RequestError(explain(subject, expected=expected, got=type(got).__name__))
