"""An OTLP receiver in this process, which stores what it receives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class Receiver:
    """Requests received, by signal."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = {"spans": [], "metrics": [], "logs": []}
        self.refused: set[str] = set()
        """Signals that are refused with UNAVAILABLE."""
        self.refusals = 0
        self.port = 0

    def receive(self, signal: str, request: Any, context: grpc.ServicerContext) -> None:
        if signal in self.refused:
            self.refusals += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "maintenance")
        self.requests[signal].append(request)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the SDK send to this receiver."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        }

    def resources(self) -> list[dict[str, Any]]:
        """Returns the distinct resources of all signals."""
        found: list[dict[str, Any]] = []
        for requests, name in (
            (self.requests["spans"], "resource_spans"),
            (self.requests["metrics"], "resource_metrics"),
            (self.requests["logs"], "resource_logs"),
        ):
            for request in requests:
                for part in getattr(request, name):
                    attributes = values(part.resource.attributes)
                    if attributes not in found:
                        found.append(attributes)
        return found

    def spans(self) -> list[tuple[str, dict[str, Any], Any]]:
        """Returns the name and the attributes of each span, and the span itself."""
        return [
            (span.name, values(span.attributes), span)
            for request in self.requests["spans"]
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def spans_by_slot(self) -> dict[str, list[Any]]:
        """Returns the spans of each slot of this host."""
        found: dict[str, list[Any]] = {}
        for request in self.requests["spans"]:
            for resource in request.resource_spans:
                place = values(resource.resource.attributes)["service.instance.id"]
                for scope in resource.scope_spans:
                    found.setdefault(place.rpartition("/")[2], []).extend(scope.spans)
        return found

    def points(self, name: str) -> list[float]:
        """Returns the values of a gauge in the order of their times."""
        found = [
            (point.time_unix_nano, point.as_double or float(point.as_int))
            for request in self.requests["metrics"]
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.gauge.data_points
        ]
        return [value for _, value in sorted(found)]

    def logs(self) -> list[tuple[str, str, str]]:
        """Returns the event name, the severity and the text of each log record."""
        return [
            (record.event_name, record.severity_text, record.body.string_value)
            for request in self.requests["logs"]
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]


def values(attributes: list[KeyValue]) -> dict[str, Any]:
    """Returns attributes as Python values."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in attributes
    }


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Serves OTLP over gRPC on a port of its own."""
    received = Receiver()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.receive("spans", request, context)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.receive("metrics", request, context)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    class Logs(logs_service_pb2_grpc.LogsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.receive("logs", request, context)
            return logs_service_pb2.ExportLogsServiceResponse()

    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(), server)
        received.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield received
        finally:
            server.stop(0).wait()
