"""Bearer token and certificates for a shared coordinator, and their transfer from a command to its
child processes.

Commands and workers read the same environment variables. A command's flags (`--tls-ca`, ...) become
these variables in its own process. A token given in a variable is removed from the environment
(shoal_common.credentials) and passed to workers in a file that only this user can read.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_common.security.secrets import secrets_to_hand_on

if TYPE_CHECKING:
    from shoal_common.rpc.channel import ChannelSettings


def channel_settings(coordinator: str) -> ChannelSettings:
    """Returns the settings for calls to the coordinator at `coordinator` (host:port) with this
    process's credentials. Raises ConfigurationError."""
    # imported here: it loads settings and gRPC, which workers of a local run should not wait for
    from shoal_common.credentials import CallerSettings

    return CallerSettings.load().channel(coordinator)


def member_channel(coordinator: str) -> ChannelSettings:
    """Returns the settings of `channel_settings` with a new member key, for a launcher that will be
    a member of a job itself."""
    return replace(channel_settings(coordinator), member_key=secrets.token_hex(16))


def secrets_as_files(directory: Path) -> dict[str, str]:
    """Writes the secrets that have been removed from this process's environment to files in
    `directory`, which only this user can read. Returns the environment variables that contain the
    paths of these files."""
    named = {}
    for name, secret in secrets_to_hand_on().items():
        if os.environ.get(f"{name}_FILE"):
            continue  # already in a file named by a flag
        path = directory / name.lower()
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(f"{secret}\n", encoding="utf-8")
        named[f"{name}_FILE"] = str(path)
    return named
