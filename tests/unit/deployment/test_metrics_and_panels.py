"""Every exported metric has a panel or a reason to have none. Panels and alerts read only metrics
that exist."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from shoal_common.rpc.metrics import ClientMetricsInterceptor, ServerMetrics
from shoal_common.telemetry.loop_watch import LoopWatch
from shoal_dashboards.boards import BOARDS, WITHOUT_PANEL
from shoal_dashboards.panels import Listing

ROOT = Path(__file__).resolve().parents[3]
GRAPHS = [(board, graph) for board in BOARDS for _, graphs in board.rows for graph in graphs]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
MODULES = sorted(f"{path.parent.name}.metrics" for path in ROOT.glob("*/shoal*/metrics.py"))


def registries() -> Iterator[CollectorRegistry]:
    """Yields one registry per class that declares metrics: those in the services' metrics.py,
    gRPC's interceptors and the watch of an event loop."""
    declaring = [ServerMetrics, ClientMetricsInterceptor]
    for name in MODULES:
        module = importlib.import_module(name)
        declaring += [
            each
            for _, each in inspect.getmembers(module, inspect.isclass)
            if each.__module__ == name
        ]
    for each in declaring:
        registry = CollectorRegistry()
        if hasattr(each, "collect"):
            registry.register(each(lambda: ()))
        elif "registry" in inspect.signature(each).parameters:
            each(registry)
        else:
            registry = each().registry
        yield registry
    yield asyncio.run(_registry_of_a_loop())


async def _registry_of_a_loop() -> CollectorRegistry:
    registry = CollectorRegistry()
    LoopWatch("a service", registry).close()
    return registry


FAMILIES = {family.name: family for registry in registries() for family in registry.collect()}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
SERIES = {
    f"{name}{suffix}": name for name, family in FAMILIES.items() for suffix in SUFFIXES[family.type]
}


def shown(expression: str) -> set[str]:
    """Returns the series that a PromQL expression reads."""
    without_labels = re.sub(r"\{[^}]*\}|\b(?:by|on) \([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:shoal|grpc)_\w+", without_labels))


def test_every_service_declares_its_metrics_in_one_module() -> None:
    assert {"shoal_coordinator.metrics", "shoal_ps_server.metrics", "shoal_worker.metrics"} <= set(
        MODULES
    )


def test_each_metric_has_a_panel_or_a_reason() -> None:
    panels = {
        SERIES.get(series)
        for _, graph in GRAPHS
        for expression, _ in graph.queries
        for series in shown(expression)
    }
    wrong = [name for name in sorted(FAMILIES) if (name in panels) == (name in WITHOUT_PANEL)]
    assert wrong == [], "add a panel in docker/grafana/shoal_dashboards or a line in WITHOUT_PANEL"


def test_panels_show_only_series_that_exist() -> None:
    unknown = {
        f"{board.uid}: {graph.title}": sorted(shown(expression) - set(SERIES))
        for board, graph in GRAPHS
        for expression, _ in graph.queries
        if shown(expression) - set(SERIES)
    }
    assert unknown == {}


def test_alerts_read_only_series_that_exist() -> None:
    read = {rule["alert"]: shown(rule["expr"]) for rule in RULES}
    assert {
        name: series - set(SERIES) for name, series in read.items() if series - set(SERIES)
    } == {}
    others = [rule for rule in RULES if not rule["expr"].startswith("up{")]
    assert [rule["alert"] for rule in others if not read[rule["alert"]]] == []


def test_each_metric_describes_what_it_counts() -> None:
    assert [name for name in FAMILIES if not FAMILIES[name].documentation.endswith(".")] == []


def test_reasons_are_given_only_for_existing_metrics() -> None:
    assert set(WITHOUT_PANEL) <= set(FAMILIES)


@pytest.mark.parametrize("service", ["coordinator", "worker", "ps"])
def test_each_service_has_its_own_dashboard(service: str) -> None:
    """A service's dashboard shows all metrics of the service except those on the overview, which
    shows only metrics of common interest."""
    uid = {"coordinator": "shoal-coordinator", "worker": "shoal-workers", "ps": "shoal-servers"}[
        service
    ]
    on = {
        board.uid: {
            SERIES[series]
            for _, graphs in board.rows
            for graph in graphs
            for each, _ in graph.queries
            for series in shown(each)
        }
        for board in BOARDS
    }
    own = {metric for metric in FAMILIES if metric.startswith(f"shoal_{service}_")}
    assert own <= on[uid] | on["shoal"]
    assert len(own & on[uid]) > len(own) / 2


def test_series_continue_when_ranks_are_reassigned() -> None:
    """No graph has lines with a rank or a member id in their labels, because such lines would break
    at a re-ranking. The table of shoal_worker_info shows both."""
    breaking = [
        f"{board.uid}: {graph.title}"
        for board, graph in GRAPHS
        if not isinstance(graph, Listing)
        for expression, legend in graph.queries
        if "{{rank}}" in legend or "{{member_id}}" in legend or "shoal_worker_info" in expression
    ]
    assert breaking == []
