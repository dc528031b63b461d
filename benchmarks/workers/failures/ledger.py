"""A worker's ledger: a record of the samples that it tried in each step, and of the steps that it
committed.

A ledger is a file of JSON lines. Each line is written by a single `write`, so that a SIGKILL
truncates at most the last one. A worker records its samples before it computes their gradient. If a
worker is killed after the others have received its gradient, its samples are therefore in its
ledger, although its commit is not. A step is considered committed if any worker has recorded the
commit.

Times are by CLOCK_MONOTONIC, which all processes of a machine share. The module does not import
torch, because the harness imports it too.
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
    """Writes the ledger of this process. Used only from the training thread."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"{os.getpid()}{LEDGER_SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._write("started")

    def tried(self, *, group: int, world_size: int, step: int, samples: Sequence[int]) -> None:
        """Records samples that this process is going to train in a step. Must be called before
        their gradient is computed. Several calls for the same group and step add samples.

        Args:
            group: number of the membership in which the step is taken. Newer memberships have
                higher numbers.
            world_size: number of workers in that membership.
            step: number of the step, from 1.
            samples: indices of the samples in the dataset.
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
    """One process's attempt at one step."""

    group: int
    world_size: int
    step: int
    samples: list[int]
    committed_ns: int | None = None
    """Time of the commit in ns; None if this process did not record a commit."""


@dataclass(kw_only=True)
class Entries:
    """Contents of one process's ledger."""

    started_ns: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    digest: str = ""
    """Digest of the final parameters; empty until the process has finished."""

    def add(self, entry: dict[str, Any]) -> None:
        """Adds a parsed line of the ledger."""
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
    """Reads the ledgers of all processes of a run while they grow."""

    def __init__(self, directory: Path) -> None:
        self._tails = Tails(directory, suffix=LEDGER_SUFFIX)
        self.of: dict[int, Entries] = {}
        """Ledgers by the pids of their processes."""

    def read(self) -> None:
        """Reads the lines that were written since the last call."""
        for pid, lines in self._tails.read():
            entries = self.of.setdefault(pid, Entries())
            for line in lines:
                entries.add(json.loads(line))
