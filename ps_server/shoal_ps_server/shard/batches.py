"""Which leased batches each member has pushed to the end, so that one which is dealt again after its death is not applied twice.

A member pushes batch after batch: when it begins another one, all partitions of this server have the one before. So for those it has
finished the server remembers keys, and for the one it is at, each partition does (partition.py). Batches that follow one another have
keys that do, so a member's finished batches are a few runs of keys. Belongs to the thread that owns the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

MOST_RUNS: Final = 64
"""How many runs of one member are kept; the oldest are forgotten. There is one for each block of batches that it leased."""


@dataclass(kw_only=True)
class MemberBatches:
    """One member's."""

    current: int = 0
    """Key of the batch that it pushed last; 0: that had none."""
    finished: list[tuple[int, int]] = field(default_factory=list)
    """First key and end of each run of keys before that, the oldest run first."""

    def begin(self, batch: int) -> None:
        """The member pushes something of `batch`."""
        if batch == self.current:
            return
        done, self.current = self.current, batch
        if not done or done in self:
            return
        if self.finished and self.finished[-1][1] == done:
            self.finished[-1] = (self.finished[-1][0], done + 1)
        else:
            self.finished.append((done, done + 1))
            del self.finished[:-MOST_RUNS]

    def __contains__(self, batch: int) -> bool:
        return any(first <= batch < end for first, end in self.finished)


class Batches:
    """All members'."""

    def __init__(self, restored: Mapping[str, MemberBatches] | None = None) -> None:
        self._members = {} if restored is None else {member: _copy(batches) for member, batches in restored.items()}

    def begin(self, member_id: str, batch: int) -> None:
        """A member pushes something of `batch`; 0: of no leased one."""
        self._members.setdefault(member_id, MemberBatches()).begin(batch)

    def is_finished(self, batch: int) -> bool:
        """Some member has pushed all of it here."""
        return batch != 0 and any(batch in batches for batches in self._members.values())

    def forget(self, member_ids: Iterable[str]) -> None:
        """Members that will not come back."""
        for member_id in member_ids:
            self._members.pop(member_id, None)

    def members(self) -> tuple[str, ...]:
        """Those of whom something is known."""
        return tuple(self._members)

    def copy(self) -> dict[str, MemberBatches]:
        """A copy, for a snapshot."""
        return {member: _copy(batches) for member, batches in self._members.items()}


def _copy(batches: MemberBatches) -> MemberBatches:
    return MemberBatches(current=batches.current, finished=list(batches.finished))
