"""Logs of a service, and its metrics over HTTP. `shoal_common.rpc.metrics` has the metrics of its
gRPC calls."""

from shoal_common.telemetry.http import HttpRequest, HttpResponse, HttpServer, serve_metrics
from shoal_common.telemetry.logs import configure_logging

__all__ = ["HttpRequest", "HttpResponse", "HttpServer", "configure_logging", "serve_metrics"]
