"""Checkpoints of a session: what `shoal.save_checkpoint` and `shoal.resume` do on each rank.

The first rank that holds the state alone reads and writes files. Saving copies the state on the training thread and writes it on another;
resuming reads on that rank and sends the state to the others as a joiner would get it. A rank that was put out of the job meanwhile
publishes nothing (`fence`).
"""

from __future__ import annotations

import json
import weakref
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_common.errors import CorruptDataError

from shoal_worker.checkpoint.files import CheckpointInfo, latest, read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.writer import CheckpointWriter
from shoal_worker.state.snapshot import Snapshot

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel
    from shoal_worker.elastic.session import Session

_WRITE_TIMEOUT = timedelta(minutes=30)
_FILES = frozenset({"registered", "sources", "loops", "steps"})
"""Parts of the captured state beside the replica's own (model, optimizer)."""


class CheckpointSaver:
    """Saves a session's state in the background. One per session."""

    def __init__(self) -> None:
        self._writer = CheckpointWriter()

    @classmethod
    def of(cls, session: Session) -> CheckpointSaver:
        """The saver of `session`."""
        return _savers.setdefault(session, cls())

    def save(self, session: Session, directory: Path, *, keep: int) -> None:
        """One rank's part of a save. Returns when the state is copied. Raises what an earlier save on this rank raised."""
        if session.is_joining:
            return
        captured: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            whole = session.assemble(channel)
            captured.clear()
            if channel.rank == 0:
                captured.update(whole)
            channel.exchange(b"")  # who comes out of this knows that the first rank has it

        session.operation("save_checkpoint", body)
        if not captured or not session.is_first:
            return
        self._writer.wait(_WRITE_TIMEOUT)
        snapshot = Snapshot.take(captured.pop("replica") | captured)
        info = CheckpointInfo(
            step=session.steps,
            strategy=session.strategy,
            world_size=session.world_size,
            generation=session.generation,
            shoal_version=version("shoal-worker"),
        )
        self._writer.submit(
            lambda: write_checkpoint(directory, snapshot, info, fence=session.fence(), keep=keep),
            what=f"writing step-{info.step} to {directory}",
            timeout=_WRITE_TIMEOUT,
        )

    def close(self, timeout: timedelta) -> None:
        """Waits for the save under way. Raises what it raised, or DeadlineError."""
        self._writer.close(timeout)


_savers: weakref.WeakKeyDictionary[Session, CheckpointSaver] = weakref.WeakKeyDictionary()


def load_newest(session: Session, directory: Path) -> bool:
    """One rank's part of a resume: see `shoal.resume`."""
    if session.is_joining:
        session.on_state_lost(lambda: _load_alone(session, directory))
        return False

    def body(channel: Channel) -> bool:
        captured, told = _read(directory) if channel.rank == 0 else (None, {})
        told = json.loads(channel.exchange(json.dumps(told).encode())[0])
        if told["error"] is not None:
            raise CorruptDataError(told["error"], reason=told["reason"])
        if told["found"]:
            session.replace_state(channel, captured)
        return bool(told["found"])

    return bool(session.operation("resume", body))


def _load_alone(session: Session, directory: Path) -> None:
    captured, told = _read(directory)
    if told["error"] is not None:
        raise CorruptDataError(told["error"], reason=told["reason"])
    if captured is not None:
        session.restore_alone(captured)


def _read(directory: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The newest checkpoint, and what to tell the other ranks about it."""
    found = latest(directory)
    if found is None:
        return None, {"found": False, "error": None}
    try:
        state = read_checkpoint(found).state
    except CorruptDataError as error:
        return None, {"found": True, "error": str(error), "reason": error.reason}
    captured = {name: state.pop(name) for name in list(state) if name in _FILES}
    return {"replica": state, **captured}, {"found": True, "error": None}
