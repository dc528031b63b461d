"""The parameter servers: pushes and pulls, stored values, and files."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, quantiles
from shoal_dashboards.rpcs import rpc_graphs

TRAFFIC = (
    Graph(
        title="Pushes and pulls",
        text="Partitions per second. Duplicates are retries that were recognized; unchanged "
        "partitions are not sent.",
        unit="short",
        queries=[
            (
                "sum by (outcome) (rate(shoal_ps_pushes_total{job}[$__rate_interval]))",
                "pushes {{outcome}}",
            ),
            (
                "sum by (outcome) (rate(shoal_ps_pulls_total{job}[$__rate_interval]))",
                "pulls {{outcome}}",
            ),
            (
                "sum by (outcome) (rate(shoal_ps_initializations_total{job}[$__rate_interval]))",
                "initializations {{outcome}}",
            ),
        ],
    ),
    Graph(
        title="Bytes moved",
        text="Payload bytes received and sent by each server. If servers differ much, tensors are "
        "distributed unevenly.",
        unit="Bps",
        queries=[
            ("rate(shoal_ps_received_bytes_total{job}[$__rate_interval])", "{{instance}} received"),
            ("rate(shoal_ps_sent_bytes_total{job}[$__rate_interval])", "{{instance}} sent"),
        ],
    ),
    Graph(
        title="Transports of tensors",
        text="Streams of pushes and pulls by transport: shared memory, separate TCP connections, "
        "or gRPC, which is slower.",
        unit="short",
        queries=[
            (
                "sum by (transport) (rate(shoal_ps_streams_total{job}[$__rate_interval]))",
                "streams by {{transport}}",
            ),
            ("sum by (transport) (shoal_ps_bulk_connections{job})", "connections by {{transport}}"),
        ],
    ),
    Graph(
        title="Time to apply a partition",
        text="Time to check and apply one pushed partition. Multiplied by the partitions pushed "
        "per second, it shows how busy the server's single core is.",
        unit="s",
        queries=quantiles("shoal_ps_apply_seconds", "instance"),
    ),
    Graph(
        title="Staleness of pushes",
        text="Number of versions between the values on which a gradient was computed and the "
        "values to which it was applied.",
        unit="none",
        queries=quantiles("shoal_ps_staleness", "job_id"),
    ),
    Graph(
        title="Waiting for slower members",
        text="Time that pulls (under bsp also pushes) waited for other members. If it is long, "
        "the bound is tight or a worker is slow.",
        unit="s",
        queries=quantiles("shoal_ps_turn_wait_seconds", "job_id"),
    ),
    Graph(
        title="Clocks",
        text="Clocks of the slowest and the fastest member according to each server, and the "
        "difference that ssp permits.",
        unit="none",
        queries=[
            ("shoal_ps_slowest_clock{job}", "{{instance}} slowest"),
            ("shoal_ps_fastest_clock{job}", "{{instance}} fastest"),
            ("shoal_ps_clock_bound{job} < +Inf", "{{instance}} bound"),
        ],
    ),
    Graph(
        title="Refused calls",
        text="Refused calls by RPC and reason. STALE_GENERATION is normal after a fault; refusals "
        "that continue indicate a bug in a client.",
        unit="short",
        queries=[
            (
                "sum by (method, reason) (rate(shoal_ps_refused_total{job}[$__rate_interval])) > 0",
                "{{method}} {{reason}}",
            )
        ],
    ),
)

HELD = (
    Graph(
        title="Versions",
        text="Lowest and highest version of the partitions on each server.",
        unit="none",
        queries=[
            ("shoal_ps_lowest_version{job}", "{{instance}} lowest"),
            ("shoal_ps_highest_version{job}", "{{instance}} highest"),
        ],
    ),
    Graph(
        title="Stored bytes",
        text="Values and optimizer state in memory, and the size of the last snapshot.",
        unit="bytes",
        queries=[
            ("shoal_ps_stored_bytes{job}", "{{instance}} in memory"),
            ("shoal_ps_snapshot_bytes{job}", "{{instance}} snapshot"),
        ],
    ),
    Graph(
        title="Rows of sparse tables",
        text="Rows that were pushed and not evicted. A row needs memory from its first push on.",
        unit="short",
        queries=[("shoal_ps_table_rows{job}", "{{instance}}")],
    ),
    Graph(
        title="Partitions given and taken",
        text="Partitions that a server gave to others or took from them, and the time during "
        "which they were not served.",
        unit="s",
        queries=[
            (
                "rate(shoal_ps_frozen_seconds_sum{job}[$__rate_interval]) / "
                "rate(shoal_ps_frozen_seconds_count{job}[$__rate_interval])",
                "{{instance}} not served",
            ),
            (
                "increase(shoal_ps_moved_partitions_total{job}[$__rate_interval]) > 0",
                "{{instance}} {{direction}}",
            ),
        ],
    ),
    Graph(
        title="Membership according to the servers",
        text="Number of partitions; members of the newest announced generation; whether the "
        "session with the coordinator is open (1); whether a backup has all acknowledged "
        "changes (1).",
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

DISKS = (
    Graph(
        title="Journal",
        text="Bytes per second written to the journal. Each update is written before it is "
        "acknowledged.",
        unit="Bps",
        queries=[("rate(shoal_ps_journal_bytes_total{job}[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Journal: time and failures",
        text="Time to write and sync a batch of changes, the number of changes per batch, and "
        "failures, which are caused by a full or faulty disk.",
        unit="s",
        queries=[
            (
                "rate(shoal_ps_journal_seconds_sum{job}[$__rate_interval]) / "
                "rate(shoal_ps_journal_seconds_count{job}[$__rate_interval])",
                "{{instance}} time",
            ),
            (
                "rate(shoal_ps_journal_records_total{job}[$__rate_interval]) / "
                "rate(shoal_ps_journal_seconds_count{job}[$__rate_interval])",
                "{{instance}} changes per batch",
            ),
            (
                "increase(shoal_ps_journal_failures_total{job}[$__rate_interval]) > 0",
                "{{instance}} failures",
            ),
        ],
    ),
    Graph(
        title="Snapshots",
        text="Age of the last snapshot; later changes are in the journal. Failures are caused by "
        "a full or faulty disk.",
        unit="s",
        queries=[
            ("time() - (shoal_ps_snapshot_timestamp_seconds{job} > 0)", "{{instance}} age"),
            (
                "rate(shoal_ps_snapshot_seconds_sum{job}[$__rate_interval]) / "
                "rate(shoal_ps_snapshot_seconds_count{job}[$__rate_interval])",
                "{{instance}} time",
            ),
            (
                "increase(shoal_ps_snapshot_failures_total{job}[$__rate_interval]) > 0",
                "{{instance}} failures",
            ),
        ],
    ),
    Graph(
        title="Disk",
        text="Free fraction of the disk with the data directory. A snapshot needs as much space "
        "as the values and optimizer state in memory.",
        unit="percentunit",
        queries=[
            ("shoal_ps_disk_free_bytes{job} / (shoal_ps_disk_bytes{job} > 0)", "{{instance}} free"),
        ],
    ),
)


SERVERS = Board(
    uid="shoal-servers",
    title="Shoal: parameter servers",
    text="Pushes and pulls, stored values, journals and disks, and RPCs.",
    rows=(
        ("Pushes and pulls", TRAFFIC),
        ("Stored values", HELD),
        ("Journal, snapshots and disks", DISKS),
        ("RPCs", rpc_graphs('job="shoal", role="server", job_id=~"$job"')),
    ),
)
