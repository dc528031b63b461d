"""A member's connection to the coordinator: one gRPC stream, which a separate thread keeps open.

The link's thread reads directives and reconnects. gRPC's own thread pulls the outgoing messages,
including a heartbeat after each interval without another message. The training thread calls the
public methods. The condition `_changed` guards all shared fields and is notified at every change.
Callbacks run on the link's thread and must not block.

While the coordinator is unavailable, training continues, and the link keeps reconnecting with
backoff. A thread that waits for a generation keeps waiting, and logs this every ten seconds. Time
without the coordinator does not count against the wait's deadline, but has a limit of its own. If
the coordinator has lost its records of the job, the link creates the job again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from shoal_common.backoff import Backoff
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    DeadlineError,
    InternalError,
    MembershipChanged,
    PermissionDeniedError,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.rpc.reach import Obstacle
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.contract.generation import Generation, MemberIdentity, Peer
from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.contract.loader_interface import Drained, StopTraining
from shoal_worker.elastic.coordinator.coordinator_messages import (
    leave_message,
    parse_generation,
    parse_ranks,
)
from shoal_worker.elastic.coordinator.hang_report import Neighbour
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.outbox import Outbox, failure_message
from shoal_worker.elastic.coordinator.progress import Progress
from shoal_worker.elastic.group.waiting import EVERY_S, WaitingLines

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 2.0
_JOB_PATIENCE_S = 30.0
_DRAIN_LOOK_S = 0.5
_AWAY_BESIDE_A_FAILURE_S = 20.0
"""Maximum time, in seconds, that a member waits for an unavailable coordinator if the member must
leave and its group has failed. Batch systems kill a process 30 s after SIGTERM."""
_EXPLAIN_AFTER_S = 2.0
"""Time in seconds after which the link looks for the reason why the coordinator has not accepted
this member."""
_RETRYABLE = (UnavailableError, DeadlineError)


class CoordinatorLink:
    """Connection of this process to the coordinator, and the latest notices about its
    membership."""

    def __init__(
        self,
        client: CoordinatorClient,
        identity: MemberIdentity,
        *,
        on_generation: Callable[[Generation], None],
        on_stop_now: Callable[[], None] = lambda: None,
        away_limit: timedelta = timedelta(days=1),
    ) -> None:
        """Creates the link without connecting it.

        Both callbacks run on the link's thread, before threads that wait for a notice are woken.
        `on_generation`: called for every new generation, to interrupt work in the generations that
        it replaces. `on_stop_now`: called when no further step boundary or generation will follow,
        to interrupt the formation of a generation. `away_limit`: how long a wait for a generation
        continues while the coordinator is unavailable.
        """
        self.client = client
        """Client for requests to the coordinator, bound to this member's run."""
        self.identity = identity
        self._on_generation = on_generation
        self._on_stop_now = on_stop_now
        self._away_limit_s = away_limit.total_seconds()
        self._changed = threading.Condition()
        self._outbox = Outbox(self._changed)
        self._welcome: pb.Welcome | None = None
        self._newest: Generation | None = None
        self._drain: str | None = None
        self._drain_ordered = False
        """True if the coordinator has ordered this member to drain, and therefore forms a
        generation without this member."""
        self._stop: str | None = None
        self._stop_now = False
        self._finished_steps: int | None = None
        self._standby: str | None = None
        self._notice = ""
        self._silent: list[tuple[str, int]] = []
        """Member ids and pids of the processes whose stacks this member has been asked to read."""
        self._apart_from = ""
        self._fatal: ShoalError | None = None
        self._apart = ""
        """Error message of the coordinator if this member's state differed from the state of its
        peers when it left; otherwise empty.
        """
        self._away_since: float | None = None
        self._away_s = 0.0
        self._ended = True
        self._thread = threading.Thread(target=self._run, name="shoal-link", daemon=True)

    # -------------------------------------------------------------------------- the training thread

    def connect(self, timeout: timedelta) -> bool:
        """Opens the session with the coordinator. Returns True if the job has already had a
        generation, which makes this member a joiner.

        Raises:
            Drained: this process was asked to leave before the coordinator responded.
            DeadlineError: the coordinator did not respond in time.
            ShoalError: the coordinator refused the member.
        """
        self._ended = False
        self._thread.start()
        deadline = time.monotonic() + timeout.total_seconds()
        explain_at = time.monotonic() + _EXPLAIN_AFTER_S
        cause = "check that it is running, and that this machine can reach it at that address"
        probe: queue.SimpleQueue[Obstacle | None] | None = None
        while True:
            with self._changed:
                if self._welcome is not None:
                    return self._welcome.joining
                self._raise_if_over()
                if self._drain is not None:
                    raise Drained(self._drain)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"waited {timeout.total_seconds():.0f} s for the coordinator at "
                        f"{self.client.address} (SHOAL_COORDINATOR) to accept this member into "
                        f"job {self.identity.job_id!r}: {cause}"
                    )
                # in slices, because SIGTERM only marks the member as draining and cannot wake this
                # thread
                self._changed.wait(min(_DRAIN_LOOK_S, left_s))
            if probe is not None and not probe.empty() and not self._is_accepted():
                cause = self._explain_absence(probe.get(), left_s) or cause
                probe, explain_at = None, time.monotonic() + EVERY_S
            elif probe is None and time.monotonic() >= explain_at:
                probe = self._probe()

    def _is_accepted(self) -> bool:
        return self._welcome is not None

    def _probe(self) -> queue.SimpleQueue[Obstacle | None]:
        """Starts a thread that determines why the coordinator cannot be reached. Returns a queue
        that receives the result. (A separate thread, because a name lookup may take half a minute,
        and SIGTERM must not wait for it.)
        """
        found: queue.SimpleQueue[Obstacle | None] = queue.SimpleQueue()

        def look() -> None:
            found.put(self.client.find_obstacle())
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=look, name="shoal-probe", daemon=True).start()
        return found

    def _explain_absence(self, obstacle: Obstacle | None, left_s: float) -> str | None:
        """Logs and returns the reason why the coordinator does not respond. Raises UnavailableError
        if waiting longer cannot help.
        """
        if obstacle is None:
            return None
        if obstacle.permanent:
            raise UnavailableError(
                f"the coordinator at {self.client.address} (SHOAL_COORDINATOR) is unreachable: "
                f"{obstacle.cause}"
            )
        _log.warning(
            "waiting for the coordinator at %s, for at most %.0f s more: %s",
            self.client.address,
            left_s,
            obstacle.cause,
        )
        return obstacle.cause

    def ready(self) -> None:
        """Requests a rank from the coordinator."""
        with self._changed:
            self._outbox.ready = True
            self._changed.notify_all()

    def wait_generation(
        self, *, after: int, timeout: timedelta, mid_step: bool = False
    ) -> Generation:
        """Waits until a generation above `after` is known, and returns the newest generation.

        `mid_step`: True if this member's group has failed within a step, possibly before its peers'
        groups. Even if the job is stopping, the coordinator responds to such a failure, either with
        a generation or with the message that none will follow, so that all members stop at the same
        step boundary. A draining member waits for that response too, because its peers may need its
        part of the state.

        Raises:
            StopTraining: the job was stopped (`Drained`: this member must leave).
            DeadlineError: no generation arrived in time, not counting time without the coordinator.
            ShoalError: this member was evicted.
        """
        started, away_before_s, lines = time.monotonic(), self.away_s, WaitingLines()
        with self._changed:
            while self._newest is None or self._newest.number <= after:
                self._raise_if_over()
                if self._stop is not None and not mid_step:
                    raise StopTraining(self._stop)
                if self._drain is not None and (
                    self._drains_now(mid_step) or after == 0 or self._no_generation_comes(mid_step)
                ):
                    raise Drained(self._drain)
                if self._stop is not None and self._stop_now:
                    raise StopTraining(self._stop)
                # in slices, because SIGTERM only marks the member as draining and cannot wake this
                # thread
                left_s = (
                    started
                    + timeout.total_seconds()
                    + self.away_s
                    - away_before_s
                    - time.monotonic()
                )
                if left_s <= 0 or self._away_for_s() > self._away_limit_s:
                    raise DeadlineError(
                        f"no generation after number {after} of job {self.identity.job_id!r} was "
                        f"formed within {time.monotonic() - started:.0f} s: {self._why_none()}"
                    )
                self._changed.wait(min(_DRAIN_LOOK_S, left_s))
                awaited = f"a generation above {after}" if after else "the first generation"
                lines.say(awaited, self._why_none)
            return self._newest

    def _why_none(self) -> str:
        if self._away_since is not None:
            return (
                f"the coordinator has been unreachable for {self._away_for_s():.0f} s; training "
                "resumes when it is back"
            )
        return self._notice or self._standby or "the coordinator has not formed it yet"

    def failed(
        self, generation: int, *, detail: str, timed_out: bool = False, suspects: Sequence[int] = ()
    ) -> None:
        """Reports a failed collective of `generation`. Does nothing if this member already knows a
        newer generation that makes members of `generation` leave it immediately. A newer generation
        that members enter only at their next step boundary does not suffice, because this rank
        cannot reach that boundary. `suspects`: unreachable ranks."""
        with self._changed:
            if self._newest is None or self._newest.interrupts_below <= generation:
                self._outbox.failure = failure_message(
                    generation, detail=detail, timed_out=timed_out, suspects=suspects
                )
                self._changed.notify_all()

    def entered(self, generation: int) -> None:
        """Records that this member has entered `generation`. Heartbeats report it."""
        with self._changed:
            self._outbox.generation, self._outbox.spare = generation, False
            self._changed.notify_all()

    def become_spare(self) -> None:
        """Records that this member has a rank but no part of the model, until it enters another
        generation. The run may end without this member.
        """
        with self._changed:
            self._outbox.spare = True
            self._changed.notify_all()

    def reports(self, progress: Callable[[], Progress]) -> None:
        """Sets the function that returns this worker's progress. It is called for each heartbeat,
        on gRPC's thread."""
        self._outbox.progress = progress

    def has_all(self, step: int) -> None:
        """Records this member's last step and reports it immediately, because peers wait for the
        report."""
        with self._changed:
            self._outbox.last_step = step
            self._changed.notify_all()

    def cannot_reach(self, ranks: Sequence[int]) -> None:
        """Records the ranks that did not accept a connection when this member probed them during a
        stall. Heartbeats report them.
        """
        self._outbox.out_of_reach = tuple(ranks)

    def silent_neighbours(self) -> list[tuple[str, int]]:
        """Returns member ids and pids of processes on this machine whose heartbeats have stopped.
        The coordinator has asked this member to read their stacks. Returns each request only once.
        """
        silent, self._silent = self._silent, []
        return silent

    def observed(self, neighbours: Sequence[Neighbour]) -> None:
        """Adds the stacks of other processes on this machine to the next heartbeat."""
        self._outbox.observed = tuple(neighbours)

    def reaches(self, reached: bool) -> None:
        """Records whether this member can reach the member `apart_from` again. Heartbeats report
        it."""
        self._outbox.in_reach = reached

    @property
    def apart_from(self) -> str:
        """Id of another member that this member could not reach. The coordinator therefore keeps
        the two in different generations. Empty if there is none."""
        return self._apart_from

    @property
    def notice(self) -> str:
        """Reason given by the coordinator for the delay of this member's next generation; empty if
        there is none.
        """
        return self._notice

    @property
    def away_s(self) -> float:
        """Total time without the coordinator, in seconds."""
        return self._away_s + self._away_for_s()

    def _away_for_s(self) -> float:
        since = self._away_since
        return time.monotonic() - since if since is not None else 0.0

    @property
    def store_url(self) -> str:
        """Redis URL of the rendezvous stores, as sent by the coordinator. The address of an
        embedded store changes when the coordinator restarts.
        """
        welcome = self._welcome
        return welcome.store_url if welcome is not None else ""

    @property
    def newest(self) -> int:
        """Number of the newest generation known; 0 before the first."""
        newest = self._newest
        return newest.number if newest is not None else 0

    @property
    def newest_generation(self) -> Generation | None:
        """The newest generation known."""
        return self._newest

    @property
    def refused(self) -> ShoalError | None:
        """Error that explains why the coordinator no longer accepts this process as a member; None
        if it is still a member. If there is an error, the process must stop training."""
        return self._fatal

    @property
    def evicted(self) -> ShoalError | None:
        """Error that explains why this process was evicted from its job; None if it was not
        evicted."""
        error = self._fatal
        return error if self._welcome is not None and isinstance(error, PreconditionError) else None

    @property
    def draining(self) -> str | None:
        """Reason why this member must leave at the next step boundary; None if it may stay."""
        return self._drain

    @property
    def excluded(self) -> bool:
        """True if the coordinator forms a generation without this member. In that case, this member
        must leave."""
        return self._drain_ordered

    @property
    def stopped(self) -> str | None:
        """Reason why the job must stop; None while it continues."""
        return self._stop

    @property
    def finished_steps(self) -> int | None:
        """Number of committed steps of a peer whose script has finished, if the coordinator
        reported it while this member was waiting for a generation; otherwise None.
        """
        return self._finished_steps

    @property
    def stopped_now(self) -> bool:
        """True if neither a step boundary nor another generation will follow for this member."""
        return self._stop_now

    def drain(self, reason: str) -> None:
        """Marks this member as leaving at the next step boundary, after SIGTERM. May be called in a
        signal handler, because it only sets one field."""
        self._drain = reason

    def fall_behind(self, why: str) -> None:
        """Marks this member as unable to continue in its job. From now on, `evicted` returns an
        error with the reason `why`, and waiting calls raise that error.
        """
        self._fail(PreconditionError(why, reason="MEMBER_BEHIND"))

    def leave(
        self,
        reason: LeaveReason,
        detail: str = "",
        *,
        alone: bool = False,
        steps: int = 0,
        held: LastState | None = None,
        timeout: timedelta = timedelta(seconds=5),
    ) -> str:
        """Leaves the job and closes the session. Waits at most `timeout` until the coordinator has
        received the message. Does not wait for an unavailable coordinator, because peers may be
        blocked until this process closes its group. Returns the result of `Member.leave`.
        """
        with self._changed:
            if self._outbox.leaving is not None:
                return ""
            self._outbox.leaving = leave_message(
                reason, detail, alone=alone, steps=steps, held=held
            )
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._ended or self._away_since is not None, timeout.total_seconds()
            )
        self.client.close()
        return self._apart

    # ---------------------------------------------------------------------------- the link's thread

    def _run(self) -> None:
        try:
            self._hold_session()
        except Exception as error:
            # Any error must be reported to the training thread, which would otherwise continue to
            # train after an eviction.
            _log.exception("the connection to the coordinator failed")
            self._fail(InternalError(f"the connection to the coordinator failed: {error!r}"))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _hold_session(self) -> None:
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        job_must_exist_at = time.monotonic() + _JOB_PATIENCE_S
        while not self._over():
            try:
                for directive in self.client.join_session(self._messages()):
                    backoff.reset()
                    self._set_away(False)
                    self._take(directive)
                if self._over():
                    return
                _log.info("the coordinator closed the connection; reconnecting")
            except _RETRYABLE as error:
                if self._over():
                    return
                # A worker may start before its coordinator listens; `connect` reports long waits.
                if self._away_since is None and self._is_accepted():
                    _log.warning(
                        "lost the connection to the coordinator; training continues without "
                        "membership changes: %s",
                        error,
                    )
                self._set_away(True)
            except UnknownResourceError as error:
                # Launchers start workers at the same time as the coordinator, so a worker may
                # connect before its job exists.
                if self._over():
                    return
                was_member = self._welcome is not None
                if (
                    not self._give_job_again(error)
                    if was_member
                    else time.monotonic() > job_must_exist_at
                ):
                    self._fail(error)
                    return
            except ShoalError as error:
                if error.reason == "REPLICAS_DIVERGED":  # the response to the leave message
                    self._apart = str(error)
                    return
                # An evicted member must not exit with success, even if it learns of the eviction
                # while leaving.
                puts_out = self._welcome is not None and isinstance(error, PreconditionError)
                if not self._over() or (puts_out and self._fatal is None):
                    self._fail(error)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._outbox.leaving is not None, backoff.next_s())

    def _give_job_again(self, error: UnknownResourceError) -> bool:
        """Creates the job again if the coordinator has lost its records although this member is
        still training in the job. Returns whether to reconnect.
        """
        welcome = self._welcome
        if welcome is None or error.reason != "JOB_UNKNOWN":
            return False
        try:
            created = self.client.create_job(welcome.spec).created
        except _RETRYABLE:
            return True
        except ShoalError as refused:
            if refused.reason == "RUN_UNKNOWN":
                # another member has already recreated the job, as a new run; joining with this
                # member's generation restores the original run
                return True
            _log.warning(
                "the coordinator has lost its records of job %r and refused to restore them from "
                "this member: %s",
                self.identity.job_id,
                refused,
            )
            return False
        if created:
            _log.warning(
                "the coordinator had lost its records of job %r; this member restored them",
                self.identity.job_id,
            )
        return True

    def _set_away(self, away: bool) -> None:
        if (self._away_since is not None) == away:
            return
        with self._changed:
            if away:
                self._away_since = time.monotonic()
            else:
                if self._is_accepted():
                    _log.warning(
                        "the coordinator is reachable again after %.0f s", self._away_for_s()
                    )
                self._away_s, self._away_since = self.away_s, None
            self._changed.notify_all()

    def _messages(self) -> Iterator[pb.MemberMessage]:
        return self._outbox.messages(self._join, self._heartbeat_interval_s)

    def _join(self, works_in: int) -> pb.Join:
        identity, newest = self.identity, self._newest
        return pb.Join(
            job_id=identity.job_id,
            member_id=identity.member_id,
            host=identity.host,
            pid=identity.pid,
            launcher_id=identity.launcher_id,
            local_index=identity.local_index,
            donor_address=identity.donor_address,
            donor_key=identity.donor_key,
            metrics_address=identity.metrics_address,
            last_generation=newest.number if newest is not None else 0,
            last_world_size=newest.world_size if newest is not None else 0,
            works_in=works_in,
            run=self.client.run,
        )

    def _drains_now(self, mid_step: bool) -> bool:
        """Returns whether to leave at this step boundary because the coordinator has ordered this
        member to drain. By contrast, a process that must leave because of SIGTERM first enters the
        generation that its peers are waiting for. If they have received the signal too, all of them
        leave together."""
        return not mid_step and self._drain_ordered

    def _no_generation_comes(self, mid_step: bool) -> bool:
        """Returns whether this member should stop waiting for a generation: the coordinator has
        announced that none will follow, has put the job on hold, or is unavailable. After a
        failure, this member may have the only copy of part of the state, so it keeps waiting for an
        unavailable coordinator for a while.
        """
        away = self._away_since is not None and (
            not mid_step or self._away_for_s() > _AWAY_BESIDE_A_FAILURE_S
        )
        return self._stop_now or self._standby is not None or away

    def _heartbeat_interval_s(self) -> float:
        return self._welcome.heartbeat_interval_ms / 1000 if self._welcome is not None else 1.0

    def _take(self, directive: pb.MemberDirective) -> None:
        kind = directive.WhichOneof("directive")
        generation = (
            parse_generation(directive, self._mine(), self._newest, self._ask_ranks)
            if kind == "generation"
            else None
        )
        with self._changed:
            if generation is not None:
                if self._newest is not None and generation.number <= self._newest.number:
                    return
                self._newest = generation
                self._standby, self._notice, self._outbox.out_of_reach = None, "", ()
                self._apart_from, self._outbox.in_reach = "", False
            elif kind == "welcome":
                self._welcome = directive.welcome
                self.client.run = directive.welcome.run
            elif kind == "drain":
                self._drain, self._drain_ordered = directive.drain.reason or "drained", True
            elif kind == "stop":
                self._stop = directive.stop.reason or "stopped"
                self._stop_now = self._stop_now or directive.stop.now
                known = directive.stop.HasField("finished_steps")
                self._finished_steps = directive.stop.finished_steps if known else None
            elif kind == "standby":
                self._standby, self._apart_from = (
                    directive.standby.reason,
                    directive.standby.apart_from,
                )
            elif kind == "notice":
                self._notice = directive.notice.text
                silent = [
                    each
                    for each in directive.notice.silent
                    if each.read_by == self.identity.member_id
                ]
                self._silent = [(each.member_id, each.pid) for each in silent]
                if self._notice:  # all members receive it, but only one worker per machine logs it
                    logs = self.identity.local_index == 0 or any(each.logs for each in silent)
                    _log.log(logging.WARNING if logs else logging.INFO, "%s", self._notice)
        if generation is not None:
            self._on_generation(generation)
        if kind == "stop" and directive.stop.behind:
            self.fall_behind(
                f"the run continued without this member and has ended: {directive.stop.reason}"
            )
        if kind == "stop" and directive.stop.now:
            self._on_stop_now()
        with self._changed:
            self._changed.notify_all()
        if generation is not None:
            # applies the changes now, so that the previous table is not kept in memory
            generation.known  # noqa: B018

    def _mine(self) -> Peer:
        """Returns this member's own entry for the rank table, with 0 in place of its rank."""
        identity = self.identity
        return Peer(
            rank=0,
            member_id=identity.member_id,
            host=identity.host,
            donor_address=identity.donor_address,
            joining=False,
            donor_key=identity.donor_key,
        )

    def _ask_ranks(self, number: int, nonce: str, ranks: Sequence[int]) -> list[Peer]:
        """Requests ranks of a generation from the coordinator; all ranks if `ranks` is empty.
        Thread-safe.

        Raises:
            MembershipChanged: there is a newer generation. This member will be notified of it.
            UnavailableError: the coordinator is unreachable, or does not know the job.
        """
        try:
            return parse_ranks(
                self.client.get_ranks(
                    self.identity.job_id, generation=number, nonce=nonce, ranks=ranks
                )
            )
        except StaleGenerationError as error:
            raise MembershipChanged(f"generation {number} has been superseded: {error}") from error
        except (DeadlineError, UnknownResourceError) as error:
            raise UnavailableError(
                f"could not get the ranks of generation {number} from the coordinator: {error}"
            ) from error

    def _fail(self, error: ShoalError) -> None:
        _log.info(
            "the coordinator ended this worker's membership: %s", error
        )  # waiting calls will raise it
        with self._changed:
            self._fatal = error
            self._changed.notify_all()

    def _over(self) -> bool:
        with self._changed:
            return self._outbox.leaving is not None or self._fatal is not None

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            error = self._fatal
            if isinstance(error, PreconditionError | PermissionDeniedError):
                raise type(error)(
                    f"this member was evicted from job {self.identity.job_id!r}: {error}",
                    reason=error.reason,
                ) from error
            raise error
