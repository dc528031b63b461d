"""All jobs of this coordinator, loaded when it starts or created on request, each with its own
loop. Belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from datetime import timedelta

from shoal_common.errors import (
    InternalError,
    LimitError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.tasks import end_tasks

from shoal_coordinator.membership.model.effects import Record
from shoal_coordinator.membership.model.events import RunWanted
from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.spec import Policy
from shoal_coordinator.membership.model.state import JobState, RunId
from shoal_coordinator.membership.runs import RunEnding, RunGranted
from shoal_coordinator.membership.transition import job_created
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.job_loop import JobLoop
from shoal_coordinator.state.codec import encode_changes, everything
from shoal_coordinator.state.store import FencedError, JobStore, Stored

logger = logging.getLogger(__name__)

_EPOCH_CHECK_INTERVAL_S = 1.0
_LONGEST_SWEEP_INTERVAL_S = 60.0
_MOST_JOBS = 10_000
"""Maximum number of jobs of one coordinator, including remembered jobs without members."""


class Jobs:
    """The loops of all jobs, by job id. `failed` is set if this coordinator must stop, because a
    newer coordinator has taken over or because of a bug."""

    def __init__(
        self,
        store: JobStore,
        *,
        clock: Clock,
        policy: Policy,
        metrics: CoordinatorMetrics,
        retention: timedelta,
    ) -> None:
        """`retention`: how long the store keeps a job without members."""
        self.failed: asyncio.Future[ShoalError] = asyncio.get_running_loop().create_future()
        self.closing = False
        """True if this coordinator is shutting down. A closed stream then does not indicate that
        its member has died."""
        self._store = store
        self._clock = clock
        self._policy = policy
        self._metrics = metrics
        self._loops: dict[str, JobLoop] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = asyncio.Lock()
        self._retention = retention
        self._sweep_interval_s = min(_LONGEST_SWEEP_INTERVAL_S, retention.total_seconds() / 4)

    async def load(self) -> None:
        """Claims all jobs in Redis and starts their loops. Also starts watching for a newer
        coordinator."""
        self._keep(asyncio.create_task(self._clock.tick(), name="clock"))
        for stored in await self._store.load_all():
            self._start(stored)
        self._keep(asyncio.create_task(self._watch_epoch(), name="epoch"))
        self._keep(asyncio.create_task(self._sweep(), name="sweep"))

    def get(self, job_id: str) -> JobLoop:
        """Returns the loop of a job. Raises UnknownResourceError if there is no such job."""
        loop = self._loops.get(job_id)
        if loop is None:
            raise UnknownResourceError(
                f"there is no job {job_id!r}; list the jobs with `shoal jobs`, or create it with "
                "CreateJob",
                reason=Refusal.JOB_UNKNOWN,
            )
        return loop

    def states(self) -> list[JobState]:
        """Returns the states of all jobs, ordered by id. May be called from any thread."""
        return [loop.state for _, loop in sorted(self._loops.copy().items())]

    def observed(self) -> list[ObservedJob]:
        """Returns the current state of all jobs, ordered by id. May be called from any thread."""
        return [loop.observed() for _, loop in sorted(self._loops.copy().items())]

    async def create(self, wanted: RunWanted, *, timeout_s: float) -> tuple[bool, RunGranted]:
        """Creates a job or finds an existing one. Returns whether the job was created, and the
        caller's run. Raises the errors of `runs.run_wanted`, and UnavailableError while a run that
        has ended still has members."""
        spec = wanted.spec
        try:
            async with asyncio.timeout(timeout_s), self._creating:
                created = spec.job_id not in self._loops and await self._create(wanted)
        except TimeoutError:
            raise UnavailableError(
                f"Redis did not create job {spec.job_id} within {timeout_s:g} s; try again",
                reason=Refusal.STORAGE_UNAVAILABLE,
            ) from None
        except FencedError as error:
            self._fail(error)
            raise
        job = self.get(spec.job_id)
        if created:
            return True, RunGranted(run=job.state.run, begun=True, previous=None)
        granted = await job.ask(wanted, timeout_s=timeout_s)
        if isinstance(granted, RunEnding):
            raise UnavailableError(f"{granted.why}; try again", reason=Refusal.RUN_ENDING)
        assert isinstance(granted, RunGranted)
        return False, granted

    async def confirm(self, refusal: ShoalError, *, timeout_s: float) -> None:
        """Checks against Redis that a refusal is up to date. Must be called before RUN_ENDED or
        RUN_UNKNOWN is sent, since the caller then exits or discards its state. Raises
        UnavailableError if a different coordinator has, or may have, newer information.

        Refusals are not written to Redis. Without this check, a coordinator that was cut off from
        Redis or suspended could therefore give an outdated answer.
        """
        if refusal.reason not in (Refusal.RUN_ENDED, Refusal.RUN_UNKNOWN) or not isinstance(
            refusal, PreconditionError
        ):
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._store.check_epoch()
        except TimeoutError:
            raise UnavailableError(
                f"Redis did not confirm within {timeout_s:g} s that this coordinator knows the "
                "newest run of every job; try again",
                reason=Refusal.STORAGE_UNAVAILABLE,
            ) from None
        except FencedError as error:
            self._fail(error)
            raise

    async def close(self, error: ShoalError) -> None:
        """Stops all loops, and closes all streams with `error`."""
        self.closing = True
        for loop in self._loops.values():
            loop.fail(error)
        await end_tasks(self._tasks.copy())

    async def _create(self, wanted: RunWanted) -> bool:
        spec, given = wanted.spec, wanted.run
        stored = await self._store.claim(spec.job_id)
        if stored is not None:
            self._start(stored)
            return False
        if len(self._loops) >= _MOST_JOBS:
            deserted = sum(loop.state.is_deserted for loop in self._loops.values())
            raise LimitError(
                f"this coordinator already has {len(self._loops)} jobs, the maximum. {deserted} "
                f"of them have no members and are deleted {self._retention} after their last "
                "change. Reuse a job's id for its next run, or lower --job-retention",
                reason=Refusal.JOBS_LIMIT,
            )
        # If Redis has lost the job, a participant's request contains its run.
        run = RunId(
            number=1 if given is None else given.number, began_unix_ms=self._clock.now().unix_ms
        )
        state = job_created(spec, given if given is not None and given.began_unix_ms else run)
        await self._store.register(spec.job_id)
        unix_ms = await self._store.commit(
            state,
            encode_changes(state, everything(state)),
            [Record(kind="job_created", run=state.run.number)],
            revision=0,
            commit_id=secrets.token_hex(8),
            durable=True,
        )
        self._clock.adjust(unix_ms)
        self._start(Stored(state=state, revision=1))
        logger.info("job created", extra={"job_id": spec.job_id})
        return True

    def _start(self, stored: Stored) -> None:
        if self.closing:
            # the coordinator has begun to shut down, so nothing would stop the new loop and its
            # sessions
            raise UnavailableError(
                "this coordinator is shutting down; try again", reason=Refusal.COORDINATOR_STOPPING
            )
        loop = JobLoop(
            stored, store=self._store, clock=self._clock, policy=self._policy, metrics=self._metrics
        )
        job_id = stored.state.spec.job_id
        self._loops[job_id] = loop
        self._keep(asyncio.create_task(loop.run(), name=f"job {job_id}"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, FencedError):
                logger.error("%s ended", task.get_name(), exc_info=error)
            self._fail(
                error
                if isinstance(error, ShoalError)
                else InternalError(f"{task.get_name()} ended: {error!r}")
            )

    def _fail(self, error: ShoalError) -> None:
        """Stops this coordinator after the loop of one job has failed. The job's state in memory
        may be wrong, or a newer coordinator may have taken over the job."""
        if not self.failed.done():
            self.failed.set_result(error)
        self.closing = True
        reason = (
            Refusal.COORDINATOR_REPLACED
            if isinstance(error, FencedError)
            else Refusal.COORDINATOR_STOPPING
        )
        for loop in self._loops.values():
            loop.fail(UnavailableError(f"this coordinator has shut down: {error}", reason=reason))

    async def _watch_epoch(self) -> None:
        """Checks regularly whether a newer coordinator has taken over. Every commit checks this as
        well; this loop stops a coordinator that commits nothing, so that its members connect to the
        new one."""
        while True:
            await asyncio.sleep(_EPOCH_CHECK_INTERVAL_S)
            try:
                await self._store.check_epoch()
                self._metrics.redis_up.set(1)
            except FencedError:
                raise
            except UnavailableError:
                self._metrics.redis_up.set(0)

    async def _sweep(self) -> None:
        """Forgets jobs that Redis has deleted, at regular intervals."""
        while True:
            await asyncio.sleep(self._sweep_interval_s)
            deserted = [job_id for job_id, loop in self._loops.items() if loop.state.is_deserted]
            with contextlib.suppress(UnavailableError):  # tries again at the next interval
                for job_id in await self._store.dropped(deserted) if deserted else []:
                    await self._forget(job_id)

    async def _forget(self, job_id: str) -> None:
        loop = self._loops[job_id]
        if not loop.is_idle:
            return  # a request in progress will write the job again
        del self._loops[job_id]
        loop.fail(
            UnknownResourceError(
                f"job {job_id!r} was deleted because it had no members for the retention time "
                "(--job-retention)",
                reason=Refusal.JOB_UNKNOWN,
            )
        )
        await self._store.forget(job_id)
        logger.info("job forgotten", extra={"job_id": job_id})
