"""One job under a seeded schedule of faults, which is recorded (recording.py) and judged at its end
(checking.py).

Its processes are a `Cluster`, and their faults come from `Faults`. This module decides how long the
faults last, checks that training makes progress in the meantime, and brings the job to a regular
end.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.history import training
from tests.history.checking import Job, promises
from tests.history.cluster import Cluster
from tests.history.faults import Faults
from tests.history.lines import History, Violation
from tests.history.modes import BOUND, Mode
from tests.history.targets import Target
from tests.history.verdict import Verdict, counts
from tests.zygote.children import Child, Zygote

_LOOK_S = 0.01
"""Polling interval for processes and files, whose changes cause no event; every such wait has a
deadline."""
_PACE_S = 0.5
"""Mean time between two faults."""
_FIRST_PACE_S = 2.0
"""Mean time between two faults before the first push is acknowledged. These faults do not count
towards the requested number."""
_SNAPSHOT_PACE_S = 1.0
_PROGRESS_EVERY = 20
"""Number of faults within which some push must have been acknowledged."""
_PROGRESS_WITHIN_S = 60.0


class Campaign:
    """A campaign, used by the thread that creates it. Another thread requests the snapshots."""

    def __init__(
        self, zygote: Zygote, directory: Path, *, mode: str, seed: int, faults: int
    ) -> None:
        """`mode`: one of `MODES`; `faults`: minimum number of faults."""
        self._mode, self._seed, self._goal = Mode.of(mode, seed), seed, faults
        self._chance = random.Random(f"{mode} {seed}")
        self._unexpected: list[Violation] = []
        self._cluster = Cluster(zygote, directory, self._mode, seed=seed)
        self._faults = Faults(
            self._cluster, self._mode, self._chance, unexpected=self._unexpected.append
        )
        self._snapshots = 0

    def run(self) -> Verdict:
        """Runs the campaign and returns its verdict. All processes that it has started have exited
        when it returns."""
        begun = time.monotonic()
        with self._cluster, self._faults, self._snapshots_being_asked_for():
            self._strike_until_enough()
            self._end_well()
            owners = {} if self._unexpected else self._cluster.owners()
        return self._judge(time.monotonic() - begun, owners)

    def _strike_until_enough(self) -> None:
        due, progress_at = time.monotonic() + self._chance.expovariate(1 / _FIRST_PACE_S), 0
        before: int | None = None
        """Number of faults before the first acknowledged push; None until then."""
        while (
            before is None or self._faults.done.total() < before + self._goal
        ) and not self._unexpected:
            self._faults.attend()
            if before is None and self._cluster.acknowledged():
                before = self._faults.done.total()
            if (now := time.monotonic()) >= due:
                self._faults.strike()
                due = now + self._chance.expovariate(
                    1 / (_FIRST_PACE_S if before is None else _PACE_S)
                )
                if self._faults.done.total() >= progress_at + _PROGRESS_EVERY:
                    progress_at = self._faults.done.total()
                    self._await_progress()
            time.sleep(_LOOK_S)

    @contextmanager
    def _snapshots_being_asked_for(self) -> Iterator[None]:
        chance, over = random.Random(self._seed), threading.Event()

        def ask() -> None:
            while not over.wait(chance.expovariate(1 / _SNAPSHOT_PACE_S)):
                self._snapshots += self._cluster.ask_for_a_snapshot(chance)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _await_progress(self) -> None:
        before, deadline = self._cluster.acknowledged(), time.monotonic() + _PROGRESS_WITHIN_S
        while self._cluster.acknowledged() == before and not self._unexpected:
            self._faults.attend()
            time.sleep(_LOOK_S)
            if time.monotonic() > deadline:
                self._unexpected.append(
                    Violation(
                        f"nothing was acknowledged for {_PROGRESS_WITHIN_S:g} s after fault "
                        f"{self._faults.done.total()}; {_said(self._cluster.workers)}"
                    )
                )

    def _end_well(self) -> None:
        """Restarts and resumes all processes, and lets the workers finish their epoch."""
        self._faults.end()
        while self._faults.are_pending and not self._unexpected:
            self._faults.attend()
            time.sleep(_LOOK_S)
        self._cluster.end_epoch()
        deadline = time.monotonic() + 2 * _PROGRESS_WITHIN_S
        waiting = [*self._cluster.workers, *self._cluster.servers]
        asked: list[Child] = []
        while waiting and not self._unexpected:
            for target in [*waiting, self._cluster.coordinator]:
                if target.child is None or not target.child.ended.is_set():
                    continue
                if target in waiting and target.child.status == 0 and not target.doomed:
                    waiting.remove(target)
                else:
                    self._faults.has_ended(target)
            for target in waiting:
                if (
                    target.child is not None
                    and target.child not in asked
                    and target.waits_for_another_run
                ):
                    asked.append(target.child)
                    target.child.kill(signal.SIGTERM)  # there will be none
            self._faults.do_what_is_due()
            if time.monotonic() > deadline:
                names = ", ".join(each.name for each in waiting)
                self._unexpected.append(
                    Violation(f"{names} did not come to the end; {_said(waiting)}")
                )
            time.sleep(_LOOK_S)

    def _judge(self, seconds: float, owners: Mapping[str, frozenset[int]]) -> Verdict:
        cluster, faults, mode = self._cluster, self._faults, self._mode.name
        verdict = Verdict(mode=mode, seed=self._seed, faults=faults.done, seconds=seconds)
        history = History.read(cluster.history)
        if self._unexpected:
            verdict.broken["every process goes on, or comes back"] = self._unexpected
        job = Job(
            records=cluster.records,
            snapshots=[cluster.held_at_the_end(*each) for each in owners.items()],
            adam=training.ADAM,
            batch_size=training.BATCH_SIZE,
            bound=BOUND if mode == "ssp" else None,
            in_step=mode == "bsp",
            table=training.table() if self._mode.has_table else None,
        )
        for promise, find in promises(history, job, ended_well=not self._unexpected).items():
            violations = list(itertools.islice(find(), 1000))
            if violations:
                verdict.broken[promise] = violations
            else:
                verdict.held.append(promise)
        verdict.counts = counts(history) | {
            "snapshots": self._snapshots,
            "processes started again": faults.restarts,
            "members evicted": faults.evicted,
            "servers drained": faults.drained,
        }
        return verdict


def _said(targets: Sequence[Target]) -> str:
    """Returns the last part of each process's output."""
    return "\n".join(
        f"{each.name}: {each.child.said()[-1500:]}" for each in targets if each.child is not None
    )
