"""One launcher's membership among the launchers of its job: the coordinator's session, held by a thread.

The thread reads directives, reconnects, and calls `on_change` after each of them; gRPC's own thread draws the messages to send. What was
heard is in attributes that only the session's thread writes; a reader sees each of them whole.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import DeadlineError, ShoalError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb

_BACKOFF_S: Final = 0.5
_FIRST_INTERVAL_S: Final = 1.0
_LEAVE_TIMEOUT_S: Final = 5.0


class NodeSession:
    """One incarnation of a launcher as a member. It wants a rank at once."""

    def __init__(self, client: CoordinatorClient, *, job_id: str, launcher_id: str, address: str, on_change: Callable[[], None]) -> None:
        """Opens the session. `address` is host:port for the first worker of all nodes, should this launcher become rank 0."""
        self.member_id = str(uuid.uuid4())
        self.generation: pb.Generation | None = None
        """The newest one heard of."""
        self.standing_by: str | None = None
        """Why there is no rank for this launcher now; None: it has one, or waits for the first."""
        self.stopped: str | None = None
        """Why the job was stopped."""
        self.error: ShoalError | None = None
        """Why the session is over."""
        self.taken = 0
        """The generation that the launcher's workers were started in; told in heartbeats."""
        self._client = client
        self._join = pb.Join(
            job_id=job_id,
            member_id=self.member_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            launcher_id=launcher_id,
            donor_address=address,
        )
        self._on_change = on_change
        self._outgoing: queue.SimpleQueue[pb.Leave | None] = queue.SimpleQueue()
        """Of the stream that is open: each has its own. None ends it."""
        self._interval_s = _FIRST_INTERVAL_S
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-node-session", daemon=True)
        self._thread.start()

    def leave(self, reason: pb.Leave.Reason, detail: str) -> None:
        """Says goodbye and waits up to 5 s for the coordinator to hear it. Idempotent."""
        self._leaving.set()
        self._outgoing.put(pb.Leave(reason=reason, detail=detail[:1024]))
        self._thread.join(_LEAVE_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------ the session's thread

    def _run(self) -> None:
        while not self._leaving.is_set():
            self._outgoing = queue.SimpleQueue()
            try:
                for directive in self._client.join_session(self._messages(self._outgoing)):
                    self._heard(directive)
                    self._on_change()
            except (UnavailableError, DeadlineError):
                pass  # the coordinator is away, and knows this member when it comes back
            except ShoalError as error:
                self.error = error
                break
            finally:
                self._outgoing.put(None)
            self._leaving.wait(_BACKOFF_S)
        self._on_change()

    def _heard(self, directive: pb.MemberDirective) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                self._interval_s = directive.welcome.heartbeat_interval_ms / 1000
            case "generation":
                self.generation = directive.generation
                self.standing_by = None
            case "standby":
                self.standing_by = directive.standby.reason
            case "stop" | "drain" as kind:
                self.stopped = getattr(directive, kind).reason or "the job was stopped"

    def _messages(self, outgoing: queue.SimpleQueue[pb.Leave | None]) -> Iterator[pb.MemberMessage]:
        """What is sent on one stream; drawn by gRPC."""
        join = pb.Join()
        join.CopyFrom(self._join)
        join.last_generation = self.generation.number if self.generation is not None else 0
        yield pb.MemberMessage(join=join)
        yield pb.MemberMessage(ready=pb.Ready())
        while True:
            try:
                leave = outgoing.get(timeout=self._interval_s)
            except queue.Empty:
                yield pb.MemberMessage(heartbeat=pb.Heartbeat(generation=self.taken))
                continue
            if leave is not None:
                yield pb.MemberMessage(leave=leave)
            return
