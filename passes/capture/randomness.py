"""Random numbers in a forward: which operators draw them, and draws on the host."""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

RANDOM = "random: "
FIRST = 4  # how many draws in a row are made small, or large, to see whether they matter


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
def unchanged_generators() -> Iterator[None]:
    """Leave all generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def host_draws() -> Iterator[list[str]]:
    """After the block, the list names the host's generators that were drawn from in it."""
    draws: list[str] = []
    python, numpy = random.getstate(), repr(np.random.get_state())
    yield draws
    draws += ["Python's random"] if random.getstate() != python else []
    draws += ["numpy.random"] if repr(np.random.get_state()) != numpy else []


def other_draws() -> Iterator[AbstractContextManager[None]]:
    """Contexts in which the host's first draws are all small, then all large."""
    for small in (True, False):
        yield _first_draws(small)


@contextmanager
def _first_draws(small: bool) -> Iterator[None]:
    def fits(values: Iterable[float]) -> bool:
        return all((value < 0.3) == small and (value > 0.7) != small for value in values)

    seeds = range(10000)
    random.seed(next(s for s in seeds if fits(_python_draws(s))))
    np.random.seed(next(s for s in seeds if fits(np.random.RandomState(s).rand(FIRST))))
    yield


def _python_draws(seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(FIRST)]
