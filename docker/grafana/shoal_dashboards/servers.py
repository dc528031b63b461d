"""The parameter servers: pushes and pulls, what they hold, and what they write."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, quantiles
from shoal_dashboards.rpcs import rpc_graphs

TRAFFIC = (
    Graph(
        title="Pushes and pulls",
        text="Partitions a second. Duplicates are retries that were recognised; unchanged pulls "
        "cost no bytes.",
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
        text="Payload received and sent by each server. Servers that differ much: tensors lie "
        "unevenly.",
        unit="Bps",
        queries=[
            ("rate(shoal_ps_received_bytes_total{job}[$__rate_interval])", "{{instance}} received"),
            ("rate(shoal_ps_sent_bytes_total{job}[$__rate_interval])", "{{instance}} sent"),
        ],
    ),
    Graph(
        title="Transports of tensors",
        text="Streams of pushes and pulls by what carries them: shared memory, TCP connections of "
        "their own, or gRPC, which is slower.",
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
        text="Check and update of one pushed partition. Times the partitions pushed a second: how "
        "busy a server's one core is.",
        unit="s",
        queries=quantiles("shoal_ps_apply_seconds", "instance"),
    ),
    Graph(
        title="Staleness of pushes",
        text="Versions between the values that a gradient was computed on and those that it met.",
        unit="none",
        queries=quantiles("shoal_ps_staleness", "job_id"),
    ),
    Graph(
        title="Waiting for slower members",
        text="How long pulls, and under bsp pushes, were held back for others. Much of it: the "
        "bound is tight, or a worker is slow.",
        unit="s",
        queries=quantiles("shoal_ps_turn_wait_seconds", "job_id"),
    ),
    Graph(
        title="Clocks",
        text="The slowest and the fastest member's clock, as each server knows them, and by how "
        "much ssp lets them differ.",
        unit="none",
        queries=[
            ("shoal_ps_slowest_clock{job}", "{{instance}} slowest"),
            ("shoal_ps_fastest_clock{job}", "{{instance}} fastest"),
            ("shoal_ps_clock_bound{job} < +Inf", "{{instance}} bound"),
        ],
    ),
    Graph(
        title="Refused calls",
        text="By RPC and reason. STALE_GENERATION after a fault is the fence at work; anything "
        "steady is a bug in a client.",
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
        text="The lowest and the highest version of a partition on each server.",
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
        text="Rows that were pushed and not evicted. A row takes memory from its first push on.",
        unit="short",
        queries=[("shoal_ps_table_rows{job}", "{{instance}}")],
    ),
    Graph(
        title="Partitions given and taken",
        text="How many a server gave to others or took from them, and how long those of a move "
        "were served by nobody.",
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
        title="Membership as the servers know it",
        text="Partitions held, members of the newest generation told, and whether the session with "
        "the coordinator is open (1) and a "
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

DISKS = (
    Graph(
        title="Journal",
        text="Bytes a second that were written before updates were acknowledged.",
        unit="Bps",
        queries=[("rate(shoal_ps_journal_bytes_total{job}[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Journal: time and failures",
        text="Time to write and sync what goes together, how many changes those are, and failures: "
        "a full or broken disk.",
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
                "{{instance}} changes together",
            ),
            (
                "increase(shoal_ps_journal_failures_total{job}[$__rate_interval]) > 0",
                "{{instance}} failures",
            ),
        ],
    ),
    Graph(
        title="Snapshots",
        text="Age of the last snapshot: the journal has what came after it. Failures mean a full "
        "or broken disk.",
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
        text="What is free of the disk with the data directory. A snapshot needs as much as is "
        "stored in memory.",
        unit="percentunit",
        queries=[
            ("shoal_ps_disk_free_bytes{job} / (shoal_ps_disk_bytes{job} > 0)", "{{instance}} free"),
        ],
    ),
)


SERVERS = Board(
    uid="shoal-servers",
    title="Shoal: parameter servers",
    text="Pushes and pulls, what servers hold, their journals and disks, and their RPCs.",
    rows=(
        ("Pushes and pulls", TRAFFIC),
        ("What they hold", HELD),
        ("Journal, snapshots and disks", DISKS),
        ("RPCs", rpc_graphs('job="shoal", role="server", job_id=~"$job"')),
    ),
)
