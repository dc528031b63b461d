"""`shoal kill` and `shoal drain`: ending one rank by force, and a rank or a parameter server by request."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from shoal_common.errors import PreconditionError, UnknownResourceError

from shoal.cli.options import Coordinator, Job, Rank, RankOrServer

if TYPE_CHECKING:
    from shoal_protos.v1.coordinator_pb2 import GetJobResponse, MemberStatus


def kill(rank: Rank, coordinator: Coordinator = None, job: Job = None) -> None:
    """Kill the worker of a rank (SIGKILL).

    To see the others go on. Only on the machine where it runs.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        answer = found.client.get_job(found.job_id)
    member = _member(answer, rank)
    _kill_process(member)
    typer.echo(f"killed rank {rank} of job {answer.spec.job_id}: SIGKILL to pid {member.pid} (generation {answer.generation.number})")


def drain(rank_or_server: RankOrServer, coordinator: Coordinator = None, job: Job = None) -> None:
    """Ask the worker of a rank, or a parameter server, to leave.

    Nothing is lost. A worker goes at its next step border. A server hands what it holds to the others while training goes on; then it ends,
    and its backup does.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        if rank_or_server.isdecimal():
            drained = found.client.drain_member(found.job_id, rank=int(rank_or_server), reason="shoal drain")
            typer.echo(f"rank {rank_or_server} of job {found.job_id} leaves at its next step border (member {drained.member_id})")
        else:
            found.client.drain_server(found.job_id, rank_or_server, reason="shoal drain")
            typer.echo(
                f"parameter server {rank_or_server} of job {found.job_id} hands its partitions to the others and then ends; "
                "`shoal status` shows how many are left"
            )


def _member(job: GetJobResponse, rank: int) -> MemberStatus:
    ranked: dict[int, MemberStatus] = {member.rank: member for member in job.members if member.rank >= 0}
    if rank in ranked:
        return ranked[rank]
    if ranked:
        there = f"there are {', '.join(map(str, sorted(ranked)))}"
    elif not job.generation.number:
        there = "none has one yet: its workers are still starting, or never call shoal.init(); see `shoal status`"
    else:
        there = f"none has one now, {len(job.members)} of at least {job.spec.min_workers} workers are there; see `shoal status`"
    raise UnknownResourceError(f"job {job.spec.job_id} has no rank {rank}: {there}", reason="MEMBER_UNKNOWN")


def _kill_process(member: MemberStatus) -> None:
    """Only the very process that joined: its number could be another's on this host, or in this container."""
    from shoal.launcher.process import Handle

    if member.host != socket.gethostname():
        raise PreconditionError(
            f"rank {member.rank} runs on {member.host}, not on this machine ({socket.gethostname()}); "
            f"run this there, or `shoal drain {member.rank}`",
            reason="MEMBER_ELSEWHERE",
        )
    gone = UnknownResourceError(f"the process of rank {member.rank} (pid {member.pid}) is not here any more", reason="PROCESS_UNKNOWN")
    try:
        process = Handle(member.pid)
    except ProcessLookupError:
        raise gone from None
    try:
        if f"SHOAL_MEMBER_ID={member.member_id}".encode() not in Path(f"/proc/{member.pid}/environ").read_bytes().split(b"\0"):
            raise gone
        process.kill()
    except (PermissionError, FileNotFoundError) as error:
        raise PreconditionError(f"pid {member.pid} (rank {member.rank}) cannot be killed: {error}", reason="PROCESS_NOT_OURS") from error
    finally:
        process.close()
