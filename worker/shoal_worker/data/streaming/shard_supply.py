"""Deals a `ShardedStream`: each rank reads only the shards of its lanes (`lanes.py`).

In each step, before batches are passed to the loop, all ranks exchange in one or two short
all-reduces how far their lanes have read. If the readers of shards have states, one more all-reduce
distributes the states at the positions after the step. A rank that takes over a shard can then seek
to its position.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import xxhash
from shoal_common.errors import CorruptDataError, PreconditionError
from typing_extensions import override

from shoal_worker.data.cursor import LoaderProgress
from shoal_worker.data.sampling import Block, EpochPlan, part_of, permutation
from shoal_worker.data.step_batches import DealtStep
from shoal_worker.data.streaming.lanes import Allotment, Place, Report, ShardsRead
from shoal_worker.data.streaming.reader import Mark, Reader
from shoal_worker.data.streaming.stream import ShardedStream
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

_log = logging.getLogger(__name__)

_NUMBERS: Final = len(Report._fields)
_BYTES: Final = 6
"""Number of bytes sent in one float64. It is small enough that adding zeros does not round them."""
_LONGEST_STATE: Final = 64 * 1024


class ShardSupply(StreamSupply):
    """Supply of steps from a `ShardedStream`: each rank reads the shards of its lanes."""

    def __init__(
        self, stream: ShardedStream, progress: LoaderProgress, *, shuffle: bool, **sizes: Any
    ) -> None:
        super().__init__(stream, progress, **sizes)
        self._shards = stream.shards
        self._shuffle = shuffle
        assert self._micro_batch_size is not None  # ensured by `check_stream`
        starts = range(0, self._batch_size, self._micro_batch_size)
        micro_batches = [min(self._micro_batch_size, self._batch_size - start) for start in starts]
        lanes = min(len(micro_batches), len(self._shards))
        self._sizes = [
            sum(micro_batches[part_of(len(micro_batches), lane, lanes)]) for lane in range(lanes)
        ]
        self._sources.ahead = max(self._sizes)
        self._epoch = -1
        """Epoch of the following attributes."""
        self._read_so_far = self._nothing_read
        self._allotment: Allotment | None = None
        """Items of the current step; None if there is no current step."""
        self._order: list[int] = []
        """Number of the shard at each position of the epoch's order."""
        self._readers: dict[int, Reader] = {}
        """Readers of this rank's shards, by position in `_order`."""
        self._items: dict[int, tuple[int, int]] = {}
        """Origin of this rank's items in the step: position of the item -> (position of its shard
        in `_order`, index of the item in the shard)."""
        self._started_epoch = -1
        """Epoch that was passed to the stream's `set_epoch` last."""
        self._first: tuple[int, int | None] = -1, None
        """Epoch number, and fingerprint of the first item in that epoch's first shard, which all
        ranks read for comparison."""
        self._sample: Any = None
        """The item that all ranks read for comparison."""
        self._warned_of_length = False

    @override
    def items_at(self, positions: Sequence[int]) -> list[Any]:
        given: list[Any] = []
        for place, neighbours in itertools.groupby(
            map(self._items.__getitem__, positions), key=lambda at: at[0]
        ):
            if (reader := self._readers.get(place)) is None:
                raise left_behind()
            given += reader.items([offset for _, offset in neighbours])
        return given

    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """Implements `Supply.take`.

        Raises:
            PreconditionError (STREAM_NOT_REPEATED): a shard yielded different items than before.
            ConfigurationError: the shards yielded no items, or the strategy lets ranks take steps
                independently.
        """
        cursor = self._progress.cursor
        self._begin_at_cursor()
        if placement.world_size > 1 and self._first[0] != cursor.epoch:
            self._first = cursor.epoch, self._first_item(loader)
        if placement.world_size > 1 and cursor.samples == 0:
            # otherwise only a joining rank would raise this error
            compare_first(self._sample, session, loader)
        allotment = self._allotment = Allotment(
            self._read_so_far, shards=len(self._order), sizes=self._sizes
        )
        mine = range(len(self._sizes))[
            part_of(len(self._sizes), placement.rank, placement.world_size)
        ]
        self._keep_readers(
            {place.shard for lane in mine if (place := self._read_so_far.lanes[lane]) is not None}
        )
        whole, lengths = True, [0] * len(self._sizes)
        while whole and not allotment.settled:
            wanted = [
                allotment.to_read(lane) if lane in mine else None
                for lane in range(len(self._sizes))
            ]
            own = self._read_lanes(wanted, loader)
            everyones = self._exchange(own, allotment, placement, session)
            whole = everyones is not None
            allotment.hear(own if everyones is None else everyones)
            for lane, report in enumerate(everyones or ()):
                lengths[lane] = report.state_bytes if report is not None else lengths[lane]
        whole = whole and self._exchange_states(lengths, mine, allotment, placement, session)
        total = sum(allotment.counts())
        if whole and (not total or (self._drop_last and total < self._batch_size)):
            self._check_not_empty(total, loader)
            self._forget()
            self._progress.end_epoch()
            return None
        # If a fault has already invalidated the step, these positions do not matter.
        positions = range(cursor.samples, cursor.samples + max(total, 1))
        lanes = self._blocks_of_lanes(allotment, cursor.samples)
        self._items = {
            position: place
            for lane in mine
            for position, place in zip(*self._placed(allotment, lane, cursor.samples), strict=True)
        }
        of_rank = [
            lanes[part_of(len(lanes), rank, placement.world_size)]
            for rank in range(placement.world_size)
        ]
        self.current = DealtStep(
            placement=placement,
            epoch=cursor.epoch,
            number=cursor.step,
            positions=positions,
            blocks=tuple(block for blocks in of_rank[placement.rank] for block in blocks),
            most_blocks=max(sum(map(len, blocks)) for blocks in of_rank),
        )
        return self.current

    @override
    def plan(self, epoch: int) -> EpochPlan:
        dealt, allotment = self.current, self._allotment
        if dealt is None or allotment is None or epoch != dealt.epoch:
            return self._plan(None)
        return self._plan(
            dealt.positions.stop if allotment.after.is_over(len(self._order)) else None
        )

    def account(self, dealt: DealtStep, block: Block) -> dict[str, Any]:
        """Implements `Supply.account`. A sample is identified by its shard and its index in the
        shard, so that the audit can detect a sample that was read twice."""
        samples = [
            (self._order[place] << 32) + offset
            for place, offset in map(self._items.__getitem__, block.positions)
        ]
        return {"samples": samples, "expected": dealt.positions.stop, "dataset": -1, "drawn": False}

    def dealing(self, epoch: int) -> dict[str, Any]:
        """Implements `Supply.dealing`: describes the position in each shard at the end of the
        current step, and the first item of the epoch's first shard.

        Since only one rank reads each shard, it would not be noticed if `read` split a shard's
        items by rank, and some items would not be trained on. All ranks therefore also read that
        first item and compare it.
        """
        read, first = self._committed(), None
        if self.current is not None and self._allotment is not None:
            read, first = self._allotment.after, self._first
        places = [place and place[:3] for place in (*read.lanes, *read.waiting)]
        return {STREAMED: xxhash.xxh3_64_hexdigest(repr((places, read.next_shard, first)).encode())}

    @property
    @override
    def ends_epoch(self) -> bool:
        return self.current is not None and not self.plan(self.current.epoch).step(
            self.current.positions.stop
        )

    def _advance(self, dealt: DealtStep) -> None:
        assert self._allotment is not None
        read = self._allotment.after
        over = read.is_over(len(self._order))
        self._progress.cursor = self._progress.cursor.after_step(
            dealt.positions, self._plan(dealt.positions.stop if over else None)
        )
        self._allotment, self._read_so_far = None, read
        if over:
            self._forget()
            return
        places = {place.shard: place.offset for place in read.lanes if place is not None}
        self._keep_readers(places)
        for place, reader in self._readers.items():
            reader.drop(places[place])

    @override
    def capture(self) -> dict[str, Any]:
        return {STATE: self._committed().to_state()} if self._progress.cursor.samples else {}

    @override
    def load(self, state: Mapping[str, Any], *, loader: str) -> None:
        read = (
            ShardsRead.from_state(part_of_stream(state, loader))
            if state["samples"]
            else self._nothing_read
        )
        if any(
            place.shard >= len(self._shards)
            for place in (*read.lanes, *read.waiting)
            if place is not None
        ):
            raise CorruptDataError(
                f"loader {loader!r}: the state refers to a shard that does not exist; the dataset "
                f"has {len(self._shards)} shards"
            )
        if state["epoch"] != self._epoch:
            self._forget()
        self._epoch, self._read_so_far = state["epoch"], read.with_lanes(len(self._sizes))
        self._order = self._order_of(self._epoch)

    def _committed(self) -> ShardsRead:
        cursor = self._progress.cursor
        return (
            self._read_so_far
            if cursor.epoch == self._epoch and cursor.samples
            else self._nothing_read
        )

    @property
    def _nothing_read(self) -> ShardsRead:
        return ShardsRead(lanes=(None,) * len(self._sizes))

    def _begin_at_cursor(self) -> None:
        epoch, read = self._progress.cursor.epoch, self._committed()
        if epoch != self._epoch:
            self._forget()
            self._epoch, self._order = epoch, self._order_of(epoch)
        if self._started_epoch != epoch:
            self._sources.close()  # data workers' copies of the stream are as old as the workers
            self._started_epoch = epoch
            set_epoch_of(self._stream, epoch)
        self._read_so_far = read

    def _order_of(self, epoch: int) -> list[int]:
        return [
            int(shard) for shard in permutation(self._seed, epoch, len(self._shards), self._shuffle)
        ]

    def _forget(self) -> None:
        self._keep_readers(())
        self._allotment, self._read_so_far, self._items = None, self._nothing_read, {}

    def _close_readers(self) -> None:
        self._keep_readers(())

    def _keep_readers(self, places: Iterable[int]) -> None:
        kept = set(places)
        for place in [place for place in self._readers if place not in kept]:
            self._readers.pop(place).close()

    def _read_lanes(
        self, wanted: Sequence[tuple[Place, int] | None], loader: str
    ) -> list[Report | None]:
        """Reads the items that this rank's lanes need in a round. Data workers read them in
        parallel: all requests are sent before the first response is awaited."""
        try:
            for at, _ in filter(None, wanted):
                self._open(at, loader)
            for lane, one in enumerate(wanted):
                if one is not None:
                    upto, states_at = self._range_of(lane, *one)
                    self._readers[one[0].shard].expect(upto, states_at=states_at)
            return [self._read_lane(lane, one) for lane, one in enumerate(wanted)]
        except BaseException:  # including Ctrl-C: an iterator that raised cannot continue
            self._close_readers()
            raise

    def _first_item(self, loader: str) -> int:
        shard = self._order[0]
        key = (self._seed, self._epoch, shard)
        reader = self._sources.open(shard, key=key, name=f"loader {loader!r}: {self._names[shard]}")
        try:
            reader.fill(1)
            self._sample = reader.items([0])[0] if reader.stop > 0 else None
            return reader.mark(min(1, reader.stop)).fingerprint
        finally:
            reader.close()

    def _open(self, at: Place, loader: str) -> None:
        """Ensures that a reader for the shard is open at this position."""
        reader = self._readers.get(at.shard)
        mark = Mark(
            position=at.offset, fingerprint=at.fingerprint, following=at.following, state=at.state
        )
        if reader is None or not reader.holds(mark):
            self._keep_readers(self._readers.keys() - {at.shard})
            shard = self._order[at.shard]
            key = (self._seed, self._epoch, shard)
            self._readers[at.shard] = self._sources.open(
                shard, key=key, name=f"loader {loader!r}: {self._names[shard]}", at=mark
            )

    def _range_of(self, lane: int, at: Place, most: int) -> tuple[int, range]:
        """Returns the position up to which to read a lane's shard in this round, and the positions
        at which to keep the reader's state. These are the probable end of the step, and later
        positions that a data worker may reach while it reads ahead."""
        stop, each = at.offset + most, self._sizes[lane]
        # a shard that has not been begun needs no state
        return stop + 1, range(stop or each, NO_END, each)

    def _read_lane(self, lane: int, wanted: tuple[Place, int] | None) -> Report | None:
        """Reads the items that one lane needs in a round."""
        if wanted is None:
            return None
        at, most = wanted
        reader = self._readers[at.shard]
        upto, states_at = self._range_of(lane, at, most)
        reader.fill(upto, states_at=states_at)
        count = min(most, reader.stop - at.offset)
        after = at.offset + count
        reached = reader.mark(after)
        more = reader.stop > after
        following = reached.following if more and reached.following is not None else 0
        return Report(
            count,
            more,
            reached.fingerprint,
            following,
            len(self._state_of(at.shard, after)) if more else 0,
        )

    def _exchange(
        self,
        own: Sequence[Report | None],
        allotment: Allotment,
        placement: Placement,
        session: LoaderSession,
    ) -> list[Report | None] | None:
        """Exchanges the reports of all lanes in this round. Returns None if a rank failed, which
        makes the step invalid.

        Raises:
            PreconditionError (STREAM_NOT_REPEATED): another rank of this replica has read different
                items in this rank's lanes.
        """
        nothing = (0,) * _NUMBERS
        reports = [
            report if report is not None and placement.leads_replica else nothing for report in own
        ]
        summed = session.sum_numbers([float(number) for report in reports for number in report])
        if summed is None:
            return None
        received: list[Report | None] = []
        for lane, mine in enumerate(own):
            count, more, *others = map(int, summed[_NUMBERS * lane : _NUMBERS * (lane + 1)])
            report = (
                Report(count, bool(more), *others) if allotment.to_read(lane) is not None else None
            )
            if mine is not None and (
                report is None or report._replace(state_bytes=0) != mine._replace(state_bytes=0)
            ):
                raise PreconditionError(
                    f"two ranks of one model replica read different items of a shard: {mine} on "
                    f"this rank, {report} on the other; a shard must yield the same items on "
                    "every machine",
                    reason="STREAM_NOT_REPEATED",
                )
            received.append(report)
        return received

    def _state_of(self, place: int, offset: int) -> bytes:
        """Encodes the state of one of this rank's readers for the exchange. Returns an empty result
        if there is no state, or if it is too long to be sent. `place`: the shard's index in the
        epoch's order."""
        state = (self._readers[place].state_at(offset) or "").encode()
        if len(state) <= _LONGEST_STATE:
            return state
        if not self._warned_of_length:
            self._warned_of_length = True
            _log.warning(
                "the state_dict of the reader of shard %r has %d bytes, more than the %d that "
                "can be sent to other ranks, so it is not sent. A rank that takes over the shard "
                "must therefore skip, one at a time, the items that were already trained on; do "
                "not store items, such as those of a shuffle buffer, in the state",
                self._shards[self._order[place]],
                len(state),
                _LONGEST_STATE,
            )
        return b""

    def _exchange_states(
        self,
        lengths: Sequence[int],
        mine: range,
        allotment: Allotment,
        placement: Placement,
        session: LoaderSession,
    ) -> bool:
        """Exchanges all ranks' reader states at the positions after the step. `lengths`: size of
        each state in bytes, by lane. Returns False if a rank failed, which makes the step
        invalid."""
        if not any(lengths):
            return True
        own = [b""] * len(lengths)
        for lane in mine:
            if (
                placement.leads_replica
                and lengths[lane]
                and (place := allotment.place(lane)) is not None
            ):
                own[lane] = self._state_of(place.shard, place.offset)
        rooms = [-(-length // _BYTES) for length in lengths]
        numbers = [
            number
            for state, room in zip(own, rooms, strict=True)
            for number in _as_numbers(state, room)
        ]
        summed = session.sum_numbers(numbers)
        if summed is None:
            return False
        stops = list(itertools.accumulate(rooms))
        cuts = [summed[stop - room : stop] for stop, room in zip(stops, rooms, strict=True)]
        states = [_from_numbers(cut, length) for cut, length in zip(cuts, lengths, strict=True)]
        allotment.hear_states([state.decode() or None for state in states])
        return True

    def _placed(
        self, allotment: Allotment, lane: int, start: int
    ) -> tuple[range, list[tuple[int, int]]]:
        """Returns the positions, within the epoch, of a lane's items in this step, and for each of
        these items its shard and its index in the shard."""
        counts = allotment.counts()
        first = start + sum(counts[:lane])
        places = [
            (part.shard, part.offset + number)
            for part in allotment.segments(lane)
            for number in range(part.items)
        ]
        return range(first, first + counts[lane]), places

    def _blocks_of_lanes(self, allotment: Allotment, start: int) -> list[list[Block]]:
        """Returns each lane's micro-batches, numbered across all lanes of the step."""
        assert self._micro_batch_size is not None
        lanes: list[list[Block]] = []
        number = 0
        for count in allotment.counts():
            positions = range(start, start + count)
            cuts = range(0, count, self._micro_batch_size)
            lanes.append(
                [
                    Block(index=number + i, positions=positions[at : at + self._micro_batch_size])
                    for i, at in enumerate(cuts)
                ]
            )
            number, start = number + len(cuts), start + count
        return lanes


def _as_numbers(data: bytes, room: int) -> list[float]:
    """Encodes `data` as `room` numbers, for an all-reduce in which all other ranks contribute
    zeros."""
    padded = data.ljust(room * _BYTES, b"\0")
    return [
        float(int.from_bytes(padded[at : at + _BYTES], "little"))
        for at in range(0, room * _BYTES, _BYTES)
    ]


def _from_numbers(numbers: Sequence[float], length: int) -> bytes:
    """Decodes the result of `_as_numbers`. `length`: length of the data in bytes."""
    return b"".join(int(number).to_bytes(_BYTES, "little") for number in numbers)[:length]
