"""Kills workers and parameter servers that this process did not start, and reads the stacks of
workers. A worker is identified by the member id in its environment."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shoal_common.errors import PreconditionError, ShoalError, UnknownResourceError
from shoal_common.system.stacks import read_stacks, serving_children

from shoal.launcher.processes.process import Handle, descendants

ELSEWHERE: Final = "MEMBER_ELSEWHERE"
"""Reason of the error for a process that runs on a different machine."""
_MEMBER_ID: Final = b"SHOAL_MEMBER_ID="


def kill_member(*, rank: int, host: str, pid: int, member_id: str) -> None:
    """Kills a member with SIGKILL. Raises the errors of `_member_process`."""
    with _member_process(rank=rank, host=host, pid=pid, member_id=member_id) as process:
        process.kill()


def member_stacks(*, rank: int, host: str, pid: int, member_id: str) -> dict[int, list[str]]:
    """Returns the stacks of all threads (`read_stacks`) of a member and of the processes that it
    has forked, such as data workers, by process id.

    Raises:
        PreconditionError, UnknownResourceError: as in `_member_process` and `read_stacks`.
        DeadlineError: the process is stopped (SIGSTOP).
    """
    with _member_process(rank=rank, host=host, pid=pid, member_id=member_id):
        found = {pid: read_stacks(pid)}
        for child in serving_children(pid):
            with contextlib.suppress(ShoalError):  # it has exited, or is stopped
                found[child] = read_stacks(child)
        return found


@contextlib.contextmanager
def _member_process(*, rank: int, host: str, pid: int, member_id: str) -> Iterator[Handle]:
    """Yields the process of a member. Verifies its identity first, since the pid could belong to a
    different process on this host or in this container. The member's host name does not decide,
    because SHOAL_HOST may have set it.

    Raises:
        PreconditionError: MEMBER_ELSEWHERE: it runs on a different machine; PROCESS_NOT_OURS: it
            belongs to a different user.
        UnknownResourceError: PROCESS_UNKNOWN: it no longer exists.
    """
    here = host == socket.gethostname()
    gone: ShoalError = (
        UnknownResourceError(
            f"the process of rank {rank} (pid {pid}) no longer exists here",
            reason="PROCESS_UNKNOWN",
        )
        if here
        else PreconditionError(
            f"rank {rank} runs on {host}, not on this machine ({socket.gethostname()}); run this "
            "command there",
            reason=ELSEWHERE,
        )
    )
    try:
        process = Handle(pid)
    except ProcessLookupError:
        raise gone from None
    try:
        if _MEMBER_ID + member_id.encode() not in _environment(pid):
            raise gone
        yield process
    except (PermissionError, FileNotFoundError) as error:
        if not here:
            raise gone from None
        raise PreconditionError(
            f"cannot access pid {pid} (rank {rank}) as this user: {error}",
            reason="PROCESS_NOT_OURS",
        ) from error
    finally:
        process.close()


def kill_server(*, job_id: str, server_id: str, coordinator: str) -> int:
    """Kills a job's parameter server with SIGKILL and returns its pid.

    The coordinator does not know the process's pid. The process is therefore identified by the job,
    the server id and the coordinator's address (host:port) in its command line or environment. The
    address matters because clusters on one machine may have jobs with the same id.

    Raises:
        UnknownResourceError: PROCESS_UNKNOWN: no such process of this user runs on this machine.
        PreconditionError: PROCESS_NOT_OURS: several processes match.
    """
    found = [pid for pid in _pids() if _is_server(pid, job_id, server_id, coordinator)]
    if len(found) > 1:
        raise PreconditionError(
            f"pids {', '.join(map(str, found))} all run server {server_id} of job {job_id}; kill "
            "the right one by its pid",
            reason="PROCESS_NOT_OURS",
        )
    try:
        with contextlib.closing(Handle(found[0])) as process:
            if _is_server(process.pid, job_id, server_id, coordinator):
                process.kill()
                return process.pid
    except (IndexError, ProcessLookupError):
        pass
    raise UnknownResourceError(
        f"no process of server {server_id} of job {job_id} at coordinator {coordinator} runs on "
        f"this machine ({socket.gethostname()}); run the command on its machine, or use `shoal "
        f"drain {server_id}`",
        reason="PROCESS_UNKNOWN",
    )


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _is_server(pid: int, job_id: str, server_id: str, coordinator: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not any(b"shoal_ps_server" in word or b"shoal-ps-server" in word for word in words):
            return False
        variables = _environment(pid)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    return (
        _setting("job", words, variables) == job_id
        and _setting("server-id", words, variables) == server_id
        and _is_same_address(_setting("coordinator", words, variables), coordinator)
    )


def _setting(flag: str, words: Sequence[bytes], variables: Iterable[bytes]) -> str:
    """Returns the value of a parameter server's setting from its command line (a flag) or
    environment (a variable); empty if it is not set. The flag takes precedence."""
    option = f"--{flag}".encode()
    for word, following in itertools.pairwise([*words, b""]):
        if word == option:
            return following.decode(errors="replace")
        if word.startswith(option + b"="):
            return word.partition(b"=")[2].decode(errors="replace")
    variable = f"SHOAL_PS_SERVER_{flag.upper().replace('-', '_')}=".encode()
    found = (each for each in variables if each.startswith(variable))
    return next(found, b"").partition(b"=")[2].decode(errors="replace")


def _is_same_address(one: str, other: str) -> bool:
    """Returns whether two addresses (host:port) are the same, even if their hosts are different
    names for one address."""
    return one == other or not _endpoints(one).isdisjoint(_endpoints(other))


def _endpoints(address: str) -> set[Any]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {entry[4][:2] for entry in found}


def kill_workers(launcher: int) -> None:
    """Kills all workers of a launcher and their descendants with SIGKILL. The launcher's services
    keep running."""
    for process in descendants(launcher):
        with (
            contextlib.closing(process),
            contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError),
        ):
            if any(variable.startswith(_MEMBER_ID) for variable in _environment(process.pid)):
                process.kill()


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
