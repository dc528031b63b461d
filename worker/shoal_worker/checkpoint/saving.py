"""Checkpoints of a session: implements `shoal.save_checkpoint` and `shoal.resume` on each rank.

Saving copies the state on the training thread, at a step boundary, and writes the copy on another
thread. If the state is sharded, each rank copies and writes its own part, and the first rank
completes the checkpoint. Otherwise the first rank that has the state does everything. Rows of
sparse tables are read from the servers: under ddp by all ranks, before a save returns; under
async_sgd by the writer's thread. To resume, one rank reads the checkpoint and sends the state to
the other ranks, in the same way as to a joiner. Before a checkpoint is published, a callback
(`fence`) raises an error if the rank has been removed from the job.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    PermissionDeniedError,
    ShoalError,
    UnavailableError,
)

from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.files import (
    begin,
    check_place,
    latest,
    mark_stopped_early,
    read_checkpoint,
    rows_of,
    write_checkpoint,
    write_sharded,
)
from shoal_worker.checkpoint.frozen import NOTHING, Frozen, FrozenMode, FrozenValues, describe_all
from shoal_worker.checkpoint.manifest import CheckpointInfo, remove
from shoal_worker.checkpoint.place import Place, check_same_place
from shoal_worker.checkpoint.rows import Files, SavedRows, described, write_rows
from shoal_worker.checkpoint.shards import Shards, describe_sums, own_sums
from shoal_worker.checkpoint.uploads import PATIENCE as UPLOAD_PATIENCE
from shoal_worker.checkpoint.uploads import Uploads, is_uploaded
from shoal_worker.checkpoint.writer import (
    DISK_PATIENCE,
    CheckpointWriter,
    in_company,
    on_each,
    on_first,
)
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.state.tree import Snapshot, StatePart, flatten

if TYPE_CHECKING:
    import torch

    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.session.session import Session

_log = logging.getLogger(__name__)

_ASK_GONE = timedelta(seconds=1)
"""Interval between checks whether the rank that completes the last checkpoint is still in the
job."""
_LOOK = timedelta(seconds=0.05)
"""Interval between checks whether the checkpoint exists."""

_FILES = frozenset({"registered", "sources", "loops", "steps", "samples", "run"})
"""Entries of the captured state besides models and optimizers."""


class CheckpointSaver:
    """Saves a session's state in the background. Each session has one saver."""

    def __init__(self) -> None:
        self._writer = CheckpointWriter()
        self._given_up = threading.Event()
        """Set if the current save must no longer wait for the shards of other ranks."""
        self._given_up_last: str | None = None
        """Description of the newest save if it was abandoned because a rank left without writing
        its part; otherwise None. Set by the writer's thread."""
        self._collects = False
        """True if there is a current save and it waits for the shards of other ranks."""
        self._elsewhere: _Elsewhere | None = None
        """The newest save, if a different rank completes it; otherwise None."""
        self._completed: tuple[Path, int] | None = None
        """Path and step of the newest save, if this rank completes it; otherwise None."""
        self.frozen_values = FrozenValues()
        self._memory: dict[str, torch.Tensor] = {}
        """Tensors of the newest copy, whose memory the next one uses again."""
        self._uploads: Uploads | None = None
        """Uploads to the URL of the newest save, if this process has completed a checkpoint for
        that URL."""
        self._checked: tuple[str, str] | None = None
        """URL and run of the newest save for which the object store has been checked. The same on
        all ranks that took part in that save."""
        self._announced: set[str] = set()
        """Directories and URLs for which `announce` has been called."""

    @classmethod
    def of(cls, session: Session) -> CheckpointSaver:
        """Returns the saver of `session`, and creates it in the first call. Before this process
        leaves its job, the saver finishes writing, because the first rank waits for the files of
        all ranks."""
        if session not in _savers:
            saver = _savers[session] = cls()
            session.on_close(lambda: saver._leave(session))
        return _savers[session]

    def announce(self, session: Session, directory: str | Path, *, step: int) -> None:
        """Reports a later save early: on the first rank, raises ConfigurationError in the first
        call for a directory if the save of step `step` would be refused because of another run's
        checkpoints. Without this, a user would learn of it after hours of training. Does nothing
        for a URL, for which the check takes requests to the object store."""
        if str(directory) in self._announced:
            return
        self._announced.add(str(directory))
        place = Place.of(directory, session.settings)
        if place.url is None and session.is_first:
            check_place(place.local(session.run), step, session.run)

    def save(
        self,
        session: Session,
        place: Place,
        *,
        keep: int,
        sharded: bool | None,
        frozen: FrozenMode = "write",
        best: float | None = None,
        mode: str = "",
    ) -> None:
        """Performs one rank's part of a save. Returns once the state is copied. Raises the error of
        this rank's previous save, if that failed. `best`, `mode`: the checkpoint's
        `CheckpointInfo.metric` and `mode`."""
        directory = place.local(session.run)
        if _holds_nothing_new(session):
            return
        if session.has_left:
            _log.info(
                "cannot save: this process has left its job, and its peers continue with the state"
            )
            return
        session.warn_of_given_up()
        session.go_back_by(lambda: _go_back(session, place))
        copy = _Copy(session, directory, sharded, frozen, self.frozen_values)

        def take(channel: Channel) -> None:
            copy.drop()
            _check_alike(channel, "save_checkpoint", place.named, f"best={best!r}, mode={mode!r}")
            self._check_storage(session, place, channel)
            self.settle_together(channel)  # so that there is never more than one copy in memory
            if self._writer.busy:  # the wait was given up
                self._memory = {}
            copy.take(channel, self._memory)

        try:
            session.operation("save_checkpoint", take, answers=False)
            if _holds_nothing_new(session):
                copy.drop()
                return
            failed = self._settle(timedelta(0))
            if failed is not None:
                raise failed  # only now, because the other ranks are in the operation
            if self._uploads is not None:
                self._uploads.check()
        except BaseException:
            copy.drop()
            raise
        info = CheckpointInfo(
            step=session.steps,
            strategy=session.strategy,
            world_size=session.world_size,
            generation=session.generation,
            run=session.run,
            metric=None if best is None or math.isnan(best) else best,
            mode=mode,
            stopped_early=session.early_stop.ended(step=session.steps),
        )
        what = f"writing step-{info.step} to {directory}"
        fence, shards, temporary = session.fence(), copy.shards, copy.temporary
        upload = self._upload_of(session, place, directory, keep=keep, fence=fence)
        completes = copy.first or (copy.whole is not None and session.is_first)
        self._completed = (directory / f"step-{info.step}", info.step) if completes else None
        self._collects, self._given_up_last = copy.first and shards is not None, None
        mine = copy.first or copy.whole is not None
        self._elsewhere = (
            None
            if mine
            else _Elsewhere(
                directory / f"step-{info.step}",
                copy.completed_by,
                shared=temporary is not None,
                uploads=place.url is not None,
            )
        )
        given_up = self._given_up = threading.Event()
        if shards is not None and temporary is not None:
            self._memory = shards.host_tensors

            def gone(shard: int) -> bool:
                return given_up.is_set() or copy.is_gone(shard)

            def complete() -> bool:
                written = (
                    write_sharded(temporary, shards, info, gone=gone, fence=fence, keep=keep)
                    is not None
                )
                if not written:
                    self._given_up_last = what
                else:
                    upload()
                return written

            def write_aside() -> bool:
                shards.write_aside(temporary)
                return True

            self._submit(session, complete if copy.first else write_aside, what=what)
        elif copy.whole is not None and session.is_first:
            once = copy.decide_frozen()
            snapshot = Snapshot.take(
                copy.whole, without=once.tensors.keys() - once.written, memory=self._memory
            )
            self._memory = snapshot.host_tensors
            rows = copy.rows()

            def write() -> bool:
                write_checkpoint(
                    directory,
                    snapshot,
                    info,
                    fence=fence,
                    keep=keep,
                    temporary=temporary,
                    rows=rows,
                    frozen=once,
                )
                upload()
                return True

            self._submit(session, write, what=what)
        else:
            self._memory = {}

    def _check_storage(self, session: Session, place: Place, channel: Channel) -> None:
        """Checks, before a run's first save to a URL, that the first rank can use the object store
        and may save to this URL. Must be called on all ranks, within an operation.

        Raises:
            ShoalError: the rank may not save to this URL, or the object store failed; raised on all
                ranks.
        """
        if place.url is None:
            return
        wanted = place.url, session.run
        asked = channel.exchange(b"" if self._checked == wanted else b"check")
        if any(asked):
            _ask_first(channel, lambda: place.check(session.steps, session.run))
        self._checked = wanted

    def _upload_of(
        self,
        session: Session,
        place: Place,
        directory: Path,
        *,
        keep: int,
        fence: Callable[[], None],
    ) -> Callable[[], None]:
        """Returns a function that starts uploading the checkpoints that this process has completed
        in `directory`. This method must be called on the training thread, and the function on the
        writer's thread."""
        if place.url is None:
            self._uploads = None
            return lambda: None
        uploads = self._uploads
        if uploads is None or (uploads.url, uploads.directory) != (place.url, directory):
            uploads = self._uploads = Uploads(
                place.url,
                directory,
                metrics=session.metrics,
                patience=place.patience,
                report=partial(setattr, session.progress, "upload_backlog_bytes"),
            )
        return partial(uploads.changed, keep=keep, fence=fence)

    def is_written(self, session: Session, place: Place, name: str) -> bool:
        """Waits until no rank is saving, and returns whether the first rank finds checkpoint `name`
        on its disk. Returns True if this process does not save, for example because it is joining.
        Must be called on every rank, after `save`."""
        path = place.local(session.run) / name

        def body(channel: Channel) -> bool:
            self.settle_together(channel)
            return bool(json.loads(channel.exchange(json.dumps(path.is_dir()).encode())[0]))

        return session.operation("save_checkpoint", body) or (
            session.is_joining or session.is_redoing or session.has_left
        )

    def settle_together(self, channel: Channel) -> None:
        """Waits until no rank is saving, so that checkpoints can be read. Must be called on all
        ranks, within an operation."""
        in_company(channel, self._writer.done_within)

    def free_memory(self) -> None:
        """Frees the memory of the newest copy of the state. The next save takes longer, because it
        cannot reuse that memory."""
        self._memory = {}

    def give_up_incomplete(self, channel: Channel) -> None:
        """Waits for the shards that are still being written, and then abandons the current save if
        a shard is missing: its rank had lost the state before it could finish the save. Must be
        called on all ranks, within an operation."""
        in_company(channel, lambda timeout: self._collects or self._writer.done_within(timeout))
        self._given_up.set()

    def close(self, timeout: timedelta) -> None:
        """Waits for the current save. Raises the save's error, or DeadlineError after `timeout`."""
        self._writer.close(timeout)

    def _submit(self, session: Session, job: Callable[[], bool], *, what: str) -> None:
        """Runs `job` on the writer's thread and counts its outcome. `job` returns False if it was
        abandoned."""
        metrics = session.metrics

        def counted() -> None:
            started, outcome = time.monotonic(), "failed"
            try:
                outcome = "written" if job() else "given_up"
            finally:
                metrics.checkpoint_ended(outcome, seconds=time.monotonic() - started)

        self._writer.submit(counted, what=what, timeout=DISK_PATIENCE)

    def _leave(self, session: Session) -> None:
        failed: object = self._settle(DISK_PATIENCE)
        if failed is None and self._given_up_last is not None:
            failed = (
                f"{self._given_up_last} was abandoned: a worker was lost before it had written its "
                "part"
            )
        elsewhere = self._elsewhere
        if failed is None and elsewhere is not None and not session.has_left:
            self._writer.submit(
                lambda: elsewhere.wait(session),
                what=f"waiting for {elsewhere.path}",
                timeout=DISK_PATIENCE,
            )
            failed = self._settle(DISK_PATIENCE)
        if failed is None:
            self._mark_early_stop(session)
            failed = self._uploaded()
        if failed is None:
            return
        _log.error("the last checkpoint was not saved: %s", failed)
        if not session.has_left:  # otherwise the remaining ranks save again
            session.missed = f"the last checkpoint was not saved: {failed}"

    def _mark_early_stop(self, session: Session) -> None:
        """Records in the newest checkpoint that early stopping ended the loop over epochs after the
        checkpoint's step. The save itself cannot record this, because a script usually saves before
        it calls `should_early_stop`."""
        loader = session.early_stop.ended(step=session.steps)
        if not loader or self._completed is None or session.has_left:
            return
        path, step = self._completed
        if step != session.steps:
            return
        try:
            session.fence()()
            mark_stopped_early(path, loader)
            if self._uploads is not None:
                self._uploads.changed_again()
        except ShoalError as error:
            _log.warning(
                "%s does not record that training has stopped early, so a run that resumes from "
                "it trains another epoch: %s",
                path,
                error,
            )

    def _uploaded(self) -> Exception | None:
        """Waits for this process's uploads, and returns their error, if any."""
        if self._uploads is None:
            return None
        try:
            self._uploads.wait(UPLOAD_PATIENCE)
        except ShoalError as error:
            return error
        return None

    def _settle(self, timeout: timedelta) -> Exception | None:
        """Waits for this rank's current save, if any, and returns its error, if any."""
        try:
            self._writer.wait(timeout)
        except Exception as error:  # of any kind, because `save` raises it later
            return error
        return None


@dataclass(frozen=True)
class _Elsewhere:
    """A checkpoint that another rank completes."""

    path: Path
    member: str
    """Id of the member that completes the checkpoint."""
    shared: bool
    """True if all ranks are known to see the directory."""
    uploads: bool = False
    """True if the checkpoint must also be in an object store."""

    def wait(self, session: Session) -> None:
        """Waits until the checkpoint exists and, if it is uploaded, until its upload is complete.
        Returns early if this rank cannot find out. Must be called on the writer's thread.

        Raises:
            UnavailableError: the other member has left without completing the checkpoint
                (CHECKPOINT_NOT_WRITTEN), or without uploading it (CHECKPOINT_NOT_UPLOADED).
            DeadlineError (CHECKPOINT_SLOW): the checkpoint takes too long.
        """
        if not self.shared and latest(self.path.parent, run=session.run) is None:
            return  # the directory may exist only on the other rank's machine
        give_up_at, ask_at = time.monotonic() + DISK_PATIENCE.total_seconds(), time.monotonic()
        while not self._is_done():
            now = time.monotonic()
            if now >= ask_at:
                if session.is_gone(self.member) and not self._is_done():
                    if self.path.is_dir():
                        raise UnavailableError(
                            f"{self.path} was not uploaded: the worker that uploads was lost, or "
                            "has failed",
                            reason="CHECKPOINT_NOT_UPLOADED",
                        )
                    raise UnavailableError(
                        f"writing {self.path} was abandoned: a worker was lost before it had "
                        "written its part",
                        reason="CHECKPOINT_NOT_WRITTEN",
                    )
                ask_at = now + _ASK_GONE.total_seconds()
            if now > give_up_at:
                raise DeadlineError(
                    f"{self.path} was not complete after {DISK_PATIENCE}; is the disk too slow?",
                    reason="CHECKPOINT_SLOW",
                )
            time.sleep(_LOOK.total_seconds())

    def _is_done(self) -> bool:
        return self.path.is_dir() and (not self.uploads or is_uploaded(self.path))


@dataclass
class _Copy:
    """The copy of the state that one save makes. If the membership changes meanwhile, the copy is
    made again."""

    session: Session
    directory: Path
    sharded: bool | None
    frozen: FrozenMode
    values: FrozenValues
    whole: dict[str, Any] | None = None
    """The complete state, on the first rank. Its tensors share memory with the state in training.
    None on other ranks."""
    shards: Shards | None = None
    """This rank's part of the state, if the state is written in shards; otherwise None."""
    temporary: Path | None = None
    """Temporary directory for the shards; None if there is none."""
    first: bool = False
    """True if this rank completes the checkpoint."""
    completed_by: str = ""
    """Id of the member that completes the checkpoint."""
    _writers: dict[int, str] = field(default_factory=dict)
    """Id of the member that writes each shard, by shard number."""
    _rows: dict[str, Any] | None = None
    """The manifest's entry for the rows of sparse tables if their files are in `temporary`;
    otherwise None."""

    def take(self, channel: Channel, memory: dict[str, torch.Tensor]) -> None:
        """Performs one rank's part of the operation: copies the state. If there was an earlier
        attempt, `drop` must have been called. `memory`: tensors of an earlier copy, whose memory
        shards reuse."""
        part, unfit = self.session.part(channel) if self.sharded is not False else None, ""
        if part is not None and self._make_room(channel):
            if channel.rank == 0:
                unfit = self.session.unfit(part.state["replica"])
            self._take_part(part, channel, memory)
        else:
            # before the state: this waits until the servers have all pushes of the last step, so
            # the pending pushes in the state no longer matter
            self._take_rows(channel)
            whole = self.session.assemble(channel)
            if channel.rank == 0:
                if self.session.is_first:  # otherwise the copy is not written
                    unfit = self.session.unfit(whole["replica"])
                self.whole = whole.pop("replica") | whole
        decision = {
            "refused": self._refused() if channel.rank == 0 else "",
            "unfit": unfit,
            "member": self.session.member_id,
        }
        # when this returns, all ranks have copied their data
        decision = json.loads(channel.exchange(json.dumps(decision).encode())[0])
        if decision["refused"]:
            raise ConfigurationError(decision["refused"])
        if decision["unfit"]:
            raise CorruptDataError(
                f"the checkpoint was not saved, because the run could not be resumed from it: "
                f"{decision['unfit']}",
                reason="MODEL_DIFFERS",
            )
        self.completed_by = decision["member"]

    def drop(self) -> None:
        """Discards the copy."""
        if self.first and self.temporary is not None:
            remove(self.temporary)
        self.whole, self.shards, self.temporary, self.first, self._rows = (
            None,
            None,
            None,
            False,
            None,
        )

    def rows(self) -> Callable[[Path], Mapping[str, Any]]:
        """Returns the function to pass to `write_checkpoint` as `rows`. If other workers continue
        to train the rows, that function reads the rows when the checkpoint is written."""
        store, known = self.session.row_store, self._rows
        if store is None or known is not None:
            return lambda temporary: known or {}
        return lambda temporary: described(store, [write_rows(temporary, store)])

    def _take_rows(self, channel: Channel) -> None:
        """Writes the rows of sparse tables before the next step changes them. Each rank writes its
        share; if not all ranks see the same directory, the first rank writes all rows."""
        store = self.session.row_store
        if store is None or not store.steady or _holds_nothing_new(self.session):
            return
        shared = self._make_room(channel)

        def work(given_up: threading.Event) -> dict[str, Files]:
            if not shared and channel.rank == 0:
                self.temporary, self.first = begin(self.directory, self.session.steps), True
            store.settle()
            if self.temporary is None:
                return {}
            share = (channel.rank, channel.world_size) if shared else (0, 1)
            return write_rows(self.temporary, store, share=share, given_up=given_up)

        self._rows = described(store, on_each(channel, work))

    def decide_frozen(self) -> Frozen:
        """Returns the frozen parameters of the unsharded state."""
        names = self.session.frozen
        return self._decided(describe_all(flatten(self.whole)[1], names)) if names else NOTHING

    def _decided(self, found: Mapping[str, Any]) -> Frozen:
        if not found:
            return NOTHING
        return self.values.decide(
            self.frozen, found, built=self.session.built, newest=latest(self.directory)
        )

    def is_gone(self, shard: int) -> bool:
        """Returns whether the rank that writes a shard has left the run. May be called from any
        thread."""
        return self.session.is_gone(self._writers[shard])

    def _take_part(
        self, part: StatePart, channel: Channel, memory: dict[str, torch.Tensor]
    ) -> None:
        part = StatePart(
            state=part.state.pop("replica") | part.state, count=part.count, shards=part.shards
        )
        names = self.session.frozen
        report = {
            "member": self.session.member_id,
            "shards": sorted(part.shards),
            "frozen": own_sums(part, frozenset(names)) if names else {},
        }
        everyones = [json.loads(each) for each in channel.exchange(json.dumps(report).encode())]
        self._writers = {number: each["member"] for each in everyones for number in each["shards"]}
        frozen = NOTHING
        if found := describe_sums(part, names, [each["frozen"] for each in everyones]):
            decided = self._decided(found) if channel.rank == 0 else NOTHING
            frozen = Frozen.received(channel.exchange(decided.sent())[0])
        self.shards = Shards.take(part, frozen, memory=memory)

    def _refused(self) -> str:
        """Returns why nothing may be written to this directory; empty if writing is allowed."""
        try:
            check_place(self.directory, self.session.steps, self.session.run)
        except ConfigurationError as error:
            return str(error)
        return ""

    def _make_room(self, channel: Channel) -> bool:
        """Creates the temporary directory on the first rank. If not all ranks see it, returns
        False, or raises ConfigurationError if `sharded=True` was passed."""
        place: dict[str, str] = {}
        if channel.rank == 0:
            try:
                self.temporary, self.first = begin(self.directory, self.session.steps), True
                place = {"name": self.temporary.name}
            except ConfigurationError as error:
                place = {"error": str(error)}
        place = json.loads(channel.exchange(json.dumps(place).encode())[0])
        if "error" in place:
            raise ConfigurationError(place["error"])
        self.temporary = self.directory / place["name"]
        blind = [
            rank
            for rank, sees in enumerate(channel.exchange(str(self.temporary.is_dir()).encode()))
            if sees != b"True"
        ]
        if not blind:
            return True
        self.drop()
        if self.sharded:
            raise ConfigurationError(
                f"save_checkpoint({str(self.directory)!r}, sharded=True): ranks {blind} do not "
                "see the directory that rank 0 created there; pass a directory that all ranks "
                "share, or sharded=False, with which rank 0 gathers the state and writes all of "
                "it"
            )
        _log.warning(
            "%s is not shared by all ranks: rank 0 gathers the state and writes all of it",
            self.directory,
        )
        return False


def _check_alike(channel: Channel, what: str, named: str, measured: str = "") -> None:
    """Raises ConfigurationError on all ranks if they named different directories or passed
    different metrics. `what`: name of the call. `named`: the directory. `measured`: the metric, as
    text. Must be called on all ranks, within an operation."""
    everyones = [
        tuple(json.loads(each)) for each in channel.exchange(json.dumps([named, measured]).encode())
    ]
    check_same_place(what, "directory", [each[0] for each in everyones])
    first = everyones[0]
    other = next((rank for rank, each in enumerate(everyones) if each != first), None)
    if other is None:
        return
    metric = everyones[other][1]
    raise ConfigurationError(
        f"{what}: rank 0 passed {first[1]}, but rank {other} passed {metric}; pass the same value "
        "on every rank: a result of shoal.evaluate or shoal.all_reduce, not one measured on this "
        "rank's own samples"
    )


def _holds_nothing_new(session: Session) -> bool:
    """Returns whether the session need not save: its state is not the run's state, or is already
    saved."""
    return session.is_joining or session.is_redoing


_savers: weakref.WeakKeyDictionary[Session, CheckpointSaver] = weakref.WeakKeyDictionary()


def load_newest(session: Session, place: Place) -> bool:
    """Performs one rank's part of `shoal.resume`."""
    saver = CheckpointSaver.of(session)
    if session.is_joining:
        session.on_state_lost(lambda: _load_alone(session, place))
        session.go_back_by(lambda: _go_back(session, place))
        return False
    session.go_back_by(lambda: _go_back(session, place))

    def body(channel: Channel) -> bool:
        _check_alike(channel, "resume", place.named)
        saver.settle_together(channel)  # otherwise the newest checkpoint may not exist yet
        saver.free_memory()  # before another copy of the state is read
        captured, found = on_first(channel, lambda: _read(session, place)) or (None, {})
        found = json.loads(channel.exchange(json.dumps(found).encode())[0])
        if found["error"] is not None:
            raise _refusal(found)
        if found["found"]:
            _take_up(session, channel, captured, Path(found["path"]))
            _resumed(session, found, place, first=channel.rank == 0)
            saver.frozen_values.state_replaced()
        return bool(found["found"])

    return bool(session.operation("resume", body))


def _go_back(session: Session, place: Place) -> str | None:
    """Implements `Session.go_back_by`: loads the newest checkpoint after the state was lost."""
    saver = CheckpointSaver.of(session)

    def body(channel: Channel) -> str | None:
        saver.give_up_incomplete(channel)
        saver.settle_together(channel)
        saver.free_memory()
        captured, found = on_first(channel, lambda: _read(session, place, run=session.run)) or (
            None,
            {},
        )
        if captured is not None:
            found["error"] = session.cannot_return(captured)
        found = json.loads(channel.exchange(json.dumps(found).encode())[0])
        if found["error"] is not None:
            return str(found["error"])
        if not found["found"]:
            return f"{place.named} has no checkpoint of this run"
        _take_up(session, channel, captured, Path(found["path"]))
        return None

    answer = session.operation("go back to a checkpoint", body, answers=False)
    return None if answer is None else str(answer)


def _load_alone(session: Session, place: Place) -> bool:
    """Loads the newest checkpoint if there is only one rank. Returns whether there was a
    checkpoint."""
    captured, found = _read(session, place)
    if found["error"] is not None:
        raise _refusal(found)
    if captured is not None:
        _take_up(session, LocalChannel(), captured, Path(found["path"]))
        _resumed(session, found, place, first=True)
        CheckpointSaver.of(session).frozen_values.state_replaced()
    return captured is not None


def _resumed(session: Session, found: Mapping[str, Any], place: Place, *, first: bool) -> None:
    """Records where early stopping ended the resumed run, if it did so. On the first rank, also
    prints the checkpoint's name."""
    session.early_stop.resumed(found["stopped_early"])
    if not first:
        return
    line = f"shoal: resumed from {place.text(Path(found['path']).name)}"
    if found["stopped_early"]:
        line += (
            ", after which should_early_stop had ended training, so no epoch is left; to train on, "
            "remove this checkpoint, and the run continues from the one before it"
        )
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for people, like a launcher's line


def _take_up(
    session: Session, channel: Channel, captured: dict[str, Any] | None, path: Path
) -> None:
    """Distributes the state of the checkpoint at `path` to all ranks, and the rows of its tables to
    the servers. `captured`: the state, which the first rank has read; None on other ranks. Must be
    called on all ranks, within an operation.

    Raises:
        CorruptDataError: rows are damaged; the state is unchanged.
        ConfigurationError: under async_sgd, the checkpoint has rows, and not all ranks share its
            directory.
        DeadlineError (SERVER_AWAY): a server was unreachable for too long.
    """
    store = session.row_store
    if store is None:
        session.replace_state(channel, captured)
        return
    # Ranks with separate disks may have different checkpoints for the step, with rows that do not
    # belong to this model.
    digests = channel.exchange(manifest.digest_of(path).encode())
    sees = [each == digests[0] for each in digests]
    if not store.steady:
        if not all(sees):
            raise ConfigurationError(
                f"resume: ranks {[rank for rank, each in enumerate(sees) if not each]} do not see "
                f"the checkpoint {path} that rank 0 read; with sparse tables and async_sgd, pass "
                "a directory that all ranks share"
            )
        stored = rows_of(path)
        if session.rank == 0 and store.lacks(stored):
            stored.verify()
        session.replace_state(channel, captured)
        store.begin_with(stored)
        return
    share = (sum(sees[: channel.rank]), sum(sees))
    seen: list[SavedRows] = []

    def verify(given_up: threading.Event) -> None:
        if sees[channel.rank]:
            seen.append(rows_of(path))
            seen[0].verify_share(share, given_up)

    on_each(channel, verify)
    if captured is not None and seen:
        captured["replica"]["tables"] = store.expected(seen[0], captured["replica"].get("tables"))
    session.replace_state(channel, captured)
    number = on_each(channel, lambda _: store.next_restoration() if channel.rank == 0 else 0)[0]

    def put(given_up: threading.Event) -> None:
        if seen:
            store.put(seen[0], share, number, given_up)

    on_each(channel, put)


def _read(
    session: Session, place: Place, *, run: str | None = None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns the state of the newest checkpoint, or None if there is none, and a report for the
    other ranks. `run`: considers only checkpoints of this run; None: of any run."""
    try:
        directory = place.readable(run)
    except ShoalError as error:
        return None, {"found": True, **_reported(error)}
    found = latest(directory, run=run)
    if found is None and (directory.is_file() or (directory / manifest.NAME).is_file()):
        what = (
            f"resume({str(directory)!r}): expected the directory passed to save_checkpoint, whose "
            "newest checkpoint is loaded"
        )
        return None, {
            "found": False,
            **_reported(ConfigurationError(f"{what}; found a single checkpoint, or a file")),
        }
    if found is None:
        return None, {"found": False, "error": None}
    try:
        checkpoint = read_checkpoint(found, session.frozen_values)
        store, state = session.row_store, checkpoint.state
        checkpoint.rows.check(store.declared() if store is not None else {})
    except CorruptDataError as error:
        return None, {"found": True, **_reported(error)}
    captured = {name: state.pop(name) for name in list(state) if name in _FILES}
    report = {
        "found": True,
        "error": None,
        "path": str(found),
        "stopped_early": checkpoint.info.stopped_early,
    }
    return {"replica": state, **captured}, report


def _reported(error: ShoalError) -> dict[str, str]:
    """Returns an error of the first rank as a message to the other ranks."""
    return {"error": str(error), "reason": error.reason, "code": error.code}


def _refusal(found: dict[str, Any]) -> ShoalError:
    """Returns the exception for an error that the first rank has reported."""
    kinds = ConfigurationError, CorruptDataError, PermissionDeniedError, DeadlineError
    kind = next((kind for kind in kinds if kind.code == found["code"]), UnavailableError)
    return kind(found["error"], reason=found["reason"])


def _ask_first(channel: Channel, work: Callable[[], None]) -> None:
    """Runs `work`, which may take a long time, on the first rank. Must be called on all ranks,
    within an operation.

    Raises:
        ShoalError: the error of `work`, on all ranks.
    """

    def report() -> dict[str, str]:
        try:
            work()
        except ShoalError as error:
            return _reported(error)
        return {}

    found = json.loads(channel.exchange(json.dumps(on_first(channel, report)).encode())[0])
    if found:
        raise _refusal(found)
