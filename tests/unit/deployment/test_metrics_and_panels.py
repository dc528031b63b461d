"""Every metric that a service exports has a panel, or a reason to have none; and panels show only metrics that exist."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from shoal_common.rpc.metrics import ClientMetricsInterceptor, ServerMetricsInterceptor

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = runpy.run_path(str(ROOT / "docker/grafana/dashboards.py"))
GRAPHS = [graph for _, graphs in DASHBOARDS["ROWS"] for graph in graphs]
MODULES = sorted(f"{path.parent.name}.metrics" for path in ROOT.glob("*/shoal*/metrics.py"))


def registries() -> Iterator[CollectorRegistry]:
    """One for each class that declares metrics: those of the services' metrics.py, and gRPC's."""
    declaring = [ServerMetricsInterceptor, ClientMetricsInterceptor]
    for name in MODULES:
        module = importlib.import_module(name)
        declaring += [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == name]
    for each in declaring:
        registry = CollectorRegistry()
        if hasattr(each, "collect"):
            registry.register(each(lambda: ()))
        elif "registry" in inspect.signature(each).parameters:
            each(registry)
        else:
            registry = each().registry
        yield registry


FAMILIES = {family.name: family for registry in registries() for family in registry.collect()}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
SERIES = {f"{name}{suffix}": name for name, family in FAMILIES.items() for suffix in SUFFIXES[family.type]}


def shown(expression: str) -> set[str]:
    """The series that a PromQL expression reads."""
    without_labels = re.sub(r"\{[^}]*\}|\bby \([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:shoal|grpc)_\w+", without_labels))


def test_every_service_declares_its_metrics_in_one_module() -> None:
    assert {"shoal_coordinator.metrics", "shoal_ps_server.metrics", "shoal_worker.metrics"} <= set(MODULES)


@pytest.mark.parametrize("metric", sorted(FAMILIES))
def test_a_metric_has_a_panel_or_a_reason(metric: str) -> None:
    panels = {SERIES.get(series) for graph in GRAPHS for expression, _ in graph.queries for series in shown(expression)}
    assert (metric in panels) != (metric in DASHBOARDS["WITHOUT_PANEL"]), (
        "a panel in docker/grafana/dashboards.py, or a line in WITHOUT_PANEL"
    )


@pytest.mark.parametrize("graph", GRAPHS, ids=[graph.title for graph in GRAPHS])
def test_a_panel_shows_only_series_that_exist(graph: Any) -> None:
    for expression, _ in graph.queries:
        assert shown(expression) <= set(SERIES), expression


@pytest.mark.parametrize("metric", sorted(FAMILIES))
def test_a_metric_says_what_it_counts(metric: str) -> None:
    assert FAMILIES[metric].documentation.endswith(".")


def test_reasons_are_given_for_metrics_that_exist() -> None:
    assert set(DASHBOARDS["WITHOUT_PANEL"]) <= set(FAMILIES)
