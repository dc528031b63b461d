"""What a job was created with, and the constants of the core's decisions. Values are checked where
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
    """A job's specification with the defaults filled in. Never changes while a run goes on."""

    job_id: str
    """1 to 64 characters of [A-Za-z0-9._-], starting with a letter or digit."""
    min_workers: int
    """Smallest world that training begins with; >= 1."""
    max_workers: int
    """Largest world; min_workers to LARGEST_WORLD."""
    min_survivors: int = 0
    """Smallest world that training goes on with once it has begun; 0: min_workers, which is filled
    in; else 1 to min_workers."""
    parameter_servers: int = 0
    """Servers that are started with the job; >= 0."""
    max_parameter_servers: int = 0
    """The most that it may have; 0: as many, which is filled in; else parameter_servers to
    MOST_SERVERS."""
    parameter_server_backups: int = 0
    """Backups of each of them; 0 or 1."""
    join_grace_ms: int = 0
    """Wait for more joiners, from the first one on; 0 to 600000."""
    lease_ms: int = DEFAULT_LEASE_MS
    """A member without a heartbeat for longer is put out if its peers wait for it (absence.py), a
    server in any case; 500 to 600000."""
    stall_timeout_ms: int = DEFAULT_STALL_TIMEOUT_MS
    """A member that all its peers wait for and that makes no progress for longer is put out: at
    once if it uses no processor time, else when their collective has run into its deadline; 1000 to
    3600000."""

    def __post_init__(self) -> None:
        if self.min_survivors == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "min_survivors", self.min_workers)
        if self.max_parameter_servers == 0:  # also in a job that an older release wrote
            object.__setattr__(self, "max_parameter_servers", self.parameter_servers)

    @property
    def servers_to_lay_out(self) -> int:
        """Servers the job waits for before its tensors are laid out; 0: it has none. Where none is
        started with the job, but some may be, it waits for one."""
        return self.parameter_servers or min(1, self.max_parameter_servers)

    @cached_property
    def heartbeat_interval_ms(self) -> int:
        """A tenth of the lease, so that one lost or late heartbeat costs nobody their place; at
        least every second."""
        return max(50, min(1000, self.lease_ms // 10))

    @cached_property
    def unheard_ms(self) -> int:
        """A member that was heard of within this time is there."""
        return 3 * self.heartbeat_interval_ms


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Constants of the core's decisions, the same for all jobs."""

    settle_ms: int = 75
    """How long a failed collective waits for the death behind it to be noticed: a broken stream or
    a waitpid comes within a few milliseconds, and then says who died; without a death all live
    members re-form."""
    timeout_settle_ms: int = 1_000
    """How long after the first report of a time-out the others that wait may take to report as
    well: the first one ends its group, which theirs notice within a quarter of a second. Who is
    silent for longer, and does not move, is what they wait for."""
    break_window_ms: int = 100
    """How long after a stream broke others may still break by the same fault of the network."""
    reconnect_ms: int = 5_000
    """How long a member without a stream may take to come back while its peers cannot go on without
    it: twice the longest backoff of a member's link, and some. Else it has its whole lease."""
    absence_ms: int = 300_000
    """How long a member may be silent that nobody is known to wait for: the network between it and
    the coordinator may be cut while it works on with its peers."""
    quiet_absence_ms: int = 120_000
    """The same for one that says nothing of its progress, as a launcher: whether somebody waits for
    it is never known."""
    closed_within_ms: int = 8_000
    """A stream that ends so soon after its member was heard of was closed; what a cut network ends,
    TCP and gRPC give up after 10 s."""
    explain_after_ms: int = 10_000
    """A step that stands for so long is explained to all."""
    explain_again_ms: int = 10_000
    """How often, while it stands."""
    look_ms: int = 1_000
    """How often the core looks for steps that stand."""
    most_lost_generations: int = 1_000_000
    """A member that knows of a generation so far above the newest one is wrong; of one not so far,
    Redis has lost it."""
    longest_settle_ms: int = 5_000
    """Failures of fresh generations double the settle time up to this, so that a broken network
    does not make generations without end."""
    fresh_generation_ms: int = 10_000
    """A generation that fails before this age counts as a fresh one."""
    border_patience_ms: int = 5_000
    """A BORDER generation does not supersede one that members are just taking, but waits at most
    this long for all of them to say that they work in it."""
    quarantine_after: int = 2
    """Mutual accusations of two members after which the higher rank is kept out."""
    kept_out_ms: int = 30_000
    """How long at least, the first time; each further accusation doubles it, up to
    longest_kept_out_ms."""
    longest_kept_out_ms: int = 3_600_000
    straggler_after_ms: int = 5_000
    """Who holds the others back for so long is named."""
    straggler_until_ms: int = 30_000
    """Who has not for so long is not named any more."""
    most_members: int = 2 * LARGEST_WORLD
    """Processes that may be in one job, those that stand by included."""
    most_departed: int = 2 * LARGEST_WORLD
    """Member ids that are remembered after their end, oldest forgotten first."""
    most_loaders: int = 64
    """Loader names with leased batches."""
    most_batches: int = 65_536
    """Batches of one epoch that a member may hold; as many can be acknowledged at once."""
    epochs_kept: int = 2
    """Epochs of one loader whose leases are kept at once; asking for an older one is answered with
    epoch_done."""
    move_retry_ms: int = 2_000
    """How long after a move of partitions that failed its receiver is given something again; each
    further failure in a row doubles it, up to longest_move_retry_ms."""
    longest_move_retry_ms: int = 60_000
    most_past_runs: int = 20
    """Runs that are over and remembered, oldest forgotten first."""
    most_drained: int = 100
    """Drained servers that are remembered, oldest forgotten first."""
    batches_retry_after_ms: int = 20
    """When to ask again, if all free batches are leased to others; a millisecond later for each
    member, so that many do not ask often."""
