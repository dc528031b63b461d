"""The coordinator's own metrics, beside those of its gRPC calls (shoal_common.telemetry)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal_coordinator.membership.state import JobPhase, JobState, MemberPhase

_MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class CoordinatorMetrics:
    """Counted where things happen; all on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.generations = Counter(
            "shoal_coordinator_generations_formed",
            "Generations written, by cause: start, failure (members interrupted) or border (joins and drains).",
            ["cause"],
            registry=registry,
        )
        self.announced = Histogram(
            "shoal_coordinator_loss_to_announcement_seconds",
            "From the moment a loss reached the coordinator (broken stream, reported exit, ended lease) until the generation without the "
            "member was handed to the survivors' streams.",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.departures = Counter(
            "shoal_coordinator_members_departed",
            "Members that are gone, by how: stream_broken, lease_expired, process_exited, script_failed, stalled, drained or finished.",
            ["ending"],
            registry=registry,
        )
        self.leases_expired = Counter(
            "shoal_coordinator_leases_expired",
            "Leases that ended without a heartbeat, of members and servers.",
            ["kind"],
            registry=registry,
        )
        self.heartbeats = Counter(
            "shoal_coordinator_heartbeats", "Heartbeats received, of members and servers.", ["kind"], registry=registry
        )
        self.collective_failures = Counter(
            "shoal_coordinator_collective_failures",
            "Failed collectives that members reported and no newer generation explained.",
            registry=registry,
        )
        self.batches_leased = Counter(
            "shoal_coordinator_batches_leased",
            "Batches leased to members of asynchronous runs, repeated leases included.",
            registry=registry,
        )
        self.moves = Counter(
            "shoal_coordinator_partition_moves",
            "Moves of partitions between parameter servers that were settled, by how: moved, or failed (the partitions stayed).",
            ["outcome"],
            registry=registry,
        )
        self.partitions_moved = Counter(
            "shoal_coordinator_partitions_moved", "Partitions that were given another parameter server.", registry=registry
        )
        self.commits = Histogram(
            "shoal_coordinator_commit_seconds",
            "Time to write one transition to Redis, retries included.",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.events_per_commit = Histogram(
            "shoal_coordinator_events_per_commit",
            "Events folded into one commit: above 1, the group commit is at work.",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=registry,
        )
        self.commit_retries = Counter(
            "shoal_coordinator_commit_retries", "Commits that Redis did not answer and that were sent again.", registry=registry
        )
        self.redis_up = Gauge(
            "shoal_coordinator_redis_up",
            "1 while Redis answers. While it is 0 training goes on and membership changes wait.",
            registry=registry,
        )
        self.redis_up.set(1)
        self.sessions = Gauge("shoal_coordinator_sessions", "Open session streams, of members and servers.", ["kind"], registry=registry)


class JobsCollector(Collector):
    """Gauges of the jobs that are not finished, read from their states at each scrape: on the scraper's thread, from immutable values."""

    def __init__(self, states: Callable[[], Iterable[JobState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """One sample per job, and per job and phase."""
        generation = GaugeMetricFamily("shoal_coordinator_generation", "Number of the job's newest generation.", labels=["job_id"])
        world = GaugeMetricFamily("shoal_coordinator_world_size", "Ranks that train now; 0 while the job waits.", labels=["job_id"])
        members = GaugeMetricFamily("shoal_coordinator_members", "Live members, by phase.", labels=["job_id", "phase"])
        servers = GaugeMetricFamily("shoal_coordinator_servers_alive", "Registered parameter servers that are alive.", labels=["job_id"])
        stands = GaugeMetricFamily("shoal_coordinator_step_stands", "1 while ranks wait and no step ends.", labels=["job_id"])
        stragglers = GaugeMetricFamily("shoal_coordinator_stragglers", "Ranks that hold the others back.", labels=["job_id"])
        for state in self._states():
            if state.phase is JobPhase.FINISHED and not state.members:
                continue
            job = state.spec.job_id
            trains = state.generation is not None and state.phase is not JobPhase.WAITING
            generation.add_metric([job], state.number)
            world.add_metric([job], len(state.generation.ranks) if trains and state.generation is not None else 0)
            servers.add_metric([job], sum(server.alive for server in state.servers.values()))
            stands.add_metric([job], state.stall is not None)
            stragglers.add_metric([job], sum(one.told for one in state.stragglers.values()))
            for phase in MemberPhase:
                members.add_metric([job, phase], state.in_phase(phase))
        yield from (generation, world, members, servers, stands, stragglers)
