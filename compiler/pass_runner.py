"""Run passes in order; after each of them check every law established so far.

A broken law is a fault of the pass that ran last. Observers see (pass name, plan) after each pass:
dumps, times and diffs are observers, not flags.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mllm_compile.compiler.errors import PlanError, RequestError, explain
from mllm_compile.compiler.plan import Plan

Law = Callable[[Plan], None]
Observer = Callable[[str, Plan], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """A decision and the laws that hold ever after; a law's docstring says it in a sentence."""

    run: Callable[[Plan], Plan]
    laws: tuple[Law, ...]

    @property
    def name(self) -> str:
        """The name for ``--stop-after`` and messages."""
        return self.run.__name__


def run_passes(
    passes: Sequence[Pass],
    plan: Plan,
    *,
    stop_after: str | None = None,
    observers: Sequence[Observer] = (),
) -> Plan:
    """The plan after all passes, or after the one named ``stop_after``."""
    names = [each.name for each in passes]
    if stop_after is not None and stop_after not in names:
        raise RequestError(explain("stop after", expected=f"one of {names}", got=repr(stop_after)))
    laws: list[Law] = []
    for each in passes:
        plan = each.run(plan)
        laws += each.laws
        for law in laws:
            check(law, plan, after=each.name)
        for observe in observers:
            observe(each.name, plan)
        if each.name == stop_after:
            break
    return plan


def check(law: Callable[..., None], *subjects: object, after: str) -> None:
    """Raise a PlanError that names the pass, the law and what breaks it."""
    try:
        law(*subjects)
    except PlanError as error:
        sentence = (law.__doc__ or law.__name__).strip().splitlines()[0]
        raise PlanError(f"after pass {after}: law {law.__name__} ({sentence}): {error}") from error
