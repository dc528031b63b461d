"""Files of the journal, `journal.NUMBER`. Each file is written once, sequentially.

A snapshot starts a new file; once the snapshot is on disk, earlier files are obsolete. One of them
is kept as a spare and becomes the next file, because the kernel overwrites existing pages ten times
as fast as it allocates new ones. Bytes after the last record of a file may therefore come from an
older file; each record contains the number of its file.

The first record of a file identifies its owner and the end of the previous file. The file
`journal.id` contains a random number that seeds the checksums of all records. The last file ends
with its last record. If a crash interrupted the write of that record, the record was never
acknowledged. If a later record proves that damaged bytes had once reached the disk, the disk has
lost acknowledged data, and the server refuses to start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_common.failpoints import failpoint

from shoal_ps_server.storage.record import Found, Record, later, read_all

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 6
"""Version of the file format, incremented by every change that older releases cannot read. Since
version 2, a partition has pieces of several tensors; since 3, pieces record their rows; since 4,
partitions may move between servers; since 5, they may be buckets of tables; since 6, buckets may be
restored from a checkpoint."""
_OLDEST_READABLE: Final = 3
OPENING: Final = "journal"
"""Kind of a file's first record."""
JOURNAL_PREFIX: Final = "journal."
_SPARE: Final = "journal.spare"
_ID: Final = "journal.id"
_MOST_PARTS: Final = 512
"""Maximum number of buffers in one write, below the kernel's limit."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Server and job that a journal belongs to."""

    job_id: str
    server_id: str

    def opening(self, number: int, *, previous_end: int) -> Record:
        """Returns the first record of file `number`. `previous_end`: number of valid bytes in the
        previous file."""
        fields = {
            "version": FORMAT_VERSION,
            "job_id": self.job_id,
            "server_id": self.server_id,
            "previous_end": previous_end,
        }
        return Record(kind=OPENING, fields=fields)


class Segments:
    """Journal files in a data directory. Methods that change files may be called by only one thread
    at a time."""

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self._owner = owner
        self.last_end = 0
        """Number of valid bytes in the last file. Known once `records` is exhausted."""
        self.journal_id = 0
        """Random number from `journal.id`. Known after `open`."""

    def open(self) -> None:
        """Reads the journal's id, or creates an id for a new journal. Raises OSError, and
        CorruptDataError / JOURNAL_CORRUPT."""
        path = self._directory / _ID
        if not path.exists():
            if self.numbers():
                raise _missing(path)
            temporary = path.with_name(f"{_ID}.tmp")
            temporary.write_text(f"{secrets.randbits(64):016x}\n")
            sync_file(temporary)
            temporary.rename(path)
            sync_directory(self._directory)
        text = path.read_text().strip()
        if not re.fullmatch("[0-9a-f]{16}", text):
            raise _corrupt(path, f"expected 16 hexadecimal digits, found {text[:50]!r}")
        self.journal_id = int(text, 16)

    def path(self, number: int) -> Path:
        """Returns the path of file `number`, whether or not it exists."""
        return self._directory / f"{JOURNAL_PREFIX}{number:08d}"

    def numbers(self) -> list[int]:
        """Returns the numbers of the existing files, ascending."""
        names = (
            path.name.removeprefix(JOURNAL_PREFIX)
            for path in self._directory.glob(f"{JOURNAL_PREFIX}*")
        )
        return sorted(int(name) for name in names if re.fullmatch(r"\d{8,}", name, re.ASCII))

    def nbytes(self) -> int:
        """Returns the total size of all files. Raises OSError."""
        return sum(self.path(number).stat().st_size for number in self.numbers())

    def create(self, number: int, *, previous_end: int) -> tuple[int, int]:
        """Creates a file and writes its first record to disk. Returns a file descriptor and the
        offset of the next write. If this raises OSError, the file does not exist."""
        path = self.path(number)
        with contextlib.suppress(FileNotFoundError):
            (self._directory / _SPARE).rename(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            opening, _ = self._owner.opening(number, previous_end=previous_end).encoded(
                self.journal_id, file=number, at=0, durable=0
            )
            end = write_all(descriptor, [opening], at=0)
            os.fdatasync(descriptor)
            sync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(OSError):
                # its old contents are invalid and will be overwritten
                os.close(descriptor)
                path.unlink(missing_ok=True)
            raise
        return descriptor, end

    def forget_before(self, number: int) -> None:
        """Removes the files before file `number`, because a snapshot contains their changes. The
        newest removed file becomes the spare. Raises OSError."""
        *older, newest = [0, *(each for each in self.numbers() if each < number)]
        if newest:
            self.path(newest).rename(self._directory / _SPARE)
            failpoint("snapshot.spare_kept")
        for each in older[1:]:
            self.path(each).unlink(missing_ok=True)
        failpoint("snapshot.journal_shortened")

    def records(self, first: int) -> Iterator[Record]:
        """Yields all records of the files from number `first` on (0: all files), in order. The
        payloads are views of the files.

        Raises CorruptDataError: JOURNAL_CORRUPT, JOURNAL_NEWER, JOURNAL_OLDER; ConfigurationError /
        JOURNAL_FOREIGN for the journal of a different server.
        """
        numbers = [number for number in self.numbers() if number >= first]
        if numbers and self._opening(numbers[-1]) is None:
            last = numbers.pop()
            if last == first:
                raise _corrupt(
                    self.path(last),
                    "its first record is incomplete, although a snapshot refers to it",
                )
            if any(found.durable for found in self._later(last, 0)):
                raise _corrupt(
                    self.path(last), "its first record is incomplete, although others follow it"
                )
            self.path(last).unlink()  # the process crashed while creating this file
        if first and not numbers:
            raise _missing(self.path(first))
        for expected, number in enumerate(numbers, first or 1):
            if number != expected:
                raise _missing(self.path(expected))
        for number in numbers:
            yield from self._records_of(number, last=number == numbers[-1])

    def _records_of(self, number: int, *, last: bool) -> Iterator[Record]:
        path, data = self.path(number), self._data(number)
        if self._opening(number) is None:
            raise _corrupt(path, "its first record is incomplete or belongs to another file")
        following = None if last else self._opening(number + 1)
        if following is None and not last:
            raise _corrupt(
                self.path(number + 1), "its first record is incomplete or belongs to another file"
            )
        counted = data.nbytes if following is None else int(following.fields["previous_end"])
        end = 0
        for found in read_all(data[:counted], self.journal_id, number):
            if end:
                yield found.record
            end = found.end
        if last:
            behind = list(self._later(number, end))
            if any(found.durable > end for found in behind):
                raise _corrupt(
                    path,
                    f"its valid records end at byte {end}, but a record after the damage shows "
                    "that more had been written to disk",
                )
            if behind:
                logger.warning(
                    "ignored records after one that a crash had torn; with --fsync never, they "
                    "may have been acknowledged",
                    extra={"path": path, "byte": end, "records": len(behind)},
                )
            # Data written by a killed process may not be on disk yet. It must be on disk before the
            # server continues.
            sync_file(path)
            self.last_end = end
        elif end != counted:
            raise _corrupt(
                path, f"its records end at byte {end}, but were written up to byte {counted}"
            )

    def _opening(self, number: int) -> Record | None:
        """Returns the validated first record of a file. Returns None if it is incomplete or belongs
        to a file with a different number. Raises the errors of `records`."""
        found: Found | None = next(read_all(self._data(number), self.journal_id, number), None)
        if found is None or found.record.kind != OPENING:
            return None
        path, fields = self.path(number), found.record.fields
        if not {"version", "job_id", "server_id", "previous_end"} <= fields.keys():
            return None
        if not _OLDEST_READABLE <= (version := fields["version"]) <= FORMAT_VERSION:
            raise CorruptDataError(
                f"{path} has format version {version}, but this release reads {_OLDEST_READABLE} "
                f"to {FORMAT_VERSION}; start the release that wrote it",
                reason="JOURNAL_NEWER" if version > FORMAT_VERSION else "JOURNAL_OLDER",
            )
        theirs = Owner(job_id=fields["job_id"], server_id=fields["server_id"])
        if theirs != self._owner:
            raise ConfigurationError(
                f"{path} belongs to server {theirs.server_id!r} of job {theirs.job_id!r}, not to "
                f"server {self._owner.server_id!r} of job {self._owner.job_id!r}; use another "
                "directory",
                reason="JOURNAL_FOREIGN",
            )
        return found.record

    def _later(self, number: int, end: int) -> Iterator[Found]:
        return later(self._data(number), end, self.journal_id, number)

    def _data(self, number: int) -> memoryview:
        path = self.path(number)
        return np.memmap(path, np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")


def write_all(descriptor: int, parts: list[bytes | memoryview], *, at: int) -> int:
    """Writes all parts from offset `at` on, and returns the number of bytes written. Raises
    OSError; some of the data may then have been written."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    total = sum(view.nbytes for view in views)
    while views:
        written = os.pwritev(descriptor, views[:_MOST_PARTS], at)
        at += written
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]
    return total


def sync_file(path: Path) -> None:
    """Makes the contents of a file durable, even if another process wrote them. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Makes a directory's entries durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(path: Path) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is missing, but it held acknowledged updates; restore it, or remove the data "
        "directory to start without values",
        reason="JOURNAL_CORRUPT",
    )


def _corrupt(path: Path, what: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is damaged: {what}. Acknowledged updates are lost; restore the file from a copy, "
        "or remove the data directory to start without values",
        reason="JOURNAL_CORRUPT",
    )
