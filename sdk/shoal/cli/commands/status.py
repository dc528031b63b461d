"""`shoal status`: shows the members of a job and their progress."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.options import Coordinator, Job, PastRun


def status(
    coordinator: Coordinator = None,
    job: Job = None,
    run: PastRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """Show a job's members and their progress.

    By default, shows the job of the newest cluster on this machine or, if none is running, the run
    that ended last.
    """
    from rich.console import Console
    from rich.text import Text

    from shoal.cli.commands.history import print_run
    from shoal.cli.target import past_run, target
    from shoal.cli.terminal.past import finished_json
    from shoal.cli.terminal.view import job_json, job_view

    if (past := past_run(run, coordinator, job)) is not None:
        if as_json:
            typer.echo(json.dumps(finished_json(past), indent=2))
        else:
            print_run(past)
        return
    with target(coordinator, job) as found:
        answer = found.client.job(found.job_id)
    if as_json:
        typer.echo(json.dumps(job_json(answer), indent=2))
    else:
        console = Console()
        console.print(job_view(answer))
        if found.page:
            console.print(Text(f"in a browser: {found.page}", style="dim"), soft_wrap=True)
