"""Recorded histories of pushes and pulls, and the guarantees of asp, ssp and bsp for them.

A value identifies the pushes in it: every partition has one element for each member, and each push
of a member adds 1 to that element (plain SGD with lr=1 and a gradient of -1 there). So the result
of a pull is a vector of counts, and each guarantee is a statement about counts.

The members' threads write a `History` while they train, and the checks read it after they have
ended. Each check raises `BrokenPromise`, which names the pull and the guarantee. The guarantees of
`check_asp` hold under every consistency.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Counts = tuple[int, ...]
"""Number of pushes of each member in a partition's values, in the order of members."""


class BrokenPromise(AssertionError):
    """A history that violates a guarantee."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """One push to all partitions."""

    member: int
    number: int
    """1, 2, 3, ... for each member."""
    began: float
    ended: float
    """Time of the acknowledgement by `time.monotonic()`; infinite without one."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """The result of one pull."""

    member: int
    iteration: int
    """Number of iterations that the member has finished, counted from the beginning of the job,
    even for a joiner."""
    began: float
    ended: float
    counts: Mapping[int, Counts]
    """Counts by partition."""


@dataclass(kw_only=True)
class History:
    """The actions of members, each in its own order. Any thread may add to it."""

    pushes: list[Push] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)

    @contextmanager
    def pushing(self, member: int, number: int) -> Iterator[None]:
        """Records the push that is made in the context."""
        began = time.monotonic()
        ended = float("inf")
        try:
            yield
            ended = time.monotonic()
        finally:
            self.pushes.append(Push(member=member, number=number, began=began, ended=ended))

    @contextmanager
    def pulling(self, member: int, iteration: int) -> Iterator[dict[int, Counts]]:
        """Records the pull that is made in the context and fills in the yielded counts. A failed
        pull is not recorded."""
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
    """Checks that every pull sees each push at most once, all pushes acknowledged before it began,
    and none that began after it ended. A member's view of a partition never goes back."""
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
                        f"{_named(pull, partition)}: {count} pushes of member {member}; {least} "
                        f"were acknowledged before, {most} had begun"
                    )
            before = seen.setdefault((pull.member, partition), counts)
            if any(now < then for now, then in zip(counts, before, strict=True)):
                raise BrokenPromise(
                    f"{_named(pull, partition)}: this member had seen {before} there"
                )
            seen[pull.member, partition] = counts


def check_ssp(
    history: History,
    *,
    bound: int,
    since: Sequence[int] = (),
    until: Mapping[int, int] | None = None,
) -> None:
    """Checks asp's guarantees, and that a pull after k iterations sees all pushes of iterations up
    to k - bound of all members (Ho et al., NIPS 2013, section 2).

    since: number of iterations of the job before each member joined; empty if all members were
    there from the beginning.
    until: number of iterations of the job before a member left, for those that did.
    """
    check_asp(history)
    for pull in history.pulls:
        for partition, counts in pull.counts.items():
            for member, count in enumerate(counts):
                least = _pushed(member, pull.iteration - bound, since, until)
                if count < least:
                    raise BrokenPromise(
                        f"{_named(pull, partition)}: {count} pushes of member {member}, at least "
                        f"{least} were due with a bound of {bound}"
                    )


def check_bsp(
    history: History, *, since: Sequence[int] = (), until: Mapping[int, int] | None = None
) -> None:
    """Checks asp's guarantees, and that a pull after k iterations sees all pushes of iterations up
    to k of all members, and no later pushes. All pulls after k iterations therefore see the same
    values. `since` and `until` are as in `check_ssp`."""
    check_asp(history)
    read: dict[tuple[int, int], Counts] = {}
    for pull in history.pulls:
        for partition, counts in pull.counts.items():
            due = tuple(
                _pushed(member, pull.iteration, since, until) for member in range(len(counts))
            )
            if counts != due:
                raise BrokenPromise(f"{_named(pull, partition)}: exactly {due} were due")
            if (other := read.setdefault((pull.iteration, partition), counts)) != counts:
                raise BrokenPromise(
                    f"{_named(pull, partition)}: another member read {other} in this iteration"
                )


def pushes_by_member(history: History) -> dict[int, int]:
    """Returns the number of acknowledged pushes of each member."""
    found: dict[int, int] = defaultdict(int)
    for push in history.pushes:
        found[push.member] += push.ended < float("inf")
    return dict(found)


def _pushed(
    member: int, iteration: int, since: Sequence[int], until: Mapping[int, int] | None
) -> int:
    """Returns the number of pushes that a member has made by the end of an iteration of the job,
    one in each iteration in which it took part."""
    last = min(iteration, (until or {}).get(member, iteration))
    return max(0, last - (since[member] if since else 0))


def _named(pull: Pull, partition: int) -> str:
    return (
        f"member {pull.member} after {pull.iteration} iterations reads {pull.counts[partition]} "
        f"in partition {partition}"
    )
