"""One action of a rank, as text and as a value; a schedule is a list of them per rank.

========== ============================================================================
``2F0``    forward of stage 2 on microbatch 0
``2I0``    input gradients of stage 2 (dI)
``2W0``    weight gradients of stage 2 (dW)
``0SEND_F0>2``  stage 0 sends its forward values of microbatch 0 to stage 2
``2RECV_F0<0``  stage 2 receives them (posts the receive; the F waits for it)
``2SEND_B0>0``  stage 2 sends gradients of microbatch 0 back to stage 0
``0RECV_B0<2``  stage 0 receives them (the I or W waits for it)
========== ============================================================================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mllm_compile.compiler.errors import PlanError, explain

Kind = Literal["F", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
KINDS: tuple[str, ...] = get_args(Kind)
COMPUTE = ("F", "I", "W")
_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What to do, for which stage and microbatch; ``peer`` is the other stage of a transfer."""

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is None) != (self.kind in COMPUTE):
            raise PlanError(explain(f"action {self.kind}", expected="a peer exactly for transfers"))

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind.startswith('SEND') else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> "Action":
        """The inverse of ``str``."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise PlanError(explain(f"action {text!r}", expected="like 2F0 or 0SEND_F0>2"))
        stage, kind, microbatch, arrow, peer = match.groups()
        action = Action(int(stage), kind, int(microbatch), int(peer) if arrow else None)  # type: ignore[arg-type]
        if str(action) != text.strip():
            raise PlanError(explain(f"action {text!r}", expected=str(action)))
        return action

    @property
    def match(self) -> "Action":
        """The transfer's other half: a send's receive, a receive's send."""
        if self.peer is None:
            raise PlanError(explain(f"action {self}", expected="a transfer"))
        kind = self.kind.replace("SEND", "?").replace("RECV", "SEND").replace("?", "RECV")
        return Action(self.peer, kind, self.microbatch, self.stage)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions of every rank, in the order in which the rank starts them.

    ``windows`` bounds how many microbatches may be in flight at a stage. A microbatch is in flight
    from its F until its last backward action at that stage; where it has none, until its forward
    sends have completed. The executor keeps the bound with one rule: before the F of a stage's
    n-th microbatch it waits for the forward sends of the stage's (n - window)-th. Where backward
    actions exist their order implies it; a frozen stage is held back by nothing else. A stage that
    is not named is not bounded.
    """

    actions: Mapping[int, tuple[Action, ...]]
    windows: Mapping[int, int] = field(default_factory=dict)

    def to_text(self) -> str:
        """One line per rank, comma-separated; then one line with the windows, if there are any."""
        lines = [
            f"{rank}: " + ",".join(map(str, actions))
            for rank, actions in sorted(self.actions.items())
        ]
        if self.windows:
            pairs = (f"{stage}={size}" for stage, size in sorted(self.windows.items()))
            lines.append("window: " + ",".join(pairs))
        return "\n".join(lines)

    @staticmethod
    def from_text(text: str) -> "Schedule":
        """The inverse of ``to_text``."""
        rows = [line.partition(":")[::2] for line in text.splitlines() if line.strip()]
        cells = [(head.strip(), [c for c in tail.split(",") if c.strip()]) for head, tail in rows]
        actions: dict[int, tuple[Action, ...]] = {}
        windows: dict[int, int] = {}
        for head, row in cells:
            try:
                if head == "window":
                    windows |= {int(s): int(w) for s, w in (cell.split("=") for cell in row)}
                elif int(head) in actions:
                    raise PlanError(explain(f"rank {head}", expected="one line", got="two"))
                else:
                    actions[int(head)] = tuple(map(Action.parse, row))
            except ValueError as error:
                raise PlanError(f"schedule line {head!r}: {error}") from error
        return Schedule(actions, windows)

    def to_csv(self) -> str:
        """Compute actions alone, one row per rank.

        torch.distributed.pipelining loads it (format ``compute_only``), and with it torchtitan.
        """
        return "\n".join(
            ",".join(str(action) for action in actions if action.kind in COMPUTE)
            for _, actions in sorted(self.actions.items())
        )
