"""All dashboards, and what none of them shows."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_dashboards.coordinator import COORDINATOR
from shoal_dashboards.overview import OVERVIEW
from shoal_dashboards.panels import Board
from shoal_dashboards.servers import SERVERS
from shoal_dashboards.workers import WORKERS

BOARDS: Sequence[Board] = (OVERVIEW, COORDINATOR, WORKERS, SERVERS)

WITHOUT_PANEL: dict[str, str] = {
    "grpc_client_started": "the servers' figures show the same calls",
    "grpc_client_handled": "the servers' figures show the same calls, and calls that found no "
    "server are errors in the caller's log",
    "grpc_client_handling_seconds": "the servers' figures, and the network between is not Shoal's "
    "to show",
}
"""Metric -> why no panel shows it."""
