"""OpenTelemetry sink: sends traces, metrics and logs of all ranks by OTLP to
OTEL_EXPORTER_OTLP_ENDPOINT.

The official SDK creates the telemetry, and its OTLP exporters send it. The delivery thread replaces
the SDK's batch processors, because these drop a batch that the receiver does not accept in time.

Each rank is a separate resource, with the run's key as an attribute. Numbers become gauges with the
time of their step; events and warnings become log records; each span becomes a separate trace.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError, UnavailableError

from shoal_worker.tracking.sinks import (
    Event,
    EventKind,
    LogLine,
    Points,
    Report,
    Span,
    TrackedRun,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

_SCOPE: Final = "shoal"
_EXPORTER_LOGGER: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"


class OpenTelemetry:
    """Sends traces, metrics and logs to an OTLP receiver over gRPC. Pass it to `shoal.track`.

    The SDK's environment variables select the receiver: OTEL_EXPORTER_OTLP_ENDPOINT (default:
    http://localhost:4317), OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
    and OTEL_TRACES_SAMPLER.
    """

    on_every_rank = True

    def __init__(self) -> None:
        """Creates the sink. Raises ConfigurationError if the packages are not installed."""
        try:
            # the import takes time, and would later delay steps by holding the interpreter's lock
            import opentelemetry.exporter.otlp.proto.grpc._log_exporter
            import opentelemetry.exporter.otlp.proto.grpc.metric_exporter
            import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "shoal.OpenTelemetry needs the package opentelemetry-exporter-otlp-proto-grpc; "
                "install it with `pip install 'shoal[opentelemetry]'`"
            ) from error
        self._exporters: _Exporters | None = None
        self._accepted: set[str] = set()
        """Kinds of telemetry (traces, metrics, logs) that the receiver has already accepted from
        the current reports, if it has not accepted all of them."""

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Creates the exporters, which connect on first use."""
        if self._exporters is not None:
            self._exporters.close()
        self._exporters = _Exporters(run)

    def write(self, reports: Sequence[Report]) -> None:
        """Sends spans as traces, points as metrics, and events and log lines as logs."""
        exporters = self._exporters
        assert exporters is not None, "the sink must be open"
        signals: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "spans": (exporters.spans.export, exporters.traced(reports)),
            "metrics": (exporters.metrics.export, exporters.measured(reports)),
            "logs": (exporters.logs.export, exporters.logged(reports)),
        }
        for name, (export, data) in signals.items():
            if data and name not in self._accepted:
                exporters.refusal.text = ""
                if export(data).name != "SUCCESS":
                    raise UnavailableError(
                        f"the OTLP receiver did not accept {name}: "
                        f"{exporters.refusal.text or 'no reason known'}; check "
                        "OTEL_EXPORTER_OTLP_ENDPOINT"
                    )
                self._accepted.add(name)
        self._accepted.clear()

    def close(self, *, ended: bool) -> None:
        """Closes the connections to the receiver."""
        exporters, self._exporters = self._exporters, None
        if exporters is not None:
            exporters.close()


class _Exporters:
    """Converts reports to telemetry of one OpenTelemetry resource, and sends it with the SDK's
    exporters."""

    def __init__(self, run: TrackedRun) -> None:
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.refusal = _Refusal()
        self.spans = OTLPSpanExporter()
        self.metrics = OTLPMetricExporter()
        self.logs = OTLPLogExporter()
        self._resource = _resource(run)
        self._scope = InstrumentationScope(_SCOPE)
        self._ended = _ended_spans()
        provider = TracerProvider(
            resource=self._resource, id_generator=_ids(), shutdown_on_exit=False
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(_SCOPE)

    def traced(self, reports: Iterable[Report]) -> list[ReadableSpan]:
        """Passes spans to the SDK, and returns those that its sampler keeps, in the SDK's form."""
        from opentelemetry.trace import SpanKind, StatusCode

        for report in reports:
            if isinstance(report, Span):
                call = "rpc.system" in report.attributes
                span = self._tracer.start_span(
                    report.name,
                    kind=SpanKind.CLIENT if call else SpanKind.INTERNAL,
                    attributes={**report.attributes, "shoal.step": report.step},
                    start_time=report.begin_ns,
                )
                if report.error:
                    span.set_status(StatusCode.ERROR, report.error)
                span.end(report.end_ns)
        ended: list[ReadableSpan] = self._ended.take()
        return ended

    def measured(self, reports: Iterable[Report]) -> MetricsData | None:
        """Returns a gauge for each number; None if there are no points."""
        from opentelemetry.sdk.metrics import export

        found: dict[str, list[export.NumberDataPoint]] = {}
        for report in reports:
            if not isinstance(report, Points):
                continue
            for name, value in {**report.values, "shoal/step": report.step}.items():
                found.setdefault(name.replace("/", "."), []).append(
                    export.NumberDataPoint(
                        attributes={},
                        start_time_unix_nano=report.time_ns,
                        time_unix_nano=report.time_ns,
                        value=value,
                    )
                )
        if not found:
            return None
        metrics = [
            export.Metric(name=name, description="", unit="", data=export.Gauge(points))
            for name, points in found.items()
        ]
        scope = export.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        resource = export.ResourceMetrics(
            resource=self._resource, scope_metrics=[scope], schema_url=""
        )
        return export.MetricsData(resource_metrics=[resource])

    def logged(self, reports: Iterable[Report]) -> list[Any]:
        """Returns a log record for each event and log line."""
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord

        numbers = {
            logging.INFO: SeverityNumber.INFO,
            logging.WARNING: SeverityNumber.WARN,
            logging.ERROR: SeverityNumber.ERROR,
            logging.CRITICAL: SeverityNumber.FATAL,
        }
        records = []
        for report in reports:
            attributes: dict[str, str | int] = {"shoal.step": report.step}
            event: str | None = None
            match report:
                case Event():
                    level = logging.WARNING if report.kind is EventKind.FAULT else logging.INFO
                    event = f"shoal.{report.kind}"
                case LogLine():
                    level, attributes["logger"] = report.level, report.logger
                case _:
                    continue
            record = LogRecord(
                timestamp=report.time_ns,
                observed_timestamp=report.time_ns,
                severity_number=numbers[level],
                severity_text=logging.getLevelName(level),
                body=report.text,
                attributes=attributes,
                event_name=event,
            )
            records.append(ReadableLogRecord(record, self._resource, self._scope))
        return records

    def close(self) -> None:
        self.refusal.close()
        for exporter in (self.spans, self.metrics, self.logs):
            exporter.shutdown()


class _Refusal(logging.Filter):
    """Log filter that catches error messages of the exporters on this thread. Keeps the last
    message, and prevents a log line for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._thread = threading.get_ident()
        logging.getLogger(_EXPORTER_LOGGER).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.text = record.getMessage()
        return False

    def close(self) -> None:
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self)


def _resource(run: TrackedRun) -> Resource:
    from opentelemetry.sdk.resources import Resource

    own = {"service.instance.id": run.place, "shoal.job": run.job, "shoal.run": run.key}
    known = Resource.create()  # from the SDK's environment variables
    if str(known.attributes.get("service.name", "")).startswith("unknown_service"):
        own["service.name"] = "shoal-worker"
    return known.merge(Resource({name: value for name, value in own.items() if value}))


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):
        """Generator of random ids. The SDK's own generator would use Python's global random
        generator, whose sequence belongs to the script."""

        def generate_span_id(self) -> int:
            return secrets.randbelow(2**64 - 1) + 1

        def generate_trace_id(self) -> int:
            return secrets.randbelow(2**128 - 1) + 1

    return Ids()


def _ended_spans() -> Any:
    from opentelemetry.sdk.trace import SpanProcessor

    class Ended(SpanProcessor):
        """Collects finished spans until they are taken."""

        def __init__(self) -> None:
            self._spans: list[ReadableSpan] = []

        def on_end(self, span: ReadableSpan) -> None:
            self._spans.append(span)

        def take(self) -> list[ReadableSpan]:
            taken, self._spans = self._spans, []
            return taken

    return Ended()
