"""`shoal logs`: the output of a job."""

from __future__ import annotations

from typing import Annotated

import typer
from shoal_common.errors import UnknownResourceError

from shoal.cli.options import Coordinator, Job


def logs(
    coordinator: Coordinator = None,
    job: Job = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Only the worker that was started as this rank.", min=0, show_default=False
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Further lines as they come, until the job has ended or Ctrl-C."
        ),
    ] = False,
) -> None:
    """Show what a job has printed that was started with `shoal submit`, or by shoal.Client.

    By default the one that was submitted last on this machine.
    """
    from shoal.client import Client

    with (
        Client(coordinator) as client,
        client.logs(job or _newest(), rank=rank, follow=follow) as lines,
    ):
        for line in lines:
            print(line, flush=follow)  # noqa: T201 - a command speaks to its person


def _newest() -> str:
    from shoal.launcher.run.submissions import Submissions

    found = Submissions().all()
    if not found:
        raise UnknownResourceError(
            "no job was submitted on this machine by this user; `shoal submit` starts one, and "
            "keeps its output",
            reason="LOG_UNKNOWN",
        )
    return found[0].job_id
