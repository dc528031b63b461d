"""Determines which attempts at steps contributed to the final parameters of a run, from the ledgers
of its workers.

An attempt is a step in one membership, an agreed group of workers. Usually only the last committed
attempt at a step contributes ("counts"): if workers returned to a checkpoint and repeated the step,
the earlier attempt has left no trace in the parameters. If one process committed a step in two
memberships, both attempts count, because the process has changed its parameters twice. This module
measures nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.workers.failures.ledger import Attempt, Entries


@dataclass(frozen=True, kw_only=True)
class Account:
    """Number of lost and repeated samples and steps of a finished run."""

    never: int
    """Number of samples that were not trained in any attempt that counts."""
    twice: int
    """Number of times that a sample was trained again, in attempts that count."""
    redone: int
    """Number of attempts that do not count, because they were aborted or undone."""
    digests: frozenset[str]
    """Digests of the final parameters. If there is more than one, the workers' parameters
    differ."""


def account(entries: Iterable[Entries], *, steps: int, samples: int) -> Account:
    """Returns the account of a run. `steps`: number of steps of the run. `samples`: number of
    samples, each of which should be trained once."""
    entries = list(entries)
    tried: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    newest: dict[int, tuple[int, int]] = {}
    for attempt in _attempts(entries):
        tried[attempt.step, attempt.group] += attempt.samples
        if attempt.committed_ns is not None:
            newest[attempt.step] = max(
                newest.get(attempt.step, (0, 0)), (attempt.committed_ns, attempt.group)
            )
    counts = {(step, group) for step, (_, group) in newest.items()}
    for each in entries:
        counts |= _committed_again(each.attempts, counts)
    times = Counter(sample for key in counts for sample in tried[key])
    return Account(
        never=samples - len(times),
        twice=times.total() - len(times),
        redone=sum(1 for step, group in tried if step <= steps and (step, group) not in counts),
        digests=frozenset(each.digest for each in entries if each.digest),
    )


def _committed_again(
    attempts: Sequence[Attempt], counts: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Returns attempts of one process as pairs of step and membership: for each step of which the
    process committed an attempt in `counts`, all attempts that it committed. `attempts`: attempts
    of the process."""
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for attempt in attempts:
        if attempt.committed_ns is not None:
            groups[attempt.step].add(attempt.group)
    return {
        (step, group)
        for step, in_groups in groups.items()
        if any((step, group) in counts for group in in_groups)
        for group in in_groups
    }


def reached(entries: Iterable[Entries]) -> list[tuple[int, int]]:
    """Returns pairs (time in ns by CLOCK_MONOTONIC, step), ordered by time: when a step was first
    committed in each membership. Includes steps that were undone later."""
    first: dict[tuple[int, int], int] = {}
    for attempt in _attempts(entries):
        if attempt.committed_ns is not None:
            key = (attempt.step, attempt.group)
            first[key] = min(first.get(key, attempt.committed_ns), attempt.committed_ns)
    return sorted((time_ns, step) for (step, _), time_ns in first.items())


def reduced_s(
    entries: Iterable[Entries], kills_ns: Sequence[int], *, ranks: int, end_ns: int
) -> float:
    """Returns the seconds during which not all ranks were training: from each kill until a newer
    membership with all `ranks` has committed a step, or until `end_ns`. Overlapping periods count
    once."""
    commits = sorted(
        (attempt.committed_ns, attempt.group, attempt.world_size)
        for attempt in _attempts(entries)
        if attempt.committed_ns is not None
    )
    total, counted_until = 0, 0
    for killed_ns in sorted(kills_ns):
        before = max((group for time_ns, group, _ in commits if time_ns < killed_ns), default=-1)
        whole = min(
            (
                time_ns
                for time_ns, group, world_size in commits
                if time_ns > killed_ns and group > before and world_size == ranks
            ),
            default=end_ns,
        )
        until = min(whole, end_ns)
        total += max(0, until - max(killed_ns, counted_until))
        counted_until = max(counted_until, until)
    return total / 1e9


def _attempts(entries: Iterable[Entries]) -> Iterable[Attempt]:
    return (attempt for each in entries for attempt in each.attempts)
