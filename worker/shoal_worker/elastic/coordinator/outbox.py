"""A member's outgoing messages to the coordinator, generated from the member's current state on
each stream.

The outbox keeps the current state instead of a queue of messages, and sends all of it again on each
new stream. A message that was lost with a broken stream is therefore sent again on the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.coordinator.coordinator_messages import (
    observed_message,
    progress_message,
)
from shoal_worker.elastic.coordinator.hang_report import Neighbour
from shoal_worker.elastic.coordinator.progress import Progress


@dataclass(kw_only=True)
class _Said:
    """Values that have already been sent on the current stream."""

    stream: int
    generation: int = 0
    ready: bool = False
    spare: bool = False
    failure: pb.CollectiveFailure | None = None
    last_step: int = 0


class Outbox:
    """Current state of a member, and its messages to the coordinator. The condition passed to the
    constructor guards all fields and must be notified after a change. gRPC's own thread pulls the
    messages."""

    def __init__(self, changed: threading.Condition) -> None:
        self.progress: Callable[[], Progress] = Progress
        """Returns this worker's progress. Called for each heartbeat, on gRPC's thread."""
        self.ready = False
        """True if the member is ready for a rank."""
        self.generation = 0
        """The member's current generation; 0 before the first."""
        self.spare = False
        """True if the member has a rank but no part of the model."""
        self.last_step = 0
        """Last step of the run, once the member has reached it; 0 before that."""
        self.failure: pb.CollectiveFailure | None = None
        self.leaving: pb.Leave | None = None
        """The member's final message; None until it leaves."""
        self.out_of_reach: tuple[int, ...] = ()
        """Ranks that did not accept a connection when this member probed them."""
        self.observed: tuple[Neighbour, ...] = ()
        """Stacks of other members on this machine, for the next heartbeat."""
        self.in_reach = False
        """True if the member can again reach the member that the coordinator keeps it separated
        from."""
        self._changed = changed
        self._streams = 0

    def messages(
        self, join: Callable[[int], pb.Join], heartbeat_interval_s: Callable[[], float]
    ) -> Iterator[pb.MemberMessage]:
        """Yields the messages of one stream. The stream ends when the next one begins or the member
        leaves. `join`: creates the first message, given the member's current generation."""
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
        """Returns the next message: immediately if one is due, otherwise a heartbeat after an
        interval without messages. Returns None if something has changed during that interval."""
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
        if self.observed:
            heartbeat.observed.extend(map(observed_message, self.observed))
            self.observed = ()
        return pb.MemberMessage(heartbeat=heartbeat)

    def _is_heartbeat_due(self, said: _Said) -> bool:
        """Returns whether a heartbeat must be sent immediately because others are waiting for it.
        This is the case after the last step of the run, and after this member has entered a
        generation, because the coordinator does not request a step boundary before all members have
        entered."""
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
    """Returns the message that reports a failed collective of `generation`. `suspects`: unreachable
    ranks."""
    return pb.CollectiveFailure(
        generation=generation, suspects=suspects, timed_out=timed_out, detail=detail[:1024]
    )
