"""What the coordinator reads from its environment (SHOAL_COORDINATOR_...) and its command line: the one module that does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from shoal_common.security import TlsSettings, TokenTable
from shoal_common.settings import Address, AddressField, Duration, ShoalSettings


class CoordinatorSettings(ShoalSettings):
    """One coordinator. Flags win over the environment."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_COORDINATOR_")

    redis: SecretStr = SecretStr("embedded://")
    """redis://[user:password@]host:port[/db] of the server that keeps all state; `embedded://` starts one of its own with temporary data,
    `embedded:///directory` one that keeps it. Members on other machines reach it if it has this machine's name: `embedded://host`."""

    redis_patience: Duration = timedelta(seconds=30)
    """How long to wait at the start for Redis to answer."""

    listen: AddressField = Address("127.0.0.1", 0)
    """host:port of the gRPC service."""

    http: AddressField = Address("127.0.0.1", 0)
    """host:port of /metrics, /healthz and /sd."""

    store_url: str | None = None
    """The Redis URL that members are told for their rendezvous stores; None: the coordinator's own, without its credentials."""

    share_store_credentials: bool = False
    """Members are told the coordinator's own Redis URL with its credentials."""

    reconnect_grace: Duration = timedelta(0)
    """How long a member whose stream broke may take to come back before it counts as dead. 0: it is dead at once, which is how a killed
    process is noticed within milliseconds; raise it where the network drops connections more often than processes die."""

    request_timeout: Duration = timedelta(seconds=5)
    """How long a call waits for Redis before it is answered with UNAVAILABLE, and a new session for its first message."""

    job_retention: Annotated[Duration, Field(ge=timedelta(seconds=1))] = timedelta(days=1)
    """How long a job that nobody is in, finished or given up, is still known after its last change; at least 1s."""

    tokens: Path | None = None
    """File of `role: token` lines: who may call. None: everyone."""

    tls_certificate: Path | None = None
    """The coordinator's certificate chain (PEM); None: plain text."""

    tls_key: Path | None = None
    """Its private key (PEM)."""

    tls_authority: Path | None = None
    """Certificates (PEM) that clients' must be signed by, with `tls_require_client_certificate`."""

    tls_require_client_certificate: bool = False
    """Mutual TLS: clients must show a certificate signed by `tls_authority`."""

    insecure: bool = False
    """Allows a `listen` address that other machines can reach without TLS or without tokens."""

    port_file: Path | None = None
    """Where to write the bound addresses, as JSON, once serving."""

    drain_timeout: Duration = timedelta(seconds=5)
    """How long calls in progress may go on after SIGTERM. Sessions end at once: members connect again."""

    log_level: str = "INFO"
    """DEBUG, INFO, WARNING, ERROR or CRITICAL."""

    @property
    def tls(self) -> TlsSettings | None:
        """For serving; None: plain text."""
        if self.tls_certificate is None and self.tls_key is None:
            return None
        return TlsSettings(
            certificate=self.tls_certificate,
            key=self.tls_key,
            authority=self.tls_authority,
            require_client_certificate=self.tls_require_client_certificate,
        )

    @property
    def token_table(self) -> TokenTable:
        """Who may call. Raises ConfigurationError when the file cannot be read."""
        return TokenTable.open() if self.tokens is None else TokenTable.from_file(self.tokens)


def parse_command_line(arguments: Sequence[str] | None = None) -> CoordinatorSettings:
    """Flags over the environment over the defaults. Exits on --help and unknown flags; raises ConfigurationError for wrong values."""
    parser = argparse.ArgumentParser(
        prog="shoal-coordinator",
        description="Shoal's coordinator: which processes belong to a job, in which generation, with which rank.",
        epilog="Every flag is also an environment variable, SHOAL_COORDINATOR_..., in capitals and with _ for -.",
    )
    for flag, metavar, text in (
        (
            "--redis",
            "URL",
            "redis://HOST:PORT, or embedded://[HOST][/DIR] for one of its own, HOST for other machines (default: embedded://)",
        ),
        ("--redis-patience", "DURATION", "how long to wait for Redis at the start (default: 30s)"),
        ("--listen", "HOST:PORT", "address of the gRPC service (default: 127.0.0.1:0, a free port)"),
        ("--http", "HOST:PORT", "address of /metrics, /healthz and /sd (default: 127.0.0.1:0)"),
        ("--store-url", "URL", "Redis URL that members are told (default: the coordinator's own, without credentials)"),
        ("--reconnect-grace", "DURATION", "how long a member whose stream broke may take to come back (default: 0s)"),
        ("--request-timeout", "DURATION", "how long a call waits for Redis (default: 5s)"),
        ("--job-retention", "DURATION", "how long a job that nobody is in is still known (default: 1d)"),
        ("--tokens", "FILE", "lines `role: token`: who may call (default: everyone)"),
        ("--tls-certificate", "FILE", "the coordinator's certificate chain (PEM)"),
        ("--tls-key", "FILE", "its private key (PEM)"),
        ("--tls-authority", "FILE", "certificates that clients' must be signed by (PEM)"),
        ("--port-file", "FILE", "written once serving: the bound addresses as JSON"),
        ("--drain-timeout", "DURATION", "how long calls may go on after SIGTERM (default: 5s)"),
        ("--log-level", "LEVEL", "DEBUG, INFO, WARNING, ERROR or CRITICAL (default: INFO)"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument("--share-store-credentials", action="store_true", default=None, help="tell members the Redis URL as it is")
    parser.add_argument("--tls-require-client-certificate", action="store_true", default=None, help="mutual TLS")
    parser.add_argument("--insecure", action="store_true", default=None, help="serve other machines without TLS or tokens")
    return CoordinatorSettings.load(**vars(parser.parse_args(arguments)))
