"""The worker processes of one launcher: starting one, and what is known of each. Whether to start one again is `policy`'s to say."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shoal.launcher.environment import (
    NodePlacement,
    WorkerIdentity,
    WorkerPlacement,
    inherited,
    metrics_listen,
    shoal_variables,
    torchrun_variables,
)
from shoal.launcher.output import OutputPump, Source, Stream, rank_prefix
from shoal.launcher.policy import WorkerExit
from shoal.launcher.process import Child, ExitStatus
from shoal.launcher.settings import RunSettings, Streams


@dataclass(kw_only=True, eq=False)
class Worker:
    """One worker process, one incarnation."""

    index: int
    rank: int
    member_id: str
    child: Child
    error_file: Path
    sources: tuple[Source, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its exit has been dealt with."""

    def exit_record(self, status: ExitStatus) -> WorkerExit:
        """The account of its end."""
        return WorkerExit(
            index=self.index,
            rank=self.rank,
            pid=self.child.pid,
            status=status,
            host=socket.gethostname(),
            unix_s=time.time(),
            message=_account(self.error_file),
        )


class WorkerStarter:
    """Starts workers of one run. Belongs to the launcher's main thread."""

    def __init__(self, settings: RunSettings, *, coordinator: str, directory: Path, pump: OutputPump, colour: bool) -> None:
        """`coordinator` is the host:port told to the workers; `directory` is for error files."""
        self.launcher_id = uuid.uuid4().hex
        self._settings = settings
        self._coordinator = coordinator
        self._directory = directory
        self._pump = pump
        self._colour = colour
        self._log_directory = settings.logs.directory and settings.logs.directory / f"{settings.job_id}-{self.launcher_id[:6]}"

    def start(self, index: int, node: NodePlacement, *, restarts: int) -> Worker:
        """Starts worker `index` as a new member. `restarts` counts how often it was started before. Raises OSError."""
        placement = WorkerPlacement(index=index, workers=self._settings.workers, node=node)
        member_id = str(uuid.uuid4())
        error_file = self._directory / f"error-{member_id}.json"
        environment = self._environment(placement, member_id, restarts, error_file)
        child = Child(self._settings.command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stderr is not None
        sources = (
            self._source(child.stdout, Stream.OUT, placement, restarts),
            self._source(child.stderr, Stream.ERR, placement, restarts),
        )
        worker = Worker(index=index, rank=placement.rank, member_id=member_id, child=child, error_file=error_file, sources=sources)
        for source in sources:
            self._pump.attach(source)
        return worker

    def _environment(self, placement: WorkerPlacement, member_id: str, restarts: int, error_file: Path) -> dict[str, str]:
        settings = self._settings
        identity = WorkerIdentity(
            coordinator=self._coordinator,
            job_id=settings.job_id,
            member_id=member_id,
            launcher_id=self.launcher_id,
            metrics_listen=metrics_listen(os.environ, index=placement.index, enabled=settings.metrics),
            record_directory=settings.record_directory,
        )
        return {
            **inherited(os.environ, workers=settings.workers, local=settings.endpoint is None),
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

    def _source(self, pipe: IO[bytes], stream: Stream, placement: WorkerPlacement, restarts: int) -> Source:
        logs, index = self._settings.logs, placement.index
        streams = Streams.OUT if stream is Stream.OUT else Streams.ERR
        file = None
        if self._log_directory is not None and logs.to_file(index, streams):
            file = self._log_directory / f"attempt_{restarts}" / str(index) / f"std{stream.name.lower()}.log"
        prefix = rank_prefix(placement.rank, colour=self._colour)
        return Source(pipe=pipe, stream=stream, prefix=prefix, console=logs.to_console(index, streams), file=file)


def _account(error_file: Path) -> str:
    """What torch's `@record` wrote about an exception: the traceback. Empty where there is nothing, or nothing of that form."""
    try:
        content = json.loads(error_file.read_text(errors="replace"))
        message = content["message"]
        return str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else str(message)
    except (OSError, ValueError, KeyError, TypeError):
        return ""
