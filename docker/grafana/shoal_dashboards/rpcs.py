"""Panels of gRPC calls, which the coordinator and the parameter servers both have."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_dashboards.panels import Graph


def rpc_graphs(selector: str) -> Sequence[Graph]:
    """Panels of the calls that the targets answer which Prometheus knows by these labels, as in
    'job="coordinator"'."""
    return (
        Graph(
            title="Calls",
            text="RPCs begun a second.",
            unit="short",
            queries=[(_per_method("grpc_server_started_total", selector), "{{grpc_method}}")],
        ),
        Graph(
            title="Calls that failed",
            text="By method and status. FailedPrecondition after a fault is fencing; Unavailable "
            "is retried.",
            unit="short",
            queries=[
                (
                    "sum by (grpc_method, grpc_code) (rate("
                    f'grpc_server_handled_total{{{selector}, grpc_code!="OK"}}[$__rate_interval])) '
                    "> 0",
                    "{{grpc_method}} {{grpc_code}}",
                )
            ],
        ),
        Graph(
            title="Time of calls",
            text="From an RPC's start to its end on the server. Sessions last as long as their "
            "member and are left out.",
            unit="s",
            queries=[
                (
                    "histogram_quantile(0.99, sum by (grpc_method, le) (rate("
                    f"grpc_server_handling_seconds_bucket{{{selector}, "
                    f'grpc_type!="bidi_stream"}}[$__rate_interval])))',
                    "{{grpc_method}} p99",
                )
            ],
        ),
        Graph(
            title="Messages",
            text="Messages a second in both directions: heartbeats, directives, chunks of tensors.",
            unit="short",
            queries=[
                (
                    _per_method("grpc_server_msg_received_total", selector),
                    "{{grpc_method}} received",
                ),
                (_per_method("grpc_server_msg_sent_total", selector), "{{grpc_method}} sent"),
            ],
        ),
    )


def _per_method(counter: str, selector: str) -> str:
    return f"sum by (grpc_method) (rate({counter}{{{selector}}}[$__rate_interval]))"
