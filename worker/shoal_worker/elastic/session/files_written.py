"""Detects files that several ranks of a machine write at the same time, overwriting each other's
content.

A rank that opens a file to replace its content (`open(path, "w")`, `torch.save`) writes a note into
a directory shared by a launcher's workers. It also reads the previous note about the same file. If
another rank has opened the file in the same generation and after the same number of steps, one
warning is logged per machine. No rank waits for another, and no messages are sent.

Not detected: files opened by compiled code (safetensors, HDF5), writes by ranks on different
machines, and writes before `shoal.init()`. Some writes may be intended and are ignored: appending,
exclusive creation, devices, writes by threads other than the script's thread, and writes by a
joiner that is replaying its script. Hidden files and directories are ignored too, because libraries
keep caches with their own locks in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import xxhash

_log = logging.getLogger(__name__)

MOST: Final = 256
"""Maximum number of files that are checked per process, because a script may write one file per
sample."""


class WhenWritten(NamedTuple):
    """Rank, generation and step of a write. Two writes count as simultaneous if they differ only in
    the rank."""

    rank: int
    generation: int
    steps: int


class WrittenFiles:
    """Files that this process has written. Used by the script's thread."""

    def __init__(self, directory: Path, now: Callable[[], WhenWritten | None]) -> None:
        """`directory`: directory of the notes, shared by all ranks of the machine. `now`: returns
        the current rank, generation and step; returns None while the script's actions are not part
        of the run."""
        self._directory = directory
        self._now = now
        self._left = MOST
        self._known: set[str] = set()
        self._process, self._thread = os.getpid(), threading.get_ident()

    def writes(self, path: str | bytes | os.PathLike[Any]) -> None:
        """Records that a file is about to be replaced. Logs a warning if another rank has written
        it at the same time."""
        if os.getpid() != self._process or threading.get_ident() != self._thread:
            return
        where = os.path.realpath(os.fsdecode(path))
        now = self._now() if not _is_left_out(where) else None
        if now is None or (self._left == 0 and where not in self._known):
            return
        if where not in self._known:
            self._known.add(where)
            self._left -= 1
        with contextlib.suppress(OSError, ValueError):  # the directory is missing or full
            before = self._note(where, now)
            if before is not None and before._replace(rank=now.rank) == now != before:
                self._warn(where, sorted((before.rank, now.rank)), now.steps)

    def _note(self, where: str, now: WhenWritten) -> WhenWritten | None:
        """Writes a note about the file `where`, and returns the previous note; None if there is
        none."""
        self._directory.mkdir(exist_ok=True)
        name = self._directory / xxhash.xxh3_64_hexdigest(where.encode(errors="surrogateescape"))
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = os.pread(descriptor, 1000, 0)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(now).encode(), 0)
        finally:
            os.close(descriptor)
        return WhenWritten(*json.loads(before)) if before else None

    def _warn(self, where: str, ranks: list[int], steps: int) -> None:
        try:
            (self._directory / "told").touch(exist_ok=False)
        except FileExistsError:
            return
        _log.warning(
            "ranks %d and %d both wrote %s after step %d, so each overwrites the other's file. "
            "Write it on one rank only (`if shoal.is_main_process():`), use a separate path for "
            "each rank, or use shoal.save_checkpoint(directory), which all ranks call. (Shown "
            "once)",
            *ranks,
            where,
            steps,
        )


def _is_left_out(where: str) -> bool:
    path = Path(where)
    of_a_library = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return of_a_library or path.suffix == ".lock" or (path.exists() and not path.is_file())


_noticing: list[WrittenFiles] = []
"""Contains the `WrittenFiles` of this process, if there is one."""


def notice_files(files: WrittenFiles) -> None:
    """Installs hooks that report each file written by this process to `files`. Must be called only
    once per process."""
    _noticing.append(files)
    sys.addaudithook(_hear)
    torch.save = _telling(torch.save)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Python audit hook (`sys.addaudithook`) that reports files opened for replacement."""
    if event == "open":
        path, mode, flags = args
        # descriptors already have a path, and os.open, which passes no mode, creates lock files
        if mode is not None and flags & os.O_TRUNC and not isinstance(path, int):
            _noticing[-1].writes(path)


def _telling(save: Callable[..., None]) -> Callable[..., None]:
    """Wraps `torch.save` so that it reports the file that it writes. `torch.save` opens files in
    compiled code, which raises no audit event."""

    @functools.wraps(save)
    def telling(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            _noticing[-1].writes(f)
        save(obj, f, *args, **kwargs)

    return telling
