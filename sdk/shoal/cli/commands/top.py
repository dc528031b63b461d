"""`shoal top`: shows a live view of a job on the full terminal, or prints one plain frame."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Coordinator, Job

if TYPE_CHECKING:
    from shoal.cli.target import Target


def top(
    coordinator: Coordinator = None,
    job: Job = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between frames.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print one frame and exit; the default if standard output is not a terminal.",
        ),
    ] = False,
) -> None:
    """Watch a job: its ranks, its parameter servers, its latest events, and other jobs. `q`
    quits."""
    from rich.console import Console

    from shoal.cli.target import target
    from shoal.cli.terminal.frame import Frames

    with target(coordinator, job) as found:
        if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            Console().print(Frames(found.client, found.job_id, full_screen=False).take())
        else:
            _watch(found, interval)


def _watch(found: Target, interval_s: float) -> None:
    from rich.live import Live

    from shoal.cli.terminal.frame import Frames
    from shoal.cli.terminal.keys import Keys

    frames = Frames(found.client, found.job_id, full_screen=True)
    with Keys() as keys, Live(frames.take(), screen=True, auto_refresh=False) as live:
        while keys.wait(interval_s) not in ("q", "Q", "\x03", "\x04"):
            live.update(frames.take(), refresh=True)
