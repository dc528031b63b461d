"""The `reason` strings of the refusals that the coordinator makes: stable over releases, clients
decide by them.

Malformed fields have no reason of their own: they are REQUEST_INVALID and their message names the
field.
"""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Why a request that is well formed was not granted, or a session was ended."""

    JOB_UNKNOWN = "JOB_UNKNOWN"
    """NOT_FOUND: no such job."""
    JOB_CONFLICT = "JOB_CONFLICT"
    """The job exists with another specification."""
    JOBS_LIMIT = "JOBS_LIMIT"
    """RESOURCE_EXHAUSTED: more jobs than a coordinator can hold, those that nobody is in
    included."""
    WATCHERS_LIMIT = "WATCHERS_LIMIT"
    """RESOURCE_EXHAUSTED: more callers follow the job's events than may at once."""
    RUN_ENDED = "RUN_ENDED"
    """The run that the caller belongs to, or wants to join, was stopped or is finished.
    UNAVAILABLE: so it is for a new parameter server; it waits for the next run."""
    RUN_ENDING = "RUN_ENDING"
    """UNAVAILABLE: the newest run has ended, and some of its members are still there: the next one
    can begin when they have left."""
    RUN_UNKNOWN = "RUN_UNKNOWN"
    """The job has, or had, no such run; the coordinator's Redis may have lost it. UNAVAILABLE: so
    it is for a parameter server, as long as members of that run may come back and say that it goes
    on."""
    RUN_UNDER_WAY = "RUN_UNDER_WAY"
    """Another run of the job goes on, and has members."""
    RUN_COMPLETED = "RUN_COMPLETED"
    """The run that was to be resumed has come to its end."""
    MEMBER_UNKNOWN = "MEMBER_UNKNOWN"
    """NOT_FOUND: no live member of that id or rank."""
    MEMBER_REPLACED = "MEMBER_REPLACED"
    """This member was given up (its stream broke, its lease ended, its process ended) or has left;
    come back with a new member_id."""
    MEMBER_CONFLICT = "MEMBER_CONFLICT"
    """Another process holds this member_id."""
    MEMBER_KEY_WRONG = "MEMBER_KEY_WRONG"
    """The caller does not have the key of the member that it speaks for."""
    MEMBERS_LIMIT = "MEMBERS_LIMIT"
    """RESOURCE_EXHAUSTED: more processes have joined than a job can hold, waiting ones included."""
    MEMBER_STALLED = "MEMBER_STALLED"
    """Ends the session of a member that made no progress while its peers waited for it."""
    LEASE_EXPIRED = "LEASE_EXPIRED"
    """Ends the session of a member or server that sent no heartbeat for lease_ms."""
    REPLICAS_DIVERGED = "REPLICAS_DIVERGED"
    """Ends the session of a member that leaves and held other values after the run's last step than
    one that left before it."""
    PROCESS_EXITED = "PROCESS_EXITED"
    """Ends the session of a member whose launcher saw its process end."""
    SESSION_REPLACED = "SESSION_REPLACED"
    """Ends a stream whose member or server has opened a newer one."""
    GENERATION_UNKNOWN = "GENERATION_UNKNOWN"
    """INVALID_ARGUMENT: a generation above the newest one. The coordinator's Redis lost writes, or
    the caller is wrong."""
    JOB_WITHOUT_SERVERS = "JOB_WITHOUT_SERVERS"
    """The job was created with parameter_servers = 0."""
    SERVERS_COMPLETE = "SERVERS_COMPLETE"
    """Each of the job's parameter server places is taken by another server_id, and it may have no
    more of them."""
    SERVER_UNKNOWN = "SERVER_UNKNOWN"
    """NOT_FOUND: the job has no parameter server of that id."""
    LAST_SERVER = "LAST_SERVER"
    """No other parameter server could take over what this one holds."""
    PLACE_WITHOUT_TENSORS = "PLACE_WITHOUT_TENSORS"
    """The job's tensors are not declared yet: there is nothing that a server could give away."""
    SERVER_CONFLICT = "SERVER_CONFLICT"
    """Another live process holds this server_id."""
    NO_SERVERS = "NO_SERVERS"
    """UNAVAILABLE: not all parameter servers of the job are there yet; ask again."""
    TENSORS_CONFLICT = "TENSORS_CONFLICT"
    """The job's tensors were declared before, and differ."""
    TENSORS_UNDECLARED = "TENSORS_UNDECLARED"
    """No member has declared the job's tensors yet."""
    TENSORS_LIMIT = "TENSORS_LIMIT"
    """RESOURCE_EXHAUSTED: more bytes than a shard map can hold."""
    BATCHES_CONFLICT = "BATCHES_CONFLICT"
    """INVALID_ARGUMENT: another member said that this epoch has another number of batches."""
    BATCHES_LIMIT = "BATCHES_LIMIT"
    """RESOURCE_EXHAUSTED: the member holds more batches than one may; it has to say which of them
    are finished."""
    LOADERS_LIMIT = "LOADERS_LIMIT"
    """RESOURCE_EXHAUSTED: more loaders than a job can hold."""
    QUEUE_LIMIT = "QUEUE_LIMIT"
    """UNAVAILABLE: more requests wait than may while Redis does not take changes; ask again."""
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    """UNAVAILABLE: Redis does not answer; ask again."""
    COORDINATOR_STOPPING = "COORDINATOR_STOPPING"
    """UNAVAILABLE: this coordinator shuts down, or could not go on; connect again, to the next
    one."""
    COORDINATOR_REPLACED = "COORDINATOR_REPLACED"
    """UNAVAILABLE: another coordinator has taken over these jobs; connect to it."""
