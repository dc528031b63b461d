"""A frame of `shoal top`: its contents on high and low terminals, and while the coordinator is not
responding."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from shoal.cli.terminal.frame import Frames
from shoal.client import Client, Event, Job, JobSummary
from shoal.client.messages import event_of, job_of, summary_of
from shoal_common.errors import UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb


class FakeClient(Client):
    """Answers without a coordinator."""

    away = False

    def job(self, job_id: str) -> Job:
        if self.away:
            raise UnavailableError("no answer")
        members = [
            pb.MemberStatus(member_id=f"m{rank}", rank=rank, host="h", pid=1) for rank in range(3)
        ]
        return job_of(
            pb.GetJobResponse(
                spec=pb.JobSpec(job_id=job_id, max_workers=3),
                phase=pb.JOB_PHASE_RUNNING,
                members=members,
            )
        )

    def jobs(self) -> tuple[JobSummary, ...]:
        phases = {
            "j": pb.JOB_PHASE_RUNNING,
            "other": pb.JOB_PHASE_WAITING,
            "old": pb.JOB_PHASE_FINISHED,
        }
        return tuple(
            summary_of(pb.JobSummary(job_id=job_id, phase=phase))
            for job_id, phase in phases.items()
        )

    def events(self, job_id: str, *, after: str = "", **_: Any) -> Iterator[Event]:  # type: ignore[override]
        return (
            event_of(pb.Event(event_id=f"{n:03}", kind=f"event{n:03}"))
            for n in range(100)
            if f"{n:03}" > after
        )


def lines_of(frames: Frames, *, height: int) -> list[str]:
    """Returns the lines that `shoal top` shows on a terminal."""
    console = Console(
        file=io.StringIO(),
        width=80,
        height=height,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    with Live(frames.take(), console=console, screen=True, auto_refresh=False):
        pass
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue().partition("\x1b[H")[2].partition("\x1b[?25h")[0]
    return [line.rstrip() for line in written.splitlines()[:height]]


@pytest.mark.parametrize("height", [20, 40])
def test_newest_events_fill_the_terminal_and_are_fetched_once(height: int) -> None:
    frames = Frames(FakeClient(), "j", full_screen=True)
    for _ in range(2):
        lines = lines_of(frames, height=height)
        assert len(lines) == height
        above = lines.index("events") + 1
        assert [line.split()[-1] for line in lines[above:]] == [
            f"event{n:03}" for n in range(100 - (height - above), 100)
        ]
    assert any(line.split() == ["other", "waiting", "-", "-", "-"] for line in lines)
    assert not any(line.startswith("old") for line in lines)


def test_last_known_state_is_shown_while_nobody_answers() -> None:
    client = FakeClient()
    frames = Frames(client, "j", full_screen=True)
    lines_of(frames, height=30)
    client.away = True
    lines = lines_of(frames, height=30)
    assert "as of then: no answer" in lines[0]
    assert any("event099" in line for line in lines)
    with pytest.raises(UnavailableError, match="no answer"):
        Frames(client, "j", full_screen=True).take()
