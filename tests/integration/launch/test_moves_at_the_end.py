"""Launchers join or leave while this launcher's run ends: it restarts nothing that has finished or
was asked to end. The launcher runs in this process with real workers; the test plays the site and
the coordinator."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.run import nodes
from shoal.launcher.run.agent import Agent
from shoal.launcher.run.reporter import ExitReport
from shoal.launcher.workers.environment import NodePlacement
from shoal.launcher.workers.output import OutputPump
from shoal.launcher.workers.policy import JobEnd
from shoal.launcher.workers.settings import RunSettings

from tests.integration.launch.test_unknown_membership import MovingSite, Reporter, news
from tests.zygote.children import eventually

STARTS = """
import os, pathlib, signal, time
with open("started", "a") as file: file.write("x")
"""
JOINS = STARTS + "pathlib.Path(os.environ['SHOAL_MEMBER_FILE']).write_text('finished')\n"
HOLDS_OUT = STARTS + (
    "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path('asked').touch())\n"
    "pathlib.Path('ready').touch()\n"
    "while not pathlib.Path('done').exists(): time.sleep(0.01)\n"
)


class SlowReporter(Reporter):
    """Answers a worker's exit report once `may_answer` is set. `asked` is set when a report waits
    for that."""

    def __init__(self) -> None:
        super().__init__(news(ours=0, end=JobEnd.COMPLETED))
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def report(
        self,
        member_id: str,
        status: Any,
        *,
        key: str = "",
        failure: str = "",
        finished: bool = False,
    ) -> ExitReport | None:
        self.asked.set()
        assert self.may_answer.wait(60)
        return super().report(member_id, status, key=key, failure=failure, finished=finished)


class Site(MovingSite):
    """Reports one change of the set of launchers, and records when the launcher has handled it."""

    def __init__(self, reporter: Reporter, after_moved: Callable[[], bool]) -> None:
        super().__init__(reporter, after_moved)
        self.placed = 0
        self.taken = threading.Event()
        """Set when the launcher has handled the change, or is about to start workers."""

    async def place(self, *, again: bool) -> NodePlacement:
        self.placed += 1
        if self.placed > 1:
            self.taken.set()
        return await super().place(again=again)

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        return None

    async def moved(self) -> None:
        if self.asked_again.is_set():
            self.taken.set()
        await super().moved()


class Run:
    """An agent with a worker that runs `program`. The set of launchers changes once the worker's
    end is reported, or once the file `after` exists."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, program: str, *, after: str = ""
    ) -> None:
        monkeypatch.chdir(directory)
        self.directory = directory
        self.reporter = SlowReporter()
        self.site = Site(
            self.reporter, after_moved=Path(after).exists if after else self.reporter.asked.is_set
        )
        self.said: list[str] = []
        self._settings = RunSettings(
            command=(sys.executable, "-c", program), program="it", job_id="it", workers=1
        )

    def to_its_end(self, meanwhile: Callable[[], None]) -> int:
        """Runs the agent and returns its exit status. Calls `meanwhile` on another thread during
        the run, because signals go to the main thread."""
        pump = OutputPump(lambda _stream, _data: None)
        other = threading.Thread(target=meanwhile)
        other.start()
        try:
            return (
                Agent(self._settings, self.site, pump=pump, note=self._note, colour=False)
                .run()
                .exit_code
            )
        finally:
            other.join()
            pump.close(nodes._CONNECT_TIMEOUT)

    @property
    def starts(self) -> int:
        return len((self.directory / "started").read_text())

    def _note(self, text: str) -> None:
        self.said.append(text)
        if "restarting all workers" in text:
            self.site.taken.set()


@pytest.mark.parametrize("program", [STARTS, JOINS], ids=["plain", "elastic"])
def test_run_whose_workers_ended_well_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """The set of launchers changes before the coordinator has answered the exit report. By then the
    job has no members."""
    run = Run(tmp_path, monkeypatch, program)

    def answer_late() -> None:
        eventually(run.site.taken.is_set, "the launcher to take the move")
        run.reporter.may_answer.set()

    assert run.to_its_end(answer_late) == 0, run.said
    assert (run.starts, run.site.placed, run.said) == (1, 1, [])


def test_launcher_asked_to_end_starts_nothing_when_launchers_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it register again with the other launchers, which would then wait for it."""
    run = Run(tmp_path, monkeypatch, HOLDS_OUT, after="asked")
    run.reporter.may_answer.set()

    def ask() -> None:
        eventually(Path("ready").exists, "the worker")
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(run.site.taken.is_set, "the launcher to take the move")
        Path("done").touch()

    assert run.to_its_end(ask) == 128 + signal.SIGTERM, run.said
    assert (run.starts, run.site.placed) == (1, 1)
    assert not any("restarting all workers" in text for text in run.said)
