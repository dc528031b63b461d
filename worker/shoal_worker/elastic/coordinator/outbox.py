"""Outgoing state of a member for the coordinator, and the messages of each stream that carry it.

It is kept as state rather than a queue, and each stream sends all of it: a message pulled for a
stream that had just broken is repeated on the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.coordinator.coordinator_messages import progress_message
from shoal_worker.elastic.coordinator.progress import Progress


@dataclass(kw_only=True)
class _Said:
    """State already sent on one stream."""

    stream: int
    generation: int = 0
    ready: bool = False
    spare: bool = False
    failure: pb.CollectiveFailure | None = None
    last_step: int = 0


class Outbox:
    """Fields guarded by the given condition: notify it after a change. grpc's own thread pulls the
    messages."""

    def __init__(self, changed: threading.Condition) -> None:
        self.progress: Callable[[], Progress] = Progress
        """Called for each heartbeat, on grpc's thread."""
        self.ready = False
        """True if the member can work in a generation."""
        self.generation = 0
        """Generation that it works in; 0 if none yet."""
        self.spare = False
        """True if it has a rank but no part in the model."""
        self.last_step = 0
        """Last step, once reached and included in its progress; 0 before that."""
        self.failure: pb.CollectiveFailure | None = None
        self.leaving: pb.Leave | None = None
        """Final message."""
        self.out_of_reach: tuple[int, ...] = ()
        """Ranks that accepted no connection."""
        self.in_reach = False
        """True if it can reach the member from which it is separated."""
        self._changed = changed
        self._streams = 0

    def messages(
        self, join: Callable[[int], pb.Join], heartbeat_interval_s: Callable[[], float]
    ) -> Iterator[pb.MemberMessage]:
        """Yields the messages of one stream, which ends when the next one begins or the member
        leaves. `join`: creates the first message, for the member's current generation."""
        with self._changed:
            self._streams += 1
            said = _Said(stream=self._streams)
        yield pb.MemberMessage(join=join(self.generation))
        while True:
            with self._changed:
                if said.stream != self._streams:
                    return
                message = self._next(said, heartbeat_interval_s)
            if message is not None:
                yield message
                if message.HasField("leave"):
                    return

    def _next(
        self, said: _Said, heartbeat_interval_s: Callable[[], float]
    ) -> pb.MemberMessage | None:
        """Returns the message to send now, or after an interval of silence; None if something has
        changed meanwhile."""
        if self.ready and not said.ready:
            said.ready = True
            return pb.MemberMessage(ready=pb.Ready())
        if self.failure is not said.failure:
            said.failure = self.failure
            return pb.MemberMessage(collective_failure=said.failure)
        if self.leaving is not None and said.generation == self.generation:
            return pb.MemberMessage(leave=self.leaving)
        if not self._is_heartbeat_due(said) and self._changed.wait_for(
            lambda: self._is_anything_due(said), heartbeat_interval_s()
        ):
            return None
        said.generation, said.spare, said.last_step = self.generation, self.spare, self.last_step
        heartbeat = pb.Heartbeat(
            generation=self.generation,
            progress=progress_message(self.progress()),
            out_of_reach=self.out_of_reach,
        )
        heartbeat.in_reach, heartbeat.spare = self.in_reach, self.spare
        return pb.MemberMessage(heartbeat=heartbeat)

    def _is_heartbeat_due(self, said: _Said) -> bool:
        """Returns whether a heartbeat is due at once because others wait for it: after a generation
        was entered (the coordinator writes no boundary for others before all are in), and after the
        last step."""
        return (said.generation, said.spare, said.last_step) != (
            self.generation,
            self.spare,
            self.last_step,
        )

    def _is_anything_due(self, said: _Said) -> bool:
        return (
            said.stream != self._streams
            or self._is_heartbeat_due(said)
            or (self.ready and not said.ready)
            or self.failure is not said.failure
            or self.leaving is not None
        )


def failure_message(
    generation: int, *, detail: str, timed_out: bool, suspects: Sequence[int]
) -> pb.CollectiveFailure:
    """Returns the message about a failed collective of `generation`. `suspects`: unreachable
    ranks."""
    return pb.CollectiveFailure(
        generation=generation, suspects=suspects, timed_out=timed_out, detail=detail[:1024]
    )
