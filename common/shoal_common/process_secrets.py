"""Secrets that stand in this process's environment, taken out of it, so that the processes which it
starts do not inherit them.

Imports nothing: every command calls it before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

SECRETS: Final = ("SHOAL_TOKEN", "SHOAL_STORE_URL")
"""Variables of callers whose values are secrets. Each has a brother of the same name with _FILE:
where the secret is read."""

_OF_ONE_PROCESS: Final = ("SHOAL_MEMBER_KEY",)
"""Variables whose values are secrets of one process, given to no other."""

SERVICE_SECRETS: Final = (
    "SHOAL_PS_SERVER_TOKEN",
    "SHOAL_COORDINATOR_REDIS",
    "SHOAL_COORDINATOR_STORE_URL",
)
"""Variables whose values are secrets of services, which start nothing that runs a user's code."""

_taken: dict[str, str] = {}
"""Variable -> the secret that this process's environment had there."""


def take_secrets() -> None:
    """Moves secrets from this process's environment into its memory. Settings
    (shoal_common.credentials) go on finding them. What other users of this machine can read is the
    environment that a process began with; they cannot read that of this user's either way."""
    for name in (*SECRETS, *_OF_ONE_PROCESS):
        if value := os.environ.pop(name, ""):
            _taken[name] = value


def taken_secrets() -> Mapping[str, str]:
    """Returns what `take_secrets` has taken, by the names of the variables."""
    return dict(_taken)


def secrets_to_hand_on() -> Mapping[str, str]:
    """Returns those of them that are also for processes of the same job."""
    return {name: value for name, value in _taken.items() if name in SECRETS}
