"""Random numbers in a forward: which operators draw them, and draws on the host."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RANDOM = "random: "


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator draws random numbers; a dropout of probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True


@contextmanager
def unchanged_generators() -> Iterator[list[str]]:
    """Leave all generators as they were; the list names the host's ones that were drawn from."""
    draws: list[str] = []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield draws
    finally:
        if random.getstate() != python:
            draws.append("host random: Python's random")
        if repr(np.random.get_state()) != repr(numpy):
            draws.append("host random: numpy.random")
        random.setstate(python)
        np.random.set_state(numpy)
