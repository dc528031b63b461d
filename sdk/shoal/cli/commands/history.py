"""`shoal history`: lists past runs, shows one of them, or compares two."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from shoal_common.errors import ConfigurationError, UnknownResourceError

from shoal.cli.options import Plot

if TYPE_CHECKING:
    from shoal.launcher.report.history import History, RecordedRun


def history(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run to show: JOB/NUMBER, as listed without arguments, or a job's id for its "
            "newest run.",
            show_default=False,
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]", help="Second run, to be compared with RUN.", show_default=False
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="List only the runs of this job.", show_default=False)
    ] = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List past runs on this machine, show one of them, or compare two.

    Runs are kept on disk with their output and events, even after their cluster has ended. `shoal
    status`, `shoal events` and `shoal logs` show a past run with --run. --plot draws a plot of RUN.
    """
    from shoal.launcher.report.history import History

    kept = History()
    if run is None:
        if plot is not None:
            raise ConfigurationError(f"--plot {plot} requires RUN; name the run to draw")
        _list(kept, job, as_json=as_json)
    elif other is not None:
        _compare(kept, run, other, as_json=as_json)
    elif plot is not None:
        _draw(kept, run, plot)
    else:
        _show(kept, run, as_json=as_json)


def _list(kept: History, job: str | None, *, as_json: bool) -> None:
    from rich.console import Console

    from shoal.cli.terminal.past import run_json, runs_view
    from shoal.launcher.report.history import RecordedRun

    found = kept.all(job)
    runs = [each for each in found if isinstance(each, RecordedRun)]
    if as_json:
        typer.echo(json.dumps([run_json(each) for each in runs], indent=2))
    elif runs:
        Console().print(runs_view(runs))
    else:
        typer.echo(
            f"no runs{'' if job is None else f' of job {job}'} are recorded on this machine; "
            "`shoal run` records its runs"
        )
    for each in found:
        if not isinstance(each, RecordedRun):
            typer.echo(
                f"shoal: cannot read the run recorded in {each.directory}: {each.why}", err=True
            )


def _show(kept: History, name: str, *, as_json: bool) -> None:
    from shoal.cli.terminal.past import run_json

    run = kept.find(name)
    if as_json:
        typer.echo(json.dumps(run_json(run), indent=2))
    else:
        print_run(run)


def _compare(kept: History, one: str, other: str, *, as_json: bool) -> None:
    from rich.console import Console

    from shoal.cli.terminal.past import comparison_json, comparison_view

    runs = kept.find(one), kept.find(other)
    if as_json:
        typer.echo(json.dumps(comparison_json(*runs), indent=2))
    else:
        Console().print(comparison_view(*runs))


def _draw(kept: History, name: str, place: str) -> None:
    from shoal.cli.terminal.plot import check_plot, draw

    check_plot(place)
    run = kept.find(name)
    draw(run.figures(), place, title=f"{Path(run.program).name}: run {run.name}")
    typer.echo(f"{place}: run {run.name}")


def print_run(run: RecordedRun) -> None:
    """Prints a run of the history with an account of its faults, pauses and figures."""
    from rich.console import Console

    from shoal.cli.terminal.past import run_view
    from shoal.launcher.report.account import figures_lines

    account: list[str] = []
    try:
        figures = run.figures()
    except UnknownResourceError:
        pass  # nothing was trained
    else:
        account = [*figures_lines(figures), *(pause.text for pause in figures.pauses)]
    Console().print(run_view(run, datetime.now(UTC), account), soft_wrap=True)
