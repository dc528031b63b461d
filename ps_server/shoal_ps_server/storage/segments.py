"""The journal's files: `journal.NUMBER`, one after the other, each opened once to be appended to.

A snapshot begins a new file, and when it is on disk those before are not needed any more. The first record of a file says whose it is. A
crash leaves a file whose end is not a whole record. That end is cut off, for nobody was told of it. Where anything behind the damage says
that the damaged bytes had been on disk for certain, the disk has lost what was acknowledged, and the server does not start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_ps_server.storage.record import Found, Record, later, read_all

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
"""Grows when an older release could not read the file."""
OPENING: Final = "journal"
"""Kind of a file's first record."""
_PREFIX: Final = "journal."


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose journal it is."""

    job_id: str
    server_id: str

    def opening(self, number: int) -> Record:
        """The first record of file `number`."""
        return Record(
            kind=OPENING, fields={"version": FORMAT_VERSION, "job_id": self.job_id, "server_id": self.server_id, "number": number}
        )


class Segments:
    """The files in a data directory. Methods that change them: one thread."""

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self._owner = owner

    def path(self, number: int) -> Path:
        """Where file `number` is, or will be."""
        return self._directory / f"{_PREFIX}{number:08d}"

    def numbers(self) -> list[int]:
        """Numbers of the files that are there, ascending."""
        names = (path.name.removeprefix(_PREFIX) for path in self._directory.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def create(self, number: int) -> int:
        """Makes the file, on disk with its first record; returns a descriptor to append to. Raises OSError; there is no such file then."""
        path = self.path(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            opening, _ = self._owner.opening(number).encoded(durable=0)
            write_all(descriptor, [opening])
            os.fdatasync(descriptor)
            sync_directory(self._directory)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def remove_before(self, number: int) -> None:
        """Those before file `number`. Raises OSError."""
        for each in self.numbers():
            if each < number:
                self.path(each).unlink(missing_ok=True)

    def records(self, first: int) -> Iterator[Record]:
        """All records of the files from `first` on, in order; 0: of all. Cuts off a torn end of the last file.

        Raises CorruptDataError: JOURNAL_CORRUPT, JOURNAL_NEWER; ConfigurationError / JOURNAL_FOREIGN for another server's.
        """
        numbers = [number for number in self.numbers() if number >= first]
        if first and not numbers:
            raise _missing(self.path(first))
        for expected, number in enumerate(numbers, first or 1):
            if number != expected:
                raise _missing(self.path(expected))
        for number in numbers:
            yield from self._records_of(number, last=number == numbers[-1])

    def _records_of(self, number: int, *, last: bool) -> Iterator[Record]:
        path = self.path(number)
        size, end = path.stat().st_size, 0
        data = np.memmap(path, np.uint8, mode="r").data if size else memoryview(b"")
        for found in read_all(data):
            if end == 0:
                self._check_opening(path, found, number)
            else:
                yield found.record
            end = found.end
        self._check_end(path, data, end, last=last)
        if end == 0:
            path.unlink()  # a crash came while it was made
        elif end < size:
            logger.warning(
                "the end of the journal was torn by a crash, and is cut off: nobody was told of it",
                extra={"path": path, "bytes": size - end},
            )
            os.truncate(path, end)
            _sync(path)

    def _check_opening(self, path: Path, found: Found, number: int) -> None:
        record, fields = found.record, found.record.fields
        if record.kind != OPENING or fields.get("number") != number:
            raise _corrupt(path, "its first record is that of another file")
        if fields["version"] > FORMAT_VERSION:
            raise CorruptDataError(
                f"{path} has format version {fields['version']}, this release reads up to {FORMAT_VERSION}: start the newer release",
                reason="JOURNAL_NEWER",
            )
        theirs = Owner(job_id=fields["job_id"], server_id=fields["server_id"])
        if theirs != self._owner:
            raise ConfigurationError(
                f"{path} is of server {theirs.server_id!r} of job {theirs.job_id!r}, this is server {self._owner.server_id!r} of job "
                f"{self._owner.job_id!r}; give another directory",
                reason="JOURNAL_FOREIGN",
            )

    def _check_end(self, path: Path, data: memoryview, end: int, *, last: bool) -> None:
        if end == data.nbytes and end:
            return
        if not last:
            raise _corrupt(path, f"damaged at byte {end}, and there are newer files")
        if any(found.durable > end for found in later(data, end)):
            raise _corrupt(path, f"damaged at byte {end}, which was on disk: a later record says so")


def write_all(descriptor: int, parts: list[bytes | memoryview]) -> int:
    """Writes all of them; returns how many bytes. Raises OSError: any part of them may have been written."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    total = sum(view.nbytes for view in views)
    while views:
        written = os.writev(descriptor, views[:_MOST_PARTS])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]
    return total


_MOST_PARTS: Final = 512
"""Fewer than the kernel takes at once."""


def sync_directory(directory: Path) -> None:
    """Makes names in it last. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(path: Path) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is missing: it has updates that were acknowledged; put it back, or remove the data directory to start without values",
        reason="JOURNAL_CORRUPT",
    )


def _corrupt(path: Path, what: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is damaged: {what}. Acknowledged updates are lost; put a copy of it in its place, or remove the data directory to start "
        "without values",
        reason="JOURNAL_CORRUPT",
    )
