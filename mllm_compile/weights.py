"""Bring what was trained back into the plain model."""

from pathlib import Path

import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.runtime.checkpoint import checkpoints, load
from mllm_compile.runtime.state import State


def load_weights(model: nn.Module, directory: str | Path) -> int:
    """Read parameters and buffers of the newest checkpoint under ``directory`` into ``model``.

    No ranks and no request are needed: a checkpoint names parameters as the model does. Returns
    the step that it was saved after. The random state of the process is left alone.

    Raises:
        RequestError: there is no finished checkpoint, or it is of another model or dtype.
    """
    found = checkpoints(directory)
    if not found:
        raise RequestError(explain(f"{directory}", expected="a finished checkpoint", got="none"))
    state = State(dict(model.named_parameters()), dict(model.named_buffers()))
    with torch.random.fork_rng(), torch.no_grad():
        return load(found[-1], state).step
