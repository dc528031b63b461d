"""Plots of the tables."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.ticks import is_wide, logarithmic

from benchmarks.report import Row


def samples(
    path: Path, rows: Sequence[Row], *, sample: str, label: str, target: float | None = None
) -> None:
    """Plots every measurement as a point, with one horizontal line of points per system. The axis
    is logarithmic if the values are far apart."""
    pyplot = _pyplot()
    shown = [row for row in reversed(rows) if row.samples.get(sample)]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(shown)), layout="constrained")
    for height, row in enumerate(shown):
        axes.plot(row.samples[sample], [height] * len(row.samples[sample]), "|", markersize=14)
    if target is not None:
        axes.axvline(target, linestyle=":", color="grey", label=f"target {target:g}")
        figure.legend(loc="outside upper right")
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_ylim(-0.5, max(len(shown), 1) - 0.5)
    values = [value for row in shown for value in row.samples[sample]]
    if is_wide(values):
        logarithmic(axes, "x", values)
    else:
        axes.set_xlim(0, None)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curves(
    path: Path,
    panels: Mapping[str, Sequence[Row]],
    *,
    x: str,
    y: str,
    labels: tuple[str, str],
    target: float,
) -> None:
    """Plots curves: a panel for each entry of `panels`, with a line for each system.

    Args:
        path: file of the plot.
        panels: title of the panel -> rows to draw.
        x: name of the samples on the horizontal axis.
        y: name of the samples on the vertical axis, which is logarithmic if they are far apart.
        labels: labels of the two axes.
        target: value marked by a horizontal line.
    """
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(13, 5),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    drawn = [row for rows in panels.values() for row in rows if row.samples.get(x)]
    values = [target, *(value for row in drawn for value in row.samples[y])]
    for axes, (title, rows) in zip(all_axes[0], panels.items(), strict=True):
        for row in rows:
            if row.samples.get(x):
                axes.plot(row.samples[x], row.samples[y], label=row.name, linewidth=1)
        axes.axhline(target, linestyle=":", color="grey", label=f"target {target:g}")
        if is_wide(values):
            logarithmic(axes, "y", values)
        axes.set_title(title)
        axes.set_xlabel(labels[0])
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    all_axes[0][0].set_ylabel(labels[1])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def progress(path: Path, panels: Mapping[str, Sequence[Row]]) -> None:
    """Plots the progress of runs with faults: a panel for each entry of `panels`, with a line for
    each system. The line shows its steps (`progress_step`) over time (`progress_s`), with a cross
    at each kill (`killed_s`) and a triangle at the end of each absence (`returned_s`). Dotted lines
    mark the kills of the row that has the most."""
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(14, 6), layout="constrained", squeeze=False
    )
    for axes, (title, rows) in zip(all_axes[0], panels.items(), strict=True):
        for row in rows:
            times, steps = (row.samples.get(f"progress_{name}", ()) for name in ("s", "step"))
            if not times:
                continue
            (line,) = axes.plot(times, steps, label=row.name, linewidth=1)
            for name, marker in (("killed_s", "x"), ("returned_s", "^")):
                marked = row.samples.get(name, ())
                heights = [steps[max(0, bisect(times, time) - 1)] for time in marked]
                axes.plot(marked, heights, marker, color=line.get_color(), markersize=5)
        for kill in max((row.samples.get("killed_s", ()) for row in rows), key=len, default=()):
            axes.axvline(kill, linestyle=":", color="grey", linewidth=0.8)
        axes.set_title(title)
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)
        axes.set_xlabel("time since the first step of all workers, s")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", title="x killed, \u25b2 replacement may join")
    all_axes[0][0].set_ylabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parts(
    path: Path, rows: Sequence[Row], *, stacks: Mapping[str, Sequence[str]], mark: str
) -> None:
    """Plots stacked bars: a panel for each entry of `stacks`, with a bar for each system. A bar is
    composed of the system's samples with the names in that entry. In the first panel, a line marks
    the samples named `mark`."""
    pyplot = _pyplot()
    shown = [row for row in reversed(rows) if not row.failure]
    figure, panels = pyplot.subplots(
        1,
        len(stacks),
        figsize=(13, 1.5 + 0.3 * len(shown)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, (label, names) in zip(panels[0], stacks.items(), strict=True):
        left = [0.0] * len(shown)
        for name in names:
            sizes = [row.samples.get(name, [0.0])[0] for row in shown]
            axes.barh(range(len(shown)), sizes, left=left, label=name.replace("_", " "))
            left = [begin + size for begin, size in zip(left, sizes, strict=True)]
        if axes is panels[0][0]:
            axes.plot(
                [row.samples[mark][0] for row in shown],
                range(len(shown)),
                "|",
                color="black",
                markersize=14,
                label=mark,
            )
        axes.set_yticks(range(len(shown)), [row.name for row in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlim(0, None)
        axes.margins(x=0.03)
        axes.set_xlabel(label)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
