"""Sends are completed exactly when it is certain that completing them cannot block."""

import pytest

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.runtime.outbox import Outbox


class Message:
    """A handle that must not be waited for before the peer has posted its receive."""

    def __init__(self, received: set[str], name: str) -> None:
        self.received, self.name, self.over = received, name, False

    def wait(self) -> None:
        assert self.name in self.received, f"{self.name} would block"
        self.over = True


def send(outbox: Outbox, received: set[str], text: str) -> Message:
    message = Message(received, text)
    outbox.sent(Action.parse(text), {int(text[-1]): [message]})
    return message


SCHEDULE = Schedule.from_text(
    """
    0: 0F0,0SEND_F0>1,0F1,0SEND_F1>1,0RECV_B0<1,0I0,0F2,0SEND_F2>1,0RECV_B1<1,0I1,0RECV_B2<1,0I2
    1: 1RECV_F0<0,1F0,1I0,1SEND_B0>0,1RECV_F1<0,1F1,1I1,1SEND_B1>0,1RECV_F2<0,1F2,1I2,1SEND_B2>0
    """
)


def test_an_arrival_proves_what_the_peer_posted_before() -> None:
    received = {"0SEND_F0>1", "1SEND_B0>0"}
    first, last = Outbox(SCHEDULE, 0), Outbox(SCHEDULE, 1)
    f0, f1 = (send(first, received, text) for text in ("0SEND_F0>1", "0SEND_F1>1"))
    first.arrived(Action.parse("0RECV_B0<1"), 1)
    assert (f0.over, f1.over) == (True, False)
    b0 = send(last, received, "1SEND_B0>0")
    last.arrived(Action.parse("1RECV_F1<0"), 0)
    assert not b0.over
    b1 = send(last, received, "1SEND_B1>0")
    last.arrived(Action.parse("1RECV_F2<0"), 0)
    assert (b0.over, b1.over) == (True, False)


def test_the_window_completes_the_microbatch_that_leaves_it() -> None:
    schedule = Schedule(
        {0: (Action(0, "F", 4), Action(0, "F", 1), Action(0, "F", 2), Action(0, "F", 9))}, {0: 2}
    )
    received = {"0SEND_F4>1", "0SEND_F4>2"}
    outbox = Outbox(schedule, 0)
    outbox.forward_starts(Action(0, "F", 4))
    first = [send(outbox, received, f"0SEND_F4>{peer}") for peer in (1, 2)]
    outbox.forward_starts(Action(0, "F", 1))
    second = send(outbox, received, "0SEND_F1>1")
    assert not any(message.over for message in first)
    outbox.forward_starts(Action(0, "F", 2))
    assert all(message.over for message in first)
    assert not second.over
    with pytest.raises(AssertionError, match="0SEND_F1>1 would block"):
        outbox.forward_starts(Action(0, "F", 9))


def test_finish_completes_all() -> None:
    received = {"0SEND_F0>1"}
    outbox = Outbox(SCHEDULE, 0)
    message = send(outbox, received, "0SEND_F0>1")
    outbox.finish()
    assert message.over


def test_an_arrival_proves_nothing_about_other_ranks_of_its_stage() -> None:
    """Ranks 1 and 2 run stage 1; one of them may be far behind."""
    lists = {0: SCHEDULE.actions[0], 1: SCHEDULE.actions[1], 2: SCHEDULE.actions[1]}
    received: set[str] = set()
    outbox = Outbox(Schedule(lists), 0)
    messages = [Message(received, name) for name in ("to 1", "to 2")]
    outbox.sent(Action.parse("0SEND_F0>1"), {1: messages[:1], 2: messages[1:]})
    received.add("to 1")
    outbox.arrived(Action.parse("0RECV_B0<1"), 1)
    assert [message.over for message in messages] == [True, False]
    received.add("to 2")
    outbox.arrived(Action.parse("0RECV_B0<1"), 2)
    assert messages[1].over


def test_a_skipped_send_counts() -> None:
    """A lane without images sends nothing for microbatch 0; the peer's receives are counted."""
    received: set[str] = set()
    outbox = Outbox(SCHEDULE, 0)
    outbox.sent(Action.parse("0SEND_F0>1"), {})
    late = send(outbox, received, "0SEND_F1>1")
    outbox.arrived(Action.parse("0RECV_B0<1"), 1)
    assert not late.over
    received.add("0SEND_F1>1")
    outbox.arrived(Action.parse("0RECV_B1<1"), 1)
    assert late.over


def test_a_proof_may_come_before_the_send() -> None:
    """The peer posts receives ahead: nothing has been sent that could be completed."""
    lines = "0: 0RECV_B0<1,0F1,0SEND_F1>1\n1: 1RECV_F1<0,1I0,1SEND_B0>0"
    outbox = Outbox(Schedule.from_text(lines), 0)
    outbox.arrived(Action.parse("0RECV_B0<1"), 1)
