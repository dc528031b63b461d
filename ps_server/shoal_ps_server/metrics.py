"""Metrics of a parameter server, except the metrics of gRPC calls (shoal_common.rpc.metrics). All
are set on the event loop."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from shoal_common.errors import ShoalError

_APPLY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_WAIT_BUCKETS_S = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
_FROZEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class Metrics:
    """Metrics of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pushes = Counter(
            "shoal_ps_pushes",
            "Pushed partitions, by outcome: applied or duplicate.",
            ("outcome",),
            registry=registry,
        )
        self.initialized = Counter(
            "shoal_ps_initializations",
            "Partitions in Initialize streams, by outcome: applied or duplicate.",
            ("outcome",),
            registry=registry,
        )
        self.pulls = Counter(
            "shoal_ps_pulls",
            "Partitions in responses to pulls, by outcome: sent, or unchanged and therefore not "
            "sent.",
            ("outcome",),
            registry=registry,
        )
        self.received_bytes = Counter(
            "shoal_ps_received_bytes",
            "Payload bytes of completely received partitions, as sent (possibly compressed).",
            registry=registry,
        )
        self.sent_bytes = Counter(
            "shoal_ps_sent_bytes", "Payload bytes of partitions sent in pulls.", registry=registry
        )
        self.streams = Counter(
            "shoal_ps_streams",
            "Streams of tensors started, by RPC and by transport: memory, tcp or grpc.",
            ("method", "transport"),
            registry=registry,
        )
        self.bulk_connections = Gauge(
            "shoal_ps_bulk_connections",
            "Open bulk connections, by transport: memory or tcp.",
            ("transport",),
            registry=registry,
        )
        self.refused = Counter(
            "shoal_ps_refused",
            "Calls refused, by RPC and reason.",
            ("method", "reason"),
            registry=registry,
        )
        self.apply_seconds = Histogram(
            "shoal_ps_apply_seconds",
            "Time to check and apply one pushed partition, in seconds.",
            registry=registry,
            buckets=_APPLY_BUCKETS_S,
        )
        self.staleness = Histogram(
            "shoal_ps_staleness",
            "Number of versions between the values on which a gradient was computed and the "
            "values to which it was applied.",
            registry=registry,
            buckets=_STALENESS_BUCKETS,
        )
        self.turn_wait_seconds = Histogram(
            "shoal_ps_turn_wait_seconds",
            "Time that pulls under ssp and bsp waited for slower members, and that pushes under "
            "bsp waited for readers, in seconds.",
            ("method",),
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.stored_bytes = Gauge(
            "shoal_ps_stored_bytes",
            "Bytes of values and optimizer state in memory.",
            registry=registry,
        )
        self.table_rows = Gauge(
            "shoal_ps_table_rows", "Rows of sparse tables that are stored.", registry=registry
        )
        self.partitions = Gauge(
            "shoal_ps_partitions",
            "Number of partitions that this server owns, with or without values.",
            registry=registry,
        )
        self.lowest_version = Gauge(
            "shoal_ps_lowest_version",
            "Lowest version of this server's partitions.",
            registry=registry,
        )
        self.highest_version = Gauge(
            "shoal_ps_highest_version",
            "Highest version of this server's partitions.",
            registry=registry,
        )
        self.generation = Gauge(
            "shoal_ps_generation",
            "Newest generation announced by the coordinator.",
            registry=registry,
        )
        self.members = Gauge(
            "shoal_ps_members", "Number of members of the newest generation.", registry=registry
        )
        self.slowest_clock = Gauge(
            "shoal_ps_slowest_clock", "Clock of the slowest member.", registry=registry
        )
        self.fastest_clock = Gauge(
            "shoal_ps_fastest_clock", "Clock of the fastest member.", registry=registry
        )
        self.clock_bound = Gauge(
            "shoal_ps_clock_bound",
            "How many clocks a member may be ahead of the slowest when it begins an iteration: "
            "the bound of ssp, 0 under bsp, +Inf under asp.",
            registry=registry,
        )
        self.clock_bound.set(math.inf)
        self.coordinator_connected = Gauge(
            "shoal_ps_coordinator_connected",
            "1 while the session with the coordinator is open.",
            registry=registry,
        )
        self.snapshot_seconds = Histogram(
            "shoal_ps_snapshot_seconds",
            "Time to take and write a snapshot, in seconds.",
            registry=registry,
        )
        self.snapshot_bytes = Gauge(
            "shoal_ps_snapshot_bytes", "Size of the last snapshot.", registry=registry
        )
        self.snapshot_timestamp = Gauge(
            "shoal_ps_snapshot_timestamp_seconds",
            "Time at which the last snapshot was written.",
            registry=registry,
        )
        self.snapshot_failures = Counter(
            "shoal_ps_snapshot_failures", "Snapshots that could not be written.", registry=registry
        )

        self.journal_records = Counter(
            "shoal_ps_journal_records", "Changes written to the journal.", registry=registry
        )
        self.journal_bytes = Counter(
            "shoal_ps_journal_bytes", "Bytes written to the journal.", registry=registry
        )
        self.journal_seconds = Histogram(
            "shoal_ps_journal_seconds",
            "Time to write and sync a batch of journal records, in seconds.",
            registry=registry,
            buckets=_APPLY_BUCKETS_S,
        )
        self.journal_failures = Counter(
            "shoal_ps_journal_failures",
            "Number of times that the journal could not be written.",
            registry=registry,
        )

        self.moved_partitions = Counter(
            "shoal_ps_moved_partitions",
            "Partitions that moved during training, by direction: given to another server, or "
            "taken from one.",
            ("direction",),
            registry=registry,
        )
        self.frozen_seconds = Histogram(
            "shoal_ps_frozen_seconds",
            "Time during which partitions of a move could be neither pushed nor pulled, measured "
            "on the server that gave them away, in seconds.",
            registry=registry,
            buckets=_FROZEN_BUCKETS_S,
        )

        self.disk_bytes = Gauge(
            "shoal_ps_disk_bytes",
            "Size of the disk with the data directory; 0: there is none.",
            registry=registry,
        )
        self.disk_free_bytes = Gauge(
            "shoal_ps_disk_free_bytes",
            "Free space on the disk with the data directory.",
            registry=registry,
        )

        self.backup_in_sync = Gauge(
            "shoal_ps_backup_in_sync",
            "1 while a backup has all changes that this server has acknowledged.",
            registry=registry,
        )

    def watch_disk(self, path: Path) -> None:
        """Registers the gauges for the total and the free size of the disk that contains the
        directory `path`. They are read at each scrape."""
        self.disk_bytes.set_function(lambda: shutil.disk_usage(path).total)
        self.disk_free_bytes.set_function(lambda: shutil.disk_usage(path).free)

    @contextmanager
    def counting_refusals(self, method: str) -> Iterator[None]:
        """Counts a ShoalError raised in the enclosed block as a refused call to `method`."""
        try:
            yield
        except ShoalError as error:
            self.refused.labels(method, error.reason).inc()
            raise

    def journal_written(self, records: int, nbytes: int, seconds: float) -> None:
        """Records a batch of changes written to disk."""
        self.journal_records.inc(records)
        self.journal_bytes.inc(nbytes)
        self.journal_seconds.observe(seconds)

    def snapshot_written(self, *, nbytes: int, seconds: float) -> None:
        """Records a snapshot written to disk."""
        self.snapshot_seconds.observe(seconds)
        self.snapshot_bytes.set(nbytes)
        self.snapshot_timestamp.set_to_current_time()
