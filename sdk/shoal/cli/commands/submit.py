"""`shoal submit`: starts `shoal run` in the background."""

from __future__ import annotations

from pathlib import Path

import typer

from shoal.cli.options import Coordinator, Job


def submit(context: typer.Context, coordinator: Coordinator = None, job: Job = None) -> None:
    """Start `shoal run` in the background, with the given flags and script.

    The run continues after this terminal is closed. `shoal logs` shows its output, and `shoal jobs`
    whether it has ended.
    """
    from shoal.client import Client

    with Client(coordinator) as client:
        script = next((each for each in context.args if Path(each).is_file()), "job")
        job_id = client.submit_command(context.args, name=script, job_id=job)
    typer.echo(f"submitted job {job_id}; `shoal logs --follow --job {job_id}` shows its output")
