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
    """A job's specification with the defaults filled in. It never changes during a run."""

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
    """Duration in milliseconds, 500 to 600000. A member without a heartbeat for longer is evicted
    if its peers wait for it (absence.py), a server in any case."""
    stall_timeout_ms: int = DEFAULT_STALL_TIMEOUT_MS
    """Duration in milliseconds, 1000 to 3600000. A member that all its peers wait for and that
    makes no progress for longer is evicted: at once if it uses no processor time, otherwise when
    the peers' collective reaches its deadline."""

    def __post_init__(self) -> None:
        if self.min_survivors == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "min_survivors", self.min_workers)
        if self.max_parameter_servers == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "max_parameter_servers", self.parameter_servers)

    @property
    def servers_to_lay_out(self) -> int:
        """Number of servers that the job waits for before its tensors are laid out; 0 if it may
        have none. A job that starts without servers but may have some waits for one."""
        return self.parameter_servers or min(1, self.max_parameter_servers)

    @cached_property
    def heartbeat_interval_ms(self) -> int:
        """Interval between heartbeats: a tenth of the lease, at most one second. One lost or late
        heartbeat therefore costs no member its place."""
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
    """Time after the first report of a timeout within which the other waiting members must report
    too. The first report ends its member's group, which the other members notice within a quarter
    of a second. A member that stays silent and makes no progress for longer is the one they wait
    for."""
    break_window_ms: int = 100
    """Time after one broken stream within which further streams may break because of the same
    network fault."""
    reconnect_ms: int = 5_000
    """Time for which a member without a stream may take to reconnect while its peers cannot
    continue without it: a little over twice the longest backoff of a member's link. Otherwise the
    member has its full lease."""
    absence_ms: int = 300_000
    """Maximum silence of a member if nobody is known to wait for it. The network between it and the
    coordinator may be down while it keeps training with its peers."""
    quiet_absence_ms: int = 120_000
    """Maximum silence of a member that reports no progress, such as a launcher, for which it can
    never be known whether somebody waits."""
    closed_within_ms: int = 8_000
    """Time between a member's last heartbeat and the end of its stream below which the member has
    closed the stream. On a network failure, TCP and gRPC give up after 10 s."""
    explain_after_ms: int = 10_000
    """Time for which a step must be stalled before the reason is sent to all members."""
    explain_again_ms: int = 10_000
    """Interval between repetitions of the explanation during a stall."""
    look_ms: int = 1_000
    """Interval at which the core looks for stalled steps."""
    most_lost_generations: int = 1_000_000
    """Distance above the newest generation up to which a reported generation means that Redis has
    lost generations. A member that reports a higher one is wrong."""
    longest_settle_ms: int = 5_000
    """Maximum settle time. The settle time doubles with each failure of a fresh generation, so that
    a broken network does not cause an endless series of generations."""
    fresh_generation_ms: int = 10_000
    """Age in milliseconds below which a failed generation counts as fresh."""
    border_patience_ms: int = 5_000
    """Maximum time for which a BORDER generation waits until all members have reported to work in
    the previous generation. It does not replace a generation that members are still adopting."""
    quarantine_after: int = 2
    """Number of mutual accusations after which the higher rank is quarantined."""
    kept_out_ms: int = 30_000
    """Minimum duration of the first quarantine; each further accusation doubles it, up to
    longest_kept_out_ms."""
    longest_kept_out_ms: int = 3_600_000
    machine_deaths: int = 4
    """Number of deaths of members on one machine within deaths_window_ms after which the machine is
    excluded. A launcher with one worker reaches it with its default of three replacements."""
    deaths_window_ms: int = 1_800_000
    deaths_apart_ms: int = 1_000
    """Time since the last counted death below which a death on the same machine counts as its
    consequence."""
    deaths_ratio: int = 3
    """Number of deaths by which each death on a typical other machine (the median) raises
    machine_deaths, since the script or the cluster may be the cause."""
    straggler_after_ms: int = 5_000
    """Time for which a member must slow the others down before it is named as a straggler."""
    straggler_until_ms: int = 30_000
    """Time for which a straggler must keep up before it is no longer named."""
    most_members: int = 2 * LARGEST_WORLD
    """Maximum number of processes in one job, including those that stand by."""
    most_machines: int = LARGEST_WORLD
    """Maximum number of machines remembered as not healthy."""
    most_departed: int = 2 * LARGEST_WORLD
    """Maximum number of former member ids remembered; the oldest are forgotten first."""
    most_loaders: int = 64
    """Maximum number of loader names with leased batches."""
    most_batches: int = 65_536
    """Maximum number of batches of one epoch leased to a member, and of batches acknowledged at
    once."""
    epochs_kept: int = 2
    """Number of epochs of one loader whose leases are kept. A request for an older epoch is
    answered with epoch_done."""
    move_retry_ms: int = 2_000
    """Time for which the receiver of a failed move of partitions is excluded. Each further
    consecutive failure doubles the time, up to longest_move_retry_ms."""
    longest_move_retry_ms: int = 60_000
    most_past_runs: int = 20
    """Maximum number of past runs remembered; the oldest are forgotten first."""
    most_drained: int = 100
    """Maximum number of drained servers remembered; the oldest are forgotten first."""
    batches_retry_after_ms: int = 20
    """Time after which a member should ask again if all free batches are leased to other members.
    One millisecond per member is added to limit the rate of requests."""
