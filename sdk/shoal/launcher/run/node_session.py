"""Membership of one launcher among the launchers of its job: a session with the coordinator,
maintained by a thread.

The thread reads the coordinator's directives, reconnects if the connection breaks, and calls
`on_change` after each change. gRPC reads the outgoing messages on its own thread. The attributes
with the results are written only by the session's thread, which replaces each of them atomically.
"""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    DeadlineError,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.settings import parse_address
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.run.site import MACHINE_REFUSED
from shoal.launcher.workers.environment import NodePlacement, machine_name

_PAUSE_S: Final = 0.5
_FIRST_INTERVAL_S: Final = 1.0
_LEAVE_TIMEOUT_S: Final = 5.0
_OVER: Final = ("RUN_ENDED", "RUN_UNKNOWN")
_GENERATION_UNKNOWN: Final = "GENERATION_UNKNOWN"
"""Reason of the error that reports that the coordinator has lost its latest writes or all of its
data."""


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A launcher's node rank among the launchers of its job, as far as the launcher knows it."""

    generation: int
    """Newest generation in which the launcher has a node rank; 0 if there was none."""
    placement: NodePlacement | None
    """Node rank of the launcher, with the number of nodes and the master address; None if it has no
    rank at the moment."""
    starts: tuple[str, ...] = ()
    """One key per node, in rank order. A node's key changes when its workers are started again.
    If a new generation has different keys, workers of plain scripts are restarted. If it has the
    same keys, the coordinator had only lost contact with a node that kept running."""
    why: str = ""
    """Human-readable reason why the launcher has no node rank; empty if it has one."""


class NodeSession:
    """Session of a launcher as a member of the launchers' job. The launcher always requests a rank.
    If it is evicted because of a long silence, it joins again as a new member."""

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        job_id: str,
        launcher_id: str,
        address: str,
        on_change: Callable[[], None],
        on_job_lost: Callable[[], None],
    ) -> None:
        """Opens the session. Both callbacks are called on the session's thread.

        Args:
            client: client of the coordinator.
            job_id: id of the launchers' job.
            launcher_id: id of this launcher.
            address: address (host:port) for the first worker of all nodes to listen on if this
                launcher gets rank 0.
            on_change: called after each change.
            on_job_lost: creates the job again if the coordinator no longer has it; raises
                ShoalError.
        """
        self.node_status = NodeStatus(
            generation=0, placement=None, why="no message from the coordinator yet"
        )
        self.stopped: str | None = None
        """Reason why the job was stopped; None if it was not stopped."""
        self.error: ShoalError | None = None
        """Error that ended the session; None while the session is open. If `is_closed`, the run has
        finished elsewhere."""
        self.works_in = 0
        """Generation of the launchers when this launcher's workers were started. Set by the
        launcher and reported in heartbeats."""
        self._client = client
        self._join = pb.Join(
            job_id=job_id,
            member_id=str(uuid.uuid4()),
            host=machine_name(os.environ),
            pid=os.getpid(),
            launcher_id=launcher_id,
            donor_address=address,
            run=client.run,
            # identifies this start of the workers across all incarnations of the session
            donor_key=uuid.uuid4().hex,
        )
        self._on_change = on_change
        self._on_job_lost = on_job_lost
        self._outgoing: queue.SimpleQueue[pb.Leave | None] = queue.SimpleQueue()
        """Messages for the open stream; None closes the stream. Each stream has its own queue."""
        self._interval_s = _FIRST_INTERVAL_S
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-node-session", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True if the run has finished elsewhere. Launchers no longer get node ranks, but running
        workers need not be stopped."""
        return self.error is not None and self.error.reason in _OVER

    def leave(self, reason: pb.Leave.Reason, detail: str) -> None:
        """Notifies the coordinator that this node is leaving, and waits up to 5 s for the session
        to end."""
        self._leaving.set()
        self._outgoing.put(pb.Leave(reason=reason, detail=detail[:1024]))
        self._thread.join(_LEAVE_TIMEOUT_S)

    # ------------------------------------------------------------------------- the session's thread

    def _run(self) -> None:
        while not self._leaving.is_set() and self.error is None:
            self._outgoing = queue.SimpleQueue()
            try:
                self._attend()
            except (UnavailableError, DeadlineError):
                pass  # the coordinator is unreachable, but will still have this member later
            except ShoalError as error:
                self._refused(error)
            finally:
                self._outgoing.put(None)
            self._on_change()
            self._leaving.wait(_PAUSE_S)

    def _attend(self) -> None:
        """Serves one stream until it is closed. Raises the error that closed it."""
        try:
            for directive in self._client.join_session(self._messages(self._outgoing)):
                self._heard(directive)
                self._on_change()
        except UnknownResourceError as error:
            self._on_job_lost()
            self._come_back(str(error))

    def _refused(self, error: ShoalError) -> None:
        if error.reason in (*_OVER, MACHINE_REFUSED) or (
            not isinstance(error, PreconditionError) and error.reason != _GENERATION_UNKNOWN
        ):
            self.error = error
            return
        self._come_back(str(error))

    def _come_back(self, why: str) -> None:
        """Makes the next stream join as a new member."""
        self._join.member_id = str(uuid.uuid4())
        self.node_status = NodeStatus(generation=0, placement=None, why=why)

    def _heard(self, directive: pb.MemberDirective) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                self._interval_s = directive.welcome.heartbeat_interval_ms / 1000
            case "generation":
                generation = directive.generation
                ranks = generation.ranks or self._ask_ranks(generation)
                if ranks:
                    placement = _placement(ranks, self._join.member_id)
                    starts = tuple(rank.donor_key for rank in ranks)
                    self.node_status = NodeStatus(
                        generation=generation.number, placement=placement, starts=starts
                    )
            case "standby":
                self.node_status = NodeStatus(
                    generation=self.node_status.generation,
                    placement=None,
                    why=directive.standby.reason,
                )
            case "stop":
                self.stopped = directive.stop.reason or "no reason was given"
            case "drain":
                self.stopped = directive.drain.reason or "this launcher was drained"

    def _ask_ranks(self, generation: pb.Generation) -> Sequence[pb.Rank]:
        """Requests the members of a generation whose table is too large to be announced in full.
        Returns an empty sequence if a newer generation exists; the coordinator will announce it.

        Raises:
            UnavailableError, DeadlineError: the coordinator does not respond; it will announce the
                generation again.
        """
        try:
            answer = self._client.get_ranks(
                self._join.job_id, generation=generation.number, nonce=generation.nonce
            )
        except StaleGenerationError:
            return ()
        return list(answer.ranks)

    def _messages(self, outgoing: queue.SimpleQueue[pb.Leave | None]) -> Iterator[pb.MemberMessage]:
        """Yields the messages to send on one stream. gRPC iterates over it."""
        join = pb.Join()
        join.CopyFrom(self._join)
        join.last_generation = self.node_status.generation
        yield pb.MemberMessage(join=join)
        yield pb.MemberMessage(ready=pb.Ready())
        while True:
            try:
                leave = outgoing.get(timeout=self._interval_s)
            except queue.Empty:
                yield pb.MemberMessage(heartbeat=pb.Heartbeat(generation=self.works_in))
                continue
            if leave is not None:
                # Reports the generation of its workers first. If the end of workers of an older
                # generation were reported under the current number, it would stop members that have
                # joined since.
                yield pb.MemberMessage(heartbeat=pb.Heartbeat(generation=self.works_in))
                yield pb.MemberMessage(leave=leave)
            return


def _placement(ranks: Sequence[pb.Rank], member_id: str) -> NodePlacement:
    rank = next(rank.rank for rank in ranks if rank.member_id == member_id)
    master = parse_address(ranks[0].donor_address)
    return NodePlacement(
        node_rank=rank, node_count=len(ranks), master_address=master.host, master_port=master.port
    )
