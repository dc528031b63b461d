"""Registry of the clusters on this machine, so that `shoal status` in a second terminal does not
need an address.

Each cluster has a small JSON file, written and removed by the process that runs the cluster. A
killed process leaves its file behind; readers remove the files of processes that no longer exist.
The registry serves one user on one host; it is not a service directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from shoal_common.errors import ConfigurationError, UnknownResourceError

from shoal.launcher.processes.process import start_ticks

_FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """A running local cluster, as recorded in the registry."""

    job_id: str
    coordinator: str
    """Address of the coordinator (host:port)."""
    http: str
    """Address of the coordinator's /metrics (host:port)."""
    redis: str
    command: str
    """Command that started the cluster, shown to users."""
    host: str
    pid: int
    """Process id of the process that runs the cluster."""
    pid_start_ticks: int
    """Start time of the process. Together with the pid, it identifies the process uniquely."""
    started_unix_s: float


def registry_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the directory of the registry: $XDG_RUNTIME_DIR/shoal, otherwise ~/.cache/shoal/run.
    Raises ConfigurationError if there is no home directory."""
    environment = os.environ if environment is None else environment
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "shoal"
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / "shoal" / "run"
    return home_directory("XDG_RUNTIME_DIR") / ".cache" / "shoal" / "run"


def home_directory(instead: str) -> Path:
    """Returns the user's home directory.

    Raises ConfigurationError if there is none. `instead`: name of the variable that makes a home
    directory unnecessary.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigurationError(
            f"HOME is not set and uid {os.getuid()} has no home directory; set HOME or {instead} "
            "to a writable directory"
        ) from None


class Registration:
    """The registry's record of this process's cluster, removed by `close`."""

    def __init__(
        self,
        *,
        job_id: str,
        coordinator: str,
        http: str,
        redis: str,
        command: str,
        directory: Path | None = None,
    ) -> None:
        """Writes the record. Raises OSError if the directory cannot be written, and
        ConfigurationError if there is no home directory."""
        pid = os.getpid()
        record = ClusterRecord(
            job_id=job_id,
            coordinator=coordinator,
            http=http,
            redis=redis,
            command=command,
            host=socket.gethostname(),
            pid=pid,
            pid_start_ticks=start_ticks(pid) or 0,
            started_unix_s=time.time(),
        )
        folder = directory or registry_directory()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / f"{pid}-{coordinator.rpartition(':')[2]}.json"
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        with os.fdopen(descriptor, "w") as file:
            json.dump({"format": _FORMAT, **asdict(record)}, file)
        Path(temporary).rename(self.path)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def running_clusters(directory: Path | None = None) -> list[ClusterRecord]:
    """Returns the running clusters, newest first. Removes the files of processes on this host that
    no longer exist."""
    found: list[ClusterRecord] = []
    try:
        folder = directory or registry_directory()
    except ConfigurationError:
        return []  # without a home directory no cluster could be recorded
    for path in folder.glob("[!.]*.json"):
        record = _read(path)
        if record is None or record.host != socket.gethostname():
            continue
        if start_ticks(record.pid) == record.pid_start_ticks:
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started_unix_s, reverse=True)


def newest_cluster(directory: Path | None = None, *, job: str | None = None) -> ClusterRecord:
    """Returns the newest cluster, or the newest cluster that runs `job`. If there is none, raises
    an UnknownResourceError with the remedy."""
    clusters = running_clusters(directory)
    if clusters and job is not None:
        named = [record for record in clusters if record.job_id == job]
        if not named:
            there = ", ".join(record.job_id for record in clusters)
            raise UnknownResourceError(
                f"no cluster of yours on this machine runs job {job!r} (running jobs: {there}); "
                "name its coordinator with --coordinator HOST:PORT",
                reason="CLUSTER_UNKNOWN",
            )
        return named[0]
    if not clusters:
        raise UnknownResourceError(
            "no cluster of yours is running on this machine; start one (shoal run --standalone "
            "--nproc-per-node 3 train.py), or name a coordinator with --coordinator HOST:PORT "
            "--job ID. `shoal history` lists past runs",
            reason="CLUSTER_UNKNOWN",
        )
    return clusters[0]


def _read(path: Path) -> ClusterRecord | None:
    """Reads an entry of the registry. Returns None for a file that has been removed or was written
    by a different release."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        if content.pop("format", None) == _FORMAT:
            return ClusterRecord(**content)
    return None
