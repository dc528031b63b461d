"""Plots of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row


def samples(path: Path, rows: Sequence[Row], *, sample: str, label: str, target: float | None = None) -> None:
    """Every measurement as a point, a line per system, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in reversed(rows) if row.samples.get(sample)]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(shown)), layout="constrained")
    for height, row in enumerate(shown):
        axes.plot(row.samples[sample], [height] * len(row.samples[sample]), "|", markersize=14)
    if target is not None:
        axes.axvline(target, linestyle=":", color="grey", label=f"target {target:g}")
        axes.legend(loc="upper right")
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
