"""The plot of a run: its contents, the smoothness of its throughput, and its tick labels."""

from __future__ import annotations

import math
import random
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import fsspec
import pytest
from shoal.cli.terminal.plot import check_plot, draw, rates
from shoal.launcher.report.account import RunFigures
from shoal.launcher.report.course import Point
from shoal.ticks import is_wide, plain
from shoal_common.errors import ConfigurationError

from benchmarks import plots
from benchmarks.report import Row

BATCH, STEP_NS = 96, 30_000_000


def figures(losses: list[float], *, samples: bool = True, **metrics: float) -> RunFigures:
    """Returns a run with steps of 30 ms, sampled about every 200 ms, with a loss for each
    sample."""
    generator, points, at_ns = random.Random(0), [], 0
    for loss in losses:
        at_ns += round(generator.uniform(0.15, 0.25) * 1e9)
        steps = at_ns // STEP_NS
        point = Point(
            at_ns=at_ns,
            steps=steps,
            samples=steps * BATCH * samples,
            samples_per_s=0.0,
            loss=loss,
            metrics=metrics,
        )
        points.append(point)
    steps = points[-1].steps
    return RunFigures(
        steps=steps,
        last_step=steps,
        steps_in_all=steps,
        samples=steps * BATCH * samples,
        seconds=steps * STEP_NS / 1e9,
        faults=0,
        joins=0,
        leaves=0,
        pauses=(),
        lost_s=0.0,
        loss=losses[-1],
        began_ns=0,
        points=tuple(points),
        asynchronous=False,
    )


def texts(file: Path) -> list[str]:
    words = [
        "".join(each.itertext()).strip()
        for each in ElementTree.parse(file).iter()
        if each.tag.endswith("}text")
    ]
    return [word.replace("\N{MINUS SIGN}", "-") for word in words]


@pytest.mark.parametrize("samples", [True, False])
def test_a_steady_run_has_a_steady_throughput(samples: bool) -> None:
    """The plotted throughput of a steady run is constant, although the numbers of steps between
    samples vary by up to a third."""
    shown = rates(figures([0.5] * 300, samples=samples))
    expected = (BATCH if samples else 1) * 1e9 / STEP_NS
    assert len(shown) == 40
    assert all(abs(rate / expected - 1) < 0.06 for _, rate in shown), shown
    assert [at for at, _ in shown] == sorted(at for at, _ in shown)


def test_short_run_has_fewer_intervals_and_the_shortest_still_has_one() -> None:
    assert len(rates(figures([0.5] * 30))) == 10
    assert len(rates(figures([0.5]))) == 1


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.7, 0.6, 0.3], {"0.4", "0.6"}),  # on a logarithmic axis: 6 x 10^-1
        ([50.0, 1.0, 0.02], {"0.1", "1", "10"}),
        ([3000.0, 2000.0], {"2,400", "3,000"}),
    ],
)
def test_ticks_are_plain_numbers(tmp_path: Path, losses: list[float], expected: set[str]) -> None:
    file = tmp_path / "run.svg"
    draw(figures(losses), file, title="t")
    said = texts(file)
    assert expected <= set(said), said
    assert not [word for word in said if re.search(r"10\s*-?\d$|\d[eE][-+]\d|×", word)], said


def test_single_value_of_a_short_run_is_drawn_as_a_dot(tmp_path: Path) -> None:
    markers = []
    for losses in ([2.0], [2.0, 1.0]):
        draw(figures(losses), tmp_path / "run.svg", title="run")
        markers.append((tmp_path / "run.svg").read_text().count("fill: #1f77b4"))
    one, two = markers
    assert one > two


def test_each_reported_number_has_a_panel(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    draw(figures([0.5, math.nan, 0.4], accuracy=0.9, lr=0.001), file, title="t")
    said = texts(file)
    assert [name for name in said if name in ("loss", "accuracy", "lr", "samples/s")] == [
        *("loss", "accuracy", "lr", "samples/s")
    ]
    draw(figures([math.nan] * 3, samples=False), file, title="t")
    assert "steps/s" in texts(file)


def test_figures_of_benchmarks_have_plain_ticks_too(tmp_path: Path) -> None:
    import matplotlib as mpl

    def row(name: str, values: list[float]) -> Row:
        return Row(name=name, command="", cells={}, samples={"s": values, "x": [1, 2], "y": values})

    rows, file = [row("one", [0.05, 0.6]), row("other", [3.0, 20.0])], tmp_path / "plot.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        plots.samples(file, rows, sample="s", label="seconds")
        assert {"0.05", "0.1", "0.5", "1", "10", "20"} <= set(texts(file))
        plots.curves(file, {"p": rows}, x="x", y="y", labels=("x", "y"), target=0.5)
        assert {"0.05", "0.1", "0.5", "1", "10", "20"} <= set(texts(file))
        plots.samples(file, [row("one", [0.5, 0.6])], sample="s", label="seconds")
        assert {"0.0", "0.6"} <= set(texts(file))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.6, "0.6"), (0, "0"), (0.0005, "0.0005"), (1_000_000, "1,000,000"), (-2.5, "-2.5")],
)
def test_numbers_are_formatted_for_people(value: float, text: str) -> None:
    assert plain(value) == text


def test_few_decades_are_drawn_without_a_logarithm() -> None:
    assert not is_wide([])
    assert not is_wide([0.1, 1.0])
    assert not is_wide([0.0, 100.0])
    assert is_wide([0.1, 2.0])


def test_plot_is_written_to_a_url(tmp_path: Path) -> None:
    place = "memory://bucket/run.svg"
    check_plot(place)
    draw(figures([1.0] * 10), place, title="run")
    local = f"file://{tmp_path}/run.svg"
    check_plot(local)
    draw(figures([1.0] * 10), local, title="run")
    stored = fsspec.filesystem("memory").cat_file("bucket/run.svg")
    assert re.sub(rb"<dc:date>.*?</dc:date>", b"", stored) == re.sub(
        rb"<dc:date>.*?</dc:date>", b"", (tmp_path / "run.svg").read_bytes()
    )


def test_a_plot_at_a_url_without_its_package_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigurationError, match=r"gcsfs; install it with pip install 'shoal"):
        check_plot("gs://bucket/run.svg")
