"""Live table of the demo, with one row per rank. If the output is not a terminal, it prints a line
from time to time instead."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.demo.stage import Outcome, Plan, steps_done

_LINE_EVERY_S = 3.0


class Screen:
    """Display of the demo's runs, as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=8, transient=True)
            if console.is_terminal
            else None
        )
        self._last_line = 0.0
        self._started: dict[str, float] = {}
        self._most_steps: dict[str, int] = {}
        self._last_ranked: dict[str, pb.GetJobResponse] = {}
        """Run -> last state of its job in which the job had ranks. It is shown at the end of a run,
        when the ranks have left and the launcher is cleaning up for a few seconds."""

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, plan: Plan, job: pb.GetJobResponse | None, outcome: Outcome) -> None:
        """Displays the newest state of a run."""
        started = self._started.setdefault(plan.title, time.monotonic())
        finished = job is not None and job.phase == pb.JOB_PHASE_FINISHED
        if job is not None and any(m.rank >= 0 for m in job.members):
            self._last_ranked[plan.title] = job
        job = self._last_ranked.get(plan.title, job)
        members = (
            sorted((m for m in job.members if m.rank >= 0), key=lambda m: m.rank)
            if job is not None
            else []
        )
        # Members that have left are not counted, so the progress is kept from decreasing.
        done = max(
            plan.total_steps if finished else steps_done(plan, members),
            self._most_steps.get(plan.title, 0),
        )
        self._most_steps[plan.title] = done
        if self._live is not None:
            self._live.update(_table(plan, job, outcome, members, done, time.monotonic() - started))
        elif time.monotonic() - self._last_line > _LINE_EVERY_S:
            self._last_line = time.monotonic()
            loss = next(
                (f"{m.progress.loss:.3f}" for m in members if not math.isnan(m.progress.loss)), "-"
            )
            generation = job.generation.number if job is not None else 0
            self._console.print(
                f"{plan.title}: step {done}/{plan.total_steps}, {len(members)} ranks, generation "
                f"{generation}, loss {loss}"
            )


def _table(
    plan: Plan,
    job: pb.GetJobResponse | None,
    outcome: Outcome,
    members: list[pb.MemberStatus],
    done: int,
    elapsed_s: float,
) -> Table:
    fault = f"   [red]SIGKILL to {outcome.killed}[/]" if outcome.killed else ""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(f"[bold]{plan.title}[/]  {elapsed_s:4.0f} s{fault}")
    grid.add_row(ProgressBar(total=plan.total_steps, completed=done, width=72))
    table = Table(expand=False)
    for name in ("rank", "pid", "phase", "generation", "step", "samples/s", "loss", "staleness"):
        table.add_column(name, justify="right")
    if job is None or not job.members:
        grid.add_row("starting processes ...")
        return grid
    for m in members:
        loss = "-" if math.isnan(m.progress.loss) else f"{m.progress.loss:.4f}"
        staleness = f"{m.progress.staleness:.0f}" if plan.strategy == "async_sgd" else "-"
        phase = pb.MemberPhase.Name(m.phase).removeprefix("MEMBER_PHASE_").lower()
        table.add_row(
            *(str(m.rank), str(m.pid), phase, str(job.generation.number), str(m.progress.step)),
            *(f"{m.progress.samples_per_s:.0f}", loss, staleness),
        )
    for m in job.members:
        if m.rank < 0:
            table.add_row(
                "-",
                str(m.pid),
                pb.MemberPhase.Name(m.phase).removeprefix("MEMBER_PHASE_").lower(),
                "-",
                "-",
                "-",
                "-",
                "-",
            )
    grid.add_row(table)
    return grid
