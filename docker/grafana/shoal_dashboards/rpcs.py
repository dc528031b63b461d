"""Panels about gRPC calls and about the event loop that serves them, for the dashboards of the
coordinator and the parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_dashboards.panels import Graph


def rpc_graphs(selector: str) -> Sequence[Graph]:
    """Returns panels about the gRPC calls to a service, and about its event loop. `selector`:
    Prometheus labels of the service's targets, such as 'job="coordinator"'."""
    return (
        Graph(
            title="Calls",
            text="RPCs started per second.",
            unit="short",
            queries=[(_per_method("grpc_server_started_total", selector), "{{grpc_method}}")],
        ),
        Graph(
            title="Failed calls",
            text="Failed calls by method and status. FailedPrecondition is normal after a fault, "
            "because calls of an older generation are refused; Unavailable is retried.",
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
            title="Duration of calls",
            text="Duration of RPCs on the server. Session streams, which last as long as their "
            "member, are not shown.",
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
            text="Messages per second in both directions: heartbeats, instructions to members, "
            "chunks of tensors.",
            unit="short",
            queries=[
                (
                    _per_method("grpc_server_msg_received_total", selector),
                    "{{grpc_method}} received",
                ),
                (_per_method("grpc_server_msg_sent_total", selector), "{{grpc_method}} sent"),
            ],
        ),
        Graph(
            title="Blocked event loop",
            text="Share of the time for which the event loop was blocked for more than 5 s. It "
            "answers no call meanwhile; the service's log has its stack.",
            unit="percentunit",
            queries=[
                (
                    f"rate(shoal_event_loop_blocked_seconds_total{{{selector}}}[$__rate_interval])",
                    "{{instance}}",
                )
            ],
        ),
    )


def _per_method(counter: str, selector: str) -> str:
    return f"sum by (grpc_method) (rate({counter}{{{selector}}}[$__rate_interval]))"
