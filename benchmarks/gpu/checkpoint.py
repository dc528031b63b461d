"""Measures how long a checkpoint of 16 GB pauses training, and how long it takes to write it."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import shoal

from benchmarks.gpu.context import COMMAND, NO_TARGET, Context
from benchmarks.gpu.decoder import Recipe, Training, in_world_of_one
from benchmarks.gpu.large import size_of
from benchmarks.report import Row, Table

_RECIPE: Final = Recipe(name="shoal ddp", system="shoal", strategy="ddp")
_BEFORE: Final = 10
"""Number of steps that are timed before the checkpoint."""
_LONGEST_S: Final = 50.0
"""Time limit of a checkpoint, during which training continues."""


def measure(context: Context) -> Table:
    """Saves the large model with its optimizer state once while it trains. Takes less than a
    minute."""
    row = context.measured(
        "checkpoint",
        _RECIPE.name,
        lambda: in_world_of_one(_RECIPE, context.device, lambda: _save(context)),
    )
    return Table(
        key="gpu-checkpoint",
        title=f"A checkpoint of the large model on {context.what}",
        target=NO_TARGET,
        method=(
            "1.34 billion parameters in fp32 and Adam's two moments, to a local directory. The "
            "pause is the call of save_checkpoint, and what the slowest step beside the writing "
            "takes longer than the median before."
        ),
        columns=(
            "GB",
            "pause ms",
            "call ms",
            "step before ms",
            "step meanwhile ms",
            "slowest ms",
            "written after s",
        ),
        rows=(row,),
        verdict="",
    )


def _save(context: Context) -> Row:
    training = Training(_RECIPE, size_of(context, _RECIPE), context.device)
    training.warm_up()
    before = [training.timed_step() for _ in range(_BEFORE)]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        begun = time.perf_counter()
        shoal.save_checkpoint(directory)
        call_s = time.perf_counter() - begun
        meanwhile: list[float] = []
        while not (written := list(Path(directory).glob("step-*"))) or not meanwhile:
            meanwhile.append(training.timed_step())
            if time.perf_counter() - begun > _LONGEST_S:
                break
        written_s = time.perf_counter() - begun
        size = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    usual_s = statistics.median(before)
    return Row(
        name=_RECIPE.name,
        command=f"{COMMAND} checkpoint",
        cells={
            "GB": f"{size / 1e9:.2f}",
            "pause ms": f"{1e3 * (call_s + max(0.0, max(meanwhile) - usual_s)):.1f}",
            "call ms": f"{1e3 * call_s:.1f}",
            "step before ms": f"{1e3 * usual_s:.1f}",
            "step meanwhile ms": f"{1e3 * statistics.median(meanwhile):.1f}",
            "slowest ms": f"{1e3 * max(meanwhile):.1f}",
            **({"written after s": f"{written_s:.3g}"} if written else {}),
        },
        samples={"before_s": before, "meanwhile_s": meanwhile},
        failure="" if written else f"not written within {_LONGEST_S:g} s",
    )
