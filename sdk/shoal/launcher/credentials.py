"""Bearer token and certificates towards a shared coordinator, from the environment: the one module here that reads them.

The names are those that workers read, so one setting serves both.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security import TlsSettings
from shoal_common.settings import ShoalSettings, secret_value


class _Credentials(ShoalSettings):
    token: SecretStr | None = None
    tls_authority: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None


def channel_settings(coordinator: str) -> ChannelSettings:
    """How to speak to the coordinator at `coordinator`, host:port. Raises ConfigurationError."""
    given = _Credentials.load()
    tls = None
    if given.tls_authority is not None:
        tls = TlsSettings(authority=given.tls_authority, certificate=given.tls_certificate, key=given.tls_key)
    return ChannelSettings(address=coordinator, token=secret_value(given.token), tls=tls)
