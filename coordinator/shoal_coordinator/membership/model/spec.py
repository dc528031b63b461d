"""Specification of a job, and the constants that the membership core uses in its decisions. Values
are validated where requests are parsed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

DEFAULT_LEASE_MS: Final = 30_000
DEFAULT_STALL_TIMEOUT_MS: Final = 60_000
LARGEST_WORLD: Final = 10_000
MOST_SERVERS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job's specification with the defaults filled in. Never changes during a run."""

    job_id: str
    """1 to 64 characters of [A-Za-z0-9._-], starting with a letter or digit."""
    min_workers: int
    """Smallest world size with which training begins; at least 1."""
    max_workers: int
    """Largest world size; min_workers to LARGEST_WORLD."""
    min_survivors: int = 0
    """Smallest world size with which training continues once it has begun, from 1 to min_workers. 0
    is replaced by min_workers."""
    parameter_servers: int = 0
    """Number of servers started with the job; at least 0."""
    max_parameter_servers: int = 0
    """Maximum number of servers, from parameter_servers to MOST_SERVERS. 0 is replaced by
    parameter_servers."""
    parameter_server_backups: int = 0
    """Number of backups per server; 0 or 1."""
    join_grace_ms: int = 0
    """Time to wait for more joiners after the first one; 0 to 600000."""
    lease_ms: int = DEFAULT_LEASE_MS
    """A member without a heartbeat for longer is evicted if its peers wait for it (absence.py), a
    server in any case; 500 to 600000."""
    stall_timeout_ms: int = DEFAULT_STALL_TIMEOUT_MS
    """A member that all its peers wait for and that makes no progress for longer is evicted: at
    once if it uses no processor time, otherwise when their collective reaches its deadline; 1000 to
    3600000."""

    def __post_init__(self) -> None:
        if self.min_survivors == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "min_survivors", self.min_workers)
        if self.max_parameter_servers == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "max_parameter_servers", self.parameter_servers)

    @property
    def servers_to_lay_out(self) -> int:
        """Number of servers that the job waits for before its tensors are laid out; 0 if it has
        none. A job that starts without servers but may have some waits for one."""
        return self.parameter_servers or min(1, self.max_parameter_servers)

    @cached_property
    def heartbeat_interval_ms(self) -> int:
        """A tenth of the lease, at most one second, so that one lost or late heartbeat costs no
        member its place."""
        return max(50, min(1000, self.lease_ms // 10))

    @cached_property
    def unheard_ms(self) -> int:
        """Time without a heartbeat after which a member counts as absent."""
        return 3 * self.heartbeat_interval_ms


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Constants of the core's decisions, the same for all jobs."""

    settle_ms: int = 75
    """Time for which a failed collective waits for a death that explains it. A broken stream or a
    waitpid arrives within a few milliseconds and identifies the dead process; without a death, all
    live members re-form."""
    timeout_settle_ms: int = 1_000
    """Time after the first report of a timeout within which the other waiting members have to
    report too: the first report ends its member's group, which theirs notice within a quarter of a
    second. A member that stays silent and makes no progress for longer is what they wait for."""
    break_window_ms: int = 100
    """Time after one broken stream within which further streams may break because of the same
    network fault."""
    reconnect_ms: int = 5_000
    """Time for which a member without a stream has to reconnect while its peers cannot continue
    without it: a little over twice the longest backoff of a member's link. Otherwise it has its
    full lease."""
    absence_ms: int = 300_000
    """Time for which a member may be silent if nobody is known to wait for it: the network between
    it and the coordinator may be down while it keeps training with its peers."""
    quiet_absence_ms: int = 120_000
    """The same for a member that reports no progress, such as a launcher: whether somebody waits
    for it can never be known."""
    closed_within_ms: int = 8_000
    """A stream that ends this soon after its member's last heartbeat was closed by the member; on a
    network failure, TCP and gRPC give up after 10 s."""
    explain_after_ms: int = 10_000
    """Time for which a step must be stalled before the reason is sent to all members."""
    explain_again_ms: int = 10_000
    """Interval between repetitions of the explanation during a stall."""
    look_ms: int = 1_000
    """Interval at which the core looks for stalled steps."""
    most_lost_generations: int = 1_000_000
    """A member that reports a generation further above the newest one is wrong; a smaller gap means
    that Redis has lost generations."""
    longest_settle_ms: int = 5_000
    """Upper limit of the settle time, which doubles with each failure of a fresh generation so that
    a broken network does not cause an endless series of generations."""
    fresh_generation_ms: int = 10_000
    """A generation that fails before this age counts as fresh."""
    border_patience_ms: int = 5_000
    """A BORDER generation does not replace one that members are still adopting, but waits at most
    this long for all of them to report that they work in it."""
    quarantine_after: int = 2
    """Number of mutual accusations after which the higher rank is quarantined."""
    kept_out_ms: int = 30_000
    """Minimum duration of the first quarantine; each further accusation doubles it, up to
    longest_kept_out_ms."""
    longest_kept_out_ms: int = 3_600_000
    straggler_after_ms: int = 5_000
    """Time for which a member must slow the others down before it is named as a straggler."""
    straggler_until_ms: int = 30_000
    """Time for which a straggler must keep up before it is no longer named."""
    most_members: int = 2 * LARGEST_WORLD
    """Maximum number of processes in one job, including those that stand by."""
    most_departed: int = 2 * LARGEST_WORLD
    """Maximum number of former member ids remembered; the oldest are forgotten first."""
    most_loaders: int = 64
    """Maximum number of loader names with leased batches."""
    most_batches: int = 65_536
    """Maximum number of batches of one epoch leased to a member, and of batches acknowledged at
    once."""
    epochs_kept: int = 2
    """Epochs of one loader whose leases are kept; a request for an older one is answered with
    epoch_done."""
    move_retry_ms: int = 2_000
    """Time for which the receiver of a failed move of partitions is excluded; each further failure
    in a row doubles it, up to longest_move_retry_ms."""
    longest_move_retry_ms: int = 60_000
    most_past_runs: int = 20
    """Maximum number of past runs remembered; the oldest are forgotten first."""
    most_drained: int = 100
    """Maximum number of drained servers remembered; the oldest are forgotten first."""
    batches_retry_after_ms: int = 20
    """Time after which a member should ask again if all free batches are leased to others; one more
    millisecond per member limits the rate of requests."""
