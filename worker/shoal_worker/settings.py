"""The worker's settings from environment variables. No other module of this distribution reads the
environment.

Launchers set these variables; users' scripts do not have to. All other modules receive the values
as arguments.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from shoal_common.bulk.transport import Transport
from shoal_common.credentials import CallerSettings, read_secret
from shoal_common.errors import ConfigurationError
from shoal_common.redis import with_authority
from shoal_common.settings import LocalDirectory
from typing_extensions import override

if TYPE_CHECKING:
    from shoal_common.rpc.channel import ChannelSettings


def _default_host() -> str:
    return socket.gethostname()


class WorkerSettings(CallerSettings):
    """`SHOAL_...` variables of one worker process. The token must have the role "worker"."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True, extra="ignore")

    coordinator: str | None = None
    """host:port of the coordinator; None: this process is a world of one."""
    job_id: str = "default"
    """Name of the job to join. The launcher creates the job."""
    run: str = ""
    """The launcher's run of the job, as `number:milliseconds` (its start time); empty: the newest
    run."""
    member_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Id of this process as a member of the job."""
    member_key: SecretStr = Field(default_factory=lambda: SecretStr(secrets.token_hex(16)))
    """Key that distinguishes this member from others with the same token. The launcher creates it,
    so that it can report the end of its own process."""
    launcher_id: str = ""
    """Id of the launcher that started this worker; empty if there is none."""
    local_index: int = Field(default=0, ge=0)
    """Index among the workers of the launcher, which selects this worker's GPU."""
    host: str = Field(default_factory=_default_host)
    """Name of this machine. Ranks on one host are adjacent."""
    local_addr: str | None = None
    """Address of this machine for peers and Prometheus: an address, an interface or a host name;
    None: the address of the route to the coordinator."""
    listen_addr: str | None = None
    """Address to listen on, if it differs from `local_addr`: an address, an interface or a host
    name; 0.0.0.0 or :: for all."""
    store_url: str | None = None
    """Redis URL of the rendezvous stores, if different from the URL sent by the coordinator."""
    store_url_file: Path | None = None
    """File that contains `store_url`, for a URL with a password."""
    redis_ca: Path | None = None
    """CA certificates (PEM) for the rendezvous stores' server, if its URL is rediss://; None: the
    system's certificates."""
    metrics_listen: str | None = None
    """host:port where /metrics is served (port 0: any); None: metrics are not served."""
    member_file: Path | None = None
    """File where this process writes "joined" when it becomes a member of its job, and "finished"
    when it reaches the end of its script as a member. The launcher needs this even while the
    coordinator is unreachable. None: not written."""
    tally_file: Path | None = None
    """File where this worker counts its commits, for the launcher (shoal_common.formats.tally);
    None: not counted."""
    allow_restart_from_scratch: bool = False
    """True to restart at step 0 if no process has the state any more and no checkpoint has been
    loaded. False: this raises an error (PROGRESS_LOST)."""
    server_transport: Transport = Transport.AUTO
    """Transport of tensors between this worker and parameter servers: auto, memory, tcp or grpc.
    Values other than auto have no fallback if the transport is not available; use them for
    measurements and debugging."""
    record_dir: LocalDirectory | None = None
    """Directory of files that record every sample index handed out, and every commit, as JSON
    lines; None: not recorded."""
    staging_dir: LocalDirectory | None = None
    """Local directory for checkpoints and log files while they are uploaded to an object store,
    and for checkpoints after their download; None: `shoal` in XDG_CACHE_HOME, which is ~/.cache by
    default."""
    upload_timeout_s: float = Field(default=300.0, gt=0)
    """Time during which each failing call to an object store is retried."""
    rendezvous_timeout_s: float = Field(default=900.0, gt=0)
    """Maximum wait for a rank: at the start, for `min_workers`, and after failures."""
    speed: float | None = Field(default=None, gt=0, le=1e6)
    """Speed of this worker relative to workers without this setting, for dealing micro-batches;
    None: the speed is measured, unless another worker has this setting."""
    drain_grace_s: float = Field(default=1.0, ge=0)
    """Time during which a worker that has been asked to leave continues with its peers. If all
    peers are asked to leave in this time, all stop at the same step boundary."""
    collective_timeout_s: float = Field(default=300.0, gt=0)
    """Maximum duration of a collective before a peer counts as stuck."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Maximum time to connect the process group of a new generation."""
    nccl_split: bool = False
    """True to split the NCCL communicators of a mesh's axes from the communicator of all ranks, if
    the library supports it, instead of connecting them separately. Must be the same for all
    workers."""
    nccl_blocking: bool = False
    """True to let NCCL's communicators block while they connect; must be the same for all workers.
    Use it for versions of torch or NCCL that fail with non-blocking communicators. An attempt to
    connect then cannot be aborted: if a peer fails during it, the connecting thread and its memory
    remain until all ranks arrive or the process exits."""
    away_timeout_s: float = Field(default=86400.0, gt=0)
    """Maximum wait for an unreachable coordinator while training cannot continue without it. Such
    time does not count as waiting for a rank."""
    full_tracebacks: bool = False
    """True to show Shoal's own lines in the traceback of an error that ends the script, besides the
    script's lines."""

    @classmethod
    @override
    def _flag(cls, field: str) -> str:
        return ""

    def channel(self, address: str, **more: Any) -> ChannelSettings:
        """Returns settings for calls to the service at `address` (host:port). The calls identify
        this member and carry its key. Raises ConfigurationError."""
        return super().channel(address, member_key=self.member_key.get_secret_value(), **more)

    def store_at(self, given: str) -> str:
        """Returns the Redis URL of the rendezvous stores: this worker's own setting, or `given`,
        the URL received from the coordinator. Raises ConfigurationError if a file with the URL
        cannot be read."""
        own = (
            self.store_url
            if self.store_url_file is None
            else read_secret(self.store_url_file, "SHOAL_STORE_URL_FILE")
        )
        return with_authority(own or given, self.redis_ca)

    @property
    def staging(self) -> Path:
        """Value of `staging_dir`, or its default."""
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return (self.staging_dir or Path(cache).expanduser() / "shoal").absolute()

    @property
    def upload_timeout(self) -> timedelta:
        """`upload_timeout_s` as a duration."""
        return timedelta(seconds=self.upload_timeout_s)

    @property
    def rendezvous_timeout(self) -> timedelta:
        """`rendezvous_timeout_s` as a duration."""
        return timedelta(seconds=self.rendezvous_timeout_s)

    @property
    def collective_timeout(self) -> timedelta:
        """`collective_timeout_s` as a duration."""
        return timedelta(seconds=self.collective_timeout_s)

    @property
    def connect_timeout(self) -> timedelta:
        """`connect_timeout_s` as a duration."""
        return timedelta(seconds=self.connect_timeout_s)

    @property
    def away_timeout(self) -> timedelta:
        """`away_timeout_s` as a duration."""
        return timedelta(seconds=self.away_timeout_s)


def mpi_world_size() -> int:
    """Returns the number of ranks started by MPI's launcher, according to the variables of MPICH
    (and derivatives) or Open MPI; 1 if there is no such launcher."""
    value = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or ""
    return int(value) if value.isdecimal() else 1


def error_file() -> Path | None:
    """Returns the file to which an exception that ends this process must be written, as set by
    torchrun and similar launchers. Returns None if the launcher has named no file."""
    value = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(value) if value else None


def check_not_torchrun(settings: WorkerSettings) -> None:
    """Checks that a world of one was not started by a launcher that expects several ranks.

    Raises:
        ConfigurationError: `WORLD_SIZE` is above one, but no coordinator is named.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if settings.coordinator is None and world_size not in ("", "1"):
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} is set, but SHOAL_COORDINATOR is not, so each rank would "
            "train alone. Start the script with `shoal run --nproc-per-node ... train.py` "
            "instead of torchrun, or unset WORLD_SIZE."
        )


def rank_variables() -> Mapping[str, str]:
    """Returns the variables `RANK` and `WORLD_SIZE` of torchrun and similar launchers, if they are
    set."""
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}


def gloo_interface() -> str:
    """Returns the network interface that the user has selected for Gloo: the first one in
    `GLOO_SOCKET_IFNAME`, or "" if none is selected."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def force_environment(values: Mapping[str, str]) -> Mapping[str, str]:
    """Sets environment variables that C++ code reads later, and overrides the user's values.

    Returns the user's values that were overridden.
    """
    overruled = {
        name: os.environ[name]
        for name, value in values.items()
        if os.environ.get(name, value) != value
    }
    os.environ.update(values)
    return overruled


class TemporaryEnvironment:
    """Environment variables that have certain values for C++ code that reads them while a context
    is open. Several threads may have contexts open at once, and none waits for another."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self._lock = threading.Lock()
        self._open = 0
        self._before: dict[str, str | None] = {}

    @contextlib.contextmanager
    def set(self) -> Iterator[Mapping[str, str]]:
        """Sets the variables, and restores their previous values when the last open context is
        closed. Yields the user's values that are overridden."""
        with self._lock:
            if not self._open:
                self._before = {name: os.environ.get(name) for name in self._values}
                force_environment(self._values)
            self._open += 1
            before = self._before
        try:
            yield {
                name: value
                for name, value in before.items()
                if value is not None and value != self._values[name]
            }
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._restore()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment_without_settings() -> dict[str, str]:
    """Returns this process's environment without `SHOAL_...` variables, for starting the services
    of a new cluster. The variables describe the cluster that this process itself may belong to."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
