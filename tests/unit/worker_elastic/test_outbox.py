"""Messages that other members wait for are sent immediately, and a new stream repeats all
messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.coordinator.coordinator_messages import leave_message
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.outbox import Outbox, failure_message

FOR_EVER_S = 10_000.0


def stream(outbox: Outbox) -> Iterator[str]:
    """Yields the kinds of the messages that a stream sends before any heartbeat interval has
    passed."""
    for message in outbox.messages(lambda works_in: pb.Join(works_in=works_in), lambda: FOR_EVER_S):
        yield str(message.WhichOneof("message"))


def test_urgent_messages_are_sent_before_the_next_heartbeat_is_due() -> None:
    outbox = Outbox(threading.Condition())
    messages = stream(outbox)
    assert next(messages) == "join"
    outbox.ready = True
    assert next(messages) == "ready"
    outbox.generation = 1
    assert next(messages) == "heartbeat"
    outbox.last_step = 40
    assert next(messages) == "heartbeat"
    outbox.failure = failure_message(1, detail="x" * 5000, timed_out=False, suspects=[])
    assert next(messages) == "collective_failure"
    outbox.leaving = leave_message(LeaveReason.FINISHED, "", alone=False, steps=40)
    assert list(messages) == ["leave"]


def test_a_stream_that_waits_is_woken_by_a_change() -> None:
    changed = threading.Condition()
    outbox = Outbox(changed)
    messages = stream(outbox)
    assert next(messages) == "join"
    heard: list[str] = []
    waiting = threading.Thread(target=lambda: heard.append(next(messages)))
    waiting.start()
    with changed:
        outbox.last_step = 1
        changed.notify_all()
    waiting.join()
    assert heard == ["heartbeat"]


def test_new_stream_repeats_everything_and_ends_the_previous_one() -> None:
    outbox = Outbox(threading.Condition())
    outbox.ready, outbox.generation = True, 3
    first = stream(outbox)
    assert [next(first) for _ in range(3)] == ["join", "ready", "heartbeat"]
    second = stream(outbox)
    assert [next(second) for _ in range(3)] == ["join", "ready", "heartbeat"]
    assert not list(first)
