"""Inputs that were moved to a device, and what the host kept of them.

What the host has to know of an input, such as how many keys go to which rank under a mask, it reads
from its own copy: it never waits for the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_KEPT: Any = WeakIdKeyDictionary()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on a device; ``on_host`` gives it back as long as the result lives."""
    there = x.to(device, non_blocking=True)
    if there is not x:
        keep(there, x)
    return there


def keep(there: Tensor, x: Tensor) -> None:
    """Let ``x`` stand for the equal ``there`` on the host."""
    _KEPT[there] = x


def on_host(x: Tensor) -> Tensor:
    """What the host kept of an input; of any other value a copy, for which it waits."""
    kept: Tensor | None = _KEPT.get(x)
    return x.cpu() if kept is None else kept
