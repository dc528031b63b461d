"""Settings of a run: parses and validates the values of torchrun's flags.

The command line itself is in `shoal.cli`. A mistake raises a ConfigurationError that names the
flag, its value and the remedy.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntFlag
from pathlib import Path
from typing import Final

from shoal_common.errors import ConfigurationError

from shoal.launcher.machines.notices import NoticeSource
from shoal.launcher.workers.environment import visible_slices

_MOST_WORKERS: Final = 10_000
_PLAIN_GRACE: Final = timedelta(seconds=30)
_ELASTIC_GRACE: Final = timedelta(minutes=5)
_COUNT_DEVICES: Final = "import torch; print(torch.cuda.device_count())"
_DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""Files that exist only if a CUDA driver is installed: on Linux, on WSL 2 under Windows, and on a
Jetson."""


@dataclass(frozen=True)
class NodeRange:
    """Value of `--nnodes`: minimum and maximum number of launchers, one per machine."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """Parses the value of `--nnodes`, such as `2` or `1:4`."""
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
        if match is None:
            raise ConfigurationError(
                f"--nnodes {text!r}: expected a number or MIN:MAX, as in 2 or 1:4"
            )
        least, most = int(match[1]), int(match[2] or match[1])
        if not 1 <= least <= most:
            raise ConfigurationError(f"--nnodes {text!r}: expected 1 <= MIN <= MAX")
        return cls(least, most)

    @property
    def fixed(self) -> bool:
        return self.least == self.most


def parse_workers(text: str) -> int:
    """Parses the value of `--nproc-per-node`: a number, `cpu` (cores), `gpu` (CUDA devices, at
    least one) or `auto` (gpu, otherwise cpu)."""
    if text == "cpu":
        return _cores()
    if text in ("gpu", "auto"):
        devices = cuda_devices()
        if text == "gpu" and devices == 0:
            raise ConfigurationError(
                "--nproc-per-node gpu: torch sees no CUDA device here; use a number, cpu or auto"
            )
        return devices or _cores()
    if not re.fullmatch(r"\d{1,5}", text) or not 1 <= int(text) <= _MOST_WORKERS:
        raise ConfigurationError(
            f"--nproc-per-node {text!r}: expected a number from 1 to {_MOST_WORKERS}, or one of "
            "auto, cpu, gpu"
        )
    return int(text)


def cuda_devices() -> int:
    """Returns the number of CUDA devices that torch sees. If CUDA_VISIBLE_DEVICES lists only MIG
    slices, returns their number, since torch sees only one slice per process.

    torch runs in a separate process, and only if there is a driver, because importing it is slow.
    """
    if slices := visible_slices(os.environ):
        return len(slices)
    if not any(driver.exists() for driver in _DRIVERS):
        return 0
    answer = subprocess.run(
        [sys.executable, "-P", "-c", _COUNT_DEVICES],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if answer.returncode != 0:
        raise ConfigurationError(
            f"torch cannot count the CUDA devices: {answer.stderr.strip()[-500:]}; pass a number "
            "to --nproc-per-node"
        )
    return int(answer.stdout)


def _cores() -> int:
    return os.cpu_count() or 1


class Streams(IntFlag):
    """Set of a worker's output streams, encoded with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


def parse_streams(flag: str, text: str) -> Mapping[int, Streams] | Streams:
    """Parses the value of `--redirects` or `--tee`: `3` for all workers, or `0:1,2:3` by local
    rank."""
    if re.fullmatch(r"[0-3]", text):
        return Streams(int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigurationError(
            f"{flag} {text!r}: expected 0, 1, 2 or 3 (none, stdout, stderr, both), or values by "
            "local rank, as in 0:3,1:2"
        )
    return {
        int(rank): Streams(int(streams))
        for rank, streams in (part.split(":") for part in text.split(","))
    }


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Destinations of the workers' output in addition to, or instead of, the console."""

    directory: Path | None = None
    """Base directory of the log files, with a subdirectory for each run; None: no files."""
    url: str | None = None
    """URL to which the files in `directory` are uploaded; None: they are not uploaded."""
    upload_timeout: timedelta = timedelta(0)
    """Maximum time that the end of the run waits for uploads."""
    redirects: Mapping[int, Streams] | Streams = Streams.NONE
    """Streams that are written only to files."""
    tee: Mapping[int, Streams] | Streams = Streams.NONE
    """Streams that are written both to files and to the console."""
    console_ranks: frozenset[int] | None = None
    """Local ranks shown on the console; None: all."""

    @classmethod
    def parse(
        cls, *, place: str | None, redirects: str, tee: str, console_ranks: str
    ) -> LogSettings:
        """Parses the values of the flags.

        `place` is the directory or URL for log files. If only `place` is given, all output is
        stored there. If only `redirects` or `tee` is given, a directory is created in /tmp. If
        `place` is a URL, the files are first written to the staging directory.
        """
        to_files, to_both = parse_streams("--redirects", redirects), parse_streams("--tee", tee)
        if place is not None and not to_files and not to_both:
            to_both = Streams.BOTH
        directory, url, upload_timeout = None, None, timedelta(0)
        if place is not None:
            directory, url, upload_timeout = _resolve(place)
        elif to_files or to_both:
            directory = Path(tempfile.mkdtemp(prefix="shoal-logs-"))
        if console_ranks and not re.fullmatch(r"\d+(,\d+)*", console_ranks):
            raise ConfigurationError(
                f"--local-ranks-filter {console_ranks!r}: expected local ranks, as in 0,1"
            )
        shown = frozenset(map(int, console_ranks.split(","))) if console_ranks else None
        return cls(
            directory=directory,
            url=url,
            upload_timeout=upload_timeout,
            redirects=to_files,
            tee=to_both,
            console_ranks=shown,
        )

    def to_file(self, index: int, stream: Streams) -> bool:
        return self.directory is not None and bool(
            stream & (_of(self.redirects, index) | _of(self.tee, index))
        )

    def to_console(self, index: int, stream: Streams) -> bool:
        shown = self.console_ranks is None or index in self.console_ranks
        return shown and bool(stream & (~_of(self.redirects, index) | _of(self.tee, index)))


def _resolve(place: str) -> tuple[Path, str | None, timedelta]:
    """Returns the directory for log files, their URL and the maximum wait for uploads. Raises
    ConfigurationError for an invalid URL or invalid settings."""
    # imported here, because other commands import this module and do without fsspec and pydantic
    from shoal_worker.object_storage import ObjectFolder, is_url, local_path

    if not is_url(place):
        scheme = re.match(r"(s3|gs|az):/", place)
        if scheme is not None:
            raise ConfigurationError(
                f"--log-dir {place}: expected two slashes, as in {scheme[1]}://bucket/logs"
            )
        return local_path(place), None, timedelta(0)
    from shoal_worker.settings import WorkerSettings

    ObjectFolder.check(place)
    settings = WorkerSettings.load()
    directory = settings.staging / f"logs-{secrets.token_hex(4)}"
    return directory, place.rstrip("/"), settings.upload_timeout


def _of(streams: Mapping[int, Streams] | Streams, index: int) -> Streams:
    return streams if isinstance(streams, Streams) else streams.get(index, Streams.NONE)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of one `shoal run` on one machine."""

    command: tuple[str, ...]
    """Command line of each worker process."""
    program: str
    """Name of the script or module, shown to users."""
    job_id: str
    workers: int
    """Number of worker processes on this machine."""
    nodes: NodeRange = NodeRange(1, 1)
    min_workers: int | None = None
    """Minimum number of workers to continue training once it has started; None: the default of
    `min_survivors`."""
    endpoint: str | None = None
    """Address of a running coordinator (host:port); None: the run starts its own cluster."""
    servers: int = 0
    """Number of parameter servers of the job. Without an `endpoint`, this run starts them."""
    server_backups: int = 0
    """Number of backups per server, 0 or 1. Without an `endpoint`, this run starts them."""
    max_servers: int = 0
    """Maximum number of parameter servers; 0: `servers`. Servers in addition to `servers` are
    started by other programs."""
    run: int = 0
    """Number of the run to take part in; 0: the current run or, if there is none, the next run."""
    resume: bool = False
    """True to continue the newest run if it failed or was stopped."""
    max_restarts: int | None = None
    """Maximum number of restarts; None: the default of `policy`."""
    fail_fast: bool = True
    """True to end the job if an elastic worker raises an exception and is not restarted."""
    fail_on_stop: bool = False
    """True if a run that was asked to stop exits with the status of an unfinished run."""
    allow_restart_from_scratch: bool = False
    """True if workers may start at step 0 although all processes with the training state have died
    and no checkpoint was loaded."""
    join_grace: timedelta | None = None
    """Maximum time that a generation waits for more workers than the minimum; None: 30 s if the
    number of nodes is fixed, otherwise 5 s."""
    join_timeout: timedelta = timedelta(minutes=10)
    """Maximum time that the launchers wait for each other."""
    shutdown_timeout: timedelta | None = None
    """Time between SIGTERM and SIGKILL; None: the default of `shutdown_grace`."""
    node_rank: int | None = None
    """Rank of this launcher, if it is fixed by a flag together with `master_address`; None: the
    launchers agree on their ranks."""
    master_address: str | None = None
    master_port: int | None = None
    local_address: str | None = None
    """Address, interface or host name that other nodes use to reach this one; None: determined
    automatically. Unused without `endpoint`."""
    listen_address: str | None = None
    """Address to listen on, if it differs from `local_address`; None: not given. Unused without
    `endpoint`."""
    role: str = "default"
    logs: LogSettings = field(default_factory=LogSettings)
    record_directory: Path | None = None
    metrics: bool = True
    warm: bool = True
    """True to fork workers from a process that has imported torch, if possible."""
    progress: bool = True
    """True to show the run's progress."""
    preemption_notice: NoticeSource = NoticeSource.NONE
    """Cloud provider to watch for preemption notices."""
    health_checks: bool = False
    """True to check this machine's health before its workers start, and after a worker has
    failed."""
    plot: str | None = None
    """Path or URL of the plot drawn at the end, a .png or .svg; None: no plot."""

    def __post_init__(self) -> None:
        if self.endpoint is None and self.nodes != NodeRange(1, 1):
            raise ConfigurationError(
                f"--nnodes {self.nodes.least}:{self.nodes.most} requires --rdzv-endpoint, the "
                "address of a coordinator that all machines can reach; start one "
                "(shoal-coordinator --listen 0.0.0.0:7000 ...) and pass --rdzv-endpoint HOST:7000"
            )
        if self.endpoint is None and (self.run or self.resume):
            raise ConfigurationError(
                f"{'--resume' if self.resume else f'--run {self.run}'} requires --rdzv-endpoint, "
                "because without it the run starts a new cluster, which has no record of earlier "
                "runs; pass the address of the coordinator that ran the job"
            )
        if self.run < 0:
            raise ConfigurationError(
                f"--run {self.run}: expected the number of a run, 1 or more, or 0 for the current "
                "or next run"
            )
        if self.nodes.most * self.workers > _MOST_WORKERS:
            raise ConfigurationError(
                f"{self.nodes.most} nodes with {self.workers} workers each exceed {_MOST_WORKERS}, "
                "the maximum number of workers in a job"
            )
        if (
            self.min_workers is not None
            and not 1 <= self.min_workers <= self.nodes.least * self.workers
        ):
            raise ConfigurationError(
                f"--min-workers {self.min_workers}: expected 1 to "
                f"{self.nodes.least * self.workers}, the number of workers that the run begins with"
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ConfigurationError(f"--max-restarts {self.max_restarts}: expected 0 or more")
        if self.shutdown_timeout is not None and self.shutdown_timeout < timedelta(0):
            raise ConfigurationError(
                f"--shutdown-timeout {self.shutdown_timeout.total_seconds():g}: expected 0 seconds "
                "or more"
            )
        if self.servers < 0:
            raise ConfigurationError(f"--servers {self.servers}: expected 0 or more")
        if self.server_backups and not self.servers:
            raise ConfigurationError(
                f"--server-backups {self.server_backups} requires --servers, the number of "
                "servers; set it too"
            )
        if self.max_servers and not self.servers:
            raise ConfigurationError(
                f"--max-servers {self.max_servers} requires --servers, the initial number of "
                "servers; set it too"
            )
        if self.max_servers and self.max_servers < self.servers:
            raise ConfigurationError(
                f"--max-servers {self.max_servers}: expected at least {self.servers}, the value of "
                "--servers"
            )
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ConfigurationError(f"--master-port {self.master_port}: expected 1 to 65535")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes.most:
            raise ConfigurationError(
                f"--node-rank {self.node_rank}: expected 0 to {self.nodes.most - 1}, since "
                f"--nnodes is {self.nodes.most}"
            )

    def shutdown_grace(self, *, elastic: bool) -> timedelta:
        """Returns the time between SIGTERM and SIGKILL after the launcher has been asked to exit.

        Elastic workers continue to their next step boundary and may then write a checkpoint. A
        caller that cannot wait so long (a batch system) sends SIGKILL itself.
        """
        if self.shutdown_timeout is not None:
            return self.shutdown_timeout
        return _ELASTIC_GRACE if elastic else _PLAIN_GRACE

    @property
    def failure_grace(self) -> timedelta:
        """Time between SIGTERM and SIGKILL after the run has failed."""
        return self.shutdown_grace(elastic=False)

    @property
    def min_survivors(self) -> int:
        """Minimum number of workers to continue training once it has started. The default is 1 if
        the number of machines is fixed, as on one machine. With `--nnodes MIN:MAX`, it is the
        number of workers on MIN machines."""
        return self.min_workers or (1 if self.nodes.fixed else self.nodes.least * self.workers)

    @property
    def effective_join_grace(self) -> timedelta:
        return self.join_grace or timedelta(seconds=30 if self.nodes.fixed else 5)


def worker_command(
    program: str, arguments: Sequence[str], *, module: bool, python: bool
) -> tuple[str, ...]:
    """Returns the command line of a worker: `python -u program ...`, as in torchrun, so that output
    is not buffered."""
    if not python:
        if module:
            raise ConfigurationError(
                "--module and --no-python cannot be combined, because a module is run by Python; "
                "pass only one of them"
            )
        return (program, *arguments)
    if module:
        return (sys.executable, "-u", "-m", program, *arguments)
    if not Path(program).is_file():
        what = "is a directory" if Path(program).is_dir() else "does not exist"
        raise ConfigurationError(
            f"the script {program!r} {what} here ({Path.cwd()}); use -m for a module, or shoal run "
            "--no-python for another program"
        )
    return (sys.executable, "-u", program, *arguments)
