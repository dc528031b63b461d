"""Telemetry of a service: log lines, and metrics over HTTP. The metrics of its gRPC calls are in
`shoal_common.rpc.metrics`."""

from shoal_common.telemetry.http import HttpRequest, HttpResponse, HttpServer, serve_metrics
from shoal_common.telemetry.logs import configure_logging

__all__ = ["HttpRequest", "HttpResponse", "HttpServer", "configure_logging", "serve_metrics"]
