"""Attention is captured as one operator: how a model is made to call it.

``attention_interfaces(model)`` registers an attention and a mask function with transformers, writes
their name into every config of the model that supports it, and puts everything back afterwards. The
name contains "flash", because transformers then hands packed segments over in one call
(``cu_seqlens``) instead of splitting on the host. Inside the context torch's own
``scaled_dot_product_attention`` becomes the same operator, which covers every other model.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mllm_compile.passes.capture.attention_masks import ALL_KNOWN, Facts
from mllm_compile.passes.capture.attention_sites import TORCH_SDPA, AttentionSites
from mllm_compile.passes.capture.implementation_name import ImplementationName

_names = itertools.count()


@contextmanager
def attention_interfaces(model: nn.Module, facts: Facts = ALL_KNOWN) -> Iterator[AttentionSites]:
    """Route every attention of ``model`` to ``mllm::attention`` while the context is open.

    Yields the sites seen so far: ``lines`` has one line per call, for the capture report.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    sites = AttentionSites(paths, facts=facts)
    with ExitStack() as stack:
        stack.enter_context(_hugging_face(model, sites))
        stack.enter_context(_patched_sdpa(sites))
        stack.enter_context(_SdpaCalls(sites))
        yield sites


class _SdpaCalls(TorchFunctionMode):
    """Catches calls of torch's attention wherever they come from."""

    def __init__(self, sites: AttentionSites):
        super().__init__()
        self._sites = sites

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is TORCH_SDPA:
            return self._sites.from_sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _patched_sdpa(sites: AttentionSites) -> Iterator[None]:
    """Python functions of torch call it by name, out of reach of a mode while one handles them."""
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = sites.from_sdpa
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = TORCH_SDPA


@contextmanager
def _hugging_face(model: nn.Module, sites: AttentionSites) -> Iterator[None]:
    """Nothing happens where transformers is missing, or the model has no part of it."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        yield
        return
    number = next(_names)
    names = {
        (flash, eager): f"mllm_{'flash_' * flash}{'eager_' * eager}{number}"
        for flash in (True, False)
        for eager in (True, False)
    }
    registries: Any = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    for (_, eager), name in names.items():
        AttentionInterface.register(name, partial(sites.attend, eager=eager))
        AttentionMaskInterface.register(name, partial(sites.make_mask, eager=eager))
    configs = list(_configs(model))
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config, chosen in zip(configs, before, strict=True):
            name = names[not _refuses_flash(config), chosen == "eager"]
            config._attn_implementation_internal = ImplementationName(name, chosen)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        for registry in registries:
            for name in names.values():
                registry.pop(name, None)


def _refuses_flash(config: Any) -> bool:
    """Chunked masks: transformers raises for any flash name beyond one chunk."""
    return getattr(config, "attention_chunk_size", None) is not None


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every config whose modules go through transformers' attention interface, once.

    A module class that declares no support has attention operators of its own, which expect the
    mask of their own implementation: those configs stay as they are.
    """
    seen: dict[int, Any] = {}
    own: set[int] = set()

    def visit(module: nn.Module, supported: bool) -> None:
        config = getattr(module, "config", None)
        if hasattr(type(module), "_supports_sdpa"):
            supported = _supports_interface(type(module))
            if not supported:
                own.add(id(config))
        if supported and hasattr(config, "_attn_implementation_internal"):
            seen[id(config)] = config
        for child in module.children():
            visit(child, supported)

    visit(model, False)
    yield from (config for key, config in seen.items() if key not in own)


def _supports_interface(kind: type) -> bool:
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend")
    return any(getattr(kind, flag, False) for flag in flags)
