"""Rank table of a generation: its digest, and the changes from one table to the next.

Members of a generation of thousands of ranks receive only the changes since the previous
generation, and a digest of the full table. This module defines the digest's input and the format of
a change; the coordinator decides which members receive a change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from shoal_common.errors import CorruptDataError

T = TypeVar("T")

MOST_SENT_WHOLE: Final = 64
"""Maximum world size at which the full table is always sent. Such a table takes a few kilobytes, so
that members need not request it."""
DIGEST_BYTES: Final = 16


def line(member_id: str, host: str, donor_address: str, donor_key: str) -> str:
    """Returns the line of text that represents one rank in the digest. None of the four values may
    contain a line break."""
    return f"{member_id}\t{host}\t{donor_address}\t{donor_key}"


def digest(lines: Iterable[str]) -> bytes:
    """Returns the digest of a rank table. `lines`: the result of `line` for each rank, in rank
    order."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).digest()


def follow(table: Sequence[T], removed: Sequence[int], added: Sequence[tuple[int, T]]) -> list[T]:
    """Applies a change to a rank table, and returns the new table. `removed`: ranks in the old
    table, ascending. `added`: pairs of new rank and entry, ascending.

    Raises:
        CorruptDataError: the change does not fit this table.
    """
    gone = set(removed)
    if len(gone) != len(removed) or any(not 0 <= rank < len(table) for rank in gone):
        raise CorruptDataError(
            f"a change removes ranks {list(removed)[:5]} from a table of {len(table)} ranks; "
            "expected distinct ranks of the table"
        )
    kept = iter([each for rank, each in enumerate(table) if rank not in gone] if gone else table)
    found: list[T] = []
    for rank, each in added:
        while len(found) < rank:
            try:
                found.append(next(kept))
            except StopIteration:
                raise CorruptDataError(
                    f"a change adds rank {rank}, but only {len(found)} ranks precede it"
                ) from None
        if len(found) != rank:
            raise CorruptDataError(
                f"a change adds rank {rank} after {len(found)} ranks; expected its ranks in "
                "ascending order"
            )
        found.append(each)
    found.extend(kept)
    return found


def runs(ranks: Iterable[int]) -> list[int]:
    """Encodes ascending ranks as ranges of consecutive ranks: [first rank, length, first rank,
    length, ...]."""
    found: list[int] = []
    for rank in ranks:
        if found and rank == found[-2] + found[-1]:
            found[-1] += 1
        else:
            found += (rank, 1)
    return found


def of_runs(found: Sequence[int], world_size: int) -> Iterator[int]:
    """Yields the ranks encoded by `runs`. Raises CorruptDataError if a rank is not below
    `world_size`, or the encoding is invalid."""
    if len(found) % 2:
        raise CorruptDataError(f"runs of ranks are encoded by {len(found)} numbers; expected pairs")
    for first, count in zip(found[::2], found[1::2], strict=True):
        if first < 0 or count < 1 or first + count > world_size:
            raise CorruptDataError(
                f"invalid ranks {first} to {first + count - 1} for world size {world_size}"
            )
        yield from range(first, first + count)
