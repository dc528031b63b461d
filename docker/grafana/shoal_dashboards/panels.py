"""Building blocks of Shoal's dashboards: panels as plain values, and their conversion to Grafana's
JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import stat, table, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")  # datasource.yml's uid
_OF_JOB = '{job_id=~"$job"}'
_COLUMNS = 24
"""A dashboard's width."""
_MARKS = (
    ("Failures", "failure", "red"),
    ("Joins and drains", "border", "green"),
    ("Starts", "start", "blue"),
)
"""Vertical lines in every graph: name, cause of the marked generations, and color."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One panel: lines over time."""

    title: str
    text: str
    """Explanation of the panel and of its use."""
    unit: str
    """Grafana's name of the unit."""
    queries: Sequence[tuple[str, str]]
    """PromQL expressions, each with the legend of its lines. `{job}` is replaced by a filter for
    the jobs selected at the top of the dashboard."""


@dataclass(frozen=True, kw_only=True)
class Number(Graph):
    """A panel with the newest value of each query in large digits."""

    bad_above: float | None = None
    """Value above which the number is red; None: never."""


@dataclass(frozen=True, kw_only=True)
class Listing(Graph):
    """A panel with a table of the newest series: their labels and values."""

    hidden: Sequence[str] = ()
    """Labels that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    """Audience and purpose of the dashboard."""
    rows: Sequence[tuple[str, Sequence[Graph]]]


def quantiles(histogram: str, by: str) -> list[tuple[str, str]]:
    """Returns the queries for the median and the 99th percentile of a histogram, per value of the
    label `by`."""
    selected = "" if histogram.startswith("shoal_coordinator_") else "{job}"
    rate = f"sum by ({by}, le) (rate({histogram}_bucket{selected}[$__rate_interval]))"
    return [
        (f"histogram_quantile({q}, {rate})", f"{{{{{by}}}}} p{round(q * 100)}") for q in (0.5, 0.99)
    ]


def rendered(board: Board) -> str:
    """Returns the contents of a dashboard's JSON file."""
    return json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(board: Board) -> Dashboard:
    built = (
        Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags(["shoal"])
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            DashboardLink("Shoal")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["shoal"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            QueryVariable("job")
            .label("Job")
            .datasource(DATASOURCE)
            .query("label_values(shoal_coordinator_generation, job_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    )
    for name, cause, color in _MARKS:
        built = built.annotation(
            AnnotationQuery()
            .name(name)
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color(color)
            .expr(
                "increase(shoal_coordinator_generations_formed_total"
                f'{{cause="{cause}"}}[$__interval]) > 0'
            )
        )
    for title, graphs in board.rows:
        built = built.with_row(Row(title))
        for graph in graphs:
            built = built.with_panel(_panel(graph))
    return built


_AnyPanel = timeseries.Panel | stat.Panel | table.Panel


def _panel(graph: Graph) -> _AnyPanel:
    panel: _AnyPanel
    match graph:
        case Number():
            panel = _number(graph)
        case Listing():
            panel = _listing(graph)
        case _:
            panel = (
                timeseries.Panel()
                .span(_COLUMNS // 3)
                .height(7)
                .fill_opacity(8)
                .legend(
                    VizLegendOptions()
                    .show_legend(True)
                    .display_mode(LegendDisplayMode.LIST)
                    .placement(LegendPlacement.BOTTOM)
                )
                .tooltip(
                    VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
                )
            )
    panel = panel.title(graph.title).description(graph.text).datasource(DATASOURCE).unit(graph.unit)
    for index, (expression, legend) in enumerate(graph.queries):
        query = (
            Dataquery()
            .expr(expression.replace("{job}", _OF_JOB))
            .legend_format(legend)
            .ref_id(chr(ord("A") + index))
        )
        if isinstance(graph, Number | Listing):
            query = query.instant()
        if isinstance(graph, Listing):
            query = query.format(PromQueryFormat.TABLE)
        panel = panel.with_target(query.datasource(DATASOURCE))
    return panel


def _number(graph: Number) -> stat.Panel:
    panel = (
        stat.Panel()
        .span(_COLUMNS // 6)
        .height(4)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if graph.bad_above is None:
        return panel.color_mode(BigValueColorMode.NONE)
    steps = [Threshold(value=None, color="green"), Threshold(value=graph.bad_above, color="red")]
    return panel.thresholds(
        ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
    ).color_mode(BigValueColorMode.VALUE)


def _listing(graph: Listing) -> table.Panel:
    hidden = dict.fromkeys(("Time", "__name__", *graph.hidden), True)
    organize = DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    return table.Panel().span(_COLUMNS // 2).height(8).with_transformation(organize)
