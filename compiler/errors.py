"""The errors that people see, and the one shape of their messages.

Every message says what it is about, what was expected, what was found and what to do about it.
"""


class CompileError(Exception):
    """Base of every error that this project raises on purpose."""


class RequestError(CompileError):
    """The user's request cannot be honoured: a wrong value, path or size."""


class CaptureError(CompileError):
    """The model's forward cannot be captured as one graph."""


class GuardError(CompileError):
    """A microbatch does not fit a captured program: another shape, or another guarded value."""


class PlanError(CompileError):
    """A plan breaks one of its laws: a fault of a pass, never of the user."""


class RunError(CompileError):
    """A rank failed while it executed its program; the message names the rank and the action."""


def explain(subject: str, *, expected: str = "", got: str = "", remedy: str = "") -> str:
    """One paragraph: ``subject: expected …, got …; remedy``. Empty parts are left out."""
    facts = ", ".join(
        part
        for part in (f"expected {expected}" if expected else "", f"got {got}" if got else "")
        if part
    )
    text = f"{subject}: {facts}" if facts else subject
    return f"{text}; {remedy}" if remedy else text
