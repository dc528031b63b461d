"""Specification of a job, and the constants used in the core's decisions. Values are validated when
requests are parsed."""

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
    """A job's specification, with defaults filled in. It does not change during a run."""

    job_id: str
    """1 to 64 characters of [A-Za-z0-9._-], starting with a letter or digit."""
    min_workers: int
    """Minimum world size to start training; at least 1."""
    max_workers: int
    """Maximum world size, from min_workers to LARGEST_WORLD."""
    min_survivors: int = 0
    """Minimum world size to continue training once it has started, from 1 to min_workers. 0 is
    replaced by min_workers."""
    parameter_servers: int = 0
    """Number of servers started with the job."""
    max_parameter_servers: int = 0
    """Maximum number of servers, from parameter_servers to MOST_SERVERS. 0 is replaced by
    parameter_servers."""
    parameter_server_backups: int = 0
    """Number of backups per server; 0 or 1."""
    join_grace_ms: int = 0
    """Maximum time in milliseconds that the first ready member waits for others; 0 to 600000."""
    lease_ms: int = DEFAULT_LEASE_MS
    """Duration of a lease in milliseconds, from 500 to 600000. A member that sends no heartbeat for
    longer is evicted if its peers are waiting for it (absence.py); a server is evicted in any
    case."""
    stall_timeout_ms: int = DEFAULT_STALL_TIMEOUT_MS
    """Duration in milliseconds, from 1000 to 3600000. A member that makes no progress for longer
    while all its peers are waiting for it is evicted: immediately if it uses no processor time,
    otherwise when its peers' collective times out."""

    def __post_init__(self) -> None:
        if self.min_survivors == 0:  # as in a job written by an older release
            object.__setattr__(self, "min_survivors", self.min_workers)
        if self.max_parameter_servers == 0:  # as in a job written by an older release
            object.__setattr__(self, "max_parameter_servers", self.parameter_servers)

    @property
    def servers_to_lay_out(self) -> int:
        """Number of servers that must have registered before the job's tensors are assigned to
        them; 0 if the job cannot have servers. If no servers are started with the job but servers
        may be added later, it is 1."""
        return self.parameter_servers or min(1, self.max_parameter_servers)

    @cached_property
    def heartbeat_interval_ms(self) -> int:
        """Interval between heartbeats: a tenth of the lease, at most one second. A member is
        therefore not evicted because a single heartbeat is lost or late."""
        return max(50, min(1000, self.lease_ms // 10))

    @cached_property
    def unheard_ms(self) -> int:
        """Time without a heartbeat after which a member counts as absent."""
        return 3 * self.heartbeat_interval_ms


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Constants used in the core's decisions, the same for all jobs."""

    settle_ms: int = 75
    """Wait in milliseconds after a failed collective for a reported death that explains it. A
    broken stream or a launcher's report identifies the dead process within a few milliseconds;
    without a death, all live members form a new generation."""
    timeout_settle_ms: int = 1_000
    """Maximum time, after the first report that a collective timed out, for other waiting members
    to report it too. The first reporter's group is aborted, which the others notice within a
    quarter of a second. A member that neither reports a timeout nor makes progress in this time is
    assumed to be the cause of the others' wait."""
    break_window_ms: int = 100
    """Maximum time, after a stream has broken, for other streams to break because of the same
    network failure."""
    reconnect_ms: int = 5_000
    """Maximum time for a member without a stream to reconnect if its peers cannot continue without
    it: a little over twice the longest backoff of a member's connection. Otherwise, the member may
    use its full lease."""
    absence_ms: int = 300_000
    """Maximum silence of a member if no other member is known to be waiting for it. Its connection
    to the coordinator may have failed while it is still training with its peers."""
    quiet_absence_ms: int = 120_000
    """Maximum silence of a member that reports no progress, such as a launcher. It is never known
    whether others are waiting for such a member."""
    closed_within_ms: int = 8_000
    """Maximum time between a member's last heartbeat and the closing of its stream if the member
    itself closed it. After a network failure, TCP and gRPC close it only after 10 s."""
    explain_after_ms: int = 10_000
    """Minimum duration of a stalled step before the reason is sent to all members."""
    explain_again_ms: int = 10_000
    """Interval between repetitions of the explanation during a stall."""
    look_ms: int = 1_000
    """Interval at which the core looks for stalled steps."""
    most_lost_generations: int = 1_000_000
    """Maximum distance between the newest generation and a higher one reported by a member. Within
    it, Redis is assumed to have lost generations; beyond it, the member is assumed to be wrong."""
    longest_settle_ms: int = 5_000
    """Maximum settle time. The settle time doubles whenever a fresh generation fails, so that a
    broken network does not cause an endless series of generations."""
    fresh_generation_ms: int = 10_000
    """Age in milliseconds below which a generation counts as fresh."""
    boundary_patience_ms: int = 5_000
    """Maximum delay of a generation for joins and drains (BORDER) while members have yet to report
    that they are working in the previous generation. A generation should not be replaced while
    members are still adopting it."""
    quarantine_after: int = 2
    """Number of times that two members must accuse each other of being unreachable before the one
    with the higher rank is quarantined."""
    kept_out_ms: int = 30_000
    """Minimum duration of the first quarantine; each further accusation doubles it, up to
    longest_kept_out_ms."""
    longest_kept_out_ms: int = 3_600_000
    machine_deaths: int = 4
    """Number of members that must die on a machine within deaths_window_ms before the machine is
    excluded. A launcher with one worker reaches it with its default of three replacements."""
    deaths_window_ms: int = 1_800_000
    deaths_apart_ms: int = 1_000
    """A death less than this time after the last counted death on the same machine is assumed to
    have the same cause and is not counted."""
    deaths_ratio: int = 3
    """Each death on a typical other machine (the median) raises machine_deaths by this number,
    since deaths everywhere suggest that the script or the cluster is the cause."""
    straggler_after_ms: int = 5_000
    """Minimum time that a member must slow the others down before it is named as a straggler."""
    straggler_until_ms: int = 30_000
    """Minimum time that a straggler must keep up before it is no longer named."""
    most_members: int = 2 * LARGEST_WORLD
    """Maximum number of processes in a job, including processes that are waiting for a rank."""
    most_machines: int = LARGEST_WORLD
    """Maximum number of unhealthy machines remembered."""
    most_departed: int = 2 * LARGEST_WORLD
    """Maximum number of former members whose ids are remembered; the oldest are forgotten first."""
    most_loaders: int = 64
    """Maximum number of loader names with leased batches."""
    most_batches: int = 65_536
    """Maximum number of batches of one epoch leased to a member, or reported as finished in one
    request."""
    epochs_kept: int = 2
    """Number of epochs of a loader whose leases are kept. A request for an older epoch is answered
    with epoch_done."""
    move_retry_ms: int = 2_000
    """Duration, in milliseconds, for which a server is excluded from moves of partitions after it
    has caused a move to fail. It doubles with each further consecutive failure, up to
    longest_move_retry_ms."""
    longest_move_retry_ms: int = 60_000
    most_past_runs: int = 20
    """Maximum number of past runs remembered; the oldest are forgotten first."""
    most_drained: int = 100
    """Maximum number of drained servers remembered; the oldest are forgotten first."""
    batches_retry_after_ms: int = 20
    """Delay before a member should ask again if all batches are leased to other members. One
    millisecond is added per member, to limit the rate of requests."""
