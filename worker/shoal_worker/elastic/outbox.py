"""What a member has to tell the coordinator, and the messages of each stream that say it.

It is kept as state, not as a queue, and each stream says all of it: a message that was drawn for a
stream that had just broken is said again on the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.coordinator_messages import progress_message
from shoal_worker.elastic.progress import Progress


@dataclass(kw_only=True)
class _Said:
    """What was said on one stream."""

    stream: int
    generation: int = 0
    ready: bool = False
    spare: bool = False
    failure: pb.CollectiveFailure | None = None
    last_step: int = 0


class Outbox:
    """Its fields are guarded by the condition that it is made with: notify it after a change.
    grpc's own thread draws the messages."""

    def __init__(self, changed: threading.Condition) -> None:
        self.progress: Callable[[], Progress] = Progress
        """Asked for each heartbeat, on grpc's thread."""
        self.ready = False
        """The member can work in a generation."""
        self.generation = 0
        """The one that it works in; 0: none yet."""
        self.spare = False
        """It has a rank and no part in the model."""
        self.last_step = 0
        """Its last step, once it has come to that, as its progress tells; 0: it has not."""
        self.failure: pb.CollectiveFailure | None = None
        self.leaving: pb.Leave | None = None
        """What it says last."""
        self.out_of_reach: tuple[int, ...] = ()
        """Ranks that took no connection."""
        self.in_reach = False
        """The member that this one is kept apart from takes its connections."""
        self._changed = changed
        self._streams = 0

    def messages(
        self, join: Callable[[int], pb.Join], heartbeat_interval_s: Callable[[], float]
    ) -> Iterator[pb.MemberMessage]:
        """Those of one stream, which ends when the next one begins, or with the goodbye. `join`:
        makes the first, of the generation that the member works in."""
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
        """What is to be said now, or after an interval of silence; None: something has changed
        meanwhile."""
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
        """At once where others wait for what it says: after a generation was entered (the
        coordinator writes no border for others before all are in), and after the last step."""
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
    """A collective of `generation` failed here. `suspects`: ranks out of reach."""
    return pb.CollectiveFailure(
        generation=generation, suspects=suspects, timed_out=timed_out, detail=detail[:1024]
    )
