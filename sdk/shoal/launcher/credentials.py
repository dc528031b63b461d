"""Bearer token and certificates towards a shared coordinator, and how the processes that a command
starts get them.

The names of the variables are those that workers read, so one setting serves both. A command's
flags (`--tls-ca`, ...) become these variables, in its own process; a token that stood in a variable
is taken out of it (shoal_common.credentials) and given to workers as a file that they alone are
told of.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_common.process_secrets import secrets_to_hand_on

if TYPE_CHECKING:
    from shoal_common.rpc.channel import ChannelSettings


def channel_settings(coordinator: str) -> ChannelSettings:
    """How to speak to the coordinator at `coordinator`, host:port. Raises ConfigurationError."""
    # settings and gRPC: workers of a local run start before these are loaded
    from shoal_common.credentials import CallerSettings

    return CallerSettings.load().channel(coordinator)


def member_channel(coordinator: str) -> ChannelSettings:
    """Likewise, for a launcher that will be a member of a job: with a key of its own."""
    return replace(channel_settings(coordinator), member_key=secrets.token_hex(16))


def secrets_as_files(directory: Path) -> dict[str, str]:
    """Writes the secrets that this process has taken out of its environment into files in
    `directory`, which only this user can read, and returns the variables that name these."""
    named = {}
    for name, secret in secrets_to_hand_on().items():
        if os.environ.get(f"{name}_FILE"):
            continue  # a flag's
        path = directory / name.lower()
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(f"{secret}\n", encoding="utf-8")
        named[f"{name}_FILE"] = str(path)
    return named
