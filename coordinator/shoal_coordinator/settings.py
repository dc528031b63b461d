"""Settings of the coordinator, read from its environment (SHOAL_COORDINATOR_...) and its command
line. No other module reads these."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from shoal_common.credentials import (
    ServiceSettings,
    add_service_flags,
    read_secret,
    refuse_password,
)
from shoal_common.settings import Address, AddressField, Duration


class CoordinatorSettings(ServiceSettings):
    """Settings of one coordinator. Flags override the environment."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_COORDINATOR_")

    redis: SecretStr = SecretStr("embedded://")
    """URL of the Redis server that stores all state: redis://[user:password@]host:port[/db].
    `embedded://` starts a server with temporary data, `embedded:///directory` a server with
    persistent data. Members on other machines can reach an embedded server if the URL has this
    machine's name: `embedded://host`."""

    redis_file: Path | None = None
    """File that contains the URL of `redis`, for a URL with a password. Takes precedence over
    `redis`."""

    redis_ca: Path | None = None
    """CA certificates (PEM) that verify the Redis server if its URL is rediss://; None: the
    system's certificates. Members use their own `tls_ca`."""

    redis_patience: Duration = timedelta(seconds=30)
    """Maximum time to wait for Redis to respond when the coordinator starts."""

    listen: AddressField = Address("127.0.0.1", 0)
    """Address (host:port) of the gRPC service."""

    http: AddressField = Address("127.0.0.1", 0)
    """Address (host:port) of the status page, /metrics, /healthz and /sd."""

    store_url: str | None = None
    """Redis URL that members receive for their rendezvous stores; None: the coordinator's own URL
    without its credentials."""

    share_store_credentials: bool = False
    """True if members receive the coordinator's own Redis URL with its credentials."""

    reconnect_grace: Duration = timedelta(0)
    """Maximum time for a member whose stream broke to reconnect before it counts as dead. 0: it
    counts as dead immediately, so that a killed process is detected within milliseconds. Raise this
    value if the network drops connections more often than processes die."""

    request_timeout: Duration = timedelta(seconds=5)
    """Maximum time that a call waits for Redis before it fails with UNAVAILABLE. Also the maximum
    time for a new session to send its first message."""

    job_retention: Annotated[Duration, Field(ge=timedelta(seconds=1))] = timedelta(days=1)
    """Time that a job without members is remembered after its last change, whether it has finished
    or was abandoned; at least 1s."""

    port_file: Path | None = None
    """File for the bound addresses, written as JSON when the coordinator begins to serve
    requests."""

    drain_timeout: Duration = timedelta(seconds=5)
    """Maximum time that calls in progress may take after SIGTERM. Sessions are closed immediately,
    and their members reconnect."""

    log_level: str = "INFO"
    """Lowest level of messages to log: DEBUG, INFO, WARNING, ERROR or CRITICAL."""

    @property
    def redis_url(self) -> str:
        """URL from `redis` or `redis_file`. Raises ConfigurationError if the file cannot be
        read."""
        return (
            self.redis.get_secret_value()
            if self.redis_file is None
            else read_secret(self.redis_file, "redis-file")
        )


def command_line() -> argparse.ArgumentParser:
    """Returns the parser for the flags of `shoal-coordinator`."""
    parser = argparse.ArgumentParser(
        prog="shoal-coordinator",
        description="Shoal's coordinator: assigns a job's processes to generations and ranks.",
        epilog="Each flag can also be set by an environment variable: SHOAL_COORDINATOR_ and its "
        "name in capitals, with _ for -.",
    )
    for flag, metavar, text in (
        (
            "--redis",
            "URL",
            "redis://HOST:PORT, or embedded://[HOST][/DIR] to start a Redis server: HOST "
            "makes it reachable from other machines, DIR keeps its data (default: "
            "embedded://)",
        ),
        ("--redis-file", "FILE", "file that contains the Redis URL, for a URL with a password"),
        (
            "--redis-ca",
            "FILE",
            "PEM file with the certificate authorities for the Redis server's certificate, "
            "for rediss:// (default: the system's)",
        ),
        ("--redis-patience", "DURATION", "how long to wait for Redis at startup (default: 30s)"),
        (
            "--listen",
            "HOST:PORT",
            "address of the gRPC service (default: 127.0.0.1:0, a free port)",
        ),
        ("--http", "HOST:PORT", "address of /metrics, /healthz and /sd (default: 127.0.0.1:0)"),
        (
            "--store-url",
            "URL",
            "Redis URL that members use (default: the coordinator's own, without credentials)",
        ),
        (
            "--reconnect-grace",
            "DURATION",
            "how long a member may take to reconnect after its stream broke (default: 0s)",
        ),
        ("--request-timeout", "DURATION", "how long a call waits for Redis (default: 5s)"),
        (
            "--job-retention",
            "DURATION",
            "how long to keep a job without members (default: 1d)",
        ),
        (
            "--port-file",
            "FILE",
            "JSON file to which the bound addresses are written once the coordinator is serving "
            "requests",
        ),
        (
            "--drain-timeout",
            "DURATION",
            "how long calls in progress may continue after SIGTERM (default: 5s)",
        ),
        (
            "--log-level",
            "LEVEL",
            "lowest level of messages to log: DEBUG, INFO, WARNING, ERROR or CRITICAL (default: "
            "INFO)",
        ),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    add_service_flags(parser, calls=False)
    parser.add_argument(
        "--share-store-credentials",
        action="store_true",
        default=None,
        help="send the coordinator's own Redis URL to members, including its credentials",
    )
    return parser


def parse_command_line(arguments: Sequence[str] | None = None) -> CoordinatorSettings:
    """Loads the settings. Flags override the environment, which overrides the defaults. Exits on
    --help and unknown flags; raises ConfigurationError for invalid values."""
    given = command_line().parse_args(arguments)
    file = (
        "put the URL in a file that only you can read, and pass --redis-file FILE (or set "
        "SHOAL_COORDINATOR_REDIS)"
    )
    refuse_password("--redis", given.redis, file)
    refuse_password("--store-url", given.store_url, "set SHOAL_COORDINATOR_STORE_URL")
    return CoordinatorSettings.load(**vars(given))
