"""Follows the commands of a run on Ray until the run has ended, and determines its outcome.

Ray itself restarts processes that were lost with a machine (`bundles`). This module interprets how
a command ended, decides which commands to wait for when the run has ended, and notices when no
launchers are left. A command that was ended externally, such as by a signal, is run again in its
bundle (docs/exit-status.md).

All objects belong to the thread that calls `Supervision.run`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import ray
from ray.exceptions import RayError
from shoal_common.errors import DeadlineError, UnavailableError

from shoal.ray.command import Command, Ended

_log = logging.getLogger("shoal.ray")

_TICK_S: Final = 0.5
_LOOK_S: Final = 5.0
"""Interval in seconds between checks that an actor is running."""
_ANSWER_S: Final = 10.0
"""Time in seconds without a response after which an actor counts as not running, because its
machine is lost or Ray has no place for it."""
_END_GRACE_S: Final = 300.0
"""Maximum wait in seconds for the other launchers after one has finished. Their scripts have
reached the same end and may still be saving results."""
_FAILURE_GRACE_S: Final = 90.0
"""Maximum wait in seconds for the other launchers after the job has failed. They give their workers
30 s to leave."""
_LEAVE_S: Final = 5.0
"""Maximum time in seconds for an actor to confirm that it has forwarded SIGTERM."""
_MOST_RERUNS: Final = 10


@dataclass(eq=False)
class Seat:
    """A command, the actor that runs it, and its results so far."""

    name: str
    command: Command
    actor: Any
    result: Any = None
    """Ray's reference to the result of the running command; None once the command has ended
    permanently."""
    look: Any = None
    """Ray's reference to a pending check that the actor is running; None if there is none."""
    looked_at: float = 0.0
    answered_at: float | None = None
    host: str = ""
    """Host name of the actor's machine; empty while the actor is not running."""
    pid: int = 0
    """Process id of the actor on its machine. It changes when Ray restarts the actor."""
    earlier: list[Ended] = field(default_factory=list)
    """Results of earlier executions of the command, before it was run again."""

    def begin(self) -> None:
        self.result = self.actor.run.remote(self.command)

    @property
    def is_there(self) -> bool:
        """True if the actor has responded recently."""
        return self.answered_at is not None and time.monotonic() < self.answered_at + _ANSWER_S


@dataclass
class Outcome:
    """Results of the launchers of a run."""

    finished: list[Ended] = field(default_factory=list)
    """Results of launchers that exited with status 0; if there are any, the job is finished."""
    failed: list[Ended] = field(default_factory=list)
    """Results of launchers that exited with a different status and were not run again."""
    earlier: list[Ended] = field(default_factory=list)
    """Results of earlier executions of launchers that were run again."""
    lost: list[str] = field(default_factory=list)
    """Ray's errors for launchers that could not be run."""

    @property
    def came_to_the_end(self) -> bool:
        """True if the script finished on all of the run's last workers: at least one launcher
        finished, and none failed."""
        return bool(self.finished) and not any(ended.has_failed for ended in self.failed)


class Supervision:
    """Supervision of one run. `run` may be called once."""

    def __init__(
        self,
        launchers: Sequence[Seat],
        servers: Sequence[Seat],
        *,
        tend: Callable[[], None],
        patience: timedelta,
    ) -> None:
        """Starts supervising a run.

        Args:
            launchers: launchers of the run. The run ends when they have exited.
            servers: parameter servers, which exit after the launchers.
            tend: function to call every half second.
            patience: maximum time without a place for any launcher.
        """
        self._launchers = list(launchers)
        self._servers = list(servers)
        self._tend = tend
        self._patience = patience
        self._outcome = Outcome()
        self._ending_at: float | None = None
        """Time at which the first launcher ended permanently; None if none has."""
        self._seen_at = time.monotonic()
        """Time at which a launcher last responded."""

    def run(self) -> Outcome:
        """Blocks until the job has ended, and returns the outcome. Raises DeadlineError if, for
        longer than `patience`, no launcher has been running, and UnavailableError if a parameter
        server is permanently lost."""
        for seat in (*self._servers, *self._launchers):
            seat.begin()
        while left := self._left(self._launchers):
            if self._is_over(left):
                break
            running = {seat.result: seat for seat in (*left, *self._left(self._servers))}
            for result in ray.wait(list(running), num_returns=1, timeout=_TICK_S)[0]:
                self._hear(running[result])
            self._look()
            self._tend()
        return self._outcome

    def stop(self, grace: timedelta) -> None:
        """Sends SIGTERM to the running commands, and blocks until they have exited or `grace` has
        passed."""
        left = [
            *(seat for seat in self._left(self._launchers) if seat.is_there),
            *self._left(self._servers),
        ]
        asked = {self._ask(seat.actor.stop): seat for seat in left}
        heard, _ = (
            ray.wait(list(asked), num_returns=len(asked), timeout=_LEAVE_S) if asked else ([], [])
        )
        results = [asked[each].result for each in heard]
        if results:
            ray.wait(results, num_returns=len(results), timeout=grace.total_seconds())

    @staticmethod
    def _left(seats: Sequence[Seat]) -> list[Seat]:
        return [seat for seat in seats if seat.result is not None]

    @staticmethod
    def _ask(method: Any) -> Any:
        """Sends a request to the current incarnation of an actor. If Ray replaces the actor, the
        request is not retried."""
        return method.options(max_task_retries=0).remote()

    # --------------------------------------------------------------------------- exits of launchers

    def _hear(self, seat: Seat) -> None:
        try:
            ended: Ended = ray.get(seat.result)
        except RayError as error:
            seat.result = None
            self._given_up(seat, f"{type(error).__name__}: {error}")
            return
        seat.result = None
        if ended.status == 0 and seat in self._launchers:
            self._outcome.finished.append(ended)
            self._begin_to_end()
        elif ended.status == 0:
            pass  # a server that exited with its job
        elif self._may_run_again(seat, ended):
            seat.earlier.append(ended)
            _log.warning(
                f"{seat.name} on {ended.host} ended with status {ended.status}; restarting it"
            )
            seat.begin()
        elif seat in self._servers or (ended.was_ended and self._ending_at is None):
            self._given_up(
                seat,
                f"it ended {len(seat.earlier) + 1} times, last with status {ended.status} on "
                f"{ended.host}; see its output",
            )
        else:
            self._outcome.earlier += seat.earlier
            self._outcome.failed.append(ended)
            if ended.has_failed or self._ending_at is not None:
                self._begin_to_end()
            else:
                # The launcher started too late or did not reach the coordinator, or the job has
                # failed and the other launchers exit on their own.
                _log.warning(
                    f"{seat.name} on {ended.host} ended with status {ended.status}, but none of "
                    "its workers failed; the others continue"
                )

    def _may_run_again(self, seat: Seat, ended: Ended) -> bool:
        if self._ending_at is not None or len(seat.earlier) >= _MOST_RERUNS:
            return False
        return seat in self._servers or ended.was_ended

    def _given_up(self, seat: Seat, why: str) -> None:
        if seat in self._servers and self._ending_at is None:
            raise UnavailableError(
                f"{seat.name} cannot be recovered: {why}", reason="SERVICE_FAILED"
            )
        if seat in self._launchers:
            self._outcome.lost.append(f"{seat.name}: {why}")
            _log.warning(f"{seat.name} was abandoned, and the others continue: {why}")

    def _begin_to_end(self) -> None:
        """Starts shutting down the run. From now on, launchers that are not running are no longer
        awaited, since they would start too late."""
        if self._ending_at is None:
            self._ending_at = time.monotonic()
            for seat in self._left(self._launchers):
                seat.look, seat.looked_at, seat.answered_at = None, 0.0, None

    def _is_over(self, left: Sequence[Seat]) -> bool:
        now = time.monotonic()
        if self._ending_at is not None:
            grace_s = _END_GRACE_S if self._outcome.finished else _FAILURE_GRACE_S
            unanswered = (
                all(seat.answered_at is None for seat in left) and now > self._ending_at + _ANSWER_S
            )
            return unanswered or now > self._ending_at + grace_s
        if now > self._seen_at + self._patience.total_seconds():
            raise DeadlineError(
                f"no launcher has run for {self._patience.total_seconds():g} s "
                "(placement_timeout), since Ray has no place for any; add nodes",
                reason="RESOURCES_UNAVAILABLE",
            )
        return False

    # ----------------------------------------------------------------------------- checks of actors

    def _look(self) -> None:
        now = time.monotonic()
        for seat in self._left(self._launchers):
            if seat.look is not None and ray.wait([seat.look], timeout=0)[0]:
                self._answered(seat)
            if seat.look is None and now > seat.looked_at + _LOOK_S:
                seat.look, seat.looked_at = self._ask(seat.actor.where), now
            if seat.host and not seat.is_there and self._ending_at is None:
                _log.warning(
                    f"{seat.name} was lost with machine {seat.host}; Ray will place it "
                    "elsewhere, and the others continue"
                )
                seat.host = ""

    def _answered(self, seat: Seat) -> None:
        look, seat.look = seat.look, None
        try:
            host, pid = ray.get(look)
        except RayError:
            if self._ending_at is None:
                seat.answered_at = None
            return
        seat.answered_at = self._seen_at = time.monotonic()
        if not seat.host:
            _log.info("%s runs on machine %s", seat.name, host)
        elif pid != seat.pid:
            _log.warning(
                f"{seat.name} was lost with machine {seat.host}; Ray placed it on {host}, and "
                "the others continued"
            )
        seat.host, seat.pid = host, pid
