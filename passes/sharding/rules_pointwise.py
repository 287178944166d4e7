"""Rules of operators that treat every element alike, broadcasting their arguments."""

from collections.abc import Callable

from mllm_compile.passes.sharding.call import Call

Rule = str | Callable[[Call], str | None]
"""A rule in factor notation, or how to write one for a call; None: this call has no rule."""


def pointwise(call: Call) -> str:
    """Any number of arguments and results that broadcast together."""
    arguments, results = ["..."] * len(call.inputs), ["..."] * len(call.results)
    return f"{', '.join(arguments)} -> {', '.join(results)}"


def linear(groups: str) -> Callable[[Call], str]:
    """Pointwise, and linear in these groups of arguments."""
    return lambda call: f"{pointwise(call)} | {groups}"


def total(call: Call) -> str:
    """A sum or difference is jointly linear in its tensors; adding a number is not."""
    return linear("0+1")(call) if len(call.inputs) == 2 else pointwise(call)


def product(call: Call) -> str:
    """A product is linear in either factor."""
    return linear("0; 1" if len(call.inputs) == 2 else "0")(call)


def quotient(call: Call) -> str:
    """A quotient is linear in its numerator, unless it is rounded."""
    return pointwise(call) if call.arguments.get("rounding_mode") else linear("0")(call)


def fill(call: Call) -> str:
    """``masked_fill`` with zero is linear."""
    return linear("0")(call) if call["value"] == 0 else pointwise(call)


def creation(call: Call) -> str | None:
    """A tensor from nothing but literals is whole; one like another's shape is pointwise."""
    if call.inputs == call.results:
        return pointwise(call)
    if call.inputs:
        return None
    return " -> " + " ".join(f"x{dim}!" for dim in range(len(call.results[0])))
