"""A launcher whose coordinator does not answer does not conclude that its workers are dead. The
launcher runs in this process with real workers."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.clusters.cluster import LocalCluster
from shoal.launcher.clusters.jobs import JobSettings
from shoal.launcher.run import agent, nodes
from shoal.launcher.run.agent import Agent
from shoal.launcher.run.nodes import SharedSite
from shoal.launcher.run.reporter import ExitReport, ExitReporter, JobNews
from shoal.launcher.run.site import Ending
from shoal.launcher.workers.environment import NodePlacement
from shoal.launcher.workers.output import OutputPump
from shoal.launcher.workers.policy import JobEnd
from shoal.launcher.workers.settings import NodeRange, RunSettings
from shoal_common.errors import DeadlineError

WAITS = """
import pathlib, sys, time
with open("started", "a") as file: file.write("x")
while not pathlib.Path("done").exists(): time.sleep(0.01)
"""
_DEADLINE_S = 60


class Reporter(ExitReporter):
    """Gives the given answers in turn; None: the coordinator is away."""

    def __init__(self, *answers: JobNews | None) -> None:
        self.answers = list(answers)

    def news(self) -> JobNews | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def report(
        self,
        member_id: str,
        status: Any,
        *,
        key: str = "",
        failure: str = "",
        finished: bool = False,
    ) -> ExitReport | None:
        news = self.news()
        return ExitReport(was_member=news.ours > 0, rank=-1, job=news) if news is not None else None

    def missing_servers(self) -> str:
        return ""

    def close(self) -> None:
        """Does nothing: no report is in flight."""


class MovingSite:
    """A site whose set of launchers changes once, right after the start."""

    coordinator = "127.0.0.1:9"
    run = None

    def __init__(self, reporter: Reporter, after_moved: Callable[[], bool]) -> None:
        self.reporter = reporter
        self.after_moved = after_moved
        self.asked_again = threading.Event()

    def begin(self, start_service: object) -> None:
        """Does nothing: this site needs no preparation."""

    async def open(self, launcher_id: str) -> ExitReporter:
        return self.reporter

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def place(self, *, again: bool) -> NodePlacement:
        return NodePlacement(node_rank=0, node_count=1, master_address="127.0.0.1", master_port=1)

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        return None

    async def moved(self) -> None:
        if self.asked_again.is_set():
            await asyncio.Event().wait()
        while not self.after_moved():
            await asyncio.sleep(0.01)
        self.asked_again.set()

    def fail(self, reason: str) -> None:
        """Does nothing: there is no other launcher."""

    def close(self, ending: Ending) -> None:
        """Does nothing: nothing was started."""


class SlowSite(MovingSite):
    """A site whose coordinator responds once `opened` is set."""

    def __init__(self, reporter: Reporter, after_moved: Callable[[], bool]) -> None:
        super().__init__(reporter, after_moved)
        self.opened = threading.Event()

    async def open(self, launcher_id: str) -> ExitReporter:
        while not self.opened.is_set():
            await asyncio.sleep(0.01)
        return self.reporter

    async def moved(self) -> None:
        await asyncio.Event().wait()


def news(*, ours: int, end: JobEnd = JobEnd.NONE) -> JobNews:
    return JobNews(end=end, why="", holders=ours, refused="", unhealthy=False, ours=ours)


def run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *answers: JobNews | None, starts: int
) -> tuple[int, int, str]:
    """Runs a launcher; returns its exit status, the number of starts of the worker, and its output.
    The worker ends once all answers but the last were given and it was started `starts` times."""
    monkeypatch.chdir(directory)
    settings = RunSettings(
        command=(sys.executable, "-c", WAITS), program="waits", job_id="waits", workers=1
    )
    said: list[str] = []
    reporter = Reporter(*answers)
    site = MovingSite(reporter, after_moved=Path("started").exists)
    pump = OutputPump(lambda _stream, _data: None)

    def settled() -> bool:
        return (
            site.asked_again.is_set()
            and len(reporter.answers) == 1
            and len(Path("started").read_text()) >= starts
        )

    finisher = threading.Thread(target=_finish_when, args=(settled, directory))
    finisher.start()
    try:
        result = Agent(settings, site, pump=pump, note=said.append, colour=False).run()
    finally:
        finisher.join()
        pump.close(nodes._CONNECT_TIMEOUT)
    return result.exit_code, len((directory / "started").read_text()), "\n".join(said)


def _finish_when(condition: Callable[[], bool], directory: Path) -> None:
    waiting = threading.Event()
    for _ in range(_DEADLINE_S * 100):
        if condition():
            break
        waiting.wait(0.01)
    (directory / "done").touch()


def test_workers_keep_running_while_the_coordinator_cannot_confirm_their_membership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = news(ours=1)
    status, starts, said = run(
        tmp_path, monkeypatch, None, None, members, news(ours=0, end=JobEnd.COMPLETED), starts=1
    )
    assert (status, starts) == (0, 1), said
    assert "restarting all workers" not in said


def test_slow_start_reports_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(agent, "_REPORT_AGAIN_S", 0.2)
    settings = RunSettings(
        command=(sys.executable, "-c", WAITS), program="waits", job_id="waits", workers=1
    )
    site = SlowSite(Reporter(news(ours=0)), after_moved=lambda: False)
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        if "the coordinator" in text:
            site.opened.set()
        if sum(line.startswith("waiting for 1 of 1 workers to join") for line in said) > 1:
            (tmp_path / "done").touch()

    monkeypatch.chdir(tmp_path)
    pump = OutputPump(lambda _stream, _data: None)
    try:
        result = Agent(settings, site, pump=pump, note=note, colour=False).run()
    finally:
        pump.close(nodes._CONNECT_TIMEOUT)
    assert result.exit_code == 0, said
    waits = [line for line in said if line.startswith("waiting for ")]
    assert any(re.fullmatch(r"waiting for .*the coordinator.*; \d+ s since .*", w) for w in waits)
    assert waits[-1].startswith("waiting for 1 of 1 workers to join (they may still be")


def test_workers_of_a_plain_script_are_restarted_once_the_membership_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, starts, said = run(tmp_path, monkeypatch, None, news(ours=0), starts=2)
    assert (status, starts) == (0, 2), said


def test_launcher_that_waits_for_others_reports_how_many_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_REMINDER_S", 0.05)
    said: list[str] = []
    enough = asyncio.Event()

    def note(text: str) -> None:
        said.append(text)
        enough.set()

    async def wait_in_vain(site: SharedSite) -> None:
        site.begin(lambda *arguments: pytest.fail("a site of several machines starts no services"))
        await site.open("launcher")
        place = asyncio.ensure_future(site.place(again=False))
        await asyncio.wait(
            [place, asyncio.ensure_future(enough.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        place.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineError)):
            await place

    with LocalCluster(JobSettings(job_id="other", min_workers=1, max_workers=1)) as cluster:
        settings = RunSettings(
            command=("true",),
            program="true",
            job_id="vain",
            workers=1,
            nodes=NodeRange(2, 2),
            endpoint=cluster.coordinator.address,
        )
        site = SharedSite(settings, note=note)
        try:
            asyncio.run(wait_in_vain(site))
        finally:
            site.close(Ending.STOPPED)
    assert said[0].startswith("waiting up to ")
    assert " s longer for the launchers of run 1 of job vain: " in said[0]
    assert " of at least 2 have joined (" in said[0]
