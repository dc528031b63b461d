"""Plots a run: loss and throughput over time, with marks for lost, new and departed members."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    from shoal.launcher.account import RunFigures

_KINDS: Final = (".png", ".svg")
_COLOURS: Final = {"fault": "C3", "join": "C2", "leave": "C1"}


def check_plot(file: Path) -> None:
    """Checks before the run that a plot can be written into `file`. Raises ConfigurationError
    otherwise."""
    if file.suffix.lower() not in _KINDS:
        raise ConfigurationError(f"--plot {file}: expected a file whose name ends in .png or .svg")
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--plot {file}: there is no directory {file.absolute().parent}; make it first"
        )
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs the package matplotlib; install it with `pip install 'shoal[plot]'`"
        )


def draw(figures: RunFigures, file: Path, *, title: str) -> None:
    """Draws the picture. Each change has the gid `fault-1`, `join-1`, `leave-1`, ... in an SVG.
    Raises OSError: it cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shoal"}):
        figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.2, 4.6), sharex=True)
        end_ns = figures.began_ns + figures.seconds * 1e9
        # nothing after the last commit is shown
        whole = sum(point.at_ns < end_ns for point in figures.points) + 1
        points = figures.points[:whole]
        at = [min(point.at_ns - figures.began_ns, figures.seconds * 1e9) / 1e9 for point in points]
        told = [
            (second, point.loss)
            for second, point in zip(at, points, strict=True)
            if not math.isnan(point.loss)
        ]
        upper.plot(
            [second for second, _ in told], [loss for _, loss in told], color="C0", linewidth=1.2
        )
        if told and all(loss > 0 for _, loss in told):
            upper.set_yscale("log")
        upper.set(ylabel="loss", title=title)
        lower.plot(at, [point.samples_per_s for point in points], color="C0", linewidth=1.2)
        lower.set(ylabel="samples/s", xlabel="seconds since the first step", ylim=(0, None))
        named = _mark(upper, lower, figures)
        if named:
            upper.legend(handles=named, loc="upper right", fontsize=8)
        figure.tight_layout()
        figure.savefig(file, dpi=110)
        plt.close(figure)


def _mark(upper: Any, lower: Any, figures: RunFigures) -> list[Any]:
    """Draws the pauses. Returns the legend's entries: one pause per kind, limited to the first
    few."""
    named, counted = [], dict.fromkeys(_COLOURS, 0)
    for pause in figures.pauses:
        still = pause.standstill
        began, ended = (
            (moment - figures.began_ns) / 1e9 for moment in (still.began_ns, still.ended_ns)
        )
        kind = (
            "fault"
            if pause.is_fault
            else "join"
            if any(change.joins for change in pause.changes)
            else "leave"
        )
        counted[kind] += 1
        for axis in (upper, lower):
            axis.axvspan(began, ended, color=_COLOURS[kind], alpha=0.25, linewidth=0)
            line = axis.axvline(
                began,
                color=_COLOURS[kind],
                linestyle="--",
                linewidth=1,
                label=f"{kind}: {still.seconds:.2f} s pause",
            )
            line.set_gid(f"{kind}-{counted[kind]}" if axis is upper else None)
        named.append(line)
    return named[:6]
