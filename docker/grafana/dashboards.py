"""Shoal's Grafana dashboard, as code: what to look at, in which order, and why each panel is there.

    python docker/grafana/dashboards.py            # writes shoal.json, which Grafana is provisioned with
    python docker/grafana/dashboards.py --check    # fails when shoal.json is not what this file makes

Every metric that a service exports has a panel here or stands in WITHOUT_PANEL with the reason; a test holds that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

TARGET = Path(__file__).resolve().with_name("shoal.json")
DATASOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")  # datasource.yml's uid

WITHOUT_PANEL: dict[str, str] = {}
"""Metric -> why no panel shows it."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One panel: lines over time."""

    title: str
    text: str
    """What it shows, and what to make of it."""
    unit: str
    """Grafana's name of the unit."""
    queries: Sequence[tuple[str, str]]
    """PromQL and the legend of its lines."""


def quantiles(histogram: str, by: str) -> list[tuple[str, str]]:
    """The median and the 99th percentile of a histogram, per value of the label `by`."""
    rate = f"sum by ({by}, le) (rate({histogram}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"{{{{{by}}}}} p{round(q * 100)}") for q in (0.5, 0.99)]


ROWS: Sequence[tuple[str, Sequence[Graph]]] = (
    (
        "Training",
        (
            Graph(
                title="Samples a second",
                text="Samples that committed steps counted: the cluster's useful work. A dip is a fault; no return to the level before is a loss of capacity.",
                unit="short",
                queries=[("sum(rate(shoal_worker_samples_total[$__rate_interval]))", "all workers")],
            ),
        ),
    ),
)


def dashboard() -> Dashboard:
    """The whole dashboard."""
    built = (
        Dashboard("Shoal")
        .uid("shoal")
        .description("Membership, training, parameter servers and RPCs of one Shoal cluster.")
        .tags(["shoal"])
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for title, graphs in ROWS:
        built = built.with_row(Row(title))
        for graph in graphs:
            built = built.with_panel(_panel(graph))
    return built


def _panel(graph: Graph) -> Panel:
    panel = (
        Panel()
        .title(graph.title)
        .description(graph.text)
        .datasource(DATASOURCE)
        .unit(graph.unit)
        .span(8)
        .height(7)
        .fill_opacity(8)
        .legend(VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    for index, (expression, legend) in enumerate(graph.queries):
        panel = panel.with_target(Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(DATASOURCE))
    return panel


def rendered() -> str:
    """shoal.json's text."""
    return json.dumps(dashboard().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    text = rendered()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.name} is not what dashboards.py makes: run make dashboards", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
