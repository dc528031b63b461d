"""Prometheus metrics of the worker, each with its help text. Each session has its own registry.

Callbacks can be registered for periods that have ended (a recovery, for example) and for finished
calls to services. Tracing is implemented with these callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from shoal_common.rpc.client_interceptors import FinishedCalls

_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_DISKS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
_STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)

PeriodFollower: TypeAlias = Callable[[str, float, Mapping[str, str | int]], None]
"""Receives the name, the duration in seconds and the attributes of a period that has just ended."""


class WorkerMetrics:
    """Metrics that a worker exports to Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = FinishedCalls()
        """Interceptor that measures this worker's calls to services."""
        self._period_followers: tuple[PeriodFollower, ...] = ()
        self.generation = Gauge(
            "shoal_worker_generation",
            "Number of this worker's current generation.",
            registry=self.registry,
        )
        self.rank = Gauge(
            "shoal_worker_rank", "This worker's rank in its generation.", registry=self.registry
        )
        self.info = Gauge(
            "shoal_worker_info",
            "Always 1; its labels are the current member id and rank of this worker, which the "
            "other series do not contain.",
            ("member_id", "rank"),
            registry=self.registry,
        )
        self.world_size = Gauge(
            "shoal_worker_world_size",
            "Number of ranks in this worker's generation.",
            registry=self.registry,
        )
        self.steps_committed = Counter(
            "shoal_worker_steps_committed",
            "Steps committed on this worker.",
            registry=self.registry,
        )
        self.steps_lost = Counter(
            "shoal_worker_steps_lost",
            "Steps of this worker that were aborted by a fault.",
            registry=self.registry,
        )
        self.samples = Counter(
            "shoal_worker_samples",
            "Samples of this worker in committed steps.",
            registry=self.registry,
        )
        self.loss = Gauge(
            "shoal_worker_loss",
            "Loss that train_step or shoal.report reported last; NaN: none yet.",
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "shoal_worker_step_seconds",
            "Time from one committed step to the next.",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self.registry,
        )
        self.wait_seconds = Counter(
            "shoal_worker_wait_seconds",
            "Time that this worker waited for its peers in collectives. The worker that waits "
            "least delays the others.",
            registry=self.registry,
        )
        self.share = Gauge(
            "shoal_worker_step_share",
            "This worker's micro-batches per step, relative to an equal share, if they are dealt "
            "by speed or a step has fewer of them than ranks; otherwise 0.",
            registry=self.registry,
        )
        self.reform_seconds = Histogram(
            "shoal_worker_reform_seconds",
            "Time to form a new generation and reconcile the state of its ranks.",
            buckets=_PAUSES,
            registry=self.registry,
        )
        self.recovery_seconds = Histogram(
            "shoal_worker_recovery_seconds",
            "Pause of training at a failure, from its detection to the next committed step.",
            buckets=_PAUSES,
            registry=self.registry,
        )
        self.join_seconds = Histogram(
            "shoal_worker_join_seconds",
            "Pause of training at a join, from the step boundary until the joiners have received "
            "their state.",
            buckets=_PAUSES,
            registry=self.registry,
        )
        self.transfer_bytes = Counter(
            "shoal_worker_state_received_bytes",
            "Bytes of state received from peers.",
            registry=self.registry,
        )
        self.transfer_seconds = Counter(
            "shoal_worker_state_receive_seconds",
            "Time spent receiving state from peers.",
            registry=self.registry,
        )
        self.staleness = Histogram(
            "shoal_worker_staleness",
            "Number of versions that other workers' pushes created between a pull and the "
            "following push (async_sgd).",
            buckets=_STALENESS,
            registry=self.registry,
        )

        self.checkpoints = Counter(
            "shoal_worker_checkpoints",
            "Checkpoints, or this worker's parts of them, by outcome: written, failed, or "
            "given_up (another worker left before it had written its part).",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in ("written", "failed", "given_up"):
            # starts at 0, so that the first failure is an increase
            self.checkpoints.labels(outcome)
        self.checkpoint_seconds = Histogram(
            "shoal_worker_checkpoint_seconds",
            "Time to write a checkpoint, or this worker's part of it, in the background of "
            "training.",
            buckets=_DISKS,
            registry=self.registry,
        )
        self.checkpoint_timestamp = Gauge(
            "shoal_worker_checkpoint_timestamp_seconds",
            "Time at which this worker last wrote a checkpoint or its part of one; 0: never.",
            registry=self.registry,
        )
        self.uploads = Counter(
            "shoal_worker_uploads",
            "Uploads of checkpoints to an object store by this worker, by outcome: written, "
            "failed, or given_up (a later save removed the checkpoint first, or this worker was "
            "evicted).",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in ("written", "failed", "given_up"):
            self.uploads.labels(outcome)
        self.upload_seconds = Histogram(
            "shoal_worker_upload_seconds",
            "Time to upload a checkpoint to an object store. Training continues during the upload.",
            buckets=_DISKS,
            registry=self.registry,
        )
        self.uploaded_bytes = Counter(
            "shoal_worker_uploaded_bytes",
            "Bytes of checkpoint files that this worker uploaded to an object store.",
            registry=self.registry,
        )
        self.upload_backlog_checkpoints = Gauge(
            "shoal_worker_upload_backlog_checkpoints",
            "Checkpoints on this worker's disk that are not yet in the object store.",
            registry=self.registry,
        )
        self.upload_backlog_bytes = Gauge(
            "shoal_worker_upload_backlog_bytes",
            "Size of the checkpoints on this worker's disk that are not yet in the object store.",
            registry=self.registry,
        )
        self.transports_lost = Counter(
            "shoal_worker_transports_lost",
            "Number of times that a transport to a parameter server (memory or tcp) was not "
            "available and the next one was used.",
            ("transport",),
            registry=self.registry,
        )
        self.pushes_lost = Counter(
            "shoal_worker_pushes_lost",
            "Acknowledged pushes of this worker, counted per partition, that a server lost "
            "because it restarted from older data.",
            registry=self.registry,
        )

    def generation_formed(
        self, *, number: int, member_id: str, rank: int, world_size: int, seconds: float
    ) -> None:
        """Records the generation that this worker has entered, its rank there, and how long the
        generation took to form."""
        self.entered(number=number, member_id=member_id, rank=rank, world_size=world_size)
        self.reform_seconds.observe(seconds)
        self._period("generation", seconds, {"number": number, "world_size": world_size})

    def recovered(self, seconds: float) -> None:
        """Records how long a failure paused training."""
        self.recovery_seconds.observe(seconds)
        self._period("recovery", seconds, {})

    def joined(self, seconds: float, *, count: int) -> None:
        """Records how long training paused while `count` joiners received their state."""
        self.join_seconds.observe(seconds)
        self._period("join", seconds, {"count": count})

    def entered(self, *, number: int, member_id: str, rank: int, world_size: int) -> None:
        """Records the generation that this worker has entered, and its rank there. Called directly
        under async_sgd, where a generation does not have to be formed."""
        self.placed(member_id=member_id, rank=rank)
        self.generation.set(number)
        self.rank.set(rank)
        self.world_size.set(world_size)

    def placed(self, *, member_id: str, rank: int) -> None:
        """Exports this worker's member id and rank, which may have changed."""
        self.info.clear()
        self.info.labels(member_id, str(rank)).set(1)

    def checkpoint_ended(self, outcome: str, *, seconds: float) -> None:
        """Records that a checkpoint, or this worker's part of one, was written or abandoned."""
        self.checkpoints.labels(outcome).inc()
        if outcome == "written":
            self.checkpoint_seconds.observe(seconds)
            self.checkpoint_timestamp.set_to_current_time()
        self._period("checkpoint", seconds, {"outcome": outcome})

    def upload_ended(self, outcome: str, *, seconds: float) -> None:
        """Records the end of an attempt to upload a checkpoint. `outcome`: written, failed or
        given_up."""
        self.uploads.labels(outcome).inc()
        if outcome == "written":
            self.upload_seconds.observe(seconds)
        self._period("upload", seconds, {"outcome": outcome})

    def upload_backlog(self, checkpoints: int, nbytes: int) -> None:
        """Records the number and size of the checkpoints on this worker's disk that are not
        uploaded yet."""
        self.upload_backlog_checkpoints.set(checkpoints)
        self.upload_backlog_bytes.set(nbytes)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """Records state received from peers."""
        self.transfer_bytes.inc(size_bytes)
        self.transfer_seconds.inc(seconds)

    def follow_periods(self, follower: PeriodFollower) -> None:
        """Registers a callback for periods that have ended: generation, recovery, join and
        checkpoint. It is called on the thread on which the period ended."""
        self._period_followers = (*self._period_followers, follower)

    def _period(self, name: str, seconds: float, attributes: Mapping[str, str | int]) -> None:
        for follower in self._period_followers:
            follower(name, seconds, attributes)
