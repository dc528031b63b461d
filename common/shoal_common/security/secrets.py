"""Removes secrets from this process's environment, so that its child processes do not inherit them.

This module imports only the standard library, since every command calls `take_secrets` before
anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

SECRETS: Final = ("SHOAL_TOKEN", "SHOAL_STORE_URL")
"""Environment variables of callers that contain secrets. For each of them, a variable with the
suffix _FILE may instead contain the path of a file with the secret."""

_OF_ONE_PROCESS: Final = ("SHOAL_MEMBER_KEY",)
"""Variables with secrets of this process alone, which are never passed on to other processes."""

SERVICE_SECRETS: Final = (
    "SHOAL_PS_SERVER_TOKEN",
    "SHOAL_COORDINATOR_REDIS",
    "SHOAL_COORDINATOR_STORE_URL",
)
"""Variables with the secrets of services, which start no processes that run user code."""

_taken: dict[str, str] = {}
"""Variable -> secret, for secrets that have been removed from this process's environment."""


def take_secrets() -> None:
    """Moves secrets from this process's environment to its memory, where the settings
    (shoal_common.credentials) find them.

    The initial environment of the process remains readable in /proc for this user and root.
    """
    for name in (*SECRETS, *_OF_ONE_PROCESS):
        if value := os.environ.pop(name, ""):
            _taken[name] = value


def taken_secrets() -> Mapping[str, str]:
    """Returns the secrets that `take_secrets` has removed from the environment, by variable."""
    return dict(_taken)


def secrets_to_hand_on() -> Mapping[str, str]:
    """Returns the secrets that other processes of the same job may receive, by variable."""
    return {name: value for name, value in _taken.items() if name in SECRETS}
