"""Which batches of an epoch are leased to whom: first come first served, and those of a lost member
dealt again.

`Epoch` and `Loader` are the frozen values that are kept; `Ledger` is the working copy of one epoch
within one transition, so that a thousand requests folded together copy the leases once. Which
batches are finished is not stored: they are those that were dealt and are neither leased nor
returned.
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
    """The last answer to a member that numbers its requests, so that a repeated request gets the
    same one."""

    sequence: int
    batches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Leases of one loader's epoch."""

    batches: int
    """How many it has; they are numbered from 0."""
    first_key: int = 0
    """What parameter servers know batch 0 by; batch n by n more."""
    dealt: int = 0
    """Batches below this were leased at least once."""
    returned: tuple[int, ...] = ()
    """Dealt to members that are gone, to be dealt again; ascending."""
    leased: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Member id -> batches it has not acknowledged yet; never empty ones. No batch is in two, or in
    `returned` too."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """Member id -> the answer to its last numbered request."""
    batch_ms: Mapping[str, int] = field(default_factory=dict)
    """Member id -> how long it takes for a batch; without those that have not said."""

    @property
    def is_done(self) -> bool:
        """Every batch is finished."""
        return self.dealt == self.batches and not self.returned and not self.leased


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The newest epochs of one loader."""

    epochs: Mapping[int, Epoch]
    """Epoch number -> its leases; at least one."""


class Ledger:
    """One epoch while a transition works on it."""

    def __init__(self, epoch: Epoch) -> None:
        self.batches = epoch.batches
        self.first_key = epoch.first_key
        self.changed = False
        """The epoch has to be written again."""
        self._dealt = epoch.dealt
        self._returned = list(epoch.returned)
        self._leased = dict(epoch.leased)
        self._answers = dict(epoch.answers)
        self._batch_ms = dict(epoch.batch_ms)
        self._speed = sum(1 / each for each in self._batch_ms.values())
        """Batches in a millisecond, of all that have said how long they take for one."""

    def repeated(self, member_id: str, sequence: int) -> Answer | None:
        """The answer that a request numbered `sequence` has had already; of a later request, if it
        is older than that."""
        answer = self._answers.get(member_id)
        return answer if answer is not None and sequence <= answer.sequence else None

    def finish(self, member_id: str, finished: Iterable[int]) -> None:
        """Acknowledges batches. What is not leased to this member is passed over: an
        acknowledgement said twice."""
        done = set(finished)
        left = tuple(batch for batch in self._leased.get(member_id, ()) if batch not in done)
        self.changed |= len(left) < len(self._leased.get(member_id, ()))
        if left:
            self._leased[member_id] = left
        else:
            self._leased.pop(member_id, None)

    def held(self, member_id: str, *, without: Iterable[int] = ()) -> int:
        """How many batches are leased to a member, but for those that it says to be finished."""
        done = set(without)
        return sum(batch not in done for batch in self._leased.get(member_id, ()))

    def keeps_pace(self, member_id: str, batch_ms: int) -> None:
        """Notes how long a member takes for a batch; 0: it does not say."""
        if batch_ms:
            self._forget_pace(member_id)
            self._batch_ms[member_id] = batch_ms
            self._speed += 1 / batch_ms

    def lease(self, member_id: str, want: int, sequence: int, *, members: int) -> tuple[int, ...]:
        """Leases up to `want` batches, returned ones first, and remembers the answer if the request
        is numbered (sequence above 0).

        With them the member has no more than its share, of `members` that there are and by their
        paces, of half of what is free, or one batch: who comes later finds some, and nobody waits
        long for the last ones (guided self-scheduling; Polychronopoulos and Kuck, IEEE Transactions
        on Computers, 1987).
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
        """The part of all members' work in a time that is this one's. Those that have not said how
        fast they are count as fast as it."""
        if member_id not in self._batch_ms:
            return 1 / max(1, members)
        speed = 1 / self._batch_ms[member_id]
        return speed / (self._speed + speed * max(0, members - len(self._batch_ms)))

    def _forget_pace(self, member_id: str) -> None:
        if member_id in self._batch_ms:
            self._speed -= 1 / self._batch_ms.pop(member_id)

    def take_back(self, member_id: str, batches: Iterable[int] | None = None) -> int:
        """What a member holds of these is to be dealt again, or with None all that it holds;
        returns how many batches there were."""
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
        """Takes the leases of a member that is gone, and forgets its requests; returns how many
        leases there were."""
        self._answers.pop(member_id, None)
        self._forget_pace(member_id)
        self.changed = True
        return self.take_back(member_id)

    def holds_of(self, member_id: str) -> bool:
        """There is something of this member to give back."""
        return (
            member_id in self._leased or member_id in self._answers or member_id in self._batch_ms
        )

    def close(self) -> Epoch:
        """The frozen value after this transition."""
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
        """Every batch is finished."""
        return self._dealt == self.batches and not self._returned and not self._leased


_KEYS_OF_AN_EPOCH: Final = 1 << 28


def first_key_of(job_id: str, run: int, loader: str, epoch: int, begun_unix_ms: int) -> int:
    """A number of 64 bits, above 0, with room for an epoch's batches behind it. Another run of the
    job has others, although its epochs have the same numbers: servers that go on with the values of
    the run before would take its batches for those."""
    digest = hashlib.blake2b(
        f"{job_id}\n{run}\n{loader}\n{epoch}\n{begun_unix_ms}".encode(), digest_size=8
    ).digest()
    return max(1, int.from_bytes(digest, "little") // _KEYS_OF_AN_EPOCH) * _KEYS_OF_AN_EPOCH
