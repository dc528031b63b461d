"""Collects stack traces that explain a stalled step: of this process while it makes no progress,
and of other processes on this machine that cannot report their own.

This process reads its own stacks in Python. The stacks of its data workers and of other members
come from faulthandler in the other process (`shoal_common.system.stacks`), which works even while a
call holds Python's global lock. If a hung process's heartbeats have stopped, the coordinator asks a
member on the same machine to read its stacks (`NeighbourStacks`).

Runs on the stall watch's thread. Each check takes at most a second."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from shoal_common.errors import ShoalError
from shoal_common.system.kernel_waits import kernel_wait, process_state
from shoal_common.system.stacks import read_stacks, serving_children

from shoal_worker.elastic.coordinator.progress import LOCATE_AFTER_S, ProgressMeter
from shoal_worker.elastic.coordinator.script_lines import (
    DATA_WORKER,
    Call,
    calls_of,
    folded,
    parse_calls,
    runs_script,
    script_line,
)

LONGEST: Final = 4096
"""Maximum length of the stacks of one process, in characters."""
_AGAIN_S: Final = 10.0
"""Interval at which the stacks of a process that makes no progress are read again."""
_BUDGET_S: Final = 1.0
"""Time limit for reading the stacks of other processes, in seconds."""
_MOST_CHILDREN: Final = 8
_STOPPED: Final = ("T ", "t ")
_MAIN: Final = "training thread"
_MULTIPROCESSING: Final = "/multiprocessing/"


class HangReport:
    """The latest stack traces of this process. Whenever new ones have been read, they become due:
    the next heartbeat must contain them."""

    def __init__(self, progress: ProgressMeter) -> None:
        self._progress = progress
        self._due = ""
        self._read: tuple[int, float] = (-1, 0.0)
        """Value of `Progress.sequence` when the stacks were last read, and the time of that
        reading."""

    def look(self) -> None:
        """Reads the stacks if this process makes no progress and its stacks have not been read
        recently. Called once a second."""
        progress = self._progress
        sequence, now = progress.sequence, time.monotonic()
        if progress.still_s < LOCATE_AFTER_S:
            progress.data_worker = self._due = ""
            return
        if sequence == self._read[0] and now < self._read[1] + _AGAIN_S:
            return
        self._read = sequence, now
        calls = calls_of(progress.thread)
        parts = [(_MAIN, folded(calls))]
        if not progress.waits.now[0]:  # if this process is waiting for others, they are the cause
            parts += _other_threads(progress.thread)
            # no process receives a signal unnecessarily
            if script_line(calls).endswith(DATA_WORKER):
                parts += self._data_workers(now + _BUDGET_S)
        self._due = _joined(parts)

    def take(self) -> str:
        """Returns the stack traces if they are due, otherwise an empty string. Afterwards they are
        no longer due. Called on gRPC's thread."""
        due, self._due = self._due, ""
        return due

    def _data_workers(self, until: float) -> list[tuple[str, str]]:
        parts, busy = [], ""
        for child in serving_children(os.getpid())[:_MOST_CHILDREN]:
            seen = _look_at(child, until)
            parts.append((f"child process {child}{seen.remark}", folded(seen.calls)))
            busy = busy or (seen.line if runs_script(seen.calls) else "") or seen.stopped
        self._progress.data_worker = busy
        return parts


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Stack traces of another member on this machine, whose heartbeats have stopped."""

    member_id: str
    script_line: str
    stacks: str


def neighbour_stacks(member_id: str, pid: int) -> Neighbour | None:
    """Returns the stacks of another member on this machine. Returns None if this process cannot see
    the other process, for example because it runs in a different container."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if b"SHOAL_MEMBER_ID=" + member_id.encode() not in variables:
        return None
    seen = _look_at(pid, time.monotonic() + _BUDGET_S)
    if not seen.calls and not seen.stopped:
        return None
    where = seen.line or "in no line of the script"
    return Neighbour(
        member_id=member_id,
        script_line=f"{where}; it is {seen.stopped}"
        if seen.stopped
        else f"{where}, in a call that holds Python's lock",
        stacks=_joined([(_MAIN, folded(seen.calls) or f"  the process is {seen.stopped}")]),
    )


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Findings about the main thread of another process."""

    calls: Sequence[Call]
    line: str
    stopped: str
    """Reason why the stack could not be read: the process is stopped, or does not respond. Empty if
    it was read."""

    @property
    def remark(self) -> str:
        return f" ({self.stopped})" if self.stopped else ""


def _look_at(pid: int, until: float) -> _Seen:
    """Reads the stack of another process. Gives up at the time `until` (a value of
    time.monotonic())."""
    state = process_state(pid)
    if state.startswith(_STOPPED):
        what = "stopped" if state.startswith("T") else "stopped by a debugger"
        return _Seen(calls=(), line="", stopped=f"{what} (pid {pid})")
    try:
        left = timedelta(seconds=max(0.05, until - time.monotonic()))
        stacks = read_stacks(pid, timeout=left)
    except ShoalError:
        dead = not process_state(pid) or process_state(pid).startswith("Z")
        what = "dead" if dead else f"without an answer in state {process_state(pid)}"
        return _Seen(calls=(), line="", stopped=f"{what} (pid {pid})")
    calls = _since_fork(parse_calls(stacks[0])) if stacks else []
    return _Seen(calls=calls, line=script_line(calls, kernel_wait(pid, pid=pid)), stopped="")


def _since_fork(calls: Sequence[Call]) -> Sequence[Call]:
    """Returns `calls` without the calls that the process inherited from its parent, if
    multiprocessing has forked it."""
    begins = itertools.takewhile(
        lambda call: not (call.function == "_bootstrap" and _MULTIPROCESSING in call.file), calls
    )
    return list(begins)


def _other_threads(training: int) -> list[tuple[str, str]]:
    """Returns the stacks of other threads that execute the script, as (heading, stack). Threads
    with the same stack share one entry."""
    names: dict[str, list[str]] = {}
    for thread in threading.enumerate():
        if thread.ident not in (None, training) and thread.name[:6] != "shoal-":
            calls = calls_of(thread.ident or 0)
            if runs_script(calls):
                names.setdefault(folded(calls), []).append(thread.name)
    return [(f"thread {_several(each)}", stack) for stack, each in names.items()]


def _several(names: Sequence[str]) -> str:
    first, *others = names
    return first if not others else f"{first} and {len(others)} more like it"


def _joined(parts: Sequence[tuple[str, str]]) -> str:
    """Joins stacks into one text of at most `LONGEST` characters. The training thread's stack comes
    first, without a heading; each other stack has one."""
    text = "\n".join(
        stack if name == _MAIN else f"{name}:\n{stack}".rstrip(":\n") for name, stack in parts
    )
    return text if len(text) <= LONGEST else text[: LONGEST - 4].rpartition("\n")[0] + "\n  ..."
