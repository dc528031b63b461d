"""Runs a launcher's agent on this terminal: shows its output, its messages and the table, and exits
with the status of the run."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from shoal_common.errors import ConfigurationError, ShoalError
from shoal_worker.object_storage import local_directory

from shoal.cli.terminal.plot import check_plot, draw
from shoal.cli.terminal.progress_bar import BarWriter, PlainLines
from shoal.launcher.report.account import (
    RunFigures,
    figures_lines,
    interrupted_line,
    stopped_line,
)
from shoal.launcher.report.follower import Show
from shoal.launcher.report.history import Outcome
from shoal.launcher.report.summary import failure_summary, survived_summary
from shoal.launcher.run.agent import Agent, RunResult
from shoal.launcher.run.recorder import RunRecorder
from shoal.launcher.run.site import Site
from shoal.launcher.run.standalone import StandaloneSite
from shoal.launcher.workers.log_uploads import LogUploads
from shoal.launcher.workers.output import (
    ConsoleWriter,
    OutputPump,
    Stream,
    TerminalStuckError,
    Writer,
)
from shoal.launcher.workers.settings import RunSettings

_LAST_OUTPUT_TIMEOUT: Final = timedelta(seconds=60)

Note = Callable[[str], None]


class RunExit(SystemExit):
    """Raised to exit the program with the status of a run. `summary`: description of the failed
    workers to show to the user; empty if none failed."""

    def __init__(self, result: RunResult, summary: str) -> None:
        super().__init__(result.exit_code)
        self.summary = summary


def tell(text: str) -> None:
    """Prints a message of the launcher itself. Used while no worker runs."""
    # a message to the user
    print(f"shoal: {text}", file=sys.stderr, flush=True)  # noqa: T201


def run_to_exit(settings: RunSettings, *, live: bool = False) -> NoReturn:
    """Runs the agent and exits with the run's status. `live`: True to show a table if standard
    output is a terminal."""
    if settings.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        tell("OMP_NUM_THREADS is not set, so each worker uses 1 thread; set it to suit your script")
    try:
        raise _run(settings, live=live)
    except TerminalStuckError as error:
        _leave(error)


def _check_record_directory(directory: Path) -> None:
    """Creates the record directory before any worker starts. Raises ConfigurationError if workers
    could not write to it."""
    local_directory(directory, "--record-dir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--record-dir {directory}: {error.strerror}; use a writable directory"
        ) from error
    if not os.access(directory, os.W_OK):
        raise ConfigurationError(
            f"--record-dir {directory} is not writable; use a writable directory"
        )


def _run(settings: RunSettings, *, live: bool) -> RunExit:
    if settings.plot is not None:
        check_plot(settings.plot)
    if settings.record_directory is not None:
        _check_record_directory(settings.record_directory)
    with ExitStack() as stack:
        pump: OutputPump

        def note(text: str) -> None:
            pump.say(f"shoal: {text}\n")

        site = _site(settings, note)
        writer: Writer = ConsoleWriter()
        show: Show | None = None
        bar: BarWriter | None = None
        if live and Stream.OUT.is_terminal:
            from shoal.cli.terminal.live import LiveView

            view = stack.enter_context(
                LiveView(
                    site.coordinator, settings.job_id, fallback=writer, progress=settings.progress
                )
            )
            writer, show = view.write, view.show
        elif settings.progress and Stream.ERR.is_terminal:
            bar = BarWriter(writer)
            writer, show = bar.write, bar.show
        elif settings.progress:
            show = PlainLines(note).show
        recorder = RunRecorder.begin(settings)
        if recorder is not None:
            stack.callback(recorder.close)
            writer = recorder.writer(writer)
        pump = OutputPump(writer)
        uploads = _log_uploads(settings, note)
        if uploads is not None:
            stack.push(partial(_finish_uploads, uploads))  # after the pump is closed
        stack.callback(pump.close, _LAST_OUTPUT_TIMEOUT, tell=_tell_if_read)
        if uploads is not None:
            stack.callback(uploads.end_notes)
        if bar is not None:
            bar.on(pump)
        agent = Agent(
            settings,
            site,
            pump=pump,
            note=note,
            colour=_coloured(),
            show=show,
            recorder=recorder,
        )
        outcome, reason, status = Outcome.FAILED, "", 1
        try:
            result = agent.run()
            outcome, reason, status = result.outcome, result.reason, result.exit_code
        except (ShoalError, OSError) as error:
            reason = str(error)
            raise
        finally:
            if bar is not None:
                bar.end()
            _show_figures(settings, agent.figures, note)
            if recorder is not None:
                recorder.end(
                    outcome,
                    reason,
                    exit_status=status,
                    figures=agent.figures,
                    course=agent.course,
                )
        if result.stopped is not None:
            note(stopped_line(agent.figures, result.stopped))
        elif result.outcome is Outcome.INTERRUPTED and agent.figures.steps:
            note(interrupted_line(agent.figures))
        summary = _show_result(settings, result, pump, note)
        for problem in () if recorder is None else recorder.problems:
            note(problem)
    return RunExit(result, summary)


def _log_uploads(settings: RunSettings, note: Note) -> LogUploads | None:
    """Starts uploading the workers' log files; returns None if they are not uploaded."""
    logs = settings.logs
    if logs.url is None or logs.directory is None:
        return None
    return LogUploads(logs.url, logs.directory, patience=logs.upload_timeout, note=note)


def _finish_uploads(uploads: LogUploads, kind: object, error: object, trace: object) -> None:
    """Uploads the rest of the log files. SIGTERM and SIGHUP end the wait for the upload, as Ctrl-C
    does. `error`: exception that ends the run; None if there is none."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def say(text: str) -> None:
        with suppress(OSError):  # nobody reads standard error any longer
            tell(text)

    tell_user = _tell_if_read if isinstance(error, TerminalStuckError) else say
    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        uploads.finish(tell_user)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_figures(settings: RunSettings, figures: RunFigures, note: Note) -> None:
    """Prints the run's figures and draws its plot, even if the run failed."""
    for line in figures_lines(figures):
        note(line)
    if settings.plot is None:
        return
    if not figures.points:
        note(
            f"--plot {settings.plot}: nothing was drawn, since no worker of a job (shoal.init) "
            "committed a step"
        )
        return
    try:
        draw(figures, settings.plot, title=f"{Path(settings.program).name}: job {settings.job_id}")
    except Exception as error:
        # errors of any kind: a failed plot must not change the run's result
        note(f"--plot {settings.plot}: could not draw the plot: {error}")


def _leave(error: TerminalStuckError) -> NoReturn:
    """Exits without writing to the terminal again, not even the buffered output that the
    interpreter would flush. Called when all processes of the run have exited."""
    _tell_if_read(str(error))
    os._exit(1)


def _tell_if_read(text: str) -> None:
    """Prints a message although the terminal is stuck, if standard error is not a terminal and
    accepts output. Never blocks."""
    if not Stream.ERR.is_terminal and select.select([], [Stream.ERR], [], 0)[1]:
        with suppress(OSError):  # nobody reads standard error any longer
            os.write(Stream.ERR, f"shoal: {text}\n".encode())


def _site(settings: RunSettings, note: Note) -> Site:
    if settings.endpoint is None:
        return StandaloneSite(settings, note=note)
    # Imported here, since it loads gRPC and the settings' modules, which a local run does not need
    # before its workers have started.
    from shoal.launcher.run.nodes import SharedSite

    return SharedSite(settings, note=note)


def _show_result(settings: RunSettings, result: RunResult, pump: OutputPump, note: Note) -> str:
    """Prints the result and returns the printed summary of failures."""
    summary = ""
    if result.failures:
        summary = failure_summary(settings.program, result.failures, result.survived)
        pump.say(summary)
    elif result.survived and (result.exit_code == 0 or result.stopped is not None):
        summary = survived_summary(result.survived, stopped=result.stopped is not None)
        note(summary)
    return summary


def _coloured() -> bool:
    return Stream.OUT.is_terminal and Stream.ERR.is_terminal and not os.environ.get("NO_COLOR")
