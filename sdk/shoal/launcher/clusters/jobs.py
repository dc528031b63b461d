"""Launchers' settings for creating a job, and their conversion to the coordinator's message."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    from shoal_protos.v1.coordinator_pb2 import JobSpec

_JOB_ID_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings for creating a job. The coordinator validates them."""

    job_id: str
    min_workers: int
    """Minimum world size to start training. Until it is reached, members wait."""
    max_workers: int
    min_survivors: int = 0
    """Minimum world size to continue training once it has started; 0: `min_workers`."""
    parameter_servers: int = 0
    parameter_server_backups: int = 0
    """Number of backups per server, 0 or 1."""
    max_parameter_servers: int = 0
    """Maximum number of servers; 0: `parameter_servers`. If it is above 0 while `parameter_servers`
    is 0, one server is started when a script needs it."""
    join_grace: timedelta = timedelta(seconds=30)
    """Maximum time that the first ready worker waits for others while fewer than `max_workers` are
    ready."""
    lease: timedelta | None = None
    """Maximum silence of a member before it is evicted; None: the coordinator's default."""
    stall_timeout: timedelta | None = None
    """Maximum time that a member may make no progress while its peers are waiting for it; None: the
    coordinator's default."""

    def message(self) -> JobSpec:
        from shoal_protos.v1.coordinator_pb2 import JobSpec

        return JobSpec(
            job_id=self.job_id,
            min_workers=self.min_workers,
            min_survivors=self.min_survivors,
            max_workers=self.max_workers,
            parameter_servers=self.parameter_servers,
            parameter_server_backups=self.parameter_server_backups,
            max_parameter_servers=self.max_parameter_servers,
            join_grace_ms=_milliseconds(self.join_grace),
            lease_ms=_milliseconds(self.lease),
            stall_timeout_ms=_milliseconds(self.stall_timeout),
        )


def launchers_job_id(job_id: str) -> str:
    """Returns the id of the auxiliary job that the launchers of a job on several machines use to
    agree on their ranks (docs/explanation/launcher-and-deployment.md#several-machines)."""
    return f"{job_id}.nodes"


def new_job_id(program: str) -> str:
    """Returns a new job id derived from the program's name: for example `train-3f9a1c` for
    `examples/train.py`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(program).stem).lstrip("._-") or "job"
    return f"{stem[: _JOB_ID_LENGTH - 7]}-{secrets.token_hex(3)}"


def is_job_id(text: str) -> bool:
    """Returns whether `text` is a valid job id."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) is not None


def check_job_id(job_id: str) -> None:
    """Raises ConfigurationError unless `job_id` is valid."""
    if not is_job_id(job_id):
        raise ConfigurationError(
            f"job id {job_id!r}: expected 1 to 64 characters of A-Z a-z 0-9 . _ -, starting with a "
            "letter or digit"
        )


def _milliseconds(duration: timedelta | None) -> int:
    return 0 if duration is None else round(duration.total_seconds() * 1000)
