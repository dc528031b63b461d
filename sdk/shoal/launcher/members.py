"""Kills processes that this process has not started: a worker or parameter server that the
coordinator describes, or all workers of one launcher. A worker is identified by the member id in
its environment."""

from __future__ import annotations

import contextlib
import itertools
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


def kill_server(*, job_id: str, server_id: str, coordinator: str) -> int:
    """Kills a job's parameter server with SIGKILL and returns its pid. Its command line or its
    environment identifies it, since the coordinator does not know its process. Of several matches,
    which belong to jobs of one name on different clusters, that of `coordinator` (host:port) is
    killed.

    Raises:
        UnknownResourceError: PROCESS_UNKNOWN: no such process of this user runs on this machine.
        PreconditionError: PROCESS_NOT_OURS: several processes match, and none or several of them
            name that coordinator.
    """
    found = [pid for pid in _pids() if _is_server(pid, job_id, server_id)]
    if len(found) > 1:
        own = [pid for pid in found if _is_server(pid, job_id, server_id, coordinator)]
        found = own if len(own) == 1 else found
    if len(found) > 1:
        raise PreconditionError(
            f"pids {', '.join(map(str, found))} all run server {server_id} of job {job_id}; kill "
            "the right one by its pid",
            reason="PROCESS_NOT_OURS",
        )
    try:
        with contextlib.closing(Handle(found[0])) as process:
            if _is_server(process.pid, job_id, server_id):
                process.kill()
                return process.pid
    except (IndexError, ProcessLookupError):
        pass
    raise UnknownResourceError(
        f"no process of server {server_id} of job {job_id} runs on this machine "
        f"({socket.gethostname()}); run this where it runs, or `shoal drain {server_id}`",
        reason="PROCESS_UNKNOWN",
    )


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _is_server(pid: int, job_id: str, server_id: str, coordinator: str | None = None) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not any(b"shoal_ps_server" in word or b"shoal-ps-server" in word for word in words):
            return False
        variables = _environment(pid)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    pairs = set(itertools.pairwise(words))
    return all(
        (f"--{flag}".encode(), value.encode()) in pairs
        or f"--{flag}={value}".encode() in words
        or f"{variable}={value}".encode() in variables
        for flag, variable, value in (
            ("job", "SHOAL_PS_SERVER_JOB", job_id),
            ("server-id", "SHOAL_PS_SERVER_SERVER_ID", server_id),
            ("coordinator", "SHOAL_PS_SERVER_COORDINATOR", coordinator),
        )
        if value is not None
    )


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
