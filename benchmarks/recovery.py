"""Determines, from the workers' step logs, when a group of workers has settled and when it has
recovered from a kill. Does not kill any process."""

from __future__ import annotations

import time

from benchmarks.workers.steplog import Commit, StepLogs

SETTLED_STEPS = 20
"""Number of steps that every worker must take in one group before the group counts as complete."""
_FRESH_NS = 1_000_000_000


class Recovery:
    """The recovery from one kill: first waits for the group to settle, and then for enough workers
    to take steps again."""

    def __init__(self, logs: StepLogs, *, workers: int, recovered: int, restarted: bool) -> None:
        """
        Args:
            logs: step logs of the workers.
            workers: number of workers before the kill.
            recovered: number of workers that must take steps again.
            restarted: True if these are new processes.
        """
        self._logs = logs
        self._workers = workers
        self._needed = recovered
        self._restarted = restarted
        self._members: dict[int, Commit] = {}
        self._victims: frozenset[int] = frozenset()
        self._killed_ns = 0
        self._first: dict[int, int] = {}

    def settled(self) -> bool:
        """Returns whether all workers have been taking steps together for a while."""
        self._logs.read()
        now = time.monotonic_ns()
        newest = {
            pid: commits[-1]
            for pid, commits in self._logs.commits.items()
            if commits and now - commits[-1].time_ns < _FRESH_NS
        }
        if (
            len(newest) != self._workers
            or len({(c.group, c.world_size) for c in newest.values()}) != 1
        ):
            return False
        self._members = newest
        return all(
            commit.world_size == self._workers
            and self._steps_in(pid, commit.group) >= SETTLED_STEPS
            for pid, commit in newest.items()
        )

    def _steps_in(self, pid: int, group: int) -> int:
        commits = self._logs.commits[pid][-SETTLED_STEPS:]
        return sum(1 for c in commits if c.group == group)

    @property
    def members(self) -> list[int]:
        """Pids of the workers in the settled group, by rank."""
        return sorted(self._members, key=lambda pid: self._members[pid].rank)

    def killed(self, pid: int, *, at_ns: int) -> None:
        """Records that the worker `pid` got SIGKILL at this CLOCK_MONOTONIC time."""
        self._victims = frozenset([pid])
        self._killed_ns = at_ns

    def over(self) -> bool:
        """Returns whether enough workers have committed a step in a group that is newer than the
        killed worker's group. Steps that the old group still commits are ignored."""
        self._logs.read()
        for pid, commits in self._logs.commits.items():
            known = self._members.get(pid)
            if pid in self._victims or pid in self._first or (known is None) != self._restarted:
                continue
            for commit in reversed(commits):
                if commit.time_ns < self._killed_ns or (
                    known is not None and commit.group <= known.group
                ):
                    break
                self._first[pid] = commit.time_ns
        return len(self._first) >= self._needed

    @property
    def last_to_recover(self) -> tuple[int, int]:
        """Pid of the worker whose commit ended the recovery, and the time of that commit in ns by
        CLOCK_MONOTONIC."""
        return sorted(self._first.items(), key=lambda item: item[1])[self._needed - 1]

    @property
    def pause_s(self) -> float:
        """Seconds from the kill until the last of the workers committed its next step."""
        return (self.last_to_recover[1] - self._killed_ns) / 1e9
