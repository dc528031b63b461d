"""Plots a run: loss, other reported metrics and throughput over time, with marks for lost, new and
departed members."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError
from shoal_worker.object_storage import ObjectFolder, is_url, local_path, write_object

from shoal.launcher.report.course import until_last_commit
from shoal.ticks import is_wide, logarithmic, plain

if TYPE_CHECKING:
    from shoal.launcher.report.account import RunFigures
    from shoal.launcher.report.course import Point

_KINDS: Final = (".png", ".svg")
_MOST_INTERVALS: Final = 40
"""Maximum number of intervals in the plot of a run's throughput."""
_STEPS_OF_INTERVAL: Final = 20
"""Minimum average number of steps per interval."""
_COLOURS: Final = {"fault": "C3", "join": "C2", "leave": "C1"}


def check_plot(place: str) -> None:
    """Checks, before the run starts, that a plot can be written to a path or URL. Raises
    ConfigurationError if not."""
    if not place.lower().endswith(_KINDS):
        raise ConfigurationError(f"--plot {place}: expected a file whose name ends in .png or .svg")
    if is_url(place):
        ObjectFolder.check(place)
    else:
        _check_directory(local_path(place))
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot requires matplotlib; install it with `pip install 'shoal[plot]'`"
        )


def _check_directory(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--plot {file}: the directory {file.absolute().parent} does not exist; create it first"
        )
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ConfigurationError(
            f"--plot {file} is not writable; use a file in a writable directory"
        )


def draw(figures: RunFigures, place: str | Path, *, title: str) -> None:
    """Draws a run to a path or URL: a panel for the loss, a panel for each other metric that the
    script reports, and a panel for the throughput. In an SVG, the mark of each pause has an id:
    `fault-1`, `join-1`, `leave-1`, ...

    Raises:
        OSError: the file cannot be written.
        ShoalError: as in `ObjectFolder`, for a URL.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    points, metrics = _shown(figures), _metric_names(figures)
    heights = [2.4, *(1.4 for _ in metrics), 2.2]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shoal"}):
        figure, panels = plt.subplots(
            len(heights),
            1,
            figsize=(7.2, sum(heights)),
            height_ratios=heights,
            sharex=True,
            layout="constrained",
        )
        loss = [(second, point.loss) for second, point in points if not math.isnan(point.loss)]
        _line(panels[0], loss, "loss")
        panels[0].set_title(title)
        values = [value for _, value in loss]
        if is_wide(values):
            logarithmic(panels[0], "y", values)
        for panel, name in zip(panels[1:-1], metrics, strict=True):
            series = [(at, point.metrics[name]) for at, point in points if name in point.metrics]
            _line(panel, series, name)
        counted = "samples/s" if figures.samples else "steps/s"
        _line(panels[-1], rates(figures), counted)
        panels[-1].set(xlabel="seconds since the first step", ylim=(0, None))
        for panel in panels[1:] if is_wide(values) else panels:
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        named = _mark(panels, figures)
        if named:
            panels[0].legend(handles=named, loc="upper right", fontsize=8)
        figure.align_ylabels(panels)
        target: Path | BytesIO = BytesIO() if is_url(place) else local_path(place)
        figure.savefig(target, dpi=110, format=str(place)[-3:].lower())
        if isinstance(target, BytesIO):
            write_object(str(place), target.getvalue())
        plt.close(figure)


def rates(figures: RunFigures) -> list[tuple[float, float]]:
    """Returns the throughput over the run as pairs (middle of an interval, rate). The rate is in
    samples per second, or in steps per second if the script distributes its samples itself.

    All intervals have the same length: a fortieth of the run or the duration of twenty steps,
    whichever is longer. With shorter intervals, the rate would depend too much on how many steps
    happen to end in each interval.
    """
    began, first = (0.0, 0), figures.last_step - figures.steps
    counts = [began] + [
        (second, point.samples if figures.samples else point.steps - first)
        for second, point in _shown(figures)
    ]
    if figures.seconds <= 0 or len(counts) < 2:
        return []
    number = max(1, min(_MOST_INTERVALS, figures.steps // _STEPS_OF_INTERVAL))
    width = figures.seconds / number
    edges = [_at(counts, place * width) for place in range(number + 1)]
    return [
        ((place + 0.5) * width, max(0.0, edges[place + 1] - edges[place]) / width)
        for place in range(number)
    ]


def _at(counts: list[tuple[float, int]], second: float) -> float:
    """Returns a step or sample count at the time `second`, interpolated between the known
    counts."""
    place = bisect.bisect_left(counts, second, key=lambda each: each[0])
    if place == 0 or place == len(counts):
        return counts[min(place, len(counts) - 1)][1]
    (before, low), (after, high) = counts[place - 1], counts[place]
    return low + (high - low) * (second - before) / max(after - before, 1e-9)


def _shown(figures: RunFigures) -> list[tuple[float, Point]]:
    """Returns the points to draw, each with its time in seconds since the first step."""
    end_ns = figures.began_ns + round(figures.seconds * 1e9)
    return [
        ((point.at_ns - figures.began_ns) / 1e9, point)
        for point in until_last_commit(figures.points, end_ns)
    ]


def _metric_names(figures: RunFigures) -> list[str]:
    return list(dict.fromkeys(name for point in figures.points for name in point.metrics))


def _line(panel: Any, series: Sequence[tuple[float, float]], name: str) -> None:
    panel.plot(
        [at for at, _ in series],
        [value for _, value in series],
        color="C0",
        linewidth=1.2,
        marker="o" if len(series) == 1 else None,  # a line through one point is invisible
    )
    panel.set_ylabel(name)
    panel.grid(alpha=0.25, linewidth=0.6)


def _mark(panels: Sequence[Any], figures: RunFigures) -> list[Any]:
    """Marks the pauses in all panels. Returns one legend entry for each kind of pause, up to a
    maximum."""
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
        for axis in reversed(panels):
            axis.axvspan(began, ended, color=_COLOURS[kind], alpha=0.25, linewidth=0)
            line = axis.axvline(
                began,
                color=_COLOURS[kind],
                linestyle="--",
                linewidth=1,
                label=f"{kind}: {still.seconds:.2f} s pause",
            )
            line.set_gid(f"{kind}-{counted[kind]}" if axis is panels[0] else None)
        named.append(line)
    return named[:6]
