"""What a service lets others see: log lines, metrics over HTTP, and the metrics of its gRPC calls."""

from shoal_common.telemetry.grpc_metrics import ClientMetricsInterceptor, ServerMetricsInterceptor
from shoal_common.telemetry.http import HttpRequest, HttpResponse, HttpServer, serve_metrics
from shoal_common.telemetry.logs import configure_logging

__all__ = [
    "ClientMetricsInterceptor",
    "HttpRequest",
    "HttpResponse",
    "HttpServer",
    "ServerMetricsInterceptor",
    "configure_logging",
    "serve_metrics",
]
