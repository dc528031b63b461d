"""Computes the figures of the demo's runs and the verdict, and plots both loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shoal_worker.data.record import audit

from shoal.demo import trace
from shoal.demo.stage import Outcome
from shoal.ticks import is_wide, logarithmic

LEAST_ACCURACY = 0.95
_SOON_S = 20
_LOST_UPDATES = "updates of this worker that it had acknowledged"
"""Part of the message that a worker prints if a restarted parameter server has lost updates that it
had acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measured results of one run."""

    title: str
    accuracy: float | None
    samples_per_s: float
    pause_at_kill_s: float | None
    """Seconds from the SIGKILL of a worker to the next committed step. For a parameter server, the
    longest time between two steps in the 20 seconds after its SIGKILL."""
    pause_at_join_s: float | None
    """Seconds from the last step before the replacement's generation to the first step in that
    generation."""
    staleness_p50: float | None
    staleness_p99: float | None
    samples_once: int
    samples_lost: int
    samples_repeated: int
    joined_unix_s: float | None
    times_s: Sequence[float]
    losses: Sequence[float]
    start_unix_s: float


def measure(outcome: Outcome) -> Figures:
    """Computes the figures of a run from the files written by its workers."""
    notes = trace.read(outcome.traces)
    verdict = audit(outcome.records)
    times, losses = notes.loss_curve(common_steps=outcome.plan.strategy != "async_sgd")
    span = notes.steps[-1].unix_s - notes.steps[0].unix_s if len(notes.steps) > 1 else 0.0
    stale = sorted(s.staleness for s in notes.steps) if outcome.plan.strategy == "async_sgd" else []
    killed, joined = _pauses(outcome, notes.steps)
    accuracies = [a.share for a in notes.accuracies]
    return Figures(
        title=outcome.plan.title,
        accuracy=min(accuracies) if accuracies else None,
        samples_per_s=sum(s.samples for s in notes.steps) / span if span else 0.0,
        pause_at_kill_s=killed,
        pause_at_join_s=joined[0] if joined is not None else None,
        staleness_p50=statistics.median(stale) if stale else None,
        staleness_p99=stale[min(len(stale) - 1, int(0.99 * len(stale)))] if stale else None,
        samples_once=sum(e.once for e in verdict.epochs),
        samples_lost=sum(e.lost for e in verdict.epochs),
        samples_repeated=sum(e.repeated for e in verdict.epochs),
        joined_unix_s=joined[1] if joined is not None else None,
        times_s=times,
        losses=losses,
        start_unix_s=notes.steps[0].unix_s if notes.steps else 0.0,
    )


def _pauses(
    outcome: Outcome, steps: Sequence[trace.CommittedStep]
) -> tuple[float | None, tuple[float, float] | None]:
    if outcome.killed_unix_s is None:
        return None, None
    if outcome.plan.servers:
        soon = [s.unix_s for s in steps if -1 <= s.unix_s - outcome.killed_unix_s <= _SOON_S]
        return max((after - before for before, after in pairwise(soon)), default=None), None
    before = max((s.generation for s in steps if s.unix_s <= outcome.killed_unix_s), default=0)
    after = [s for s in steps if s.generation > before]
    if not after:
        return None, None
    pause = after[0].unix_s - outcome.killed_unix_s
    generations = sorted({s.generation for s in after})
    if len(generations) < 2:
        return pause, None
    last = max(s.unix_s for s in after if s.generation == generations[-2])
    first = min(s.unix_s for s in after if s.generation == generations[-1])
    return pause, (first - last, first)


def faults(outcome: Outcome, figures: Figures) -> list[str]:
    """Returns a human-readable description of each check that failed; empty if all passed."""
    found = []
    if outcome.exit_code != 0:
        found.append(
            f"{figures.title}: the run ended with status {outcome.exit_code}; its output is in "
            f"{outcome.log}"
        )
    if figures.accuracy is None or figures.accuracy < LEAST_ACCURACY:
        got = "none" if figures.accuracy is None else f"{figures.accuracy:.4f}"
        found.append(f"{figures.title}: test accuracy {got}; expected at least {LEAST_ACCURACY}")
    if figures.samples_lost or figures.samples_repeated or not figures.samples_once:
        found.append(
            f"{figures.title}: {figures.samples_lost} samples lost, {figures.samples_repeated} "
            "seen more than once"
        )
    if outcome.plan.kill_at is not None and outcome.killed_unix_s is None:
        found.append(f"{figures.title}: nothing was killed before the end")
    elif (
        outcome.plan.kill_at is not None
        and not outcome.plan.servers
        and figures.pause_at_join_s is None
    ):
        found.append(f"{figures.title}: no replacement joined before the end")
    if outcome.plan.servers and _LOST_UPDATES in outcome.log.read_text(errors="replace"):
        found.append(
            f"{figures.title}: a parameter server lost updates that it had acknowledged; the "
            f"output is in {outcome.log}"
        )
    if outcome.left_running:
        found.append(
            f"{figures.title}: processes were left running: {'; '.join(outcome.left_running)}"
        )
    return found


def print_table(console: Console, all_figures: Sequence[Figures]) -> None:
    """Prints the figures as a table with one column per run."""
    table = Table(title="Shoal on handwritten digits")
    table.add_column("")
    for figures in all_figures:
        table.add_column(figures.title, justify="right")
    rows = [
        ("test accuracy", [_or_dash(f.accuracy, ".4f") for f in all_figures]),
        ("samples/s", [f"{f.samples_per_s:.0f}" for f in all_figures]),
        ("pause at the kill", [_or_dash(f.pause_at_kill_s, ".3f", " s") for f in all_figures]),
        ("pause at the join", [_or_dash(f.pause_at_join_s, ".3f", " s") for f in all_figures]),
        (
            "staleness p50 / p99",
            [
                f"{f.staleness_p50:.0f} / {f.staleness_p99:.0f}"
                if f.staleness_p50 is not None
                else "-"
                for f in all_figures
            ],
        ),
        (
            "samples seen exactly once",
            [
                f"{f.samples_once} of {f.samples_once + f.samples_lost + f.samples_repeated}"
                for f in all_figures
            ],
        ),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    console.print(table)


def plot(path: Path, outcomes: Sequence[Outcome], all_figures: Sequence[Figures]) -> None:
    """Plots both loss curves over time with the faults marked, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(all_figures), figsize=(6.4 * len(all_figures), 4), sharey=True, squeeze=False
    )
    losses = [loss for figures in all_figures for loss in figures.losses]
    for axis, outcome, figures in zip(axes[0], outcomes, all_figures, strict=True):
        axis.plot(
            figures.times_s,
            figures.losses,
            color="0.8",
            linewidth=0.8,
            label="each step" if outcome.plan.strategy != "async_sgd" else "each push",
        )
        axis.plot(figures.times_s, _smoothed(figures.losses), color="C0", label="mean of 25")
        if outcome.killed_unix_s is not None:
            axis.axvline(
                outcome.killed_unix_s - figures.start_unix_s,
                color="C3",
                linestyle="--",
                label=f"SIGKILL: {figures.pause_at_kill_s or 0:.2f} s pause",
            )
        if figures.joined_unix_s is not None:
            axis.axvline(
                figures.joined_unix_s - figures.start_unix_s,
                color="C2",
                linestyle="--",
                label=f"join: {figures.pause_at_join_s or 0:.2f} s pause",
            )
        axis.set(title=figures.title, xlabel="seconds")
        if is_wide(losses):
            logarithmic(axis, "y", losses)
        axis.legend(loc="best", fontsize=8)
    axes[0][0].set_ylabel("training loss")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smoothed(values: Sequence[float], window: int = 25) -> list[float]:
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def _or_dash(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
