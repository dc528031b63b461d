"""A job as launchers describe it: durations and plain values, turned into the message that the
coordinator takes."""

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
    """What a job is created with. The coordinator validates it."""

    job_id: str
    min_workers: int
    """The smallest world that training begins with; below it members wait."""
    max_workers: int
    min_survivors: int = 0
    """The smallest world that training goes on with once it has begun; 0: `min_workers`."""
    parameter_servers: int = 0
    parameter_server_backups: int = 0
    """Backups of each of them, 0 or 1."""
    max_parameter_servers: int = 0
    """Servers that it may have; 0: as many as `parameter_servers`. More than 0 where
    `parameter_servers` is 0: one is started when a script asks for it."""
    join_grace: timedelta = timedelta(seconds=30)
    """How long the first ready worker waits for others, when the world is not full."""
    lease: timedelta | None = None
    """Silence after which a member is put out; None: the coordinator's default."""
    stall_timeout: timedelta | None = None
    """How long an accused member may make no progress; None: the coordinator's default."""

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
    """The job in which the launchers of a job on several machines agree (docs/decisions/0064)."""
    return f"{job_id}.nodes"


def new_job_id(program: str) -> str:
    """A fresh id that a person recognizes: `train-3f9a1c` for `examples/train.py`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(program).stem).lstrip("._-") or "job"
    return f"{stem[: _JOB_ID_LENGTH - 7]}-{secrets.token_hex(3)}"


def check_job_id(job_id: str) -> None:
    """Raises ConfigurationError unless a job may be called so."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", job_id):
        raise ConfigurationError(
            f"job id {job_id!r}: expected 1 to 64 characters of A-Z a-z 0-9 . _ -, starting with a "
            "letter or digit"
        )


def _milliseconds(duration: timedelta | None) -> int:
    return 0 if duration is None else round(duration.total_seconds() * 1000)
