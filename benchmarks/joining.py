"""Determines from the workers' step logs when a group is complete, and how long a join delayed the
others. Does not start any process."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.errors import MeasurementError
from benchmarks.workers.steplog import Commit

STEPS_AROUND: Final = 10
"""Maximum number of steps before a join and after it that are searched for the stall and give the
median."""
_TAKEN: Final = re.compile(r"received ([\d.]+) MB of state from \d+ donor\(s\) in ([\d.]+) s")


def members(commits: Mapping[int, Sequence[Commit]], *, workers: int, since_ns: int) -> list[int]:
    """Returns the pids, by rank, of workers that have taken more than `STEPS_AROUND` steps as a
    group of this size since that time; empty if there is no such group. A process that has exited
    is not included, because it has taken no steps since."""
    late = {
        pid: [commit for commit in of_pid if commit.time_ns > since_ns]
        for pid, of_pid in commits.items()
    }
    whole = {
        pid: of_pid for pid, of_pid in late.items() if _whole_steps(of_pid, workers) > STEPS_AROUND
    }
    return sorted(whole, key=lambda pid: whole[pid][-1].rank) if len(whole) == workers else []


def _whole_steps(commits: Sequence[Commit], workers: int) -> int:
    return next(
        (number for number, commit in enumerate(reversed(commits)) if commit.world_size != workers),
        len(commits),
    )


def stall_s(commits: Sequence[Commit], *, workers: int) -> tuple[float, float]:
    """Returns the wait that a join caused in one remaining worker, in seconds: (longest step minus
    median step, median step) around the join, from the times at which that worker committed steps
    between the kill and the time after the join.

    Raises:
        MeasurementError: it took no step between the death and the join, so the two cannot be
            distinguished.
    """
    shrunk = next(
        (number for number, commit in enumerate(commits) if commit.world_size < workers), None
    )
    joined = (
        None
        if shrunk is None
        else next(
            (n for n in range(shrunk, len(commits)) if commits[n].world_size == workers), None
        )
    )
    if shrunk is None or joined is None:
        raise MeasurementError(
            "no step of the survivors lies between the death and the join: take a state that is "
            "trained faster"
        )
    times = [
        commit.time_ns
        for commit in commits[max(shrunk, joined - 1 - STEPS_AROUND) : joined + 1 + STEPS_AROUND]
    ]
    steps = [(end - begin) / 1e9 for begin, end in itertools.pairwise(times)]
    median = statistics.median(steps)
    return max(steps) - median, median


def taken(output: str) -> list[tuple[float, float]]:
    """Returns bytes and seconds of each state that Shoal's workers have received, oldest first,
    according to their output."""
    return [
        (float(megabytes) * 1e6, float(seconds)) for megabytes, seconds in _TAKEN.findall(output)
    ]
