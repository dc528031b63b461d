"""Recorded histories of pushes and pulls, and what asp, ssp and bsp promise of them.

A value tells who pushed how often: every partition has one element for each member, and each push
of a member adds 1 to that element (plain SGD with lr=1, and a gradient of -1 there). So what a pull
brought is a vector of counts, and a promise is a sentence about counts.

`History` is written by the members' threads while they train; the checks read it when they have
ended. Each check raises `BrokenPromise`, which names the pull and the promise. What `check_asp`
finds is promised under every consistency.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Counts = tuple[int, ...]
"""Number of pushes of each member, by its place, in a partition's values."""


class BrokenPromise(AssertionError):
    """A history that must not be."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """One push to all partitions."""

    member: int
    number: int
    """1, 2, 3, ... of the member's."""
    began: float
    ended: float
    """Time of the acknowledgement by `time.monotonic()`; infinite without one."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """The result of one pull."""

    member: int
    iteration: int
    """Number of iterations that the member has finished, counted from the beginning of the job,
    also for a joiner."""
    began: float
    ended: float
    counts: Mapping[int, Counts]
    """Partition -> counts."""


@dataclass(kw_only=True)
class History:
    """The actions of members, each in its own order. Any thread may add to it."""

    pushes: list[Push] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)

    @contextmanager
    def pushing(self, member: int, number: int) -> Iterator[None]:
        """Around a push."""
        began = time.monotonic()
        ended = float("inf")
        try:
            yield
            ended = time.monotonic()
        finally:
            self.pushes.append(Push(member=member, number=number, began=began, ended=ended))

    @contextmanager
    def pulling(self, member: int, iteration: int) -> Iterator[dict[int, Counts]]:
        """Around a pull, which fills in what it brought. One that fails is not recorded."""
        began = time.monotonic()
        counts: dict[int, Counts] = {}
        yield counts
        self.pulls.append(
            Pull(
                member=member,
                iteration=iteration,
                began=began,
                ended=time.monotonic(),
                counts=counts,
            )
        )


def check_asp(history: History) -> None:
    """Every pull sees each push once, all that were acknowledged before it began, and none that had
    not begun when it ended. What one member sees of a partition never goes back."""
    seen: dict[tuple[int, int], Counts] = {}
    for pull in sorted(history.pulls, key=lambda pull: pull.began):
        for partition, counts in pull.counts.items():
            for member, count in enumerate(counts):
                least = sum(
                    push.member == member and push.ended <= pull.began for push in history.pushes
                )
                most = sum(
                    push.member == member and push.began <= pull.ended for push in history.pushes
                )
                if not least <= count <= most:
                    raise BrokenPromise(
                        f"{_told(pull, partition)}: {count} pushes of member {member}; {least} "
                        f"were acknowledged before, {most} had begun"
                    )
            before = seen.setdefault((pull.member, partition), counts)
            if any(now < then for now, then in zip(counts, before, strict=True)):
                raise BrokenPromise(
                    f"{_told(pull, partition)}: this member had seen {before} there"
                )
            seen[pull.member, partition] = counts


def check_ssp(
    history: History,
    *,
    bound: int,
    since: Sequence[int] = (),
    until: Mapping[int, int] | None = None,
) -> None:
    """Beside what asp promises: a pull after k iterations sees all pushes of iterations up to k -
    bound of all members (Ho et al., NIPS 2013, section 2).

    `since`: for each member how many iterations the job had behind it when it came; none given: all
    were there from the beginning. `until`: how many it had when a member left, for those that did.
    """
    check_asp(history)
    for pull in history.pulls:
        for partition, counts in pull.counts.items():
            for member, count in enumerate(counts):
                least = _pushed(member, pull.iteration - bound, since, until)
                if count < least:
                    raise BrokenPromise(
                        f"{_told(pull, partition)}: {count} pushes of member {member}, at least "
                        f"{least} were due with a bound of {bound}"
                    )


def check_bsp(
    history: History, *, since: Sequence[int] = (), until: Mapping[int, int] | None = None
) -> None:
    """Beside what asp promises: a pull after k iterations sees all pushes of iterations up to k of
    all members, and none of a later one; so all that pull after k iterations see the same. `since`,
    `until`: as `check_ssp` has them."""
    check_asp(history)
    read: dict[tuple[int, int], Counts] = {}
    for pull in history.pulls:
        for partition, counts in pull.counts.items():
            due = tuple(
                _pushed(member, pull.iteration, since, until) for member in range(len(counts))
            )
            if counts != due:
                raise BrokenPromise(f"{_told(pull, partition)}: exactly {due} were due")
            if (other := read.setdefault((pull.iteration, partition), counts)) != counts:
                raise BrokenPromise(
                    f"{_told(pull, partition)}: another member read {other} in this iteration"
                )


def pushes_by_member(history: History) -> dict[int, int]:
    """Returns how many pushes of each member were acknowledged."""
    found: dict[int, int] = defaultdict(int)
    for push in history.pushes:
        found[push.member] += push.ended < float("inf")
    return dict(found)


def _pushed(
    member: int, iteration: int, since: Sequence[int], until: Mapping[int, int] | None
) -> int:
    """Returns how many pushes a member has made by the end of an iteration of the job, one in each
    that it took part in."""
    last = min(iteration, (until or {}).get(member, iteration))
    return max(0, last - (since[member] if since else 0))


def _told(pull: Pull, partition: int) -> str:
    return (
        f"member {pull.member} after {pull.iteration} iterations reads {pull.counts[partition]} "
        f"in partition {partition}"
    )
