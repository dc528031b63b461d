"""Membership of a process in a job: requests ranks from the coordinator, connects a group for each
generation, and releases groups that have ended.

The training thread forms and leaves groups. The link's thread calls `_interrupt` for each new
generation. `_interrupt` aborts the training thread's collectives in a generation that has ended,
and its attempt to form a generation that has been superseded. `_lock` guards `_group` and
`_forming`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Final, NoReturn

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_common.system.own_address import REACHED_ELSEWHERE

from shoal_worker.backends.base import CommunicationBackend, cause_of
from shoal_worker.backends.registry import backend_class
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.generation import Generation, MemberIdentity
from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.coordinator.hang_report import HangReport
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.coordinator.stall_watch import (
    GENERATION_OVER_OR_AWAY,
    LOOK_AFTER_S,
    StallWatch,
    looked_at,
    named_addresses,
    named_ranks,
    unreachable,
)
from shoal_worker.elastic.group.group import Group, GroupConfiguration
from shoal_worker.elastic.group.waiting import EVERY_S, WaitingLines
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.settings import WorkerSettings
from shoal_worker.store.errors import StoreTimeoutError
from shoal_worker.store.redis_store import RedisStore

# ------------------------------------------------------------------------------- connecting a group

_MOST_NAMED: Final = 5


class Forming:
    """Attempt to connect a generation, which another thread can abort."""

    def __init__(self, generation: Generation, store: RedisStore | None) -> None:
        self.generation = generation
        self._store = store

    def abort(self, reason: str) -> None:
        """Makes the connecting thread fail immediately. Thread-safe."""
        if self._store is not None:
            self._store.abort(reason)


def connect(
    generation: Generation,
    *,
    make_backend: Callable[[], CommunicationBackend],
    store_url: str,
    prefix: str,
    host: str,
    arrival_timeout: timedelta,
    connect_timeout: timedelta,
    collective_timeout: timedelta,
    announce: Callable[[Forming], None],
    waits: Waits,
) -> Group:
    """Connects this member to its peers in `generation`, under a new prefix in the store.

    First waits until all members have arrived, because peers may still be building their models or
    finishing a forward pass. Only then connects, with a short deadline. `announce`: called before
    anything blocks, with a handle that lets another thread abort the attempt. `waits`: records how
    long this rank waits. A log line names the missing ranks every ten seconds.

    Raises:
        MembershipChanged: the attempt was aborted, a peer failed, or not all members arrived
            within `arrival_timeout` or connected within `connect_timeout`.
        ConfigurationError: the backend does not work on this machine, so a later generation would
            fail too.
    """
    if generation.world_size == 1:
        announce(Forming(generation, None))
        return Group(generation, None, None)
    configuration = GroupConfiguration(
        make_backend=make_backend,
        store=lambda name: RedisStore(store_url, f"{prefix}:{name}", timeout=connect_timeout),
        hostname=host,
        connect_timeout=connect_timeout,
        collective_timeout=collective_timeout,
    )
    store = RedisStore(store_url, prefix, timeout=connect_timeout)
    announce(Forming(generation, store))
    try:
        with waits.of(f"generation {generation.number} to form"):
            _arrive(generation, store, arrival_timeout)
            backend = make_backend()
            configuration.initialize(backend, generation, store)
    except (MembershipChanged, ConfigurationError):
        raise
    except (RuntimeError, ShoalError) as error:
        raise MembershipChanged(
            f"generation {generation.number} did not form: {cause_of(error)}"
        ) from error
    return Group(generation, backend, store, configuration)


def _arrive(generation: Generation, store: RedisStore, timeout: timedelta) -> None:
    """Waits until all ranks have arrived. Raises StoreTimeoutError with the missing ranks."""
    deadline, lines = time.monotonic() + timeout.total_seconds(), WaitingLines()
    store.set(_arrival(generation.rank), b"1")
    if store.add("arrived", 1) == generation.world_size:
        store.set("complete", b"1")
    while True:
        left_s = deadline - time.monotonic()
        try:
            store.wait(["complete"], timedelta(seconds=max(0.001, min(EVERY_S, left_s))))
        except StoreTimeoutError as error:
            if left_s <= EVERY_S:
                raise StoreTimeoutError(
                    f"waited {timeout.total_seconds():g} s for {_absent(generation, store)}"
                ) from error
            lines.say(
                f"generation {generation.number} to form",
                lambda: f"not yet arrived: {_absent(generation, store)}",
            )
        else:
            return


def _absent(generation: Generation, store: RedisStore) -> str:
    there = set(store.list_keys())
    absent = [rank for rank in range(generation.world_size) if _arrival(rank) not in there]
    more = len(absent) - _MOST_NAMED
    return (named_ranks(generation, absent[:_MOST_NAMED]) or "nobody") + (
        f" and {more} more" if more > 0 else ""
    )


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


# --------------------------------------------------------------------------------------- membership

_log = logging.getLogger(__name__)

_REACH_TIMEOUT = timedelta(seconds=1)
_EVENTS_TIMEOUT = timedelta(seconds=2)
_DEPARTURES = ("member_lost", "member_left")
_DEPARTURES_REPORTED = 3
_MOST_BEHIND: Final = 64
"""Maximum number of members that the coordinator lists in its response to shoal.v1.GetJobRequest
with below_step."""
_NO_MORE_MEMBERS = "the run has ended, and no more members join this generation"


def _holders(generation: Generation, apart_from: Collection[int]) -> set[str]:
    return {peer.member_id for peer in generation.peers if peer.rank not in apart_from}


class Membership:
    """Membership of this process in a job with a coordinator. Implements `Member`."""

    def __init__(
        self,
        client: CoordinatorClient,
        identity: MemberIdentity,
        settings: WorkerSettings,
        *,
        host: str,
    ) -> None:
        """Creates the membership without connecting. `host`: address of this process for peers."""
        self._settings = settings
        self._host = host
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._forming: Forming | None = None
        self._left = 0
        self._drained = False
        """True if this process has left while the other members continue."""
        self._events_read = ""
        self._departures: deque[str] = deque(maxlen=_DEPARTURES_REPORTED)
        self.waits = Waits()
        self.link = CoordinatorLink(
            client,
            identity,
            on_generation=self._interrupt,
            on_stop_now=self._give_up_forming,
            away_limit=settings.away_timeout,
        )
        self._watch: StallWatch | None = None
        self._hangs: HangReport | None = None
        self.make_backend: Callable[[], CommunicationBackend] | None = None
        """Creates the backend of the next group; set before the first `form`."""

    def join(self) -> bool:
        """Connects to the coordinator. See `CoordinatorLink.connect` for the result and the
        errors."""
        self._notify_launcher("joined")
        joining = self.link.connect(self._settings.rendezvous_timeout)
        self._watch = StallWatch(self.link, self.waits, lambda: self._group, self._hangs)
        self._watch.start()
        return joining

    def observe(self, progress: ProgressMeter) -> None:
        """Registers `progress` as the source of the progress that heartbeats report. Must be called
        before `join`."""
        self.waits = progress.waits
        self._hangs = hangs = HangReport(progress)
        self.link.reports(
            lambda: dataclasses.replace(
                progress.snapshot(),
                busy_link=self._watch.busy_link if self._watch else None,
                stacks=hangs.take(),
            )
        )

    @property
    def only_backend(self) -> str | None:
        """None, because any backend is allowed."""
        return None

    def serve(self, engine: TrainingEngine) -> None:
        """Sets the training engine, which provides the backend for connecting groups. Must be
        called before the first `form`."""
        if not engine.asynchronous:
            self.make_backend = backend_class(engine.backend_name)

    @property
    def group(self) -> Group | None:
        """The last group that was formed, which may have failed; None before the first and after
        `leave_group`."""
        return self._group

    def await_generation(self, timeout: timedelta | None = None) -> Generation:
        """Waits for a generation that this process has not entered yet, and returns it
        (`Member.await_generation`)."""
        return self.link.wait_generation(
            after=self._left, timeout=timeout or self._settings.rendezvous_timeout
        )

    def form(self) -> Group:
        """Leaves the current group, waits for a newer generation and connects it. Also raises the
        errors of `CoordinatorLink.wait_generation`.

        Raises:
            MembershipChanged: the generation did not form. The caller must report this with
                `failed`, and call `form` again.
        """
        group = self._group
        if group is not None and group.broken is None:
            # the current group is still needed if a stop arrives instead
            generation = self.await_generation()
            self.leave_group("re-forming")
        else:
            self.leave_group("re-forming")
            generation = self.link.wait_generation(
                after=self._left, timeout=self._settings.rendezvous_timeout, mid_step=True
            )
        self._left = generation.number
        try:
            group = connect(
                generation,
                make_backend=self._make_backend,
                store_url=self._settings.store_at(self.link.store_url),
                prefix=f"shoal:{{{self.link.identity.job_id}}}:store:"
                f"{generation.number}-{generation.nonce}",
                host=self._host,
                arrival_timeout=self._settings.collective_timeout,
                connect_timeout=self._settings.connect_timeout,
                collective_timeout=self._settings.collective_timeout,
                announce=self._announce,
                waits=self.waits,
            )
        finally:
            with self._lock:
                self._forming = None
        with self._lock:
            self._group = group
        newest = self.link.newest_generation
        if newest is not None and generation.number < newest.interrupts_below:
            group.abort(f"superseded by generation {newest.number}")
        self.link.entered(generation.number)
        _log.info(
            "generation %d formed: rank %d of %d",
            generation.number,
            generation.rank,
            generation.world_size,
        )
        return group

    def _make_backend(self) -> CommunicationBackend:
        assert self.make_backend is not None
        backend = self.make_backend()
        backend.waits = self.waits
        return backend

    def failed(self, error: BaseException) -> None:
        """Reports to the coordinator that a collective of the current generation has failed, or
        that the generation did not form. Does nothing if a newer generation shows that the
        coordinator already knows.

        After a timeout, a failure to form or a long stall, first determines which peers are
        unreachable, which takes at most a second.
        """
        timed_out = isinstance(error.__cause__, TimeoutError) or "timed out" in str(error).lower()
        stood = self.waits.last_s >= LOOK_AFTER_S
        suspects = self._out_of_reach() if timed_out or stood or self._group is None else []
        detail = str(error)
        if suspects and self._group is None:
            named = named_addresses(self.link.newest_generation, suspects[:_MOST_NAMED])
            detail = f"{detail}; this rank cannot reach {named}; {REACHED_ELSEWHERE}"
            _log.warning("%s. Other machines reach this machine at %s", detail, self._host)
        self.link.failed(self._left, detail=detail, timed_out=timed_out, suspects=suspects)

    def _out_of_reach(self) -> list[int]:
        generation = self.link.newest_generation
        if generation is None or generation.number != self._left:
            return []
        try:
            peers = looked_at(generation)
        except GENERATION_OVER_OR_AWAY:
            return []
        return unreachable(
            peers, timeout=_REACH_TIMEOUT, given_up=lambda: self.link.newest != generation.number
        )

    def give_up_place(self, why: str) -> NoReturn:
        """Leaves the job because this process cannot catch up with its peers, and raises
        PreconditionError (`Member.give_up_place`)."""
        _log.warning("leaving: %s", why)
        self.link.fall_behind(why)
        self.leave(LeaveReason.FAILED, why)
        raise PreconditionError(why, reason="MEMBER_BEHIND")

    def check_current(self, generation: int) -> None:
        """Asks the coordinator whether this member still belongs to the job, and has not been
        evicted since `generation`. Thread-safe.

        Returns normally if the coordinator cannot be reached, because a coordinator that is down
        does not evict members. If only this process cannot reach the coordinator, however, it may
        have been evicted. The state that it then publishes was committed while it was still a
        member, but may be older than the job's newest state.

        Raises:
            StaleGenerationError: this member no longer belongs to the job.
        """
        identity = self.link.identity
        if self._drained:
            return  # this process left while the others continued, with the job's state
        try:
            job = self.link.client.get_job(identity.job_id, member_id=identity.member_id)
        except (UnavailableError, DeadlineError):
            return
        if all(m.member_id != identity.member_id for m in job.members):
            raise StaleGenerationError(
                f"this process was evicted from job {identity.job_id!r} after generation "
                f"{generation}, so its state is not published as a checkpoint"
            )

    def has_left(self, member_id: str) -> bool:
        """Asks the coordinator whether a member has left the job. A member that was asked to drain
        belongs to the job until it leaves. Returns False while the coordinator is unavailable."""
        newest, group = self.link.newest_generation, self._group
        # a member may also leave without a following generation, if the job is on hold or ending
        whole = group is not None and not group.ended
        if (
            self._drained
            or newest is None
            or (whole and any(peer.member_id == member_id for peer in newest.known or ()))
        ):
            return False
        try:
            job = self.link.client.get_job(self.link.identity.job_id, member_id=member_id)
        except (UnavailableError, DeadlineError):
            return False
        return all(m.member_id != member_id for m in job.members)

    def all_have(self, generation: Generation, apart_from: Collection[int], step: int) -> bool:
        """Reports `step`, and asks the coordinator whether all other members have reported it
        (`Member.all_have`). Returns False while the coordinator is unavailable."""
        self.link.has_all(step)  # the caller has committed the step
        try:
            job = self.link.client.get_job(self.link.identity.job_id, below_step=step)
            behind = [m for m in job.members if m.member_id != self.link.identity.member_id]
            if job.generation.number == generation.number:
                return all(m.rank in apart_from for m in behind) and len(job.members) < _MOST_BEHIND
            if len(job.members) >= _MOST_BEHIND:  # the list is full, so there may be more members
                return False
            newest = self.link.newest_generation
            if (
                newest is not None
                and newest.number == job.generation.number == generation.number + 1
            ):
                # members that join after the last step do not matter; in a large world, the ranks
                # of `generation` can no longer be requested
                behind = [m for m in behind if m.rank not in newest.joining]
            return not behind or not (
                _holders(generation, apart_from) & {m.member_id for m in behind}
            )
        except (UnavailableError, DeadlineError):
            return False
        except MembershipChanged:
            # the ranks of that generation are no longer known, so no member with a rank may be
            # behind
            return False

    def last_departures(self) -> Sequence[str]:
        """Returns the members that have left or failed most recently (`Member.last_departures`).
        Asks the coordinator for events since the last call, unless it is unavailable."""
        try:
            job_id, after = self.link.identity.job_id, self._events_read
            for event in self.link.client.watch_events(
                job_id, after_event_id=after, deadline=_EVENTS_TIMEOUT
            ):
                self._events_read = event.event_id
                if event.kind in _DEPARTURES:
                    why = (
                        event.attributes.get("detail")
                        or event.attributes.get("ending")
                        or "no reason was given"
                    )
                    self._departures.appendleft(f"{event.member_id} ({why})")
        except (UnavailableError, DeadlineError):
            pass  # then only the known departures are returned
        return tuple(self._departures)

    def leave_group(self, reason: str) -> None:
        """Releases the group and closes its sockets, so that no peer waits for this process."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort(reason)
            started = time.monotonic()
            group.close()
            elapsed = time.monotonic() - started
            if elapsed > 1.0:
                _log.warning(
                    "closing the process group of generation %d took %.1f s",
                    group.generation.number,
                    elapsed,
                )

    def leave(
        self,
        reason: LeaveReason,
        detail: str = "",
        *,
        alone: bool = False,
        steps: int = 0,
        held: LastState | None = None,
    ) -> str:
        """Closes the session with the coordinator and releases the group. Idempotent. For the
        arguments, see `Member.leave`."""
        self._drained = self._drained or reason == LeaveReason.DRAINED
        if self._watch is not None:
            self._watch.close()
        apart = self.link.leave(reason, detail, alone=alone, steps=steps, held=held)
        if reason == LeaveReason.FINISHED and not alone and self._group is not None:
            self._group.all_leave()
        self.leave_group("this member left the job")
        asked = self._drained or self.link.stopped is not None or self.link.refused is not None
        if reason == LeaveReason.FINISHED and not asked and not apart:
            self._notify_launcher("finished")
        return apart

    def _notify_launcher(self, what: str) -> None:
        """Writes `what` ("joined" or "finished") to the launcher's file, because the launcher needs
        this information even if the coordinator is unavailable."""
        if self._settings.member_file is not None:
            self._settings.member_file.write_text(what)

    def _announce(self, forming: Forming) -> None:
        with self._lock:
            self._forming = forming
        if self.link.newest > forming.generation.number:
            forming.abort("a newer generation was announced")
        if self.link.stopped_now:
            forming.abort(_NO_MORE_MEMBERS)

    def _give_up_forming(self) -> None:
        with self._lock:
            forming = self._forming
        if forming is not None:
            forming.abort(_NO_MORE_MEMBERS)

    def _interrupt(self, generation: Generation) -> None:
        with self._lock:
            group, forming = self._group, self._forming
        if forming is not None and forming.generation.number < generation.number:
            forming.abort(f"superseded by generation {generation.number}")
        if group is not None and group.generation.number < generation.interrupts_below:
            group.abort(f"superseded by generation {generation.number}")
