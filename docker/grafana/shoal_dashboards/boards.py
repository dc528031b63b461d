"""All dashboards, and the metrics that none of them shows."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_dashboards.coordinator import COORDINATOR
from shoal_dashboards.overview import OVERVIEW
from shoal_dashboards.panels import Board
from shoal_dashboards.servers import SERVERS
from shoal_dashboards.workers import WORKERS

BOARDS: Sequence[Board] = (OVERVIEW, COORDINATOR, WORKERS, SERVERS)

WITHOUT_PANEL: dict[str, str] = {
    "grpc_client_started": "the metrics of the servers cover the same calls",
    "grpc_client_handled": "the metrics of the servers cover the same calls; a call without a "
    "reachable server is an error in the caller's log",
    "grpc_client_handling_seconds": "the metrics of the servers cover all but the network between",
}
"""Reason why no panel shows a metric, by metric."""
