"""What a worker reads from its environment: the one module of this distribution that does.

Launchers set these; a user's script never needs to. Everything else in the package takes values.
"""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from shoal_common.bulk.transport import Transport
from shoal_common.credentials import CallerSettings, read_secret
from shoal_common.errors import ConfigurationError
from shoal_common.redis import with_authority

if TYPE_CHECKING:
    from shoal_common.rpc.channel import ChannelSettings


def _default_host() -> str:
    return socket.gethostname()


class WorkerSettings(CallerSettings):
    """`SHOAL_...` variables of one worker process. Its token is of role worker."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True, extra="ignore")

    coordinator: str | None = None
    """host:port of the coordinator; None: this process is a world of one."""
    job_id: str = "default"
    """The job to join. The launcher has created it."""
    run: str = ""
    """The job's run that the launcher is in, as `number:milliseconds` (when it began); empty: the
    newest."""
    member_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """This process, this incarnation."""
    member_key: SecretStr = Field(default_factory=lambda: SecretStr(secrets.token_hex(16)))
    """By which the services know this member from others that have the same token. A launcher makes
    it, so that it can tell of the end of a process that is its own."""
    launcher_id: str = ""
    """The launcher that started it."""
    local_index: int = Field(default=0, ge=0)
    """Its index among that launcher's workers: which GPU it takes."""
    host: str = Field(default_factory=_default_host)
    """Name of this machine: ranks of one host are adjacent."""
    local_addr: str | None = None
    """Where peers and Prometheus reach this machine: an address, an interface or a host name; None:
    at the address of the route to the coordinator."""
    listen_addr: str | None = None
    """What of this machine is listened on, where that is another: an address, an interface or a
    host name; 0.0.0.0 or :: for all."""
    store_url: str | None = None
    """Redis of the rendezvous stores, if other than what the coordinator tells."""
    store_url_file: Path | None = None
    """File that holds that URL, where it has a password."""
    redis_ca: Path | None = None
    """Certificates (PEM) that the server of the rendezvous stores must be signed by, where its URL
    is rediss://; None: the system's."""
    metrics_listen: str | None = None
    """host:port to serve /metrics on (port 0: any); None: no metrics are served."""
    member_file: Path | None = None
    """Where to write "joined" when this process becomes a member of its job, and "finished" when it
    came to the end of its script as one: its launcher has to know, also while nobody can reach the
    coordinator. None: nowhere."""
    tally_file: Path | None = None
    """Where to count this worker's commits for its launcher (shoal_common.tally); None: nowhere."""
    allow_restart_from_scratch: bool = False
    """Whether to begin again at step 0 when every process that held the state is gone and no
    checkpoint was taken up. Else that is an error, PROGRESS_LOST."""
    server_transport: Transport = Transport.AUTO
    """What tensors travel by between this worker and parameter servers: auto, memory, tcp or grpc.
    Other than auto is for measurements and for finding faults: nothing takes the place of what
    cannot be had then."""
    record_dir: Path | None = None
    """Where to record every sample index handed out and every commit, as JSON lines; None:
    nowhere."""
    rendezvous_timeout_s: float = Field(default=900.0, gt=0)
    """Longest wait for a rank: at the start, for `min_workers`, and after failures."""
    drain_grace_s: float = Field(default=1.0, ge=0)
    """How long a worker that was asked to leave goes on with its peers, in case they are asked as
    well: then all stop at one border."""
    collective_timeout_s: float = Field(default=300.0, gt=0)
    """Longest a collective may take before a peer counts as stuck."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time to connect the process group of a new generation."""
    nccl_split: bool = False
    """Whether the parts of a mesh over NCCL are split off the communicator of all ranks, where the
    library can, and not connected anew; the same for all workers."""
    nccl_blocking: bool = False
    """Whether NCCL's communicators block while they connect; the same for all workers. For a torch
    or an NCCL that fails with communicators that do not. An attempt to connect can then not be
    aborted: if a peer dies meanwhile, its thread and its memory stay until all ranks come or the
    process ends."""
    away_timeout_s: float = Field(default=86400.0, gt=0)
    """Longest wait for a coordinator that is away, where training cannot go on without it. It does
    not count as waiting for a rank."""
    full_tracebacks: bool = False
    """Whether an error of Shoal that ends the script is shown with Shoal's own lines, and not with
    those of the script alone."""

    def channel(self, address: str, **more: Any) -> ChannelSettings:
        """Says how to call the service at host:port as this member, with its key. Raises
        ConfigurationError."""
        return super().channel(address, member_key=self.member_key.get_secret_value(), **more)

    def store_at(self, told: str) -> str:
        """Returns the Redis URL of the rendezvous stores: this worker's own, else the one that the
        coordinator has told it. Raises ConfigurationError: a file with it cannot be read."""
        own = (
            self.store_url
            if self.store_url_file is None
            else read_secret(self.store_url_file, "SHOAL_STORE_URL_FILE")
        )
        return with_authority(own or told, self.redis_ca)

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
    """How many ranks MPI's launcher started, by what MPICH (and its kin) or Open MPI tell each of
    them; 1 without one."""
    told = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or ""
    return int(told) if told.isdecimal() else 1


def error_file() -> Path | None:
    """Where a launcher like torchrun looks for the exception that ended this process; None: it has
    named no file."""
    told = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(told) if told else None


def check_not_torchrun(settings: WorkerSettings) -> None:
    """Refuses to be a world of one under a launcher that expects several ranks.

    Raises:
        ConfigurationError: `WORLD_SIZE` says more than one, but no coordinator is named.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if settings.coordinator is None and world_size not in ("", "1"):
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} is set, but SHOAL_COORDINATOR is not: each rank would train "
            "alone. Start the script with `shoal run --nproc-per-node ... train.py` instead of "
            "torchrun, or unset WORLD_SIZE."
        )


def rank_variables() -> Mapping[str, str]:
    """Returns what torchrun and its kin tell a process about its rank, `RANK` and `WORLD_SIZE`,
    where they are set."""
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}


def gloo_interface() -> str:
    """Returns the network interface that the user has chosen for Gloo, the first of
    `GLOO_SOCKET_IFNAME`; "" where none is chosen."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def force_environment(values: Mapping[str, str]) -> Mapping[str, str]:
    """Sets environment variables for C++ code that reads them later, whatever the user has set.

    Returns the values that the user had given to those that are others now.
    """
    overruled = {
        name: os.environ[name]
        for name, value in values.items()
        if os.environ.get(name, value) != value
    }
    os.environ.update(values)
    return overruled


def environment_without_settings() -> dict[str, str]:
    """Returns the environment for services of a cluster that this process starts, without the
    settings of one that it may be in."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
