"""`shoal logs`: shows the output of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from shoal_common.errors import ConfigurationError, UnknownResourceError

from shoal.cli.options import Coordinator, Job, PastRun

if TYPE_CHECKING:
    from shoal.launcher.report.history import RecordedRun


def logs(
    coordinator: Coordinator = None,
    job: Job = None,
    run: PastRun = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Show only the output of the worker that was started as this rank.",
            min=0,
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Also print new lines as they are written, until the job ends or Ctrl-C.",
        ),
    ] = False,
) -> None:
    """Show the output of a run on this machine.

    By default, shows the run that was started last. --follow works for runs started with `shoal
    submit` or shoal.Client.
    """
    from shoal.client import Client

    if run is not None or not coordinator:
        past = _kept(run, job)
        if past is not None:
            _print(past, rank, follow=follow)
            return
    with (
        Client(coordinator) as client,
        client.logs(job or _newest(), rank=rank, follow=follow) as lines,
    ):
        for line in lines:
            print(line, flush=follow)  # noqa: T201 - a command speaks to its person


def _kept(run: str | None, job: str | None) -> RecordedRun | None:
    """Returns the recorded run whose output is requested. Returns None if it is the last run that
    was submitted (for the job, if one is given), because the output of a submission can also be
    followed."""
    from shoal.launcher.report.history import History
    from shoal.launcher.run.submissions import Submissions

    if run is not None:
        return History().find(run)
    newest = History().newest(job)
    submitted = [each for each in Submissions().all() if job in (None, each.job_id)]
    if newest is None or (submitted and submitted[0].started_unix_s >= newest.started_unix_s):
        return None
    is_submitted = submitted and submitted[0].directory == newest.directory
    return None if is_submitted else newest


def _print(past: RecordedRun, rank: int | None, *, follow: bool) -> None:
    from shoal.cli.terminal.past import finished_line
    from shoal.launcher.report.history import Outcome

    if follow and past.outcome is Outcome.RUNNING:
        raise ConfigurationError(
            f"--follow is not supported for run {past.name}, which was not submitted and "
            "prints on the terminal that started it; omit --follow to see its output so far"
        )
    typer.echo(f"shoal: {finished_line(past)}", err=True)
    prefix = "" if rank is None else f"[{rank}]: "
    for line in past.log_lines():
        if line.startswith(prefix):
            print(line)  # noqa: T201 - a command speaks to its person


def _newest() -> str:
    from shoal.launcher.run.submissions import Submissions

    found = Submissions().all()
    if not found:
        raise UnknownResourceError(
            "you have not submitted a job on this machine; start one with `shoal submit`, which "
            "keeps its output",
            reason="LOG_UNKNOWN",
        )
    return found[0].job_id
