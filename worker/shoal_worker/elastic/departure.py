"""How this process's part in the run ends: with its job, by being drained, or with its script.

Owns the reason why the job is to stop, once this process obeys it, and what has to be done before the goodbye. All of it runs on the
training thread, or at the process's end.

Here is also, as pure functions, which of the ranks that were asked to leave go at a border: as many as can while ranks that stay hold all
of the state. Each rank tells all others what it holds and whether it was asked to leave. Where two ranks hold the only copies of a shard,
one goes now; the ranks that are left cut the state anew, and then nobody misses the other. If none can go, as when a model's last replica
loses a rank, all stop together: their scripts run on, and can save what they hold between them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal_common.exit_status import PUT_OUT

from shoal_worker.elastic.committed_state import HeldState
from shoal_worker.elastic.loader_interface import Drained, StopTraining
from shoal_worker.elastic.member import LeaveReason, Member


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank tells the others at a border, of itself."""

    asked: bool
    """This rank was asked to leave."""
    excluded: bool
    """The coordinator has written a generation without it: it goes at this border."""
    holds: Sequence[str]
    """The parts of the state that it holds, by names that are the same on all ranks."""
    stopping: bool
    """This rank knows that the job stops. In such a job all ranks leave at one border, and the next step's closing says which."""
    joiners: bool
    """This rank knows of a newer generation, with members that are not in the present one."""


@dataclass(frozen=True, kw_only=True)
class WhoLeaves:
    """What follows."""

    now: frozenset[int]
    """Ranks that go at this border."""
    stop: bool
    """All are to stop, since those that were asked could never go alone."""


def who_leaves(told: Sequence[Told]) -> WhoLeaves:
    """Decides who leaves at a border. `told`: what each rank has told, in rank order; the same list on every rank."""
    if any(each.stopping for each in told):
        return WhoLeaves(now=frozenset(), stop=False)
    copies = Counter(part for each in told for part in each.holds)
    now: set[int] = set()
    for rank, each in sorted(enumerate(told), key=lambda one: (not one[1].excluded, one[0])):
        if not each.asked:
            continue
        if each.excluded or all(copies[part] > 1 for part in each.holds):
            now.add(rank)
            copies.subtract(each.holds)
    lost = any(count < 1 for count in copies.values())
    stuck = not now and any(each.asked for each in told) and not any(each.joiners for each in told)
    return WhoLeaves(now=frozenset() if lost or stuck else frozenset(now), stop=lost or stuck)


_log = logging.getLogger(__name__)


class Departure:
    """Notes that the run is to end, and says goodbye once."""

    def __init__(self, membership: Member | None, held: HeldState) -> None:
        self._membership = membership
        self._held = held
        self._callbacks: list[Callable[[], None]] = []

    @property
    def stopped(self) -> str | None:
        """Why no further step begins here; None: steps go on. Operations between steps still work."""
        return self._held.phase.stopped

    def on_leave(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, before this process says goodbye."""
        self._callbacks.append(callback)

    def obey(self, stop: StopTraining) -> None:
        """Notes that training stops. If this member alone leaves (`Drained`), and training has not stopped before: ends the process.

        Raises:
            SystemExit: status 0, drained.
        """
        if self.stopped is None and isinstance(stop, Drained):
            self.exit_drained(str(stop))
        self._held.phase.stop(str(stop))

    def exit_drained(self, reason: str) -> NoReturn:
        """Leaves the job and ends the process with status 0: the members that stay go on with the script. They do not wait for what this
        process still writes."""
        self._exit(reason, status=0)

    def exit_spare(self, why: str) -> NoReturn:
        """Ends the process, which is a spare and can do nothing where its script stands. Started again, it waits at the
        loop's beginning."""
        reason = f"{why}: it ends, to be started again"
        _log.warning("%s", reason)
        self._exit(reason, status=PUT_OUT)

    def _exit(self, reason: str, *, status: int) -> NoReturn:
        _log.info("leaving: %s", reason)
        self._held.phase.leave(reason)  # at the script's end there is nobody to wait for
        for source in self._held.sources:
            source.leaving()
        if self._membership is not None and not (self._held.has_engine and self._held.engine.asynchronous):
            self._membership.leave(LeaveReason.DRAINED, reason, alone=True)
        self.say_goodbye(LeaveReason.DRAINED, reason, alone=True)
        raise SystemExit(status)

    def finish(self) -> None:
        """Does what is to be done before the goodbye, once."""
        while self._callbacks:
            self._callbacks.pop()()

    def say_goodbye(self, reason: LeaveReason, detail: str = "", *, alone: bool = False) -> None:
        """Leaves the job, once everything is done that is to be done before. Where it has left already, does that. `alone`: its peers go
        on."""
        self.finish()
        if self._membership is not None:
            self._membership.leave(reason, detail, alone=alone, steps=self._held.steps)
