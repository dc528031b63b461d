"""Settings of a parameter server, read from its environment (SHOAL_PS_SERVER_...) and its command
line. No other module reads these."""

from __future__ import annotations

import argparse
import enum
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import SettingsConfigDict
from shoal_common.credentials import (
    CallerSettings,
    RefusedToken,
    ServiceSettings,
    add_service_flags,
)
from shoal_common.settings import Address, AddressField, Duration, LocalDirectory
from shoal_common.system import own_address


class Fsync(enum.StrEnum):
    """Policy for syncing the journal to disk. It matters only if the machine loses power; a killed
    process loses no changes with any setting."""

    GROUP = "group"
    """Sync before a change is acknowledged. Changes that arrive while the disk is busy are synced
    together."""
    ALWAYS = "always"
    """Sync before a change is acknowledged, separately for each change."""
    NEVER = "never"
    """Do not sync; the kernel decides when the data is written."""


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class PsServerSettings(ServiceSettings, CallerSettings):
    """Settings of one server. Flags override the environment. When it calls the coordinator and
    other servers of the job, the server uses its own certificate and a token with the server
    role."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_PS_SERVER_")

    coordinator: AddressField
    """Address (host:port) of the coordinator."""

    job: _Name
    """Id of the job whose tensors this server stores."""

    server_id: _Name = Field(default_factory=socket.gethostname)
    """Id of the server. It must be the same after a restart, because it identifies the server's
    snapshot."""

    listen: AddressField = Address("127.0.0.1", 0)
    """Address (host:port) of the gRPC service."""

    bulk_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the bulk channel, on the host of `listen`; 0: any port. Workers that cannot reach
    it push and pull over gRPC."""

    http: AddressField = Address("127.0.0.1", 0)
    """Address (host:port) of /metrics and /healthz."""

    advertise: str | None = None
    """Host or interface that workers use to reach this server; None: the host that it listens on.
    If it listens on all addresses, the default is `local_addr` if set, otherwise this machine's
    name or, if other machines cannot use the name, the local address of connections to the
    coordinator."""

    local_addr: str | None = Field(default=None, validation_alias="SHOAL_LOCAL_ADDR")
    """Address, interface or host name that other machines use to reach this one. The variable
    applies to all processes of the machine."""

    data_dir: LocalDirectory | None = None
    """Directory of the journal and the snapshot, which are read when the server starts; None: the
    server's state is lost when the process exits."""

    fsync: Fsync = Fsync.GROUP
    """Policy for syncing the journal to disk."""

    journal_limit: Annotated[int, Field(ge=1 << 20)] = 1 << 29
    """Size of the journal in bytes above which a snapshot replaces it, provided that the journal is
    also more than four times as large as the server's state."""

    snapshot_interval: Duration = timedelta(minutes=1)
    """Time between snapshots while values change; 0s: snapshots are written only on request and at
    SIGTERM."""

    staging_memory: Annotated[int, Field(ge=16 << 20)] = 1 << 30
    """Maximum memory, in bytes, for received pushes that are not applied yet. One member may use at
    most a quarter."""

    port_file: Path | None = None
    """File for the bound addresses, written as JSON when the server begins to serve requests."""

    drain_timeout: Duration = timedelta(seconds=10)
    """Maximum time that calls in progress may take after SIGTERM."""

    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of threads that torch uses. To use several cores, more servers are better than more
    threads."""

    log_level: str = "INFO"
    """Lowest level of messages to log: DEBUG, INFO, WARNING, ERROR or CRITICAL."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls_ca is not None and self.tls_cert is None and not self.insecure:
            raise ValueError(
                "tls_ca is set without tls_cert, so this server would call others over TLS but "
                "serve in plain text; set tls_cert and tls_key"
            )
        return self

    def advertised(self, port: int) -> str:
        """Returns the gRPC service's address (host:port) for workers. `port`: port that it listens
        on."""
        return str(Address(self._host_of(self.listen), port))

    def advertised_http(self, port: int) -> str:
        """Returns the metrics' address (host:port) for Prometheus. `port`: port that serves the
        metrics."""
        return str(Address(self._host_of(self.http), port))

    def _host_of(self, listened: Address) -> str:
        """Returns the host to advertise. Raises ConfigurationError for an interface or a
        `local_addr` that this machine does not have."""
        if self.advertise is not None:
            return own_address.of_interface(self.advertise) or self.advertise
        if not own_address.is_unspecified(listened.host):
            return listened.host
        towards = (self.coordinator.host, self.coordinator.port)
        if self.local_addr:
            return own_address.OwnAddress.find(
                self.local_addr, listened.host, towards=towards
            ).announced
        return (
            own_address.name_for_others()
            or own_address.route_towards(*towards)
            or socket.gethostname()
        )


def command_line() -> argparse.ArgumentParser:
    """Returns the parser for the flags of `shoal-ps-server`."""
    parser = argparse.ArgumentParser(
        prog="shoal-ps-server",
        description="A parameter server: stores a share of one job's tensors and applies pushed "
        "gradients to it.",
        epilog="Each flag can also be set by an environment variable: SHOAL_PS_SERVER_ and its "
        "name in capitals, with _ for -.",
    )
    for flag, metavar, text in (
        ("--coordinator", "HOST:PORT", "the coordinator"),
        ("--job", "ID", "id of the job whose tensors this server stores"),
        (
            "--server-id",
            "ID",
            "id of this server, which must be the same after a restart (default: this "
            "machine's name)",
        ),
        (
            "--listen",
            "HOST:PORT",
            "address of the gRPC service (default: 127.0.0.1:0, a free port)",
        ),
        (
            "--bulk-port",
            "PORT",
            "TCP port of the bulk channel, on --listen's host (default: 0, a free port)",
        ),
        ("--http", "HOST:PORT", "address of /metrics and /healthz (default: 127.0.0.1:0)"),
        (
            "--advertise",
            "HOST|INTERFACE",
            "host or interface at which workers reach this server (default: "
            "SHOAL_LOCAL_ADDR, or detected)",
        ),
        (
            "--data-dir",
            "DIR",
            "directory for the journal and the snapshot, from which a restarted server "
            "recovers (default: neither is written)",
        ),
        (
            "--fsync",
            "group|always|never",
            "when to sync the journal to disk: before each acknowledgement, many changes at "
            "once (group) or each separately (always), or never (default: group)",
        ),
        (
            "--journal-limit",
            "BYTES",
            "size of the journal in bytes above which a snapshot replaces it (default: 512 MiB)",
        ),
        (
            "--snapshot-interval",
            "DURATION",
            "time between snapshots; 0s: only on request and at SIGTERM (default: 1m)",
        ),
        (
            "--staging-memory",
            "BYTES",
            "bytes of memory for incoming pushes; one worker may use a quarter of it "
            "(default: 1 GiB)",
        ),
        (
            "--port-file",
            "FILE",
            "JSON file to which the bound addresses are written once the server is serving "
            "requests",
        ),
        (
            "--drain-timeout",
            "DURATION",
            "how long calls in progress may continue after SIGTERM (default: 10s)",
        ),
        ("--threads", "N", "number of torch threads (default: 1)"),
        (
            "--log-level",
            "LEVEL",
            "lowest level of messages to log: DEBUG, INFO, WARNING, ERROR or CRITICAL (default: "
            "INFO)",
        ),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    add_service_flags(parser, calls=True)
    parser.add_argument("--token", action=RefusedToken, help=argparse.SUPPRESS)
    return parser


def parse_command_line(arguments: Sequence[str] | None = None) -> PsServerSettings:
    """Loads the settings. Flags override the environment, which overrides the defaults. Exits on
    --help and unknown flags; raises ConfigurationError for invalid values."""
    return PsServerSettings.load(**vars(command_line().parse_args(arguments)))
