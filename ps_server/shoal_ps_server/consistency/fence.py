"""Who may still act on this server: a pure core.

The coordinator names the members of each generation; this remembers who was put out, and when.

Asynchronous training is not interrupted by a change of membership, so a member's generation need
not be the newest: a member that is still in may go on in the one it knows. What must not get
through is what a member sent before it was put out. So the fence refuses

- members that are not in the newest generation known here, and
- generations up to the last one without the member, when it was put out and is in again.

A caller whose generation is above every one known here is neither let in nor refused, also a
member: the news has not reached this server yet.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal_common.errors import StaleGenerationError
from shoal_common.security import check_member_key

_NONE: Final[Mapping[str, str]] = {}

REMEMBERED = 1024
"""Members out of the job whose sequence numbers and put-out generations are kept, in case they come
back."""


class Verdict(enum.Enum):
    """What the fence says of a caller it does not refuse."""

    ADMITTED = "admitted"
    UNHEARD_OF = "unheard of"
    """Its generation is newer than any known here: ask again when the coordinator has spoken."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a new membership changed."""

    joined: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()
    """Out for so long that nothing is kept of them."""


@dataclass(kw_only=True)
class Fence:
    """Invariants: `generation` never falls; `put_out` has the members out of the job that are still
    remembered, and those back in it."""

    generation: int = -1
    """The newest known; 0: the job has none yet; -1: the coordinator has not spoken."""
    members: frozenset[str] = frozenset()
    put_out: dict[str, int] = field(default_factory=dict)
    """Member -> the newest generation without it, oldest departure first."""
    key_digests: dict[str, str] = field(default_factory=dict)
    """Member of the newest generation -> the digest of its key; without those that have none."""

    @classmethod
    def restored(
        cls,
        *,
        generation: int,
        members: Iterable[str],
        put_out: Mapping[str, int],
        key_digests: Mapping[str, str] = _NONE,
    ) -> Fence:
        """Makes the fence that a snapshot held."""
        return cls(
            generation=generation,
            members=frozenset(members),
            put_out=dict(put_out),
            key_digests=dict(key_digests),
        )

    def learn(
        self, generation: int, members: Iterable[str], key_digests: Mapping[str, str] = _NONE
    ) -> Change:
        """The coordinator names a generation's members, and the digests of the keys of those that
        have one. An older generation than the known one is old news, and changes nothing."""
        if generation < self.generation:
            return Change()
        now = frozenset(members)
        change = Change(joined=now - self.members, left=self.members - now)
        self.generation, self.members, self.key_digests = generation, now, dict(key_digests)
        for member in sorted(change.left):
            self.put_out.pop(member, None)  # so that it goes to the end
            self.put_out[member] = generation
        for member in self.put_out.keys() - now:
            self.put_out[member] = generation
        return Change(joined=change.joined, left=change.left, forgotten=self._forget())

    def remember(self, others: Fence) -> None:
        """Takes over whom another server knows to have been put out. It knows no newer generation
        than this one does."""
        known = dict(others.put_out) | dict.fromkeys(others.members - self.members, self.generation)
        for member in known.keys() & self.put_out.keys():
            self.put_out[member] = max(self.put_out[member], known.pop(member))
        self.put_out = known | self.put_out

    def check_key(self, member: str, key: str) -> None:
        """Raises PermissionDeniedError when `key` is not that of this member of the newest
        generation."""
        check_member_key(member, self.key_digests.get(member, ""), key)

    def check(self, member: str, generation: int) -> Verdict:
        """Raises StaleGenerationError for a caller that is fenced off for good."""
        if member in self.members:
            if generation <= (floor := self.put_out.get(member, -1)):
                raise StaleGenerationError(
                    f"member {member!r} speaks for generation {generation}, but it was not in "
                    f"generation {floor}: what it began before is void; go on in the generation it "
                    "was ranked in again"
                )
            return Verdict.ADMITTED if generation <= self.generation else Verdict.UNHEARD_OF
        if generation > self.generation:
            return Verdict.UNHEARD_OF
        raise StaleGenerationError(
            f"member {member!r} (generation {generation}) is not in generation {self.generation}, "
            "the newest known here; join again or end"
        )

    def _forget(self) -> frozenset[str]:
        forgotten = [member for member in self.put_out if member not in self.members][
            : max(0, len(self.put_out) - REMEMBERED)
        ]
        for member in forgotten:
            del self.put_out[member]
        return frozenset(forgotten)
