"""`shoal events`: shows the events of a job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Coordinator, Job, PastRun

if TYPE_CHECKING:
    from shoal.client import Event
    from shoal.launcher.report.history import RecordedRun


def events(
    coordinator: Coordinator = None,
    job: Job = None,
    run: PastRun = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Also print new events as they happen, until the cluster ends or Ctrl-C.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as a line of JSON.")
    ] = False,
) -> None:
    """Show what has happened in a job, oldest first.

    By default, shows the newest cluster on this machine or, if none is running, the run that ended
    last.
    """
    from rich.console import Console

    from shoal.cli.target import past_run, target
    from shoal.cli.terminal.past import finished_line
    from shoal.cli.terminal.view import event_json, event_line

    console = Console()

    def show(event: Event) -> None:
        if as_json:
            # the command's output
            print(json.dumps(event_json(event)), flush=True)  # noqa: T201
        else:
            console.print(event_line(event), soft_wrap=True)

    if (past := past_run(run, coordinator, job)) is not None:
        typer.echo(f"shoal: {finished_line(past)}", err=True)
        for event in _events_of(past):
            show(event)
        return
    with (
        target(coordinator, job) as found,
        found.client.events(found.job_id, follow=follow) as stream,
    ):
        for event in stream:
            show(event)


def _events_of(past: RecordedRun) -> list[Event]:
    from google.protobuf.json_format import ParseDict
    from shoal_protos.v1 import coordinator_pb2 as pb

    from shoal.client.messages import event_of

    return [
        event_of(ParseDict(stored, pb.Event(), ignore_unknown_fields=True))
        for stored in past.events()
    ]
