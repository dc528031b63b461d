"""Decides which members may still act on this server. Pure core without I/O.

The coordinator announces the members of each generation; the fence remembers evicted members, each
with the newest generation without it.

Membership changes do not interrupt asynchronous training, so a member need not act in the newest
generation: a current member may continue in an older generation. Messages that were sent before
their sender was evicted must not be accepted. The fence therefore refuses

- members that are not in the newest generation known to this server, and
- for a member that was evicted and has returned, all generations up to the last one without it.

A caller's generation may be newer than all generations known to this server, because the
coordinator has not announced it to the server yet. The fence then neither admits nor refuses the
caller.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal_common.errors import StaleGenerationError
from shoal_common.security.authentication import check_member_key

_NONE: Final[Mapping[str, str]] = {}

REMEMBERED = 1024
"""Maximum number of former members that are remembered, with their sequence numbers and the
generation in which they were evicted, in case they return."""


class Verdict(enum.Enum):
    """The fence's answer for a caller that it does not refuse."""

    ADMITTED = "admitted"
    UNHEARD_OF = "unheard of"
    """The caller's generation is not known here yet. Check again once the coordinator has announced
    it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Effects of adopting the members of a generation."""

    joined: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()
    """Members that have been absent for so long that their state has been dropped."""


@dataclass(kw_only=True)
class Fence:
    """Current and former members of the job. Invariants: `generation` never decreases; `evicted`
    contains the remembered former members and the members that have returned."""

    generation: int = -1
    """Newest generation known here; 0 if the job has none yet; -1 if the coordinator has not
    announced any."""
    members: frozenset[str] = frozenset()
    evicted: dict[str, int] = field(default_factory=dict)
    """Member -> newest generation without it. The earliest departure comes first."""
    key_digests: dict[str, str] = field(default_factory=dict)
    """Member of the newest generation -> digest of its key. Members without a key are omitted."""

    @classmethod
    def restored(
        cls,
        *,
        generation: int,
        members: Iterable[str],
        evicted: Mapping[str, int],
        key_digests: Mapping[str, str] = _NONE,
    ) -> Fence:
        """Restores a fence from a snapshot."""
        return cls(
            generation=generation,
            members=frozenset(members),
            evicted=dict(evicted),
            key_digests=dict(key_digests),
        )

    def learn(
        self, generation: int, members: Iterable[str], key_digests: Mapping[str, str] = _NONE
    ) -> Change:
        """Adopts the members of a generation and the digests of their keys, as announced by the
        coordinator. Ignores a generation older than the newest known one."""
        if generation < self.generation:
            return Change()
        now = frozenset(members)
        change = Change(joined=now - self.members, left=self.members - now)
        self.generation, self.members, self.key_digests = generation, now, dict(key_digests)
        for member in sorted(change.left):
            self.evicted.pop(member, None)  # removed first, so that the new entry is at the end
            self.evicted[member] = generation
        for member in self.evicted.keys() - now:
            self.evicted[member] = generation
        return Change(joined=change.joined, left=change.left, forgotten=self._forget())

    def remember(self, others: Fence) -> None:
        """Adds the members that the fence of another server has recorded as evicted. That server
        must not know a newer generation than this server."""
        known = dict(others.evicted) | dict.fromkeys(others.members - self.members, self.generation)
        for member in known.keys() & self.evicted.keys():
            self.evicted[member] = max(self.evicted[member], known.pop(member))
        self.evicted = known | self.evicted

    def check_key(self, member: str, key: str) -> None:
        """Raises PermissionDeniedError if `key` is not the key of this member of the newest
        generation."""
        check_member_key(member, self.key_digests.get(member, ""), key)

    def check(self, member: str, generation: int) -> Verdict:
        """Returns whether a caller is admitted, or has a generation that this server does not know
        yet. Raises StaleGenerationError if the caller will never be admitted in this generation."""
        if member in self.members:
            if generation <= (floor := self.evicted.get(member, -1)):
                raise StaleGenerationError(
                    f"stale generation {generation} of member {member!r}, which was not in "
                    f"generation {floor}; retry in its current generation"
                )
            return Verdict.ADMITTED if generation <= self.generation else Verdict.UNHEARD_OF
        if generation > self.generation:
            return Verdict.UNHEARD_OF
        raise StaleGenerationError(
            f"member {member!r} (generation {generation}) is not in generation {self.generation}, "
            "the newest known to this server; join again, or exit"
        )

    def _forget(self) -> frozenset[str]:
        forgotten = [member for member in self.evicted if member not in self.members][
            : max(0, len(self.evicted) - REMEMBERED)
        ]
        for member in forgotten:
            del self.evicted[member]
        return frozenset(forgotten)
