"""The table of a generation's ranks, as coordinator and members both know it: its digest, and how
one table follows from another.

A generation of thousands is told to its members by what has changed since the one before, with a
digest of the whole. So this is the one place that says what the digest covers, and what a change
means; who may be told what is the coordinator's affair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from shoal_common.errors import CorruptDataError

T = TypeVar("T")

MOST_TOLD_WHOLE: Final = 64
"""Worlds of up to so many ranks are told whole, with each generation: that takes some kilobytes,
and nobody ever has to ask."""
DIGEST_BYTES: Final = 16


def line(member_id: str, host: str, donor_address: str, donor_key: str) -> str:
    """What the digest covers of one rank. None of the four may hold a line break."""
    return f"{member_id}\t{host}\t{donor_address}\t{donor_key}"


def digest(lines: Iterable[str]) -> bytes:
    """The digest of a table, from the lines of its ranks in rank order."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).digest()


def follow(table: Sequence[T], removed: Sequence[int], added: Sequence[tuple[int, T]]) -> list[T]:
    """The table without the ranks `removed` (its own, ascending) and with those that are `added`,
    each at its new rank, ascending.

    Raises:
        CorruptDataError: the change does not fit this table.
    """
    gone = set(removed)
    if len(gone) != len(removed) or any(not 0 <= rank < len(table) for rank in gone):
        raise CorruptDataError(
            f"a change removes ranks {list(removed)[:5]} of a table that has {len(table)}"
        )
    kept = iter([each for rank, each in enumerate(table) if rank not in gone] if gone else table)
    found: list[T] = []
    for rank, each in added:
        while len(found) < rank:
            try:
                found.append(next(kept))
            except StopIteration:
                raise CorruptDataError(
                    f"a change adds rank {rank} to a table that has {len(found)} by then"
                ) from None
        if len(found) != rank:
            raise CorruptDataError(
                f"a change adds rank {rank} where there are {len(found)}: its ranks do not ascend"
            )
        found.append(each)
    found.extend(kept)
    return found


def runs(ranks: Iterable[int]) -> list[int]:
    """Ascending ranks as the first of each run and its length, alternately."""
    found: list[int] = []
    for rank in ranks:
        if found and rank == found[-2] + found[-1]:
            found[-1] += 1
        else:
            found += (rank, 1)
    return found


def of_runs(found: Sequence[int], world_size: int) -> Iterator[int]:
    """The ranks that `runs` was given. Raises CorruptDataError where they are none of a world of
    `world_size`."""
    if len(found) % 2:
        raise CorruptDataError(f"runs of ranks come in pairs, not as {len(found)} numbers")
    for first, count in zip(found[::2], found[1::2], strict=True):
        if first < 0 or count < 1 or first + count > world_size:
            raise CorruptDataError(
                f"ranks {first} to {first + count - 1} in a world of {world_size}"
            )
        yield from range(first, first + count)
