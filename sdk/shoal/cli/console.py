"""Runs an agent on this terminal: its output, its notes, its table, and its exit status."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Final, NoReturn

from shoal.launcher.agent import Agent, RunResult
from shoal.launcher.output import ConsoleWriter, OutputPump, Stream, TerminalStuckError, Writer
from shoal.launcher.settings import RunSettings
from shoal.launcher.site import Site
from shoal.launcher.standalone import StandaloneSite
from shoal.launcher.summary import failure_summary, survived_summary

_LAST_OUTPUT_TIMEOUT: Final = timedelta(seconds=60)

Note = Callable[[str], None]


class RunExit(SystemExit):
    """The end of a run. `summary`: which workers failed, for people; empty: none did."""

    def __init__(self, result: RunResult, summary: str) -> None:
        super().__init__(result.exit_code)
        self.summary = summary


def tell(text: str) -> None:
    """A line of the launcher's own, before anything runs."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command speaks to its person


def run_to_exit(settings: RunSettings, *, live: bool = False) -> NoReturn:
    """Runs, and exits with the run's status. `live`: under a table, if standard output is a terminal."""
    if settings.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        tell("OMP_NUM_THREADS is not set: each worker gets 1 thread; set it to what suits your script")
    try:
        raise _run(settings, live=live)
    except TerminalStuckError as error:
        _leave(error)


def _run(settings: RunSettings, *, live: bool) -> RunExit:
    with ExitStack() as stack:
        pump: OutputPump

        def note(text: str) -> None:
            pump.say(f"shoal: {text}\n")

        site = _site(settings, note)
        writer: Writer = ConsoleWriter()
        if live and Stream.OUT.is_terminal:
            from shoal.cli.live import LiveView

            writer = stack.enter_context(LiveView(site.coordinator, settings.job_id, fallback=writer)).write
        pump = OutputPump(writer)
        stack.callback(pump.close, _LAST_OUTPUT_TIMEOUT)
        result = Agent(settings, site, pump=pump, note=note, colour=_coloured()).run()
        summary = _tell_result(settings, result, pump, note)
    return RunExit(result, summary)


def _leave(error: TerminalStuckError) -> NoReturn:
    """All that was started has ended. Nothing may be written to this terminal any more, not even what the interpreter would flush."""
    if not Stream.ERR.is_terminal and select.select([], [Stream.ERR], [], 0)[1]:
        os.write(Stream.ERR, f"shoal: {error}\n".encode())
    os._exit(1)


def _site(settings: RunSettings, note: Note) -> Site:
    if settings.endpoint is None:
        return StandaloneSite(settings, note=note)
    # Imported here: it brings gRPC's and the settings' modules, which a local run loads only once its workers are on their way.
    from shoal.launcher.nodes import SharedSite

    return SharedSite(settings, note=note)


def _tell_result(settings: RunSettings, result: RunResult, pump: OutputPump, note: Note) -> str:
    """Returns what it told."""
    summary = ""
    if result.failures:
        summary = failure_summary(settings.program, result.failures, result.survived)
        pump.say(summary)
    elif result.survived and result.exit_code == 0:
        summary = survived_summary(result.survived)
        note(summary)
    return summary


def _coloured() -> bool:
    return Stream.OUT.is_terminal and Stream.ERR.is_terminal and not os.environ.get("NO_COLOR")
