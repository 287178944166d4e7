"""Build a model whose parameters have shapes but no storage, so that any size can be planned.

Only parameters go to the meta device, one at a time as modules register them: each must fit into
(untouched, so virtual) memory alone. Buffers, samples and everything else stay real: the capture
reads values of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context every parameter that a module registers loses its storage at once."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and not value.is_meta:
            value = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
        register(module, name, value)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
