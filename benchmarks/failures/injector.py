"""Carries out a schedule of faults on the workers of a running system."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.failures.schedule import Fault
from benchmarks.systems import System
from benchmarks.workers.failures.ledger import Entries, Ledgers


class Injector:
    """Follows one run through its ledgers, kills workers, and delays their replacements. The
    benchmark's main thread polls it by calling `over`."""

    def __init__(
        self,
        system: System,
        ledgers: Ledgers,
        *,
        absent: Path,
        faults: Iterator[Fault],
        ranks: int,
        steps: int,
    ) -> None:
        """
        Args:
            system: started workers.
            ledgers: their ledgers.
            absent: file that keeps new workers from joining as long as it exists.
            faults: faults to carry out; their times are relative to `begun_ns`.
            ranks: number of workers when none is absent.
            steps: number of the last step; no fault occurs after it.
        """
        self._system = system
        self._ledgers = ledgers
        self._absent = absent
        self._faults = faults
        self._next = next(faults, None)
        self._ranks = ranks
        self._steps = steps
        self._returns_ns = 0
        self.begun_ns = 0
        """Time at which all workers first committed a step together; 0 before that."""
        self.kills_ns: list[int] = []
        self.returns_ns: list[int] = []
        """Times at which absences ended. There is one fewer than there are kills while a worker is
        absent."""

    def over(self) -> bool:
        """Carries out the faults that are due. Returns whether the run is over, that is, whether
        all workers that took the last step have finished."""
        self._ledgers.read()
        if not self.begun_ns:
            self.begun_ns = self._begun()
            return False
        last = {
            pid: entries
            for pid, entries in self._ledgers.of.items()
            if entries.attempts and entries.attempts[-1].step == self._steps
        }
        if any(each.attempts[-1].committed_ns is not None for each in last.values()):
            self._return()
            return any(each.digest for each in last.values()) and all(
                each.digest or not _is_alive(pid) for pid, each in last.items()
            )
        now = time.monotonic_ns()
        if self._absent.exists():
            if now >= self._returns_ns:
                self._return()
        elif self._next is not None and now >= self.begun_ns + self._next.at_s * 1e9:
            self._kill(self._next)
        return False

    def _begun(self) -> int:
        firsts = [
            next(
                (
                    attempt.committed_ns
                    for attempt in entries.attempts
                    if attempt.committed_ns is not None and attempt.world_size == self._ranks
                ),
                None,
            )
            for entries in self._ledgers.of.values()
        ]
        times = [first for first in firsts if first is not None]
        return max(times) if len(times) >= self._ranks else 0

    def _kill(self, fault: Fault) -> None:
        alive = [
            pid
            for pid, entries in sorted(self._ledgers.of.items(), key=_by_start)
            if entries.started_ns and _is_alive(pid)
        ]
        if not alive:
            return  # all are being started again; the fault waits for one
        self._absent.touch()
        killed_ns = time.monotonic_ns()
        self._system.kill(alive[int(fault.victim * len(alive))])
        self.kills_ns.append(killed_ns)
        self._returns_ns = killed_ns + int(fault.absent_s * 1e9)
        self._system.replace()
        self._next = next(self._faults, None)

    def _return(self) -> None:
        if self._absent.exists():
            self._absent.unlink()
            self.returns_ns.append(time.monotonic_ns())


def _by_start(item: tuple[int, Entries]) -> int:
    return item[1].started_ns


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
