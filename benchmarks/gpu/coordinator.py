"""Compares a training step in a worker of `shoal run`, which has a coordinator, with a step in a
world of one rank without services."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu.context import COMMAND, NO_TARGET, Context
from benchmarks.gpu.decoder import FEW_LAYERS, Recipe, Training, in_world_of_one
from benchmarks.gpu.large import size_of
from benchmarks.processes import Stage
from benchmarks.report import Row, Table

_RECIPE: Final = Recipe(name="shoal ddp", system="shoal", strategy="ddp", few_layers=True)
_MODULE: Final = "benchmarks.gpu.coordinator"
_TIMEOUT_S: Final = 50.0
_REHEARSAL_TIMEOUT_S: Final = 200.0
"""Time limit on a busy host."""


def measure(context: Context) -> Table:
    """Trains in a process without services, then in a worker of a job with a launcher and a
    coordinator. Takes less than a minute."""
    rows = tuple(
        context.measured(
            "coordinator", name, lambda name=name, under=under: _row(context, name, under=under)
        )
        for name, under in (
            ("without a coordinator", False),
            ("shoal run, with a coordinator", True),
        )
    )
    return Table(
        key="gpu-coordinator",
        title=f"Steps with and without a coordinator on {context.what}",
        target=NO_TARGET,
        method=(
            f"Shoal's ddp, one worker, {FEW_LAYERS} layers of the large model; each row is a "
            "process of its own. In both nothing travels between workers; in a step the "
            "coordinator is asked nothing."
        ),
        columns=("step ms", "step alone ms", "host ms"),
        rows=rows,
        verdict="",
    )


def _row(context: Context, name: str, *, under: bool) -> Row:
    run = [sys.executable, "-m", "shoal", "run", "--standalone", "--nproc-per-node", "1"]
    timeout_s = _REHEARSAL_TIMEOUT_S if context.rehearsal else _TIMEOUT_S
    with Stage() as stage:
        output = stage.directory / "figures.json"
        words = ["-m", _MODULE, "--device", context.device.type, "--output", str(output)]
        stage.finish(
            stage.start("steps", [*(run if under else [sys.executable]), *words]),
            timeout_s=timeout_s,
        )
        cells = json.loads(output.read_text())
    return Row(name=name, command=f"{COMMAND} coordinator", cells=cells)


def main() -> None:
    """Trains in this process and writes the figures to a file. The process may be a worker of a
    job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    context = Context(device=device, what="")

    def train() -> dict[str, str]:
        figures = Training(_RECIPE, size_of(context, _RECIPE), device).figures()
        seconds = {
            "step ms": figures.step_s,
            "step alone ms": figures.synced_s,
            "host ms": figures.host_s,
        }
        return {column: f"{1e3 * value:.2f}" for column, value in seconds.items()}

    if "SHOAL_COORDINATOR" in os.environ:
        import shoal

        shoal.init()
        cells = train()
    else:
        cells = in_world_of_one(_RECIPE, device, train)
    options.output.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
