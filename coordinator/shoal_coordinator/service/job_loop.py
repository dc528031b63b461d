"""Loop of one job: queues events, applies them with the core, writes the result to Redis, and only
then responds and announces changes.

Events that arrive during a commit go into the next commit (group commit). This shares the cost of
Redis's disk writes and gives events a single order. When many members arrive at the same time, the
loop waits a moment longer to gather their joins; any other event ends this wait. Heartbeats do not
pass through the loop: they only update the pulses in memory, and work while Redis is unreachable.
All state belongs to the event loop; other threads may read `state`, which is immutable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from shoal_common.backoff import Backoff
from shoal_common.errors import InternalError, ShoalError, UnavailableError
from shoal_common.failpoints import failpoint

from shoal_coordinator.membership.leases import Leased
from shoal_coordinator.membership.model.effects import AnnounceGeneration
from shoal_coordinator.membership.model.events import (
    Ending,
    Event,
    ExitReported,
    LeaseEnded,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MemberReady,
    OfRun,
    ServerLost,
    StreamBroken,
)
from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.pulse import (
    Progress,
    Pulse,
    Pulses,
    ServerPulse,
    attached,
    detached,
    expired,
)
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.spec import Policy
from shoal_coordinator.membership.model.state import Cause, JobState, Now
from shoal_coordinator.membership.transition import (
    Granted,
    Outcome,
    Transition,
    next_wake_ms,
    transition,
)
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.sessions import Sessions
from shoal_coordinator.state.codec import encode_changes
from shoal_coordinator.state.store import JobStore, Stored

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 1.0
_LONGEST_SCAN_INTERVAL_MS = 500
_GATHER_S = 0.005
"""Time, in seconds, for which the loop gathers joins while members arrive in a rush: ten times the
processor time of a commit. In a throng, it gathers them four times as long."""
_RUSH = 3
"""Number of arrivals in one commit that count as a rush."""
_THRONG = 20
"""Number of arrivals in one commit that count as a throng."""
_MOST_REQUESTS = 50_000
"""Maximum number of queued requests: five per member of the largest world size."""
_RETRY_AFTER = timedelta(seconds=1)
"""Delay before the caller may retry a request that was refused because the queue was full."""


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """A queued event and, later, its outcome."""

    event: Event
    done: Callable[[Outcome], None] | None
    noticed_s: float


class JobLoop:
    """Owner of one job's state. `run` is the loop's task; it ends only with an error that prevents
    this coordinator from continuing."""

    def __init__(
        self,
        stored: Stored,
        *,
        store: JobStore,
        clock: Clock,
        policy: Policy,
        metrics: CoordinatorMetrics,
    ) -> None:
        self.state: JobState = stored.state
        """State of the job, as written to Redis."""
        self.sessions = Sessions()
        self._store = store
        self._clock = clock
        self._policy = policy
        self._metrics = metrics
        self._revision = stored.revision
        self._queue: dict[Submitted, None] = {}
        """Queued events in order of arrival."""
        self._woken = asyncio.Event()
        self._urgent = asyncio.Event()
        """Set when an event other than an arrival is queued."""
        self._gather_s = 0.0
        """Time in seconds that the next events wait for further events, unless an urgent event
        arrives."""
        self._committed = asyncio.Event()
        self._failure: ShoalError | None = None
        self._stepping = False
        now_ms = clock.now().ms
        # Restarts all leases before any of them can expire, regardless of how long no coordinator
        # was running.
        self._members = {
            member_id: detached(attached(None, now_ms), now_ms) for member_id in self.state.members
        }
        self._servers = {
            s.server_id: ServerPulse(heard_ms=now_ms, attached=False)
            for s in self.state.servers.values()
            if s.alive
        }
        self._newest, self._newest_run = Progress(), 0
        self._folded_ms = now_ms
        self._next_scan_ms = now_ms
        self._loss_noticed_s: float | None = None
        """Time at which the coordinator received the first sign of a loss that it has not decided
        on yet; None if there is none."""

    # -------------------------------------------------------------------- calls by other components

    @property
    def pulses(self) -> Pulses:
        """The heartbeat states of the job's members and servers. They are not copies: they change
        as heartbeats arrive. On other threads, use `observed`."""
        return Pulses(members=self._members, servers=self._servers, newest=self._newest_progress)

    @property
    def _newest_progress(self) -> Progress:
        return self._newest if self._newest_run == self.state.run.number else Progress()

    def observed(self) -> ObservedJob:
        """Returns the job's current state. May be called from any thread."""
        pulses = Pulses(
            members=self._members.copy(),
            servers=self._servers.copy(),
            newest=self._newest_progress,
        )
        return ObservedJob(state=self.state, pulses=pulses, now=self._clock.last_read)

    def submit(self, event: Event, done: Callable[[Outcome], None] | None = None) -> Submitted:
        """Queues an event. Calls `done` with its outcome after the outcome has been written to
        Redis and before anything is announced. If the loop has stopped, calls `done` immediately
        with the error."""
        submitted = Submitted(event, done, time.monotonic())
        if self._failure is None:
            self._queue[submitted] = None
            self._woken.set()
            if not isinstance(_unwrapped(event), MemberJoined | MemberReady):
                self._urgent.set()
        elif done is not None:
            done(self._failure)
        return submitted

    def request(self, event: Event, done: Callable[[Outcome], None]) -> Submitted:
        """Queues a request that any client may send and retry. If the queue is full, calls `done`
        with an UnavailableError instead."""
        if len(self._queue) < _MOST_REQUESTS:
            return self.submit(event, done)
        refused = Submitted(event, done, time.monotonic())
        error = UnavailableError(
            f"job {self.state.spec.job_id} has reached the limit of {len(self._queue)} requests "
            "waiting for Redis; try again later",
            reason=Refusal.QUEUE_LIMIT,
            retry_after=_RETRY_AFTER,
        )
        _answer_all([refused], error)
        return refused

    def withdraw(self, submitted: Submitted) -> None:
        """Cancels an event that is still queued. Its `done` callback receives an
        UnavailableError."""
        if submitted in self._queue:
            del self._queue[submitted]
            _answer_all(
                [submitted],
                UnavailableError(
                    "the caller is no longer waiting for this request",
                    reason=Refusal.STORAGE_UNAVAILABLE,
                ),
            )

    async def ask(self, event: Event, *, timeout_s: float, keep: bool = False) -> Granted:
        """Queues a request and returns its outcome. Raises the request's error if it is refused, or
        UnavailableError if Redis does not accept the change in time.

        `keep`: True if the request must be carried out even if the caller stops waiting.
        """
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if answer.done():
                return
            if isinstance(outcome, ShoalError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        submitted = self.request(event, done)
        try:
            return await within(answer, timeout_s)
        finally:
            if not keep:
                self.withdraw(submitted)

    def poke(self) -> None:
        """Wakes the loop after a heartbeat that may affect a decision."""
        self._woken.set()

    def set_pulse(self, member_id: str, pulse: Pulse) -> None:
        """Replaces the heartbeat state of a live member."""
        self._members[member_id] = pulse
        if pulse.progress.step or pulse.progress.steps_in_all:
            self._newest, self._newest_run = pulse.progress, self.state.run.number

    def set_server_pulse(self, server_id: str, pulse: ServerPulse) -> None:
        """Replaces the heartbeat state of a registered server."""
        self._servers[server_id] = pulse

    def next_commit(self) -> asyncio.Event:
        """Returns an asyncio event for callers that follow the job's event log. It is set once the
        next entries have been written, or once no more entries will be written."""
        return self._committed

    def fail(self, error: ShoalError) -> None:
        """Stops the loop of a job whose state can no longer be written. All waiting requests and
        all streams end with `error`."""
        self._failure = error
        _answer_all(self._take_queue(), error)
        self.sessions.end_all(error)
        self._committed.set()
        self._woken.set()
        self._urgent.set()

    @property
    def is_idle(self) -> bool:
        """True if the job has neither members nor live servers, and no event is queued or being
        processed."""
        return self.state.is_deserted and not self._queue and not self._stepping

    @property
    def failure(self) -> ShoalError | None:
        """Reason why this loop has stopped; None while it is running."""
        return self._failure

    # ------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Processes events until cancelled. Raises FencedError if another coordinator has taken
        over, and InternalError on a bug."""
        # A cancellation can be lost if a call to Redis completes at the same time. `fail` is always
        # called before a cancellation, so its error is checked here.
        while True:
            await self._wait_for_work()
            if self._gather_s:
                await self._gather()
            if self._failure is not None:
                return
            self._stepping = True
            await self._step()
            self._stepping = False

    async def _wait_for_work(self) -> None:
        due_ms = self._next_due_ms()
        delay_s = None if due_ms is None else max(0.0, (due_ms - self._clock.now().ms) / 1000)
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()

    async def _gather(self) -> None:
        """Waits `_gather_s` for further members to join or to become ready, or until an event of a
        different kind is queued."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._gather_s):
                await self._urgent.wait()

    def _next_due_ms(self) -> int | None:
        dues = [] if not (self._members or self._servers) else [self._next_scan_ms]
        wake_ms = next_wake_ms(self.state, self._folded_ms, self._policy)
        if wake_ms is not None:
            dues.append(wake_ms)
        return min(dues, default=None)

    async def _step(self) -> None:
        now = self._clock.now()
        batch = self._take_queue()
        batch += [Submitted(event, None, time.monotonic()) for event in self._ended_leases(now)]
        try:
            decided = transition(
                self.state,
                now,
                [submitted.event for submitted in batch],
                pulses=self.pulses,
                nonce=secrets.token_hex(16),
                policy=self._policy,
            )
            await self._commit(decided, events=len(batch))
        except asyncio.CancelledError:
            if self._failure is not None:  # the events that had left the queue by then
                _answer_all(batch, self._failure)
            raise
        except Exception as error:
            _answer_all(
                batch,
                error
                if isinstance(error, ShoalError)
                else InternalError(f"a membership decision failed: {error!r}"),
            )
            raise
        self._folded_ms = now.ms
        self._deliver(batch, decided)

    def _take_queue(self) -> list[Submitted]:
        queue, self._queue = list(self._queue), {}
        # Woken without events by heartbeats that report adopted generations; thousands of these
        # arrive one by one.
        rush = (not queue or len(queue) >= _RUSH) and not self._urgent.is_set()
        self._gather_s = 0.0 if not rush else 4 * _GATHER_S if len(queue) >= _THRONG else _GATHER_S
        self._urgent.clear()
        return queue

    def _ended_leases(self, now: Now) -> list[Event]:
        if now.ms < self._next_scan_ms:
            return []
        lease_ms = self.state.spec.lease_ms
        self._next_scan_ms = now.ms + min(_LONGEST_SCAN_INTERVAL_MS, lease_ms // 10)
        members = [
            LeaseEnded(member_id=member_id)
            for member_id in expired(self._members, now.ms, lease_ms)
        ]
        servers = [
            ServerLost(server_id=server_id, ending=Ending.LEASE_EXPIRED)
            for server_id in expired(self._servers, now.ms, lease_ms)
        ]
        self._metrics.leases_expired.labels("server").inc(len(servers))
        return [*members, *servers]

    async def _commit(self, decided: Transition, *, events: int) -> None:
        """Writes a transition to Redis. Retries while Redis is unreachable."""
        if not decided.changes and not decided.records:
            return
        written = encode_changes(decided.state, decided.changes)
        commit_id = secrets.token_hex(8)
        began_s = time.monotonic()
        backoff = Backoff(first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
        failpoint("decision.before_write")
        while True:
            try:
                unix_ms = await self._store.commit(
                    decided.state,
                    written,
                    decided.records,
                    revision=self._revision,
                    commit_id=commit_id,
                    durable=decided.changes.generation
                    or decided.changes.moves
                    or bool(decided.changes.servers),
                )
                break
            except UnavailableError as error:
                if error.reason != Refusal.STORAGE_UNAVAILABLE:
                    raise
                self._metrics.redis_up.set(0)
                self._metrics.commit_retries.inc()
                logger.warning(
                    "membership changes are waiting for Redis: %s",
                    error,
                    extra={"job_id": self.state.spec.job_id},
                )
            await asyncio.sleep(backoff.next_s())
        failpoint("decision.written")
        self._revision += 1
        self._clock.adjust(unix_ms)
        self._metrics.redis_up.set(1)
        self._metrics.commits.observe(time.monotonic() - began_s)
        self._metrics.events_per_commit.observe(events)

    def _deliver(self, batch: list[Submitted], decided: Transition) -> None:
        self.state = decided.state
        for submitted, outcome in zip(batch, decided.outcomes, strict=True):
            if submitted.done is not None:
                submitted.done(outcome)
            if isinstance(outcome, ShoalError):
                logger.info(
                    "refused: %s",
                    outcome,
                    extra={"job_id": self.state.spec.job_id, "reason": outcome.reason},
                )
        self.sessions.carry_out(decided.effects)
        for member_id in decided.changes.members:
            if member_id not in self.state.members:
                self._members.pop(member_id, None)
        for server_id in decided.changes.servers:
            server = self.state.servers.get(server_id)
            if server is None or not server.alive:
                self._servers.pop(server_id, None)
        if decided.records:
            self._committed.set()
            self._committed = asyncio.Event()
        self._observe(batch, decided)

    def _observe(self, batch: list[Submitted], decided: Transition) -> None:
        for reason in decided.reasons:
            logger.info("%s", reason, extra={"job_id": self.state.spec.job_id})
        losses = [s.noticed_s for s in batch if _may_lose(s.event)]
        if losses and self._loss_noticed_s is None:
            self._loss_noticed_s = min(losses)
        for effect in decided.effects:
            if isinstance(effect, AnnounceGeneration):
                self._metrics.generations.labels(effect.generation.cause).inc()
                if self._loss_noticed_s is not None and effect.generation.cause is Cause.FAILURE:
                    self._metrics.announced.observe(time.monotonic() - self._loss_noticed_s)
        if not self.state.broken_streams:
            self._loss_noticed_s = None
        for record in decided.records:
            if record.kind in ("member_lost", "member_left"):
                ending = record.attributes["ending"]
                self._metrics.departures.labels(ending).inc()
                self._metrics.leases_expired.labels("member").inc(ending == Ending.LEASE_EXPIRED)
            if record.kind in ("partitions_moved", "move_failed"):
                self._metrics.moves.labels(
                    "moved" if record.kind == "partitions_moved" else "failed"
                ).inc()
            if record.kind == "partitions_moved":
                self._metrics.partitions_moved.inc(int(record.attributes["partitions"]))
        self._metrics.collective_failures.inc(
            sum(record.kind == "collective_failed" for record in decided.records)
        )
        self._metrics.batches_leased.inc(
            sum(len(outcome.batches) for outcome in decided.outcomes if isinstance(outcome, Leased))
        )


async def within(answer: asyncio.Future[Granted], timeout_s: float) -> Granted:
    """Waits for the outcome of a request to a job's loop. Raises UnavailableError if Redis does not
    accept the change in time; the change may still take effect later."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise UnavailableError(
            f"Redis did not accept this change within {timeout_s:g} s, but may still do so; try "
            "again",
            reason=Refusal.STORAGE_UNAVAILABLE,
        ) from None


def _may_lose(event: Event) -> bool:
    """Returns whether applying the event may cause a member to be lost."""
    return isinstance(
        _unwrapped(event), MemberLost | LeaseEnded | StreamBroken | ExitReported | MemberLeft
    )


def _unwrapped(event: Event) -> Event:
    """Returns the event that an OfRun event contains; returns any other event unchanged."""
    return event.event if isinstance(event, OfRun) else event


def _answer_all(batch: list[Submitted], error: ShoalError) -> None:
    for submitted in batch:
        if submitted.done is not None:
            submitted.done(error)
