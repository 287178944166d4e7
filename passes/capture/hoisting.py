"""Hoisting: lifting calls of Python helpers out of the trace.

The code of every candidate function is replaced by a trampoline, which sees the actual arguments;
the outermost call that can be one opaque node becomes one.
"""

import gc
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mllm_compile.passes.capture import module_state
from mllm_compile.passes.capture.candidates import Candidates
from mllm_compile.passes.capture.hoisted_calls import Refused, emit, is_plain, record
from mllm_compile.passes.capture.reachable import names_in
from mllm_compile.passes.capture.shadow_mode import ShadowMode

_found: WeakKeyDictionary[nn.Module, dict[CodeType, list[ref[FunctionType]]]] = WeakKeyDictionary()


class Hoister:
    """Decides, call by call, what is hoisted in one trace."""

    def __init__(self, model: nn.Module, mode: ShadowMode):
        self.model, self.mode = model, mode
        self.thread = threading.get_ident()
        self.busy = False
        self.refused: dict[str, str] = {}
        self._refused_codes: set[CodeType] = set()

    def call(self, function: FunctionType, name: str, args: Any, kwargs: Any) -> Any:
        """What a trampoline does instead of the function."""
        code = function.__code__
        foreign = self.busy or threading.get_ident() != self.thread
        if foreign or code in self._refused_codes or not self._fits((args, kwargs)):
            return function(*args, **kwargs)
        try:
            recorded = self._record(function, name, args, kwargs)
        except Refused as reason:
            self._refused_codes.add(code)
            self.refused[name] = str(reason)
            return function(*args, **kwargs)
        return emit(self.mode, *recorded)

    def _fits(self, arguments: Any) -> bool:
        leaves = pytree.tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return (
            bool(tensors)
            and not any(tensor.is_floating_point() for tensor in tensors)
            and self.mode.shadows.known(tensors)
            and all(is_plain(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        )

    def _record(self, function: FunctionType, name: str, args: Any, kwargs: Any) -> Any:
        before = module_state.snapshot(self.model, code=False)
        self.busy = True
        try:
            recorded = record(self.mode, function, name, args, kwargs)
        except Refused:
            module_state.restore(before)
            raise
        except Exception as error:  # whatever the helper does with real values
            module_state.restore(before)
            raise Refused(f"it raised {type(error).__name__}") from error
        finally:
            self.busy = False
        changed = module_state.changed(before)
        if changed:
            module_state.restore(before)
            raise Refused(f"it changes {changed[0]}")
        return recorded


@contextmanager
def intercepted(candidates: Candidates, hoister: Hoister) -> Iterator[None]:
    """Let every function that runs one of these codes ask the hoister first."""
    replaced: list[tuple[FunctionType, CodeType]] = []
    try:
        for code, functions in _functions(hoister.model, candidates).items():
            for function in functions:
                name = candidates[code]
                original = _copy(function)
                function.__code__ = _trampoline(code, _bind(hoister, original, name))
                replaced.append((function, code))
        yield
    finally:
        for function, code in replaced:
            function.__code__ = code


def _functions(model: nn.Module, codes: Collection[CodeType]) -> dict[CodeType, list[FunctionType]]:
    """All functions that share a code: importers, bound methods and decorators see the same.

    Looking for them takes as long as a trace: what was found for a model holds while all live.
    """
    known = _found.setdefault(model, {})
    living = {code: [f for r in known.get(code, ()) if (f := r())] for code in codes}
    stale = [code for code in codes if not living[code] or len(living[code]) < len(known[code])]
    if stale:
        owners = [f for f in gc.get_referrers(*stale) if isinstance(f, FunctionType)]
        for code in stale:
            living[code] = [f for f in owners if f.__code__ is code]
            known[code] = [ref(function) for function in living[code]]
    return living


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _bind(hoister: Hoister, function: FunctionType, name: str) -> Callable[[Any, Any], Any]:
    def ask(args: Any, kwargs: Any) -> Any:
        return hoister.call(function, name, args, kwargs)

    return ask


def _trampoline(code: CodeType, ask: Callable[[Any, Any], Any]) -> CodeType:
    """Code that calls ``ask(args, kwargs)``, which it carries as a constant, and fits ``code``."""

    def template(*args: Any, **kwargs: Any) -> Any:
        return "ask".__call__(args, kwargs)  # type: ignore[operator]

    constants = tuple(ask if value == "ask" else value for value in template.__code__.co_consts)
    return template.__code__.replace(
        co_consts=constants,
        co_freevars=code.co_freevars,
        co_names=(*template.__code__.co_names, *names_in(code)),  # for who asks what it can reach
        co_filename="<hoist>",
    )
