"""Shoal's Grafana dashboard, as code: what to look at, in which order, and why each panel is there.

    python docker/grafana/dashboards.py            # writes shoal.json, which Grafana is provisioned with
    python docker/grafana/dashboards.py --check    # fails when shoal.json is not what this file makes

Every metric that a service exports has a panel here or stands in WITHOUT_PANEL with the reason; a test holds that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

TARGET = Path(__file__).resolve().with_name("shoal.json")
DATASOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")  # datasource.yml's uid

_RANK = " * on (job_id, instance) group_left (rank) shoal_worker_info"
"""Gives a worker's series the rank that it has at the moment: its own labels name the place where it runs."""
_OF_JOB = '{job_id=~"$job"}'

WITHOUT_PANEL: dict[str, str] = {
    "grpc_client_started": "the servers' figures show the same calls",
    "grpc_client_handled": "the servers' figures show the same calls, and calls that found no server are errors in the caller's log",
    "grpc_client_handling_seconds": "the servers' figures, and the network between is not Shoal's to show",
}
"""Metric -> why no panel shows it."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One panel: lines over time."""

    title: str
    text: str
    """What it shows, and what to make of it."""
    unit: str
    """Grafana's name of the unit."""
    queries: Sequence[tuple[str, str]]
    """PromQL and the legend of its lines. `{job}` stands for: of the jobs chosen at the dashboard's top."""


def quantiles(histogram: str, by: str) -> list[tuple[str, str]]:
    """The median and the 99th percentile of a histogram, per value of the label `by`."""
    selected = "" if histogram.startswith("shoal_coordinator_") else "{job}"
    rate = f"sum by ({by}, le) (rate({histogram}_bucket{selected}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"{{{{{by}}}}} p{round(q * 100)}") for q in (0.5, 0.99)]


MEMBERSHIP = (
    Graph(
        title="World size",
        text="Ranks that train now, and parameter servers that are alive. 0 ranks: the job waits for its fewest workers.",
        unit="none",
        queries=[
            ("shoal_coordinator_world_size{job}", "{{job_id}} ranks"),
            ("shoal_coordinator_servers_alive{job}", "{{job_id}} parameter servers"),
        ],
    ),
    Graph(
        title="Members by phase",
        text="Joined members replay their script, ready ones wait for a generation, quarantined ones are kept out.",
        unit="none",
        queries=[("sum by (phase) (shoal_coordinator_members{job}) > 0", "{{phase}}")],
    ),
    Graph(
        title="Steps that stand, and stragglers",
        text="Jobs in which ranks have waited for ten seconds, and ranks that hold the others back. `shoal status` and the logs name them.",
        unit="none",
        queries=[
            ("shoal_coordinator_step_stands{job}", "{{job_id}} stands"),
            ("shoal_coordinator_stragglers{job}", "{{job_id}} stragglers"),
        ],
    ),
    Graph(
        title="Generation",
        text="Number of each job's newest generation. Each step up is a join, a departure or a failure.",
        unit="none",
        queries=[("shoal_coordinator_generation{job}", "{{job_id}}")],
    ),
    Graph(
        title="New generations",
        text="By cause. Failures interrupt the step in flight; borders do not.",
        unit="none",
        queries=[("increase(shoal_coordinator_generations_formed_total[$__rate_interval]) > 0", "{{cause}}")],
    ),
    Graph(
        title="Departures",
        text="How members went, leases that ended without a heartbeat, and failed collectives that no newer generation explained.",
        unit="none",
        queries=[
            ("increase(shoal_coordinator_members_departed_total[$__rate_interval]) > 0", "{{ending}}"),
            ("increase(shoal_coordinator_leases_expired_total[$__rate_interval]) > 0", "lease of a {{kind}}"),
            ("increase(shoal_coordinator_collective_failures_total[$__rate_interval]) > 0", "unexplained collective failures"),
        ],
    ),
    Graph(
        title="From a loss to its announcement",
        text="From the moment the coordinator learns of a death until the survivors have been told of the generation without it.",
        unit="s",
        queries=quantiles("shoal_coordinator_loss_to_announcement_seconds", "instance"),
    ),
    Graph(
        title="Writing a transition",
        text="Time of one commit to Redis, on disk before it is announced. It bounds how fast membership can change.",
        unit="s",
        queries=quantiles("shoal_coordinator_commit_seconds", "instance"),
    ),
    Graph(
        title="Events in a commit",
        text="Above 1 the group commit is at work. Retries mean that Redis did not answer.",
        unit="none",
        queries=[
            *quantiles("shoal_coordinator_events_per_commit", "instance"),
            ("increase(shoal_coordinator_commit_retries_total[$__rate_interval]) > 0", "{{instance}} retries"),
        ],
    ),
    Graph(
        title="Redis",
        text="1 while Redis answers the coordinator. At 0 training goes on and membership waits.",
        unit="none",
        queries=[("shoal_coordinator_redis_up", "{{instance}}")],
    ),
    Graph(
        title="Sessions",
        text="Open sessions of members and parameter servers.",
        unit="none",
        queries=[("shoal_coordinator_sessions", "{{kind}}")],
    ),
    Graph(
        title="Heartbeats",
        text="Heartbeats a second: the coordinator's steady load.",
        unit="short",
        queries=[("rate(shoal_coordinator_heartbeats_total[$__rate_interval])", "{{kind}}")],
    ),
    Graph(
        title="Batches leased",
        text="Batches a second dealt first come first served to members of asynchronous runs.",
        unit="short",
        queries=[("rate(shoal_coordinator_batches_leased_total[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Partitions that move",
        text="Moves between parameter servers that were settled, and partitions that have another server since: servers come, or are "
        "drained. Where moves fail again and again, the job's events say why (move_failed).",
        unit="none",
        queries=[
            ("increase(shoal_coordinator_partition_moves_total[$__rate_interval]) > 0", "moves: {{outcome}}"),
            ("increase(shoal_coordinator_partitions_moved_total[$__rate_interval]) > 0", "partitions moved"),
        ],
    ),
)

TRAINING = (
    Graph(
        title="Samples a second",
        text="Samples that committed steps counted: the useful work. A dip is a fault; a lower level after it is capacity lost.",
        unit="short",
        queries=[("sum(rate(shoal_worker_samples_total{job}[$__rate_interval]))", "all workers")],
    ),
    Graph(
        title="Loss",
        text="The loss of each rank's last committed step, where the loop tells it.",
        unit="short",
        queries=[(f"shoal_worker_loss{{job}}{_RANK}", "rank {{rank}}")],
    ),
    Graph(
        title="Step time",
        text="From one commit to the next. The 99th percentile far above the median: stragglers, or faults.",
        unit="s",
        queries=quantiles("shoal_worker_step_seconds", "job_id"),
    ),
    Graph(
        title="Waiting for peers",
        text="Seconds of each second that a rank waits in collectives. One far below the others holds them back; all high: the network.",
        unit="percentunit",
        queries=[(f"rate(shoal_worker_wait_seconds_total{{job}}[$__rate_interval]){_RANK}", "rank {{rank}}")],
    ),
    Graph(
        title="Steps",
        text="Steps a second that each worker committed, and that a fault made void. Committed, all lines of one job lie together.",
        unit="short",
        queries=[
            ("rate(shoal_worker_steps_committed_total{job}[$__rate_interval])", "{{instance}} committed"),
            ("rate(shoal_worker_steps_lost_total{job}[$__rate_interval]) > 0", "{{instance}} lost"),
        ],
    ),
    Graph(
        title="World size and generation",
        text="Ranks in the generation that each worker works in. Workers that differ for longer than a step are being put out.",
        unit="none",
        queries=[
            ("shoal_worker_world_size{job}", "{{instance}} world size"),
            ("shoal_worker_generation{job}", "{{instance}} generation"),
        ],
    ),
    Graph(
        title="Rank",
        text="Which worker has which rank, and when that changed.",
        unit="none",
        queries=[("shoal_worker_rank{job}", "{{instance}}")],
    ),
)

FAULTS = (
    Graph(
        title="Pause at a failure",
        text="From noticing a failure to the next committed step, as the slowest survivor saw it.",
        unit="s",
        queries=quantiles("shoal_worker_recovery_seconds", "job_id"),
    ),
    Graph(
        title="Pause at a join",
        text="How long the others stood still at a border, until joiners had their state.",
        unit="s",
        queries=quantiles("shoal_worker_join_seconds", "job_id"),
    ),
    Graph(
        title="Forming a generation",
        text="To connect the new process group and reconcile state in it: the part of a pause that is not detection.",
        unit="s",
        queries=quantiles("shoal_worker_reform_seconds", "job_id"),
    ),
    Graph(
        title="State received from peers",
        text="Bytes a second while joiners, and ranks that were behind, are fed.",
        unit="Bps",
        queries=[
            (
                "rate(shoal_worker_state_received_bytes_total{job}[$__rate_interval])"
                " / rate(shoal_worker_state_receive_seconds_total{job}[$__rate_interval])",
                "{{instance}}",
            )
        ],
    ),
)

PARAMETER_SERVERS = (
    Graph(
        title="Pushes and pulls",
        text="Partitions a second. Duplicates are retries that were recognised; unchanged pulls cost no bytes.",
        unit="short",
        queries=[
            ("sum by (outcome) (rate(shoal_ps_pushes_total{job}[$__rate_interval]))", "pushes {{outcome}}"),
            ("sum by (outcome) (rate(shoal_ps_pulls_total{job}[$__rate_interval]))", "pulls {{outcome}}"),
            ("sum by (outcome) (rate(shoal_ps_initializations_total{job}[$__rate_interval]))", "initializations {{outcome}}"),
        ],
    ),
    Graph(
        title="Bytes moved",
        text="Payload received and sent by each server. Servers that differ much: tensors lie unevenly.",
        unit="Bps",
        queries=[
            ("rate(shoal_ps_received_bytes_total{job}[$__rate_interval])", "{{instance}} received"),
            ("rate(shoal_ps_sent_bytes_total{job}[$__rate_interval])", "{{instance}} sent"),
        ],
    ),
    Graph(
        title="Transports of tensors",
        text="Streams of pushes and pulls by what carries them: shared memory, TCP connections of their own, or gRPC, which is slower. "
        "Below: transports that workers could not have (a port that is shut, say).",
        unit="short",
        queries=[
            ("sum by (transport) (rate(shoal_ps_streams_total{job}[$__rate_interval]))", "streams by {{transport}}"),
            ("sum by (transport) (shoal_ps_bulk_connections{job})", "connections by {{transport}}"),
            (
                "sum by (transport) (increase(shoal_worker_transports_lost_total{job}[$__rate_interval])) > 0",
                "not to be had: {{transport}}",
            ),
        ],
    ),
    Graph(
        title="Staleness of pushes",
        text="Versions between the values that a gradient was computed on and those that it met: on the servers, and as workers saw it.",
        unit="none",
        queries=[*quantiles("shoal_ps_staleness", "job_id"), *quantiles("shoal_worker_staleness", "job_id")],
    ),
    Graph(
        title="Pushes lost",
        text="Acknowledged updates, by partition, that a server no longer had: it lost its disk, or had no data directory. Else nothing.",
        unit="none",
        queries=[("increase(shoal_worker_pushes_lost_total{job}[$__rate_interval]) > 0", "{{instance}}")],
    ),
    Graph(
        title="Time to apply a partition",
        text="Check and update of one pushed partition. Times the partitions pushed a second: how busy a server's one core is.",
        unit="s",
        queries=quantiles("shoal_ps_apply_seconds", "instance"),
    ),
    Graph(
        title="Waiting for slower members",
        text="How long pulls, and under bsp pushes, were held back for others. Much of it: the bound is tight, or a worker is slow.",
        unit="s",
        queries=quantiles("shoal_ps_turn_wait_seconds", "job_id"),
    ),
    Graph(
        title="Clocks",
        text="The slowest and the fastest member's clock, as each server knows them.",
        unit="none",
        queries=[("shoal_ps_slowest_clock{job}", "{{instance}} slowest"), ("shoal_ps_fastest_clock{job}", "{{instance}} fastest")],
    ),
    Graph(
        title="Versions",
        text="The lowest and the highest version of a partition on each server.",
        unit="none",
        queries=[("shoal_ps_lowest_version{job}", "{{instance}} lowest"), ("shoal_ps_highest_version{job}", "{{instance}} highest")],
    ),
    Graph(
        title="Stored bytes",
        text="Values and optimizer state in memory, and the size of the last snapshot.",
        unit="bytes",
        queries=[("shoal_ps_stored_bytes{job}", "{{instance}} in memory"), ("shoal_ps_snapshot_bytes{job}", "{{instance}} snapshot")],
    ),
    Graph(
        title="Rows of sparse tables",
        text="Rows that were pushed and not evicted. A row takes memory from its first push on.",
        unit="short",
        queries=[("shoal_ps_table_rows{job}", "{{instance}}")],
    ),
    Graph(
        title="Snapshots",
        text="Age of the last snapshot: the journal has what came after it. Failures mean a full or broken disk.",
        unit="s",
        queries=[
            ("time() - (shoal_ps_snapshot_timestamp_seconds{job} > 0)", "{{instance}} age"),
            (
                "rate(shoal_ps_snapshot_seconds_sum{job}[$__rate_interval]) / rate(shoal_ps_snapshot_seconds_count{job}[$__rate_interval])",
                "{{instance}} time",
            ),
            ("increase(shoal_ps_snapshot_failures_total{job}[$__rate_interval]) > 0", "{{instance}} failures"),
        ],
    ),
    Graph(
        title="Journal",
        text="Bytes a second that were written before updates were acknowledged.",
        unit="Bps",
        queries=[("rate(shoal_ps_journal_bytes_total{job}[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Journal: time and failures",
        text="Time to write and sync what goes together, how many changes those are, and failures: a full or broken disk.",
        unit="s",
        queries=[
            (
                "rate(shoal_ps_journal_seconds_sum{job}[$__rate_interval]) / rate(shoal_ps_journal_seconds_count{job}[$__rate_interval])",
                "{{instance}} time",
            ),
            (
                "rate(shoal_ps_journal_records_total{job}[$__rate_interval]) / rate(shoal_ps_journal_seconds_count{job}[$__rate_interval])",
                "{{instance}} changes together",
            ),
            ("increase(shoal_ps_journal_failures_total{job}[$__rate_interval]) > 0", "{{instance}} failures"),
        ],
    ),
    Graph(
        title="Partitions given and taken",
        text="How many a server gave to others or took from them, and how long those of a move were served by nobody.",
        unit="s",
        queries=[
            (
                "rate(shoal_ps_frozen_seconds_sum{job}[$__rate_interval]) / rate(shoal_ps_frozen_seconds_count{job}[$__rate_interval])",
                "{{instance}} not served",
            ),
            ("increase(shoal_ps_moved_partitions_total{job}[$__rate_interval]) > 0", "{{instance}} {{direction}}"),
        ],
    ),
    Graph(
        title="Refused calls",
        text="By RPC and reason. STALE_GENERATION after a fault is the fence at work; anything steady is a bug in a client.",
        unit="short",
        queries=[("sum by (method, reason) (rate(shoal_ps_refused_total{job}[$__rate_interval])) > 0", "{{method}} {{reason}}")],
    ),
    Graph(
        title="Membership as the servers know it",
        text="Partitions held, members of the newest generation told, and whether the session with the coordinator is open (1) and a "
        "backup has all that was acknowledged (1).",
        unit="none",
        queries=[
            ("shoal_ps_partitions{job}", "{{instance}} partitions"),
            ("shoal_ps_members{job}", "{{instance}} members"),
            ("shoal_ps_generation{job}", "{{instance}} generation"),
            ("shoal_ps_coordinator_connected{job}", "{{instance}} connected"),
            ("shoal_ps_backup_in_sync{job}", "{{instance}} backup in sync"),
        ],
    ),
)

RPCS = (
    Graph(
        title="Calls",
        text="RPCs begun a second on the coordinator and the parameter servers.",
        unit="short",
        queries=[("sum by (grpc_method) (rate(grpc_server_started_total[$__rate_interval]))", "{{grpc_method}}")],
    ),
    Graph(
        title="Calls that failed",
        text="By method and status. FailedPrecondition after a fault is fencing; Unavailable is retried.",
        unit="short",
        queries=[
            (
                'sum by (grpc_method, grpc_code) (rate(grpc_server_handled_total{grpc_code!="OK"}[$__rate_interval])) > 0',
                "{{grpc_method}} {{grpc_code}}",
            )
        ],
    ),
    Graph(
        title="Time of calls",
        text="From an RPC's start to its end on the server. Sessions last as long as their member and are left out.",
        unit="s",
        queries=[
            (
                "histogram_quantile(0.99, sum by (grpc_method, le) "
                '(rate(grpc_server_handling_seconds_bucket{grpc_type!="bidi_stream"}[$__rate_interval])))',
                "{{grpc_method}} p99",
            )
        ],
    ),
    Graph(
        title="Messages",
        text="Messages a second in both directions: heartbeats, directives, chunks of tensors.",
        unit="short",
        queries=[
            ("sum by (grpc_method) (rate(grpc_server_msg_received_total[$__rate_interval]))", "{{grpc_method}} received"),
            ("sum by (grpc_method) (rate(grpc_server_msg_sent_total[$__rate_interval]))", "{{grpc_method}} sent"),
        ],
    ),
)

ROWS: Sequence[tuple[str, Sequence[Graph]]] = (
    ("Training", TRAINING),
    ("Membership", MEMBERSHIP),
    ("Faults", FAULTS),
    ("Parameter servers", PARAMETER_SERVERS),
    ("RPCs", RPCS),
)


def dashboard() -> Dashboard:
    """The whole dashboard."""
    built = (
        Dashboard("Shoal")
        .uid("shoal")
        .description("Membership, training, parameter servers and RPCs of one Shoal cluster.")
        .tags(["shoal"])
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            QueryVariable("job")
            .label("Job")
            .datasource(DATASOURCE)
            .query("label_values(shoal_coordinator_generation, job_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    )
    for title, graphs in ROWS:
        built = built.with_row(Row(title))
        for graph in graphs:
            built = built.with_panel(_panel(graph))
    return built


def _panel(graph: Graph) -> Panel:
    panel = (
        Panel()
        .title(graph.title)
        .description(graph.text)
        .datasource(DATASOURCE)
        .unit(graph.unit)
        .span(8)
        .height(7)
        .fill_opacity(8)
        .legend(VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    for index, (expression, legend) in enumerate(graph.queries):
        query = Dataquery().expr(expression.replace("{job}", _OF_JOB)).legend_format(legend).ref_id(chr(ord("A") + index))
        panel = panel.with_target(query.datasource(DATASOURCE))
    return panel


def rendered() -> str:
    """shoal.json's text."""
    return json.dumps(dashboard().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    text = rendered()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.name} is not what dashboards.py makes: run make dashboards", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
