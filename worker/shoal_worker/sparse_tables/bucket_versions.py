"""Tracks the versions of sparse tables' buckets, in a job whose ranks take steps together.

Each push increases a bucket's version by one, so every rank knows the version that each bucket has
after the last step. If a server reports a lower version, it has lost data, which is logged and
tolerated. If it reports a higher version, a different job is training the table, which is an error.

May be used only on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shoal_common.errors import MembershipChanged, PreconditionError

_log = logging.getLogger(__name__)


class BucketVersions:
    """The version that each partition has once all committed pushes have been applied: partition ->
    version."""

    def __init__(self, *, table_of: Callable[[int], str], lost: Callable[[int], None]) -> None:
        """`table_of`: returns the name of a bucket's table, for errors. `lost`: called with the
        number of pushes that a server has lost."""
        self._table_of = table_of
        self._lost = lost
        self._expected: dict[int, int] = {}
        self._found: dict[int, int] = {}
        """Versions that this rank has read from servers since the last committed step."""

    def __bool__(self) -> bool:
        """Returns whether the version of any partition is known."""
        return bool(self._expected)

    def __getitem__(self, partition_id: int) -> int:
        return self._expected[partition_id]

    def get(self, partition_id: int) -> int:
        """Returns the version of a bucket; 0 if the version is unknown."""
        return self._expected.get(partition_id, 0)

    def has_all(self, partitions: Collection[int]) -> bool:
        """Returns whether the versions of all these partitions are known."""
        return self._expected.keys() >= set(partitions)

    @property
    def found_anew(self) -> bool:
        """True if this rank has read versions from servers since the last committed step."""
        return bool(self._found)

    def note(self, found: Mapping[int, int]) -> None:
        """Records versions read from a server. Logs a warning if the server lacks earlier pushes.

        Raises PreconditionError (TABLE_AHEAD) if a different job is training the table.
        """
        for partition_id, version in found.items():
            expected = self._expected.get(partition_id)
            if version == expected:
                continue
            if expected is not None:
                self._differs(partition_id, version, expected)
            self._expected[partition_id] = self._found[partition_id] = version

    def _differs(self, partition_id: int, version: int, expected: int) -> None:
        table = self._table_of(partition_id)
        if version > expected:
            raise PreconditionError(
                f"sparse table {table!r}: bucket {partition_id} has {version - 1} pushes, but the "
                f"ranks of this job have made only {expected - 1}, so another job or strategy is "
                "also training the table; use a table in one job with one strategy",
                reason="TABLE_AHEAD",
            )
        _log.warning(
            "sparse table %r: bucket %d contains %d pushes, but %d were made, so its server has "
            "lost data; training continues with the remaining rows. A server with its own data "
            "directory loses no pushes",
            *(table, partition_id, version - 1, expected - 1),
        )
        self._lost(expected - version)

    def agree(self, received: Sequence[Mapping[int, int]]) -> None:
        """Combines the versions known to the ranks. If ranks know different versions of a bucket,
        forgets them, so that each rank must read them from the servers again, and raises
        MembershipChanged."""
        known: dict[int, set[int]] = {}
        for versions in received:
            for partition_id, version in versions.items():
                known.setdefault(partition_id, set()).add(version)
        differing = sorted(each for each, versions in known.items() if len(versions) > 1)
        self._expected = {
            each: min(versions) for each, versions in known.items() if len(versions) == 1
        }
        if differing:
            raise MembershipChanged(
                f"ranks read different versions of buckets {differing[:5]} of sparse tables"
            )

    def step_counts(self, pushed: Iterable[int]) -> None:
        """Records a committed step. `pushed`: the buckets to which the step has pushed, which
        increases their versions by one."""
        self._found.clear()  # not earlier, because a repeated step needs a new key too
        self._expected.update({each: self._expected[each] + 1 for each in pushed})

    def encode(self) -> dict[str, int]:
        """Returns the versions by partition id, as a JSON-compatible dict, for other ranks and
        checkpoints."""
        return {str(each): version for each, version in self._expected.items()}

    def restore(self, versions: Mapping[str, int]) -> None:
        """Loads the result of `encode`. The versions are treated as if they had just been read from
        servers."""
        self._expected = {int(each): version for each, version in versions.items()}
        self._found = dict(self._expected)
