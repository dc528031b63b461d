"""`shoal jobs`: lists jobs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.options import Coordinator


def jobs(
    coordinator: Coordinator = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the jobs as JSON.")] = False,
) -> None:
    """List jobs.

    By default, lists the jobs of this machine: jobs of running clusters, and jobs started with
    `shoal submit`, even after they have ended.
    """
    from rich.console import Console

    from shoal.cli.terminal.view import jobs_view, summary_json
    from shoal.client import Client

    with Client(coordinator) as client:
        found = client.jobs()
    if as_json:
        typer.echo(json.dumps([summary_json(job) for job in found], indent=2))
    elif found:
        Console().print(jobs_view(found))
    else:
        typer.echo(
            "no jobs"
            if coordinator
            else "this machine has no jobs of yours; start one with `shoal run` or `shoal submit`"
        )
