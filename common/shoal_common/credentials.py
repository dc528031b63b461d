"""Settings and command-line flags for tokens, keys and certificates. They are the same for every
command and service.

A secret is never a command-line argument, because other users can see arguments in process lists.
It is read from a file that a flag names, or from an environment variable. A process removes secrets
from its environment (security/secrets.py), so that its child processes do not inherit them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

from pydantic import SecretStr
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from shoal_common.errors import ConfigurationError
from shoal_common.security.authentication import TlsSettings, TokenTable
from shoal_common.security.secrets import taken_secrets
from shoal_common.settings import ShoalSettings

if TYPE_CHECKING:
    from shoal_common.rpc.channel import ChannelSettings

CALLER_FLAGS: Final[Mapping[str, str]] = {
    "--tls-ca": "PEM file with the authorities for the services' certificates; enables TLS",
    "--tls-cert": "PEM file with this program's client certificate, if services require one",
    "--tls-key": "PEM private key of --tls-cert",
    "--token-file": "file that contains the bearer token of this program",
}
"""Flag -> help text, for all programs that call a service. The corresponding environment variables
are SHOAL_TLS_CA and so on."""

_SERVICE_FLAGS: Final[Mapping[str, str]] = {
    "--tokens": "file with lines `role: token` or `role@job: token` for the accepted tokens "
    "(default: accept every caller)",
    "--tls-cert": "PEM file with this service's certificate; with --tls-key, enables TLS",
    "--tls-key": "PEM private key of --tls-cert",
    "--tls-client-ca": "PEM file with the authorities for client certificates; enables mutual TLS",
}

_RENAMED: Final[Mapping[str, str]] = {
    "TLS_AUTHORITY": "TLS_CA",
    "TLS_CERTIFICATE": "TLS_CERT",
    "TLS_REQUIRE_CLIENT_CERTIFICATE": "TLS_CLIENT_CA",
}


def read_secret(path: Path, what: str) -> str:
    """Returns the secret in a file, without the line break at its end. Raises ConfigurationError if
    the file is unreadable, or is not a single line of printable ASCII.

    `what`: name of the setting, used in errors.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what}: cannot read the file {path}: {error}") from error
    if not text or "\n" in text:
        raise ConfigurationError(
            f"{what}: the file {path} {'has several lines' if text else 'is empty'}; expected the "
            "secret on one line"
        )
    if not text.isascii() or not text.isprintable():
        raise ConfigurationError(
            f"{what}: the file {path} contains characters other than printable ASCII; expected the "
            "secret on one line"
        )
    return text


class _SecuritySettings(ShoalSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Adds a further source of settings: the secrets that this process has removed from its
        environment."""
        prefix = str(cls.model_config.get("env_prefix", ""))
        _refuse_old_names(prefix, os.environ)
        taken = {
            name.removeprefix(prefix).lower(): value
            for name, value in taken_secrets().items()
            if name.startswith(prefix)
        }
        known = {field: value for field, value in taken.items() if field in cls.model_fields}
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=known)


class CallerSettings(_SecuritySettings):
    """Settings of a process that calls services: its credentials, and how it verifies the
    services."""

    token: SecretStr | None = None
    """Bearer token; can be set only by its environment variable."""

    token_file: Path | None = None
    """File that contains the bearer token."""

    tls_ca: Path | None = None
    """Certificate authorities (PEM) that verify services; None: no TLS."""

    tls_cert: Path | None = None
    """Client certificate chain (PEM), for mutual TLS."""

    tls_key: Path | None = None
    """The private key (PEM) of `tls_cert`."""

    @property
    def bearer_token(self) -> str | None:
        """Bearer token from the variable or the file; None if neither is set. Raises
        ConfigurationError if the file cannot be read."""
        if self.token_file is not None:
            return read_secret(self.token_file, "token-file")
        return None if self.token is None else self.token.get_secret_value()

    def channel(self, address: str, **more: Any) -> ChannelSettings:
        """Returns the settings for calls to the service at `address` (host:port). `more`: values
        for other fields of ChannelSettings. Raises ConfigurationError."""
        # imported here because it imports gRPC, which commands that fail early do not need
        from shoal_common.rpc.channel import ChannelSettings

        return ChannelSettings(
            address=address, token=self.bearer_token, tls=self.calling_tls, **more
        )

    @property
    def calling_tls(self) -> TlsSettings | None:
        """TLS settings for calls to other services; None: no TLS.

        Raises ConfigurationError if a certificate is configured without its key.
        """
        if self.tls_ca is None and self.tls_cert is None and self.tls_key is None:
            return None
        return TlsSettings(authority=self.tls_ca, certificate=self.tls_cert, key=self.tls_key)


class ServiceSettings(_SecuritySettings):
    """Settings of a service: its credentials, and how it authenticates callers."""

    tokens: Path | None = None
    """File with a line `role: token` or `role@job: token` for each accepted token. None: every
    caller is accepted."""

    tls_cert: Path | None = None
    """Certificate chain of this service (PEM); None: no TLS."""

    tls_key: Path | None = None
    """The private key (PEM) of `tls_cert`."""

    tls_client_ca: Path | None = None
    """Certificate authorities (PEM) that verify clients, for mutual TLS; None: clients need no
    certificate."""

    insecure: bool = False
    """True to allow a `listen` address that other machines can reach even if TLS or tokens are not
    configured."""

    @property
    def serving_tls(self) -> TlsSettings | None:
        """TLS settings of this service; None: no TLS.

        Raises ConfigurationError if a certificate is configured without its key, a key without its
        certificate, or a client CA without a certificate.
        """
        if self.tls_cert is None and self.tls_key is None:
            if self.tls_client_ca is not None:
                raise ConfigurationError(
                    f"--tls-client-ca {self.tls_client_ca} requires TLS, but --tls-cert and "
                    "--tls-key are not set; set them too"
                )
            return None
        return TlsSettings(
            certificate=self.tls_cert, key=self.tls_key, client_authority=self.tls_client_ca
        )

    @property
    def token_table(self) -> TokenTable:
        """Accepted tokens with their roles. Raises ConfigurationError if the file cannot be
        read."""
        return TokenTable.open() if self.tokens is None else TokenTable.from_file(self.tokens)


def _refuse_old_names(prefix: str, environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a variable is set under a name from an earlier release. If the
    variable were ignored, the process would run without TLS."""
    for old, new in _RENAMED.items():
        if environment.get(f"{prefix}{old}"):
            raise ConfigurationError(
                f"the variable {prefix}{old} was renamed to {prefix}{new}; set that instead"
            )


# -------------------------------------------------------------------------------------------- flags


def add_service_flags(parser: argparse.ArgumentParser, *, calls: bool) -> None:
    """Adds the flags of ServiceSettings to a parser. `calls`: True to add the flags of
    CallerSettings too, for a service that calls other services."""
    flags = dict(_SERVICE_FLAGS)
    if calls:
        flags |= {flag: text for flag, text in CALLER_FLAGS.items() if flag not in flags}
    for flag, text in flags.items():
        parser.add_argument(flag, metavar="FILE", help=text)
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow an address that other machines can reach even without TLS or tokens",
    )


def refuse_password(flag: str, url: str | None, remedy: str) -> None:
    """Raises ConfigurationError if the URL given as `flag` contains a password. `remedy`: last part
    of the error message."""
    if url is not None and _has_password(url):
        raise ConfigurationError(
            f"{flag}: every user of this machine can see a password on the command line; {remedy}",
            reason="SECRET_IN_ARGUMENTS",
        )


class RefusedToken(argparse.Action):
    """Parser action that rejects `--token VALUE` and names the remedy."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise ConfigurationError(
            "--token: every user of this machine can see a token on the command line; put it in a "
            "file that only you can read, and pass --token-file FILE (or set the variable)",
            reason="SECRET_IN_ARGUMENTS",
        )


def _has_password(url: str) -> bool:
    try:
        return urlsplit(url).password is not None or bool(re.search(r"[?&]password=", url))
    except ValueError:
        return "@" in url
