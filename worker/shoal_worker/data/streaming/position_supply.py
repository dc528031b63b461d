"""Deals a stream by position: every rank reads the entire stream and skips other ranks' items.

A step is the next `global_batch_size` items after the cursor. Every rank also reads the item after
the step (with `drop_last`, the next step), so it knows without communication whether the step is
incomplete and whether the epoch ends with this step. In each step, the ranks compare the items that
they have read (`Supply.dealing`). If the stream yields different items on some rank, or ends at a
different position, this is detected before the step is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal_common.errors import CorruptDataError
from typing_extensions import override

from shoal_worker.data.balance import Balance
from shoal_worker.data.cursor import LoaderProgress
from shoal_worker.data.sampling import Block, EpochPlan
from shoal_worker.data.step_batches import DealtStep, dealt_by
from shoal_worker.data.streaming.reader import Mark, Reader
from shoal_worker.data.streaming.supply import (
    NO_END,
    STATE,
    StreamSupply,
    compare_first,
    left_behind,
    part_of_stream,
    set_epoch_of,
)
from shoal_worker.elastic.contract.loader_interface import LoaderSession, Placement
from shoal_worker.state.digest import STREAMED


class PositionSupply(StreamSupply):
    """Supply of a stream's steps by position: every rank reads the entire stream and skips other
    ranks' items."""

    def __init__(
        self, stream: Any, progress: LoaderProgress, *, balance: Balance, **sizes: Any
    ) -> None:
        super().__init__(stream, progress, **sizes)
        self._balance = balance
        self._epoch = -1
        """Epoch of the mark and the reader."""
        self._mark = Mark()
        """Mark at the cursor's position."""
        self._started_epoch = -1
        """Epoch that was passed to the stream's `set_epoch` last."""
        self._reader: Reader | None = None
        self._described: tuple[DealtStep | None, Mark, dict[str, Any]] | None = None

    @override
    def items_at(self, positions: Sequence[int]) -> list[Any]:
        if self._reader is None:
            raise left_behind()
        return self._reader.items(positions)

    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """Implements `Supply.take`.

        Raises:
            PreconditionError (STREAM_NOT_REPEATED): the source yielded different items than before.
            ConfigurationError: the source yielded no items.
        """
        cursor = self._progress.cursor
        try:
            reader = self._reader_at_cursor(loader)
            ahead = self._batch_size if self._drop_last else 1
            reader.fill(
                cursor.samples + self._batch_size + ahead,
                states_at=range(cursor.samples, NO_END, self._batch_size),
            )
        except BaseException:
            # Also on Ctrl-C: an iterator that raised an error cannot continue, so the next one
            # begins at the mark.
            self._close_readers()
            raise
        plan = self.plan(cursor.epoch)
        positions = plan.step(cursor.samples)
        if not positions:
            self._check_not_empty(plan.length, loader)
            self._end_epoch()
            return None
        self.current = dealt_by(plan, positions, cursor, placement, self._balance)
        if cursor.samples == 0 and placement.world_size > 1:
            compare_first(reader.items([positions[0]])[0], session, loader)
        return self.current

    @override
    def plan(self, epoch: int) -> EpochPlan:
        return self._plan(
            self._reader.end if self._reader is not None and epoch == self._epoch else None
        )

    def account(self, dealt: DealtStep, block: Block) -> dict[str, Any]:
        """Implements `Supply.account`. Until the end of the stream is known, `expected` is the
        number of samples dealt so far."""
        plan = self.plan(dealt.epoch)
        expected = dealt.positions.stop if plan.length == NO_END else plan.counted
        return {
            "samples": list(block.positions),
            "expected": expected,
            "dataset": -1,
            "drawn": False,
        }

    def dealing(self, epoch: int) -> dict[str, Any]:
        """Implements `Supply.dealing`: describes the stream's items up to the end of the current
        step, and whether the stream ends there."""
        if (
            self._described is None
            or self._described[0] is not self.current
            or self._described[1] is not self._mark
        ):
            mark, end = self._committed_mark(), None
            if self.current is not None and self._reader is not None:
                mark, end = self._reader.mark(self.current.positions.stop), self._reader.end
            said = f"{mark.position} items, {mark.fingerprint:012x}" + (
                f", an end after {end}" if end is not None else ""
            )
            self._described = self.current, self._mark, {STREAMED: said}
        return self._described[2]

    @property
    @override
    def ends_epoch(self) -> bool:
        return self.current is not None and not self.plan(self.current.epoch).step(
            self.current.positions.stop
        )

    def _advance(self, dealt: DealtStep) -> None:
        assert self._reader is not None
        stop = dealt.positions.stop
        self._progress.cursor = self._progress.cursor.after_step(
            dealt.positions, self.plan(dealt.epoch)
        )
        if self._progress.cursor.epoch != dealt.epoch:
            self._close()
        else:
            self._mark = self._reader.mark(stop)
            self._reader.drop(stop)

    @override
    def capture(self) -> dict[str, Any]:
        mark = self._committed_mark()
        if not mark.position:
            return {}
        return {
            STATE: {
                "fingerprint": mark.fingerprint,
                "following": mark.following,
                "state": mark.state,
            }
        }

    @override
    def load(self, state: Mapping[str, Any], *, loader: str) -> None:
        position = state["samples"]
        if position:
            of_stream = part_of_stream(state, loader)
            fingerprint, following, own = (
                of_stream.get(name) for name in ("fingerprint", "following", "state")
            )
            if (
                type(fingerprint) is not int
                or type(following) not in (int, type(None))
                or type(own) not in (str, type(None))
            ):
                raise CorruptDataError(
                    f"loader {loader!r}: the state of its stream is {of_stream!r}, which no "
                    "release of Shoal has written"
                )
            mark = Mark(position=position, fingerprint=fingerprint, following=following, state=own)
        else:
            mark = Mark()
        if state["epoch"] != self._epoch:
            self._close()
        self._epoch, self._mark = state["epoch"], mark

    def _committed_mark(self) -> Mark:
        """Returns the mark at the cursor's position. If the script has moved the cursor to the
        beginning of a different epoch, returns the mark at the beginning of the stream."""
        cursor = self._progress.cursor
        return (
            self._mark
            if (cursor.epoch, cursor.samples) == (self._epoch, self._mark.position)
            else Mark()
        )

    def _reader_at_cursor(self, loader: str) -> Reader:
        epoch, mark = self._progress.cursor.epoch, self._committed_mark()
        if self._epoch != epoch:
            self._close()
        self._epoch, self._mark = epoch, mark
        reader = self._reader
        if reader is not None and reader.holds(mark):
            reader.drop(mark.position)
            return reader
        self._close()
        if self._started_epoch != epoch:
            self._sources.close()  # a data worker's copy of the stream is as old as the worker
            self._started_epoch = epoch
        set_epoch_of(self._stream, epoch)
        self._reader = self._sources.open(
            0, key=(self._seed, epoch), name=f"loader {loader!r}: {self._names[0]}", at=mark
        )
        return self._reader

    def _end_epoch(self) -> None:
        self._close()
        self._progress.end_epoch()

    def _close(self) -> None:
        self._close_readers()
        self._mark = Mark()

    def _close_readers(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
