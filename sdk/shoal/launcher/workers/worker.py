"""Starts the worker processes of one launcher and tracks their state. `policy` decides whether they
are restarted."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Final

from shoal_common.formats.runs import Run
from shoal_common.formats.tally import read_tally
from shoal_common.system.own_address import OwnAddress, interface_of

from shoal.launcher.processes.credentials import secrets_as_files
from shoal.launcher.processes.process import Child, ExitStatus
from shoal.launcher.workers.environment import (
    NodePlacement,
    WorkerIdentity,
    WorkerPlacement,
    inherited,
    interface_variables,
    metrics_listen,
    shoal_variables,
    slice_variables,
    torchrun_variables,
)
from shoal.launcher.workers.output import OutputPump, Source, Stream, rank_prefix
from shoal.launcher.workers.policy import WorkerExit
from shoal.launcher.workers.settings import RunSettings, Streams
from shoal.launcher.workers.warm import WarmWorkers

_REMINDER_S: Final = 10.0
"""Interval in seconds between messages about workers that have not exited."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """One worker process, from its start to its exit."""

    index: int
    rank: int
    member_id: str
    member_key: str
    """Secret that proves to the coordinator that a report about the worker comes from the worker's
    launcher."""
    child: Child
    error_file: Path
    member_file: Path
    tally_file: Path
    """File with the worker's counts of its commits (`shoal_common.formats.tally`)."""
    sources: tuple[Source, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once the launcher has processed the worker's exit."""
    has_succeeded: bool = False
    """True if the worker's process has exited with status 0."""

    @property
    def has_joined(self) -> bool:
        """True if the worker has recorded that it has joined the job. This shows that the script is
        elastic, even while the coordinator cannot be asked."""
        return bool(self._said())

    @property
    def has_finished(self) -> bool:
        """True if the worker has recorded that its script finished without having been asked to
        leave or stop."""
        return self._said() == "finished"

    def may_hang(self, quiet: timedelta) -> bool:
        """Returns whether the worker has joined its job, has not finished its script, and has not
        committed a step for the time `quiet`."""
        if self._said() != "joined":
            return False
        tally = read_tally(self.tally_file)
        return (
            tally is None
            or time.monotonic_ns() - tally.spans[-1].last_ns > quiet.total_seconds() * 1e9
        )

    def exit_record(self, status: ExitStatus, *, rank: int = -1) -> WorkerExit:
        """Returns the record of the worker's exit. `rank`: last rank according to the coordinator;
        -1 if unknown."""
        raised = _account(self.error_file)
        return WorkerExit(
            index=self.index,
            rank=next((known for known in (raised.rank, rank) if known >= 0), self.rank),
            started_as=self.rank,
            pid=self.child.pid,
            status=status,
            host=socket.gethostname(),
            unix_s=raised.unix_s or time.time(),
            message=raised.message,
            traceback=raised.traceback,
        )

    def _said(self) -> str:
        try:
            return self.member_file.read_text().strip()
        except FileNotFoundError:
            return ""


class WorkerStarter:
    """Starts the workers of one run. Belongs to the launcher's main thread."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        coordinator: str,
        directory: Path,
        pump: OutputPump,
        note: Callable[[str], None],
        colour: bool,
    ) -> None:
        """`coordinator`: address (host:port) that is passed to the workers. `directory`: directory
        for error files. `note`: callback that shows a message to the user."""
        self.launcher_id = uuid.uuid4().hex
        self.run: Run | None = None
        """Run that the workers take part in; None: the newest run of a job that can have only one
        run."""
        self._settings = settings
        self._coordinator = coordinator
        self._directory = directory
        self._pump = pump
        self._colour = colour
        self.warm = WarmWorkers(
            settings.command, self._common_environment(), wanted=settings.warm, note=note
        )
        # a bucket may keep the logs of all launchers and runs of a job
        digits = 6 if settings.logs.url is None else 12
        self._log_directory = (
            settings.logs.directory
            and settings.logs.directory / f"{settings.job_id}-{self.launcher_id[:digits]}"
        )

    def start(self, index: int, node: NodePlacement, *, restarts: int) -> Worker:
        """Starts worker `index` as a new member. `restarts`: number of earlier starts of this
        worker. Raises OSError."""
        placement = WorkerPlacement(index=index, workers=self._settings.workers, node=node)
        member_id, member_key = str(uuid.uuid4()), secrets.token_hex(16)
        error_file = self._directory / f"error-{member_id}.json"
        member_file, tally_file = (
            self._directory / f"member-{member_id}",
            self._directory / f"tally-{member_id}",
        )
        environment = self._environment(
            placement, member_id, member_key, restarts, error_file, member_file, tally_file
        )
        child = self.warm.start(self._settings.command, environment)
        assert child.stdout is not None
        assert child.stderr is not None
        sources = (
            self._source(child.stdout, Stream.OUT, placement, restarts),
            self._source(child.stderr, Stream.ERR, placement, restarts),
        )
        worker = Worker(
            index=index,
            rank=placement.rank,
            member_id=member_id,
            member_key=member_key,
            child=child,
            error_file=error_file,
            member_file=member_file,
            tally_file=tally_file,
            sources=sources,
        )
        for source in sources:
            self._pump.attach(source)
        return worker

    def _environment(
        self,
        placement: WorkerPlacement,
        member_id: str,
        member_key: str,
        restarts: int,
        error_file: Path,
        member_file: Path,
        tally_file: Path,
    ) -> dict[str, str]:
        settings = self._settings
        identity = WorkerIdentity(
            coordinator=self._coordinator,
            job_id=settings.job_id,
            run=self.run,
            member_id=member_id,
            member_key=member_key,
            launcher_id=self.launcher_id,
            member_file=member_file,
            tally_file=tally_file,
            metrics_listen=metrics_listen(
                os.environ, index=placement.index, enabled=settings.metrics
            ),
            record_directory=self._record_directory,
            allow_restart_from_scratch=settings.allow_restart_from_scratch,
            local_address=settings.local_address if settings.endpoint is not None else None,
            listen_address=settings.listen_address if settings.endpoint is not None else None,
        )
        return {
            **self._common_environment(),
            **slice_variables(os.environ, index=placement.index),
            **torchrun_variables(
                placement,
                run_id=settings.job_id,
                role=settings.role,
                restarts=restarts,
                max_restarts=settings.max_restarts or 0,
                error_file=error_file,
            ),
            **shoal_variables(identity, index=placement.index),
        }

    def _common_environment(self) -> dict[str, str]:
        settings = self._settings
        return {
            **inherited(os.environ, workers=settings.workers, local=settings.endpoint is None),
            **({} if settings.endpoint is None else secrets_as_files(self._directory)),
            **self._interface_variables(),
        }

    def _interface_variables(self) -> dict[str, str]:
        """Returns the variables that make torch's own process groups (in plain scripts and under
        NCCL) use the interface of `--local-addr`. Omits variables that the user has already set."""
        settings = self._settings
        if settings.endpoint is None or not settings.local_address:
            return {}
        # it imports pydantic, which workers should not wait for
        from shoal_common.settings import parse_address

        endpoint = parse_address(settings.endpoint)
        own = OwnAddress.find(
            settings.local_address, settings.listen_address, towards=(endpoint.host, endpoint.port)
        )
        return interface_variables(os.environ, interface_of(own.announced))

    @property
    def _record_directory(self) -> Path | None:
        """Directory for records of samples. Each run has a separate directory, since every sample
        must be counted once per run."""
        base = self._settings.record_directory
        return base if base is None or self.run is None else base / f"run-{self.run.number}"

    def _source(
        self, pipe: IO[bytes], stream: Stream, placement: WorkerPlacement, restarts: int
    ) -> Source:
        logs, index = self._settings.logs, placement.index
        streams = Streams.OUT if stream is Stream.OUT else Streams.ERR
        file = None
        if self._log_directory is not None and logs.to_file(index, streams):
            file = (
                self._log_directory
                / f"attempt_{restarts}"
                / str(index)
                / f"std{stream.name.lower()}.log"
            )
        prefix = rank_prefix(placement.rank, colour=self._colour)
        return Source(
            pipe=pipe,
            stream=stream,
            prefix=prefix,
            console=logs.to_console(index, streams),
            file=file,
        )


async def all_ended(
    workers: Collection[Worker], timeout: timedelta, *, note: Callable[[str], None]
) -> bool:
    """Waits until `workers` is empty; the caller removes workers that have exited. Lists the
    remaining workers every 10 s. Returns False if some remain after `timeout`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout.total_seconds()
    while waits := [asyncio.ensure_future(worker.ended.wait()) for worker in workers]:
        left_s = deadline - loop.time()
        _, pending = await asyncio.wait(waits, timeout=max(0.0, min(left_s, _REMINDER_S)))
        for wait in pending:
            wait.cancel()
        if pending and left_s <= _REMINDER_S:
            return False
        if pending:
            note(f"waiting up to {left_s - _REMINDER_S:.0f} s longer for {named(workers)} to end")
    return True


def named(workers: Iterable[Worker]) -> str:
    """Returns a human-readable list of the workers."""
    return ", ".join(
        f"rank {worker.rank} (pid {worker.child.pid})"
        for worker in sorted(workers, key=lambda worker: worker.index)
    )


@dataclass(frozen=True, kw_only=True)
class _Account:
    """A worker's record of its fatal exception."""

    message: str = ""
    traceback: str = ""
    rank: int = -1
    unix_s: float = 0.0


def _account(error_file: Path) -> _Account:
    """Reads a record in the format of torch's `@record`, extended by Shoal's rank and time. Returns
    an empty record if the file is missing or has a different format."""
    try:
        content = json.loads(error_file.read_text(errors="replace"))
        message = content["message"]
        if not isinstance(message, dict):
            return _Account(message=str(message), traceback=str(message))
        own = content.get("shoal", {})
        return _Account(
            message=str(message["message"]),
            traceback=own.get("brief") or str(message["extraInfo"]["py_callstack"]),
            rank=int(own.get("rank", -1)),
            unix_s=float(own.get("unix_s", 0.0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Account()
