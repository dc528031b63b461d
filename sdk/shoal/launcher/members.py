"""Kills workers that this process has not started: one described by the coordinator, or all of one
launcher. A worker is identified by the member id in its environment."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

from shoal_common.errors import PreconditionError, UnknownResourceError

from shoal.launcher.process import Handle, descendants

_MEMBER_ID: Final = b"SHOAL_MEMBER_ID="


def kill_member(*, rank: int, host: str, pid: int, member_id: str) -> None:
    """Kills a member with SIGKILL. The pid could belong to another process on this host or in this
    container, so the process is verified.

    Raises:
        PreconditionError: MEMBER_ELSEWHERE: it runs on another machine; PROCESS_NOT_OURS: this user
            may not kill it.
        UnknownResourceError: PROCESS_UNKNOWN: it no longer exists.
    """
    if host != socket.gethostname():
        raise PreconditionError(
            f"rank {rank} runs on {host}, not on this machine ({socket.gethostname()}); run this "
            f"there, or `shoal drain {rank}`",
            reason="MEMBER_ELSEWHERE",
        )
    gone = UnknownResourceError(
        f"the process of rank {rank} (pid {pid}) is not here any more", reason="PROCESS_UNKNOWN"
    )
    try:
        process = Handle(pid)
    except ProcessLookupError:
        raise gone from None
    try:
        if _MEMBER_ID + member_id.encode() not in _environment(pid):
            raise gone
        process.kill()
    except (PermissionError, FileNotFoundError) as error:
        raise PreconditionError(
            f"pid {pid} (rank {rank}) cannot be killed: {error}", reason="PROCESS_NOT_OURS"
        ) from error
    finally:
        process.close()


def kill_workers(launcher: int) -> None:
    """Kills all workers of this launcher and their descendants with SIGKILL. Its services
    continue."""
    for process in descendants(launcher):
        with (
            contextlib.closing(process),
            contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError),
        ):
            if any(variable.startswith(_MEMBER_ID) for variable in _environment(process.pid)):
                process.kill()


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
