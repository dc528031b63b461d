from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_PHASE_UNSPECIFIED: _ClassVar[JobPhase]
    JOB_PHASE_WAITING: _ClassVar[JobPhase]
    JOB_PHASE_RUNNING: _ClassVar[JobPhase]
    JOB_PHASE_STOPPING: _ClassVar[JobPhase]
    JOB_PHASE_FINISHED: _ClassVar[JobPhase]

class JobEnding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_ENDING_UNSPECIFIED: _ClassVar[JobEnding]
    JOB_ENDING_COMPLETED: _ClassVar[JobEnding]
    JOB_ENDING_STOPPED: _ClassVar[JobEnding]
    JOB_ENDING_FAILED: _ClassVar[JobEnding]

class MemberPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_PHASE_UNSPECIFIED: _ClassVar[MemberPhase]
    MEMBER_PHASE_JOINED: _ClassVar[MemberPhase]
    MEMBER_PHASE_READY: _ClassVar[MemberPhase]
    MEMBER_PHASE_RANKED: _ClassVar[MemberPhase]
    MEMBER_PHASE_DRAINING: _ClassVar[MemberPhase]
    MEMBER_PHASE_QUARANTINED: _ClassVar[MemberPhase]

class MachineCondition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MACHINE_CONDITION_UNSPECIFIED: _ClassVar[MachineCondition]
    MACHINE_CONDITION_HEALTHY: _ClassVar[MachineCondition]
    MACHINE_CONDITION_LEAVING: _ClassVar[MachineCondition]
    MACHINE_CONDITION_UNHEALTHY: _ClassVar[MachineCondition]
    MACHINE_CONDITION_EXCLUDED: _ClassVar[MachineCondition]

class ServerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_ROLE_PRIMARY: _ClassVar[ServerRole]
    SERVER_ROLE_BACKUP: _ClassVar[ServerRole]
JOB_PHASE_UNSPECIFIED: JobPhase
JOB_PHASE_WAITING: JobPhase
JOB_PHASE_RUNNING: JobPhase
JOB_PHASE_STOPPING: JobPhase
JOB_PHASE_FINISHED: JobPhase
JOB_ENDING_UNSPECIFIED: JobEnding
JOB_ENDING_COMPLETED: JobEnding
JOB_ENDING_STOPPED: JobEnding
JOB_ENDING_FAILED: JobEnding
MEMBER_PHASE_UNSPECIFIED: MemberPhase
MEMBER_PHASE_JOINED: MemberPhase
MEMBER_PHASE_READY: MemberPhase
MEMBER_PHASE_RANKED: MemberPhase
MEMBER_PHASE_DRAINING: MemberPhase
MEMBER_PHASE_QUARANTINED: MemberPhase
MACHINE_CONDITION_UNSPECIFIED: MachineCondition
MACHINE_CONDITION_HEALTHY: MachineCondition
MACHINE_CONDITION_LEAVING: MachineCondition
MACHINE_CONDITION_UNHEALTHY: MachineCondition
MACHINE_CONDITION_EXCLUDED: MachineCondition
SERVER_ROLE_PRIMARY: ServerRole
SERVER_ROLE_BACKUP: ServerRole

class JobSpec(_message.Message):
    __slots__ = ("job_id", "min_workers", "min_survivors", "max_workers", "parameter_servers", "parameter_server_backups", "max_parameter_servers", "join_grace_ms", "lease_ms", "stall_timeout_ms")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MIN_SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SERVER_BACKUPS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARAMETER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    JOIN_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    min_workers: int
    min_survivors: int
    max_workers: int
    parameter_servers: int
    parameter_server_backups: int
    max_parameter_servers: int
    join_grace_ms: int
    lease_ms: int
    stall_timeout_ms: int
    def __init__(self, job_id: _Optional[str] = ..., min_workers: _Optional[int] = ..., min_survivors: _Optional[int] = ..., max_workers: _Optional[int] = ..., parameter_servers: _Optional[int] = ..., parameter_server_backups: _Optional[int] = ..., max_parameter_servers: _Optional[int] = ..., join_grace_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., stall_timeout_ms: _Optional[int] = ...) -> None: ...

class RunId(_message.Message):
    __slots__ = ("number", "began_unix_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    began_unix_ms: int
    def __init__(self, number: _Optional[int] = ..., began_unix_ms: _Optional[int] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "ended_unix_ms", "ending", "ending_reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ENDING_REASON_FIELD_NUMBER: _ClassVar[int]
    run: RunId
    ended_unix_ms: int
    ending: JobEnding
    ending_reason: str
    def __init__(self, run: _Optional[_Union[RunId, _Mapping]] = ..., ended_unix_ms: _Optional[int] = ..., ending: _Optional[_Union[JobEnding, str]] = ..., ending_reason: _Optional[str] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("spec", "run", "resume", "follow")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    run: RunId
    resume: bool
    follow: bool
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., resume: _Optional[bool] = ..., follow: _Optional[bool] = ...) -> None: ...

class CreateJobResponse(_message.Message):
    __slots__ = ("spec", "created", "run", "begun", "previous", "now_unix_ms")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    created: bool
    run: RunId
    begun: bool
    previous: RunStatus
    now_unix_ms: int
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., created: _Optional[bool] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., begun: _Optional[bool] = ..., previous: _Optional[_Union[RunStatus, _Mapping]] = ..., now_unix_ms: _Optional[int] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id", "run", "member_id", "below_step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    BELOW_STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    run: RunId
    member_id: str
    below_step: int
    def __init__(self, job_id: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., member_id: _Optional[str] = ..., below_step: _Optional[int] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("spec", "phase", "generation", "members", "servers", "now_unix_ms", "ending", "ending_reason", "waits_for", "run", "past_runs", "servers_awaited", "member_put_out", "newest_step", "steps_in_all", "machines")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ENDING_REASON_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PAST_RUNS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_AWAITED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_PUT_OUT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    phase: JobPhase
    generation: Generation
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    servers: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    now_unix_ms: int
    ending: JobEnding
    ending_reason: str
    waits_for: str
    run: RunId
    past_runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    servers_awaited: int
    member_put_out: bool
    newest_step: int
    steps_in_all: int
    machines: _containers.RepeatedCompositeFieldContainer[MachineStatus]
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., phase: _Optional[_Union[JobPhase, str]] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ..., now_unix_ms: _Optional[int] = ..., ending: _Optional[_Union[JobEnding, str]] = ..., ending_reason: _Optional[str] = ..., waits_for: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., past_runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ..., servers_awaited: _Optional[int] = ..., member_put_out: _Optional[bool] = ..., newest_step: _Optional[int] = ..., steps_in_all: _Optional[int] = ..., machines: _Optional[_Iterable[_Union[MachineStatus, _Mapping]]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobSummary]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobSummary, _Mapping]]] = ...) -> None: ...

class JobSummary(_message.Message):
    __slots__ = ("job_id", "phase", "generation", "world_size", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    phase: JobPhase
    generation: int
    world_size: int
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., phase: _Optional[_Union[JobPhase, str]] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member_id", "phase", "rank", "host", "pid", "metrics_address", "progress", "joined_unix_ms", "launcher_id", "note")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    JOINED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_ID_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    phase: MemberPhase
    rank: int
    host: str
    pid: int
    metrics_address: str
    progress: Progress
    joined_unix_ms: int
    launcher_id: str
    note: str
    def __init__(self, member_id: _Optional[str] = ..., phase: _Optional[_Union[MemberPhase, str]] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., joined_unix_ms: _Optional[int] = ..., launcher_id: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class MachineStatus(_message.Message):
    __slots__ = ("host", "condition", "reason", "since_unix_ms")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    host: str
    condition: MachineCondition
    reason: str
    since_unix_ms: int
    def __init__(self, host: _Optional[str] = ..., condition: _Optional[_Union[MachineCondition, str]] = ..., reason: _Optional[str] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("server_id", "server_index", "address", "metrics_address", "alive", "role", "in_sync", "draining", "partitions", "value_bytes")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    server_index: int
    address: str
    metrics_address: str
    alive: bool
    role: ServerRole
    in_sync: bool
    draining: bool
    partitions: int
    value_bytes: int
    def __init__(self, server_id: _Optional[str] = ..., server_index: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., alive: _Optional[bool] = ..., role: _Optional[_Union[ServerRole, str]] = ..., in_sync: _Optional[bool] = ..., draining: _Optional[bool] = ..., partitions: _Optional[int] = ..., value_bytes: _Optional[int] = ...) -> None: ...

class MemberMessage(_message.Message):
    __slots__ = ("join", "heartbeat", "ready", "collective_failure", "leave")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FAILURE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: Heartbeat
    ready: Ready
    collective_failure: CollectiveFailure
    leave: Leave
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., collective_failure: _Optional[_Union[CollectiveFailure, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("job_id", "member_id", "host", "pid", "launcher_id", "local_index", "donor_address", "metrics_address", "last_generation", "donor_key", "last_world_size", "works_in", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    DONOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DONOR_KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKS_IN_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    host: str
    pid: int
    launcher_id: str
    local_index: int
    donor_address: str
    metrics_address: str
    last_generation: int
    donor_key: str
    last_world_size: int
    works_in: int
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., launcher_id: _Optional[str] = ..., local_index: _Optional[int] = ..., donor_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., last_generation: _Optional[int] = ..., donor_key: _Optional[str] = ..., last_world_size: _Optional[int] = ..., works_in: _Optional[int] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("spec", "heartbeat_interval_ms", "joining", "store_url", "run")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    STORE_URL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    heartbeat_interval_ms: int
    joining: bool
    store_url: str
    run: RunId
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., heartbeat_interval_ms: _Optional[int] = ..., joining: _Optional[bool] = ..., store_url: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "epoch", "sequence", "samples_per_s", "loss", "step_time_s", "samples", "staleness", "waiting_s", "waiting_in", "busy_time_s", "cpu_s", "busy_link", "server_wait_s", "awaited_server", "metrics", "steps_in_all", "script_line", "share", "upload_backlog_bytes", "last_wait", "stacks")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_IN_FIELD_NUMBER: _ClassVar[int]
    BUSY_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_LINK_FIELD_NUMBER: _ClassVar[int]
    SERVER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    AWAITED_SERVER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_LINE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_WAIT_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    sequence: int
    samples_per_s: float
    loss: float
    step_time_s: float
    samples: int
    staleness: float
    waiting_s: float
    waiting_in: str
    busy_time_s: float
    cpu_s: float
    busy_link: BusyLink
    server_wait_s: float
    awaited_server: str
    metrics: _containers.ScalarMap[str, float]
    steps_in_all: int
    script_line: str
    share: float
    upload_backlog_bytes: int
    last_wait: str
    stacks: str
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., step_time_s: _Optional[float] = ..., samples: _Optional[int] = ..., staleness: _Optional[float] = ..., waiting_s: _Optional[float] = ..., waiting_in: _Optional[str] = ..., busy_time_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., busy_link: _Optional[_Union[BusyLink, _Mapping]] = ..., server_wait_s: _Optional[float] = ..., awaited_server: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., steps_in_all: _Optional[int] = ..., script_line: _Optional[str] = ..., share: _Optional[float] = ..., upload_backlog_bytes: _Optional[int] = ..., last_wait: _Optional[str] = ..., stacks: _Optional[str] = ...) -> None: ...

class BusyLink(_message.Message):
    __slots__ = ("rank", "bytes_per_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes_per_s: float
    def __init__(self, rank: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("generation", "progress", "in_reach", "spare", "out_of_reach", "observed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IN_REACH_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_REACH_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    progress: Progress
    in_reach: bool
    spare: bool
    out_of_reach: _containers.RepeatedScalarFieldContainer[int]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedStacks]
    def __init__(self, generation: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., in_reach: _Optional[bool] = ..., spare: _Optional[bool] = ..., out_of_reach: _Optional[_Iterable[int]] = ..., observed: _Optional[_Iterable[_Union[ObservedStacks, _Mapping]]] = ...) -> None: ...

class ObservedStacks(_message.Message):
    __slots__ = ("member_id", "script_line", "stacks")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_LINE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    script_line: str
    stacks: str
    def __init__(self, member_id: _Optional[str] = ..., script_line: _Optional[str] = ..., stacks: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectiveFailure(_message.Message):
    __slots__ = ("generation", "suspects", "timed_out", "detail")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    suspects: _containers.RepeatedScalarFieldContainer[int]
    timed_out: bool
    detail: str
    def __init__(self, generation: _Optional[int] = ..., suspects: _Optional[_Iterable[int]] = ..., timed_out: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "detail", "alone", "steps", "replicas")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Leave.Reason]
        REASON_DRAINED: _ClassVar[Leave.Reason]
        REASON_FINISHED: _ClassVar[Leave.Reason]
        REASON_FAILED: _ClassVar[Leave.Reason]
    REASON_UNSPECIFIED: Leave.Reason
    REASON_DRAINED: Leave.Reason
    REASON_FINISHED: Leave.Reason
    REASON_FAILED: Leave.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    reason: Leave.Reason
    detail: str
    alone: bool
    steps: int
    replicas: Replicas
    def __init__(self, reason: _Optional[_Union[Leave.Reason, str]] = ..., detail: _Optional[str] = ..., alone: _Optional[bool] = ..., steps: _Optional[int] = ..., replicas: _Optional[_Union[Replicas, _Mapping]] = ...) -> None: ...

class Replicas(_message.Message):
    __slots__ = ("generation", "step", "agreed", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    agreed: int
    digests: _containers.ScalarMap[str, int]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., agreed: _Optional[int] = ..., digests: _Optional[_Mapping[str, int]] = ...) -> None: ...

class MemberDirective(_message.Message):
    __slots__ = ("welcome", "generation", "drain", "stop", "standby", "notice", "rank")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    generation: Generation
    drain: Drain
    stop: Stop
    standby: Standby
    notice: Notice
    rank: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., standby: _Optional[_Union[Standby, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("number", "nonce", "cause", "ranks", "interrupts_below", "created_unix_ms", "world_size", "table_digest", "change", "joining", "most_local_ranks")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Generation.Cause]
        CAUSE_START: _ClassVar[Generation.Cause]
        CAUSE_FAILURE: _ClassVar[Generation.Cause]
        CAUSE_BORDER: _ClassVar[Generation.Cause]
    CAUSE_UNSPECIFIED: Generation.Cause
    CAUSE_START: Generation.Cause
    CAUSE_FAILURE: Generation.Cause
    CAUSE_BORDER: Generation.Cause
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTS_BELOW_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    MOST_LOCAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    nonce: str
    cause: Generation.Cause
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    interrupts_below: int
    created_unix_ms: int
    world_size: int
    table_digest: bytes
    change: RankChange
    joining: _containers.RepeatedScalarFieldContainer[int]
    most_local_ranks: int
    def __init__(self, number: _Optional[int] = ..., nonce: _Optional[str] = ..., cause: _Optional[_Union[Generation.Cause, str]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., interrupts_below: _Optional[int] = ..., created_unix_ms: _Optional[int] = ..., world_size: _Optional[int] = ..., table_digest: _Optional[bytes] = ..., change: _Optional[_Union[RankChange, _Mapping]] = ..., joining: _Optional[_Iterable[int]] = ..., most_local_ranks: _Optional[int] = ...) -> None: ...

class RankChange(_message.Message):
    __slots__ = ("since", "removed", "added")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    since: int
    removed: _containers.RepeatedScalarFieldContainer[int]
    added: _containers.RepeatedCompositeFieldContainer[Rank]
    def __init__(self, since: _Optional[int] = ..., removed: _Optional[_Iterable[int]] = ..., added: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ...) -> None: ...

class GetRanksRequest(_message.Message):
    __slots__ = ("job_id", "generation", "nonce", "ranks")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    generation: int
    nonce: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., generation: _Optional[int] = ..., nonce: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetRanksResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    def __init__(self, ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "member_id", "host", "local_rank", "local_world_size", "donor_address", "joining", "donor_key")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DONOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    DONOR_KEY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    member_id: str
    host: str
    local_rank: int
    local_world_size: int
    donor_address: str
    joining: bool
    donor_key: str
    def __init__(self, rank: _Optional[int] = ..., member_id: _Optional[str] = ..., host: _Optional[str] = ..., local_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., donor_address: _Optional[str] = ..., joining: _Optional[bool] = ..., donor_key: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "now", "behind", "finished_steps")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    now: bool
    behind: bool
    finished_steps: int
    def __init__(self, reason: _Optional[str] = ..., now: _Optional[bool] = ..., behind: _Optional[bool] = ..., finished_steps: _Optional[int] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ("reason", "apart_from")
    REASON_FIELD_NUMBER: _ClassVar[int]
    APART_FROM_FIELD_NUMBER: _ClassVar[int]
    reason: str
    apart_from: str
    def __init__(self, reason: _Optional[str] = ..., apart_from: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("text", "silent")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    text: str
    silent: _containers.RepeatedCompositeFieldContainer[SilentMember]
    def __init__(self, text: _Optional[str] = ..., silent: _Optional[_Iterable[_Union[SilentMember, _Mapping]]] = ...) -> None: ...

class SilentMember(_message.Message):
    __slots__ = ("member_id", "pid", "read_by", "logs")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    READ_BY_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    pid: int
    read_by: str
    logs: bool
    def __init__(self, member_id: _Optional[str] = ..., pid: _Optional[int] = ..., read_by: _Optional[str] = ..., logs: _Optional[bool] = ...) -> None: ...

class ReportExitRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "exit_code", "signal", "failure", "finished", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    exit_code: int
    signal: int
    failure: str
    finished: bool
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., failure: _Optional[str] = ..., finished: _Optional[bool] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class ReportExitResponse(_message.Message):
    __slots__ = ("was_member", "rank")
    WAS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    was_member: bool
    rank: int
    def __init__(self, was_member: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...

class ReportMachineRequest(_message.Message):
    __slots__ = ("job_id", "host", "condition", "reason", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    host: str
    condition: MachineCondition
    reason: str
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., host: _Optional[str] = ..., condition: _Optional[_Union[MachineCondition, str]] = ..., reason: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class ReportMachineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainMemberRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "rank", "reason", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    rank: int
    reason: str
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class DrainMemberResponse(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    def __init__(self, member_id: _Optional[str] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("job_id", "reason", "run", "ending")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    run: RunId
    ending: JobEnding
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., ending: _Optional[_Union[JobEnding, str]] = ...) -> None: ...

class StopJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "backup", "move")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    register: RegisterServer
    heartbeat: ServerHeartbeat
    backup: BackupReport
    move: MoveReport
    def __init__(self, register: _Optional[_Union[RegisterServer, _Mapping]] = ..., heartbeat: _Optional[_Union[ServerHeartbeat, _Mapping]] = ..., backup: _Optional[_Union[BackupReport, _Mapping]] = ..., move: _Optional[_Union[MoveReport, _Mapping]] = ...) -> None: ...

class RegisterServer(_message.Message):
    __slots__ = ("job_id", "server_id", "address", "metrics_address", "host", "pid", "incarnation", "run", "generation", "held_place")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_PLACE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server_id: str
    address: str
    metrics_address: str
    host: str
    pid: int
    incarnation: str
    run: RunId
    generation: int
    held_place: int
    def __init__(self, job_id: _Optional[str] = ..., server_id: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., generation: _Optional[int] = ..., held_place: _Optional[int] = ...) -> None: ...

class ServerHeartbeat(_message.Message):
    __slots__ = ("stored_bytes",)
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    stored_bytes: int
    def __init__(self, stored_bytes: _Optional[int] = ...) -> None: ...

class BackupReport(_message.Message):
    __slots__ = ("epoch", "in_sync", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    in_sync: bool
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., in_sync: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class MoveReport(_message.Message):
    __slots__ = ("move", "taken", "reason", "receiver_incarnation", "giver_failed")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GIVER_FAILED_FIELD_NUMBER: _ClassVar[int]
    move: int
    taken: bool
    reason: str
    receiver_incarnation: str
    giver_failed: bool
    def __init__(self, move: _Optional[int] = ..., taken: _Optional[bool] = ..., reason: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., giver_failed: _Optional[bool] = ...) -> None: ...

class ServerDirective(_message.Message):
    __slots__ = ("welcome", "members", "stop", "place", "settled", "move")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    welcome: ServerWelcome
    members: Members
    stop: Stop
    place: ServerPlace
    settled: MovesSettled
    move: MovePartitions
    def __init__(self, welcome: _Optional[_Union[ServerWelcome, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., place: _Optional[_Union[ServerPlace, _Mapping]] = ..., settled: _Optional[_Union[MovesSettled, _Mapping]] = ..., move: _Optional[_Union[MovePartitions, _Mapping]] = ...) -> None: ...

class MovePartitions(_message.Message):
    __slots__ = ("move", "partition_ids", "receiver_index", "receiver_address", "giver_incarnation")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    move: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    receiver_index: int
    receiver_address: str
    giver_incarnation: str
    def __init__(self, move: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., receiver_index: _Optional[int] = ..., receiver_address: _Optional[str] = ..., giver_incarnation: _Optional[str] = ...) -> None: ...

class MovesSettled(_message.Message):
    __slots__ = ("move", "epoch")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    move: int
    epoch: int
    def __init__(self, move: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ServerPlace(_message.Message):
    __slots__ = ("epoch", "role", "primary_address", "backup_id", "in_sync")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_ID_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    role: ServerRole
    primary_address: str
    backup_id: str
    in_sync: bool
    def __init__(self, epoch: _Optional[int] = ..., role: _Optional[_Union[ServerRole, str]] = ..., primary_address: _Optional[str] = ..., backup_id: _Optional[str] = ..., in_sync: _Optional[bool] = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("job_id", "server_id", "reason", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server_id: str
    reason: str
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., server_id: _Optional[str] = ..., reason: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerWelcome(_message.Message):
    __slots__ = ("server_index", "heartbeat_interval_ms", "spec", "run")
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    server_index: int
    heartbeat_interval_ms: int
    spec: JobSpec
    run: RunId
    def __init__(self, server_index: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., spec: _Optional[_Union[JobSpec, _Mapping]] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("generation", "member_ids", "key_digests")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    member_ids: _containers.RepeatedScalarFieldContainer[str]
    key_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, generation: _Optional[int] = ..., member_ids: _Optional[_Iterable[str]] = ..., key_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "frozen", "apart", "table")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    frozen: bool
    apart: bool
    table: TableSpec
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., frozen: _Optional[bool] = ..., apart: _Optional[bool] = ..., table: _Optional[_Union[TableSpec, _Mapping]] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("buckets", "seed", "initializer", "scale", "optimizer", "hyperparameters", "max_age", "max_rows")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    buckets: int
    seed: int
    initializer: str
    scale: float
    optimizer: str
    hyperparameters: _containers.ScalarMap[str, float]
    max_age: int
    max_rows: int
    def __init__(self, buckets: _Optional[int] = ..., seed: _Optional[int] = ..., initializer: _Optional[str] = ..., scale: _Optional[float] = ..., optimizer: _Optional[str] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ..., max_age: _Optional[int] = ..., max_rows: _Optional[int] = ...) -> None: ...

class DeclareTensorsRequest(_message.Message):
    __slots__ = ("job_id", "tensors", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class DeclareTensorsResponse(_message.Message):
    __slots__ = ("shard_map",)
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    shard_map: ShardMap
    def __init__(self, shard_map: _Optional[_Union[ShardMap, _Mapping]] = ...) -> None: ...

class GetShardMapRequest(_message.Message):
    __slots__ = ("job_id", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class GetShardMapResponse(_message.Message):
    __slots__ = ("shard_map",)
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    shard_map: ShardMap
    def __init__(self, shard_map: _Optional[_Union[ShardMap, _Mapping]] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("epoch", "tensors", "partitions", "servers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    servers: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    def __init__(self, epoch: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("partition_id", "pieces", "primary", "bucket")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    primary: int
    bucket: Bucket
    def __init__(self, partition_id: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., primary: _Optional[int] = ..., bucket: _Optional[_Union[Bucket, _Mapping]] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("tensor_index", "number")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    number: int
    def __init__(self, tensor_index: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("tensor_index", "offset", "length")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    offset: int
    length: int
    def __init__(self, tensor_index: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LeaseBatchesRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "loader", "epoch", "batches_in_epoch", "want", "finished", "sequence", "keep", "returned", "run", "batch_ms")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_IN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BATCH_MS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    loader: str
    epoch: int
    batches_in_epoch: int
    want: int
    finished: _containers.RepeatedScalarFieldContainer[int]
    sequence: int
    keep: bool
    returned: _containers.RepeatedScalarFieldContainer[int]
    run: RunId
    batch_ms: int
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., loader: _Optional[str] = ..., epoch: _Optional[int] = ..., batches_in_epoch: _Optional[int] = ..., want: _Optional[int] = ..., finished: _Optional[_Iterable[int]] = ..., sequence: _Optional[int] = ..., keep: _Optional[bool] = ..., returned: _Optional[_Iterable[int]] = ..., run: _Optional[_Union[RunId, _Mapping]] = ..., batch_ms: _Optional[int] = ...) -> None: ...

class LeaseBatchesResponse(_message.Message):
    __slots__ = ("batches", "epoch_done", "retry_after_ms", "newest_epoch", "first_key")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_DONE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_KEY_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedScalarFieldContainer[int]
    epoch_done: bool
    retry_after_ms: int
    newest_epoch: int
    first_key: int
    def __init__(self, batches: _Optional[_Iterable[int]] = ..., epoch_done: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., newest_epoch: _Optional[int] = ..., first_key: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("job_id", "after_event_id", "follow", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_event_id: str
    follow: bool
    run: RunId
    def __init__(self, job_id: _Optional[str] = ..., after_event_id: _Optional[str] = ..., follow: _Optional[bool] = ..., run: _Optional[_Union[RunId, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_id", "unix_ms", "kind", "generation", "member_id", "attributes", "run")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    unix_ms: int
    kind: str
    generation: int
    member_id: str
    attributes: _containers.ScalarMap[str, str]
    run: int
    def __init__(self, event_id: _Optional[str] = ..., unix_ms: _Optional[int] = ..., kind: _Optional[str] = ..., generation: _Optional[int] = ..., member_id: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., run: _Optional[int] = ...) -> None: ...
