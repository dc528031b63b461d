"""`shoal kill`, `shoal drain`, `shoal readmit` and `shoal stop`: kill or drain a rank or a
parameter server, readmit a machine, or stop an entire job."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Coordinator, Job, RankOrServer


def kill(rank_or_server: RankOrServer, coordinator: Coordinator = None, job: Job = None) -> None:
    """Kill the worker of a rank, or a parameter server, with SIGKILL.

    Use this to see how a job recovers. It works only on the machine where the process runs.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        if not rank_or_server.isdecimal():
            found.client.kill(found.job_id, server=rank_or_server)
            typer.echo(f"killed parameter server {rank_or_server} of job {found.job_id}: SIGKILL")
            return
        rank = int(rank_or_server)
        generation = found.client.job(found.job_id).generation
        member = found.client.kill(found.job_id, rank=rank)
        assert member is not None, "a rank was named"
    typer.echo(
        f"killed rank {rank} of job {found.job_id}: SIGKILL to pid {member.pid} (generation "
        f"{generation})"
    )


def drain(rank_or_server: RankOrServer, coordinator: Coordinator = None, job: Job = None) -> None:
    """Ask the worker of a rank, or a parameter server, to leave without losing any work.

    A worker leaves after the current step. A server hands its partitions over to the other servers
    while training continues; then it and its backup exit.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        if rank_or_server.isdecimal():
            member_id = found.client.drain(
                found.job_id, rank=int(rank_or_server), reason="shoal drain"
            )
            typer.echo(
                f"rank {rank_or_server} of job {found.job_id} will leave after the current step "
                f"(member {member_id})"
            )
        else:
            found.client.drain(found.job_id, server=rank_or_server, reason="shoal drain")
            typer.echo(
                f"parameter server {rank_or_server} of job {found.job_id} will hand its partitions "
                "over to the others and then exit; `shoal status` shows how many are left"
            )


def readmit(
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST",
            help="Host name of the machine, as shown by `shoal status`.",
            show_default=False,
        ),
    ],
    coordinator: Coordinator = None,
    job: Job = None,
) -> None:
    """Admit workers again on a machine that a job refuses.

    A job refuses a machine that failed a health check, or whose workers died again and again.
    `shoal status` shows the reason.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        found.client.readmit(found.job_id, host)
        typer.echo(f"job {found.job_id} admits workers on {host} again; start `shoal run` there")


def stop(
    coordinator: Coordinator = None,
    job: Job = None,
    reason: Annotated[
        str, typer.Option(help="Reason for the stop, shown by `shoal status`.", show_default=False)
    ] = "shoal stop",
) -> None:
    """Ask all workers of a job to stop.

    They stop together after the current step, and the script continues after its training loop. To
    end a plain torchrun script, stop its launcher instead.
    """
    from shoal.cli.target import target

    with target(coordinator, job) as found:
        found.client.stop(found.job_id, reason=reason)
        typer.echo(f"job {found.job_id} will stop after the current step")
