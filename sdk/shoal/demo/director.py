"""Runs both parts of the demo one after the other, and prints the verdict."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from shoal_common.errors import ShoalError
from shoal_common.system.scratch import ScratchDirectory

from shoal.demo import report
from shoal.demo.screen import Screen
from shoal.demo.stage import Plan, perform

_TRAINING_SAMPLES = 1437
_GLOBAL_BATCH = 96
_SLOW_WORKER = 2


def plans(*, sync_epochs: int, async_epochs: int) -> list[Plan]:
    """Returns the plans of the demo's two runs."""
    return [
        Plan(
            title="synchronous (ddp), one worker killed",
            strategy="ddp",
            epochs=sync_epochs,
            total_steps=sync_epochs * math.ceil(_TRAINING_SAMPLES / _GLOBAL_BATCH),
            kill_at=0.5,
        ),
        Plan(
            title="asynchronous (async_sgd), one worker 4 x slower, one server killed",
            strategy="async_sgd",
            epochs=async_epochs,
            total_steps=async_epochs * math.ceil(_TRAINING_SAMPLES / (_GLOBAL_BATCH // 3)),
            servers=2,
            kill_at=0.5,
            environment={"SHOAL_DEMO_SLOW_INDEX": str(_SLOW_WORKER)},
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 if all checks passed."""
    parser = argparse.ArgumentParser(
        prog="shoal demo",
        description="Train on handwritten digits on a cluster of processes, with faults.",
    )
    parser.add_argument("--sync-epochs", type=int, default=80, help="epochs of the synchronous run")
    parser.add_argument(
        "--async-epochs", type=int, default=20, help="epochs of the asynchronous run"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("out/demo.png"), help="where to write the plot"
    )
    parser.add_argument(
        "--keep", type=Path, help="keep records, traces and output in this directory"
    )
    options = parser.parse_args(arguments)
    console = Console()
    started = time.monotonic()
    with contextlib.closing(ScratchDirectory("demo")) as scratch:
        base = options.keep or scratch.path
        outcomes = []
        try:
            with Screen(console) as screen:
                for plan in plans(
                    sync_epochs=options.sync_epochs, async_epochs=options.async_epochs
                ):
                    outcomes.append(perform(plan, base / plan.strategy, screen.show))
        except ShoalError as error:
            console.print(f"[red]{error}[/]")
            return 1
        figures = [report.measure(outcome) for outcome in outcomes]
        faults = [
            fault
            for outcome, f in zip(outcomes, figures, strict=True)
            for fault in report.faults(outcome, f)
        ]
        report.print_table(console, figures)
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        report.plot(options.plot, outcomes, figures)
        console.print(f"loss curves: {options.plot}   total {time.monotonic() - started:.0f} s")
        for fault in faults:
            console.print(f"[red]FAILED[/] {fault}")
        for outcome in outcomes:
            if outcome.exit_code != 0:
                console.print(
                    outcome.log.read_text(errors="replace")[-4000:], markup=False, highlight=False
                )
        if not faults:
            console.print(
                "[green]all checks passed[/]: no restart of the survivors, no sample or update "
                "lost or counted twice, no process left behind"
            )
    return 1 if faults else 0
