"""`shoal events`: the events of a job."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.options import Coordinator, Job


def events(
    coordinator: Coordinator = None,
    job: Job = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Further ones as they happen, until the cluster ends or Ctrl-C."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, one a line, for programs.")
    ] = False,
) -> None:
    """Show what has happened in a job, oldest first."""
    from rich.console import Console

    from shoal.cli.target import target
    from shoal.cli.terminal.view import event_json, event_line

    console = Console()
    with (
        target(coordinator, job) as found,
        found.client.events(found.job_id, follow=follow) as stream,
    ):
        for event in stream:
            if as_json:
                # a command speaks to its person
                print(json.dumps(event_json(event)), flush=True)  # noqa: T201
            else:
                console.print(event_line(event), soft_wrap=True)
