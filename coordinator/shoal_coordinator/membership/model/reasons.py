"""Reason codes of refused requests. They are stable across releases, because clients act on them.

All malformed fields have the reason REQUEST_INVALID; the message names the field.
"""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Reason code for a well-formed request that was refused, or for a session that was closed."""

    JOB_UNKNOWN = "JOB_UNKNOWN"
    """NOT_FOUND: no such job."""
    JOB_CONFLICT = "JOB_CONFLICT"
    """The job exists with a different specification."""
    JOBS_LIMIT = "JOBS_LIMIT"
    """RESOURCE_EXHAUSTED: the coordinator already has the maximum number of jobs, including jobs
    without members."""
    WATCHERS_LIMIT = "WATCHERS_LIMIT"
    """RESOURCE_EXHAUSTED: too many callers follow the job's events."""
    RUN_ENDED = "RUN_ENDED"
    """The run that the caller belongs to, or wants to join, has been stopped or has finished.
    UNAVAILABLE for a new parameter server, which waits for the next run."""
    RUN_ENDING = "RUN_ENDING"
    """UNAVAILABLE: the newest run has ended, but some of its members have not left yet. The next
    run can start once they have left."""
    RUN_UNKNOWN = "RUN_UNKNOWN"
    """The job has no record of this run; the coordinator's Redis may have lost it. UNAVAILABLE for
    a parameter server while members of the run may still return and continue it."""
    RUN_UNDER_WAY = "RUN_UNDER_WAY"
    """A different run of the job is in progress and has members."""
    RUN_COMPLETED = "RUN_COMPLETED"
    """The run that was to be resumed had completed."""
    MEMBER_UNKNOWN = "MEMBER_UNKNOWN"
    """NOT_FOUND: no live member has this id or rank."""
    MEMBER_REPLACED = "MEMBER_REPLACED"
    """This member has left or has been removed (its stream broke, its lease expired or its process
    exited); rejoin with a new member_id."""
    MEMBER_CONFLICT = "MEMBER_CONFLICT"
    """A different process has this member_id."""
    MEMBER_KEY_WRONG = "MEMBER_KEY_WRONG"
    """The caller does not have the key of the member it claims to be."""
    MEMBERS_LIMIT = "MEMBERS_LIMIT"
    """RESOURCE_EXHAUSTED: the job has the maximum number of processes, including processes that are
    waiting."""
    MACHINE_REFUSED = "MACHINE_REFUSED"
    """The member's machine failed a health check, or its workers died repeatedly."""
    MACHINES_LIMIT = "MACHINES_LIMIT"
    """RESOURCE_EXHAUSTED: too many machines are recorded as unhealthy."""
    MEMBER_STALLED = "MEMBER_STALLED"
    """Closes the session of a member that made no progress while its peers were waiting for it."""
    LEASE_EXPIRED = "LEASE_EXPIRED"
    """Closes the session of a member or server that sent no heartbeat for lease_ms."""
    REPLICAS_DIVERGED = "REPLICAS_DIVERGED"
    """Closes the session of a member that leaves after the run's last step, if its parameter values
    differ from the values of a member that left earlier."""
    PROCESS_EXITED = "PROCESS_EXITED"
    """Closes the session of a member whose process has exited, as reported by its launcher."""
    SESSION_REPLACED = "SESSION_REPLACED"
    """Closes the older stream of a member or server that has opened a newer one."""
    GENERATION_UNKNOWN = "GENERATION_UNKNOWN"
    """INVALID_ARGUMENT: the generation is above the newest one. Either the coordinator's Redis lost
    writes or the caller is wrong."""
    JOB_WITHOUT_SERVERS = "JOB_WITHOUT_SERVERS"
    """The job was created with parameter_servers = 0."""
    SERVERS_COMPLETE = "SERVERS_COMPLETE"
    """Each of the job's parameter server places is taken by a different server_id, and the job may
    not have more places."""
    SERVER_UNKNOWN = "SERVER_UNKNOWN"
    """NOT_FOUND: the job has no parameter server with this id."""
    LAST_SERVER = "LAST_SERVER"
    """No other parameter server can take over this server's partitions."""
    PLACE_WITHOUT_TENSORS = "PLACE_WITHOUT_TENSORS"
    """The job's tensors are not declared yet, so the server has nothing to hand over."""
    SERVER_CONFLICT = "SERVER_CONFLICT"
    """A different live process has this server_id."""
    NO_SERVERS = "NO_SERVERS"
    """UNAVAILABLE: some parameter servers of the job have not registered yet; retry."""
    TENSORS_CONFLICT = "TENSORS_CONFLICT"
    """The job's tensors have already been declared differently."""
    TENSORS_UNDECLARED = "TENSORS_UNDECLARED"
    """No member has declared the job's tensors yet."""
    TENSORS_LIMIT = "TENSORS_LIMIT"
    """RESOURCE_EXHAUSTED: the tensors exceed the size of a shard map."""
    BATCHES_CONFLICT = "BATCHES_CONFLICT"
    """INVALID_ARGUMENT: another member reported a different number of batches for this epoch."""
    BATCHES_LIMIT = "BATCHES_LIMIT"
    """RESOURCE_EXHAUSTED: the member has too many leased batches and must report finished ones
    first."""
    LOADERS_LIMIT = "LOADERS_LIMIT"
    """RESOURCE_EXHAUSTED: the job has the maximum number of loaders with leased batches."""
    QUEUE_LIMIT = "QUEUE_LIMIT"
    """UNAVAILABLE: too many requests are queued while Redis accepts no changes; retry."""
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    """UNAVAILABLE: Redis does not respond; retry."""
    COORDINATOR_STOPPING = "COORDINATOR_STOPPING"
    """UNAVAILABLE: this coordinator is shutting down or had to stop; connect to its successor."""
    COORDINATOR_REPLACED = "COORDINATOR_REPLACED"
    """UNAVAILABLE: a newer coordinator has taken over these jobs; connect to it."""
