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
    """Counters and histograms, updated by the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.generations = Counter(
            "shoal_coordinator_generations_formed",
            "Generations formed, by cause: start, failure (members were interrupted) or "
            "border (joins and drains at a step boundary).",
            ["cause"],
            registry=registry,
        )
        self.announced = Histogram(
            "shoal_coordinator_loss_to_announcement_seconds",
            "Time from the moment the coordinator learned of a loss (broken stream, reported "
            "exit, expired lease) until it sent the generation without the lost member to "
            "the survivors.",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.departures = Counter(
            "shoal_coordinator_members_departed",
            "Members that left or were lost, by reason: stream_broken, lease_expired, "
            "process_exited, script_failed, stalled, drained or finished.",
            ["ending"],
            registry=registry,
        )
        self.leases_expired = Counter(
            "shoal_coordinator_leases_expired",
            "Leases of members and servers that expired because no heartbeat arrived.",
            ["kind"],
            registry=registry,
        )
        self.heartbeats = Counter(
            "shoal_coordinator_heartbeats",
            "Heartbeats received from members and servers.",
            ["kind"],
            registry=registry,
        )
        self.collective_failures = Counter(
            "shoal_coordinator_collective_failures",
            "Failed collectives reported by members for which no newer generation was the reason.",
            registry=registry,
        )
        self.batches_leased = Counter(
            "shoal_coordinator_batches_leased",
            "Batches leased to members of asynchronous runs, including batches that were "
            "leased again.",
            registry=registry,
        )
        self.moves = Counter(
            "shoal_coordinator_partition_moves",
            "Completed moves of partitions between parameter servers, by outcome: moved, or "
            "failed (the partitions stayed).",
            ["outcome"],
            registry=registry,
        )
        self.partitions_moved = Counter(
            "shoal_coordinator_partitions_moved",
            "Partitions that were moved to another parameter server.",
            registry=registry,
        )
        self.commits = Histogram(
            "shoal_coordinator_commit_seconds",
            "Time to write one state transition to Redis, including retries.",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.events_per_commit = Histogram(
            "shoal_coordinator_events_per_commit",
            "Number of events written in one commit. Above 1: events arrived faster than "
            "Redis could write them one by one.",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=registry,
        )
        self.commit_retries = Counter(
            "shoal_coordinator_commit_retries",
            "Commits that were sent again because Redis did not respond.",
            registry=registry,
        )
        self.redis_up = Gauge(
            "shoal_coordinator_redis_up",
            "1 while Redis responds, otherwise 0. While it is 0, training continues and "
            "membership changes wait.",
            registry=registry,
        )
        self.redis_up.set(1)
        self.sessions = Gauge(
            "shoal_coordinator_sessions",
            "Open session streams of members and servers.",
            ["kind"],
            registry=registry,
        )


class JobsCollector(Collector):
    """Collects the gauges of all jobs at each scrape, on the thread that serves the scrape. For a
    run that has ended and has no members left, exports only its failure."""

    def __init__(self, observed: Callable[[], Iterable[ObservedJob]]) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric]:
        """Yields one sample for each job or, for counts by phase, for each job and phase."""
        gauges = {
            name: GaugeMetricFamily(f"shoal_coordinator_{name}", text, labels=["job_id"])
            for name, (text, _) in _JOB_GAUGES.items()
        }
        members = GaugeMetricFamily(
            "shoal_coordinator_members", "Live members, by phase.", labels=["job_id", "phase"]
        )
        phases = GaugeMetricFamily(
            "shoal_coordinator_job_phase",
            "1 for the current phase of the job.",
            labels=["job_id", "phase"],
        )
        machines = GaugeMetricFamily(
            "shoal_coordinator_machines",
            "Machines that are not healthy, by condition: leaving (the provider is taking it "
            "away), unhealthy (a health check failed) or excluded (its workers died again "
            "and again).",
            labels=["job_id", "condition"],
        )
        failed = GaugeMetricFamily(
            "shoal_coordinator_run_failed_timestamp_seconds",
            "Time at which the job's newest run failed; missing for jobs whose newest run "
            "has not failed.",
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
        "Number of generations that the newest run has had; 0 until training begins.",
        lambda job: job.state.number - job.state.run_above,
    ),
    "world_size": (
        "Number of ranks that are training; 0 while the job waits.",
        lambda job: job.world_size,
    ),
    "min_workers": (
        "Minimum number of ranks with which the job begins to train.",
        lambda job: job.state.spec.min_workers,
    ),
    "max_workers": ("Maximum number of ranks of the job.", lambda job: job.state.spec.max_workers),
    "newest_step": (
        "Highest step that any member has reported as committed.",
        lambda job: job.newest_step,
    ),
    "seconds_without_progress": (
        "Seconds since any rank last began another step, step boundary or operation; 0 while "
        "the job does not train.",
        lambda job: job.without_progress_s,
    ),
    "step_stands": (
        "1 while a step is stalled: ranks wait for each other and the step does not end, all ranks "
        "hang, or a worker hangs with leased batches (async_sgd).",
        lambda job: job.state.stall is not None,
    ),
    "stragglers": (
        "Number of ranks that slow the others down.",
        lambda job: sum(one.is_named for one in job.state.stragglers.values()),
    ),
    "servers_alive": (
        "Number of registered parameter servers that are alive.",
        lambda job: sum(server.alive for server in job.state.servers.values()),
    ),
    "server_places_unserved": (
        "Number of parameter server places without a serving primary, whose partitions can "
        "be neither pushed nor pulled.",
        lambda job: job.unserved_places,
    ),
    "server_places_unprotected": (
        "Number of parameter server places without a backup in sync, in a job with backups.",
        lambda job: job.unprotected_places,
    ),
}
"""Name of a gauge without the prefix `shoal_coordinator_` -> help text and value."""
