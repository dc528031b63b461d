"""Metrics of the coordinator, in addition to the metrics of its gRPC calls
(shoal_common.telemetry)."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.state import JobPhase, MachineCondition, MemberPhase

_NOT_HEALTHY = tuple(each for each in MachineCondition if each is not MachineCondition.HEALTHY)
_MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class CoordinatorMetrics:
    """Metrics that the event loop updates when events occur."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.generations = Counter(
            "shoal_coordinator_generations_formed",
            "Generations written, by cause: start, failure (members interrupted) or border (joins "
            "and drains).",
            ["cause"],
            registry=registry,
        )
        self.announced = Histogram(
            "shoal_coordinator_loss_to_announcement_seconds",
            "From the moment a loss reached the coordinator (broken stream, reported exit, ended "
            "lease) until the generation without the member was handed to the survivors' streams.",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.departures = Counter(
            "shoal_coordinator_members_departed",
            "Members that are gone, by how: stream_broken, lease_expired, process_exited, "
            "script_failed, stalled, drained or finished.",
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
            "shoal_coordinator_heartbeats",
            "Heartbeats received, of members and servers.",
            ["kind"],
            registry=registry,
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
            "Moves of partitions between parameter servers that were settled, by how: moved, or "
            "failed (the partitions stayed).",
            ["outcome"],
            registry=registry,
        )
        self.partitions_moved = Counter(
            "shoal_coordinator_partitions_moved",
            "Partitions that were given another parameter server.",
            registry=registry,
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
            "shoal_coordinator_commit_retries",
            "Commits that Redis did not answer and that were sent again.",
            registry=registry,
        )
        self.redis_up = Gauge(
            "shoal_coordinator_redis_up",
            "1 while Redis answers. While it is 0 training continues and membership changes wait.",
            registry=registry,
        )
        self.redis_up.set(1)
        self.sessions = Gauge(
            "shoal_coordinator_sessions",
            "Open session streams, of members and servers.",
            ["kind"],
            registry=registry,
        )


class JobsCollector(Collector):
    """Collects the gauges of all jobs at each scrape, on the scraper's thread. For an ended run
    whose members are gone, only its failure is exported."""

    def __init__(self, observed: Callable[[], Iterable[ObservedJob]]) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per job, or per job and phase."""
        gauges = {
            name: GaugeMetricFamily(f"shoal_coordinator_{name}", text, labels=["job_id"])
            for name, (text, _) in _JOB_GAUGES.items()
        }
        members = GaugeMetricFamily(
            "shoal_coordinator_members", "Live members, by phase.", labels=["job_id", "phase"]
        )
        phases = GaugeMetricFamily(
            "shoal_coordinator_job_phase",
            "1 for the phase that the job is in.",
            labels=["job_id", "phase"],
        )
        machines = GaugeMetricFamily(
            "shoal_coordinator_machines",
            "Machines that are not healthy, by condition: leaving (its provider takes it away), "
            "unhealthy (a health check failed) or excluded (its workers died again and again).",
            labels=["job_id", "condition"],
        )
        failed = GaugeMetricFamily(
            "shoal_coordinator_run_failed_timestamp_seconds",
            "When the job's newest run failed; absent of jobs whose newest run did not.",
            labels=["job_id"],
        )
        for job in self._observed():
            state, job_id = job.state, job.state.spec.job_id
            if job.failed_unix_ms:
                failed.add_metric([job_id], job.failed_unix_ms / 1000)
            if state.phase is JobPhase.FINISHED and not state.members:
                continue
            for name, (_, value) in _JOB_GAUGES.items():
                gauges[name].add_metric([job_id], value(job))
            for phase in MemberPhase:
                members.add_metric([job_id, phase], state.in_phase(phase))
            found = Count(machine.condition for machine in state.machines.values())
            for condition in _NOT_HEALTHY:
                machines.add_metric([job_id, condition], found[condition])
            for job_phase in JobPhase:
                phases.add_metric([job_id, job_phase], state.phase is job_phase)
        yield from (*gauges.values(), members, machines, phases, failed)


_JOB_GAUGES: Final[Mapping[str, tuple[str, Callable[[ObservedJob], float]]]] = {
    "run": ("Number of the job's newest run.", lambda job: job.state.run.number),
    "generation": ("Number of the job's newest generation.", lambda job: job.state.number),
    "run_generations": (
        "Generations of the newest run, as their numbers tell; 0: it has not begun to train.",
        lambda job: job.state.number - job.state.run_above,
    ),
    "world_size": ("Ranks that train now; 0 while the job waits.", lambda job: job.world_size),
    "min_workers": (
        "The fewest ranks with which the job begins to train.",
        lambda job: job.state.spec.min_workers,
    ),
    "max_workers": ("The most ranks that the job takes.", lambda job: job.state.spec.max_workers),
    "newest_step": (
        "The highest step that a member has committed, as heartbeats say.",
        lambda job: job.newest_step,
    ),
    "seconds_without_progress": (
        "Seconds since a rank last came to another step, border or operation; 0 while the job does "
        "not train.",
        lambda job: job.without_progress_s,
    ),
    "step_stands": (
        "1 while ranks wait and no step ends.",
        lambda job: job.state.stall is not None,
    ),
    "stragglers": (
        "Ranks that hold the others back.",
        lambda job: sum(one.is_named for one in job.state.stragglers.values()),
    ),
    "servers_alive": (
        "Registered parameter servers that are alive.",
        lambda job: sum(server.alive for server in job.state.servers.values()),
    ),
    "server_places_unserved": (
        "Places of parameter servers at which no primary serves: what lies there can be neither "
        "pushed to nor pulled.",
        lambda job: job.unserved_places,
    ),
    "server_places_unprotected": (
        "Places of parameter servers without a backup in sync, in a job that is to have backups.",
        lambda job: job.unprotected_places,
    ),
}
"""Name of a gauge without the prefix `shoal_coordinator_` -> help text and value."""
