"""A worker's ledger: which samples it tried in which step, and which steps it committed.

One file of JSON lines per process, one `write` per line, so that a SIGKILL truncates at most the
last line. A worker records its samples before it computes their gradient. A worker that was killed
after the others received its gradient has therefore recorded them, although it never recorded the
commit; a step counts once any worker has recorded its commit. Times are CLOCK_MONOTONIC, which all
processes of a machine share. No torch here: the harness imports this module too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workers.failures.task import LEDGER_SUFFIX
from benchmarks.workers.steplog import Tails


class Ledger:
    """Writes this process's file. Used only from the training thread."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"{os.getpid()}{LEDGER_SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._write("started")

    def tried(self, *, group: int, world_size: int, step: int, samples: Sequence[int]) -> None:
        """Notes samples of this process's share of a step, before their gradient is computed.

        Args:
            group: number of the membership in which the step is taken; newer ones are higher.
            world_size: workers of that membership.
            step: number of the step, from 1.
            samples: indices in the dataset. Calls for the same group and step add up.
        """
        self._write(
            "tried", group=group, world_size=world_size, step=step, samples=list(map(int, samples))
        )

    def committed(self) -> None:
        """Records that the step that was tried last has changed this process's parameters."""
        self._write("committed")

    def saved(self, seconds: float) -> None:
        """Records how long a checkpoint delayed this process."""
        self._write("saved", seconds=seconds)

    def finished(self, *, digest: str) -> None:
        """Records the digest of the final parameters."""
        self._write("finished", digest=digest)

    def _write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "time_ns": time.monotonic_ns(), **fields})
        os.write(self._file, line.encode() + b"\n")


@dataclass(kw_only=True)
class Attempt:
    """One step as one process tried it."""

    group: int
    world_size: int
    step: int
    samples: list[int]
    committed_ns: int | None = None
    """Time of the commit; None: this process recorded no commit."""


@dataclass(kw_only=True)
class Entries:
    """Content of one process's ledger."""

    started_ns: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    digest: str = ""
    """Digest of the final parameters; empty until the process has finished."""

    def add(self, entry: dict[str, Any]) -> None:
        """Adds one line."""
        match entry["kind"]:
            case "started":
                self.started_ns = entry["time_ns"]
            case "tried":
                last = self.attempts[-1] if self.attempts else None
                if (
                    last is not None
                    and last.committed_ns is None
                    and (last.group, last.step) == (entry["group"], entry["step"])
                ):
                    last.samples.extend(entry["samples"])
                else:
                    self.attempts.append(
                        Attempt(
                            group=entry["group"],
                            world_size=entry["world_size"],
                            step=entry["step"],
                            samples=entry["samples"],
                        )
                    )
            case "committed":
                self.attempts[-1].committed_ns = entry["time_ns"]
            case "saved":
                self.saved_s.append(entry["seconds"])
            case "finished":
                self.digest = entry["digest"]


class Ledgers:
    """Reads the ledgers of all processes of a run, as they grow."""

    def __init__(self, directory: Path) -> None:
        self._tails = Tails(directory, suffix=LEDGER_SUFFIX)
        self.of: dict[int, Entries] = {}
        """Ledgers by the pids of their processes."""

    def read(self) -> None:
        """Reads what was written since the last call."""
        for pid, lines in self._tails.read():
            entries = self.of.setdefault(pid, Entries())
            for line in lines:
                entries.add(json.loads(line))
