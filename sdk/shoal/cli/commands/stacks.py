"""`shoal stacks`: the Python stacks of a job's workers."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Coordinator, Job


def stacks(
    rank_or_job: Annotated[
        str | None,
        typer.Argument(
            metavar="RANK|JOB",
            help="Show only this rank, or the ranks of this job. Default: all ranks of the job.",
            show_default=False,
        ),
    ] = None,
    coordinator: Coordinator = None,
    job: Job = None,
    every_thread: Annotated[
        bool,
        typer.Option("--all", help="Show every thread, and every frame of libraries."),
    ] = False,
) -> None:
    """Show the Python stacks of a job's workers.

    The innermost call comes first. Includes the data workers that a worker has forked. Needs no
    debugger and no privileges. Workers on other machines are shown only while a step is stalled.
    """
    from shoal_common.errors import ConfigurationError, ShoalError, UnknownResourceError
    from shoal_worker.elastic.coordinator.script_lines import folded, parse_calls

    from shoal.cli.target import target
    from shoal.launcher.processes.members import ELSEWHERE, member_stacks

    rank = None
    if rank_or_job is not None:
        if rank_or_job.isdecimal():
            rank = int(rank_or_job)
        elif job in (None, rank_or_job):
            job = rank_or_job
        else:
            raise ConfigurationError(
                f"{rank_or_job!r}: expected a rank of job {job}; `shoal status` lists its ranks"
            )
    with target(coordinator, job) as found:
        members = found.client.job(found.job_id).members
        chosen = [each for each in members if each.rank is not None and rank in (None, each.rank)]
        if not chosen:
            raise UnknownResourceError(
                f"job {found.job_id} has no rank {rank}; `shoal status` lists its ranks"
                if rank is not None
                else f"job {found.job_id} has no ranks",
                reason="MEMBER_UNKNOWN",
            )
    for member in chosen:
        assert member.rank is not None, "only members with a rank are selected"
        try:
            processes = member_stacks(
                rank=member.rank, host=member.host, pid=member.pid, member_id=member.member_id
            )
        except ShoalError as error:
            if error.reason == ELSEWHERE and member.stacks:
                where = f" ({member.host}, while the step is stalled):\n{member.stacks}"
            elif rank is not None:
                raise
            elif error.reason == ELSEWHERE:
                where = f" runs on {member.host}: run `shoal stacks` there"
            else:
                where = f": {error}"
            typer.echo(f"rank {member.rank}{where}\n")
            continue
        for pid, threads in processes.items():
            of = f"rank {member.rank}"
            what = of if pid == member.pid else f"child process of {of}"
            for number, stack in enumerate(threads if every_thread else threads[:1]):
                thread = f", thread {number}" if number else ""
                shown = stack if every_thread else folded(parse_calls(stack))
                typer.echo(f"{what} (pid {pid} on {member.host}){thread}:\n{shown}\n")
