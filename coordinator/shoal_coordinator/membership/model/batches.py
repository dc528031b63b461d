"""Leases the batches of an epoch to members, first come, first served. A lost member's batches can
be leased again.

`Epoch` and `Loader` are the frozen values that are stored. `Ledger` is the working copy of an epoch
within a transition, so that a thousand requests copy the leases only once. Finished batches need
not be stored: a batch is finished if it was leased before and is now neither leased nor returned.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Response to a member's last numbered request, sent again if the request is retried."""

    sequence: int
    batches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """State of the batches in one epoch of a loader: which of them are leased, and to which
    members."""

    batches: int
    """Number of batches, numbered from 0."""
    first_key: int = 0
    """Key of batch 0, as used by the parameter servers. Batch n has this key plus n."""
    dealt: int = 0
    """All batches below this number have been leased at least once."""
    returned: tuple[int, ...] = ()
    """Numbers of batches that were leased before and must be leased again, ascending."""
    leased: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Member id -> batches that the member has not finished; never an empty tuple. A batch occurs
    at most once in `leased` and `returned` together."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """Member id -> the response to its last numbered request."""
    batch_ms: Mapping[str, int] = field(default_factory=dict)
    """Member id -> milliseconds per batch, for members that report it."""

    @property
    def is_done(self) -> bool:
        """True if every batch is finished."""
        return self.dealt == self.batches and not self.returned and not self.leased


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The newest epochs of a loader."""

    epochs: Mapping[int, Epoch]
    """Epoch number -> its leases; never empty."""


class Ledger:
    """Mutable working copy of an epoch's leases within a transition."""

    def __init__(self, epoch: Epoch) -> None:
        self.batches = epoch.batches
        self.first_key = epoch.first_key
        self.changed = False
        """True if the epoch must be written again."""
        self._dealt = epoch.dealt
        self._returned = list(epoch.returned)
        self._leased = dict(epoch.leased)
        self._answers = dict(epoch.answers)
        self._batch_ms = dict(epoch.batch_ms)
        self._speed = sum(1 / each for each in self._batch_ms.values())
        """Batches per millisecond of all members that report their speed."""

    def repeated(self, member_id: str, sequence: int) -> Answer | None:
        """Returns the recorded response if the request numbered `sequence` has already been
        handled; None if it is new. For an older request, returns the response to the newest one."""
        answer = self._answers.get(member_id)
        return answer if answer is not None and sequence <= answer.sequence else None

    def finish(self, member_id: str, finished: Iterable[int]) -> None:
        """Records that a member has finished batches. Ignores batches that are not leased to it,
        since the message may be a retry."""
        done = set(finished)
        left = tuple(batch for batch in self._leased.get(member_id, ()) if batch not in done)
        self.changed |= len(left) < len(self._leased.get(member_id, ()))
        if left:
            self._leased[member_id] = left
        else:
            self._leased.pop(member_id, None)

    def held(self, member_id: str, *, without: Iterable[int] = ()) -> int:
        """Returns the number of batches leased to a member, not counting those in `without`."""
        done = set(without)
        return sum(batch not in done for batch in self._leased.get(member_id, ()))

    def keeps_pace(self, member_id: str, batch_ms: int) -> None:
        """Records the time that a member needs per batch, which determines its share; 0 means
        unknown."""
        if batch_ms:
            self._forget_pace(member_id)
            self._batch_ms[member_id] = batch_ms
            self._speed += 1 / batch_ms

    def lease(self, member_id: str, want: int, sequence: int, *, members: int) -> tuple[int, ...]:
        """Leases up to `want` batches, returned batches first. Records the response if the request
        is numbered (`sequence` above 0).

        The member may hold at most half of the free batches, multiplied by its share of the total
        speed of `members` members, but at least one batch. Late members therefore still get
        batches, and no member waits long for the last ones (guided self-scheduling;
        Polychronopoulos and Kuck, IEEE Transactions on Computers, 1987).
        """
        free, held = (
            len(self._returned) + self.batches - self._dealt,
            len(self._leased.get(member_id, ())),
        )
        most = math.ceil(free * self._share(member_id, members) / 2)
        want = min(want, max(most - held, 0 if held else 1), free)
        batches = [heapq.heappop(self._returned) for _ in range(min(want, len(self._returned)))]
        fresh = min(want - len(batches), self.batches - self._dealt)
        batches.extend(range(self._dealt, self._dealt + fresh))
        self._dealt += fresh
        if batches:
            self._leased[member_id] = (*self._leased.get(member_id, ()), *batches)
        self.changed |= bool(batches or sequence)
        if sequence:
            self._answers[member_id] = Answer(sequence=sequence, batches=tuple(batches))
        return tuple(batches)

    def _share(self, member_id: str, members: int) -> float:
        """Returns this member's fraction of the total speed of `members` members. Members that have
        not reported a speed are assumed to be as fast as this one."""
        if member_id not in self._batch_ms:
            return 1 / max(1, members)
        speed = 1 / self._batch_ms[member_id]
        return speed / (self._speed + speed * max(0, members - len(self._batch_ms)))

    def _forget_pace(self, member_id: str) -> None:
        if member_id in self._batch_ms:
            self._speed -= 1 / self._batch_ms.pop(member_id)

    def take_back(self, member_id: str, batches: Iterable[int] | None = None) -> int:
        """Ends a member's leases of `batches` (None: all of its leases), so that these batches can
        be leased again. Returns the number of leases that were ended."""
        held = self._leased.pop(member_id, ())
        asked = set(held if batches is None else batches)
        if left := tuple(batch for batch in held if batch not in asked):
            self._leased[member_id] = left
        batches = [batch for batch in held if batch in asked]
        for batch in batches:
            heapq.heappush(self._returned, batch)
        self.changed |= bool(batches)
        return len(batches)

    def give_back(self, member_id: str) -> int:
        """Ends all leases of a lost member, so that its batches can be leased again, and deletes
        the record of its requests. Returns the number of leases that were ended."""
        self._answers.pop(member_id, None)
        self._forget_pace(member_id)
        self.changed = True
        return self.take_back(member_id)

    def holds_of(self, member_id: str) -> bool:
        """Returns whether the epoch has a record of this member: its leases, the last response sent
        to it, or its speed."""
        return (
            member_id in self._leased or member_id in self._answers or member_id in self._batch_ms
        )

    def close(self) -> Epoch:
        """Returns the frozen epoch at the end of the transition."""
        return Epoch(
            batches=self.batches,
            first_key=self.first_key,
            dealt=self._dealt,
            returned=tuple(sorted(self._returned)),
            leased=self._leased,
            answers=self._answers,
            batch_ms=self._batch_ms,
        )

    @property
    def is_done(self) -> bool:
        """True if every batch is finished."""
        return self._dealt == self.batches and not self._returned and not self._leased


_KEYS_OF_AN_EPOCH: Final = 1 << 28


def first_key_of(job_id: str, run: int, loader: str, epoch: int, begun_unix_ms: int) -> int:
    """Returns the key of an epoch's batch 0: a positive 64-bit number, small enough for the keys of
    all other batches to follow it. Each run of a job gets different keys, even for the same epoch.
    Servers that continue with the values of the previous run would otherwise mistake new batches
    for batches that they have already received."""
    digest = hashlib.blake2b(
        f"{job_id}\n{run}\n{loader}\n{epoch}\n{begun_unix_ms}".encode(), digest_size=8
    ).digest()
    return max(1, int.from_bytes(digest, "little") // _KEYS_OF_AN_EPOCH) * _KEYS_OF_AN_EPOCH
