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
    """Returns the pids, by rank, of a group of `workers` workers that have each taken more than
    `STEPS_AROUND` steps together since the time `since_ns`; empty if there is no such group. A
    worker that died before that time is not included, because it has not taken any steps since."""
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
    """Returns the delay that a join caused in one survivor: the longest step around the join minus
    the median step there, and that median step, in seconds.

    `commits`: steps that the survivor committed from the kill until after the join. `workers`:
    number of workers before the kill and after the join.

    Raises:
        MeasurementError: the survivor took no step between the death and the join, so the two
            pauses cannot be distinguished.
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
    """Returns the size in bytes and the duration in seconds of each transfer of a state to a worker
    of Shoal, oldest first. `output`: output of the workers."""
    return [
        (float(megabytes) * 1e6, float(seconds)) for megabytes, seconds in _TAKEN.findall(output)
    ]
