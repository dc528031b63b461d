"""Divides a list of shards into steps: assigns shards to lanes, and each lane's items to steps.
Everything here depends only on the arguments.

A step's global batch is divided into *lanes*, whose number depends only on the batch sizes. A lane
reads one shard after another. At any time a rank owns some lanes and reads only their shards. A
lane that needs a shard gets the next unread one. When no shards are left and some lanes are
exhausted, the remaining lanes contribute more, so that every step but the last is complete.

The number of items in a shard is known only after reading it. The items of a step are therefore
determined in rounds (`Allotment`). In a round, each rank reads the items that its lanes need, all
ranks exchange how far their lanes have come, and every rank makes the same decision about what to
read next. One round is usually sufficient; when a shard ends, another round is needed. The result
depends on the shards and the batch sizes, not on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal_common.errors import CorruptDataError


class Place(NamedTuple):
    """Reading position in a shard."""

    shard: int
    """Index of the shard in the epoch's order of shards."""
    offset: int
    """Number of items of the shard that have been taken."""
    fingerprint: int
    """Fingerprint of the items that have been taken."""
    following: int | None = None
    """Fingerprint of the next item; None if unknown."""
    state: str | None = None
    """State of the shard's reader after these items; None if it has none."""


class Report(NamedTuple):
    """Result of one lane in a round, reported by the rank that owns the lane: how far it has
    read."""

    items: int
    """Number of items read; at most the number requested."""
    more: bool
    """True if the shard has further items."""
    fingerprint: int
    """Fingerprint of the shard's items up to and including the last item read."""
    following: int = 0
    """Fingerprint of the next item; 0 if there is none."""
    state_bytes: int = 0
    """Size of the state of the shard's reader after the last item read; 0 if the reader has no
    state."""


class Segment(NamedTuple):
    """Adjacent items of one shard."""

    shard: int
    offset: int
    items: int


@dataclass(frozen=True, kw_only=True)
class ShardsRead:
    """Committed position in an epoch: the reading position in each shard."""

    lanes: tuple[Place | None, ...]
    """Position of each lane in its shard; None if the lane has read its last shard to the end."""
    next_shard: int = 0
    """First shard, in the epoch's order, that has not been assigned to a lane yet."""
    waiting: tuple[Place, ...] = ()
    """Partially read shards without a lane, because the run has continued with fewer lanes."""

    def is_over(self, shards: int) -> bool:
        """Returns whether all of the epoch's shards have been read, as far as is known without
        opening a shard. `shards`: number of shards in the epoch."""
        return self.next_shard >= shards and not self.waiting and not any(self.lanes)

    def with_lanes(self, lanes: int) -> ShardsRead:
        """Returns the same position for a different number of lanes."""
        kept, given_up = (
            self.lanes[:lanes],
            [place for place in self.lanes[lanes:] if place is not None],
        )
        filled = (*kept, *(None for _ in range(lanes - len(kept))))
        return ShardsRead(
            lanes=filled, next_shard=self.next_shard, waiting=(*self.waiting, *given_up)
        )

    def to_state(self) -> dict[str, Any]:
        """Returns the position as a JSON-able dictionary."""
        lanes = [place and list(place) for place in self.lanes]
        return {
            "lanes": lanes,
            "next_shard": self.next_shard,
            "waiting": [list(place) for place in self.waiting],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShardsRead:
        """Creates a position from the result of `to_state`. Raises CorruptDataError if `state` is
        not such a result."""
        try:
            return cls(
                lanes=tuple(place and _place(place) for place in state["lanes"]),
                next_shard=_count(state["next_shard"]),
                waiting=tuple(map(_place, state["waiting"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"the positions in shards that the loader's state contains are invalid: {error!r}"
            ) from error


def _place(values: Sequence[Any]) -> Place:
    shard, offset, fingerprint = map(_count, values[:3])
    following, state = values[3:] or (None, None)  # earlier releases did not save them
    if not isinstance(state, (str, type(None))):
        raise ValueError(f"got {state!r}, but expected the state of a reader")
    return Place(
        shard, offset, fingerprint, None if following is None else _count(following), state
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"got {value!r}, but expected a non-negative integer")
    return value


@dataclass(kw_only=True)
class _Lane:
    """State of one lane while the items of a step are determined."""

    at: Place | None
    want: int
    have: int = 0
    known: bool = True
    """True if the current shard is known to have a further item."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def lacks(self) -> bool:
        return self.have < self.want


class Allotment:
    """Determines the items of one step, round by round. Every rank has an identical copy."""

    def __init__(self, read: ShardsRead, *, shards: int, sizes: Sequence[int]) -> None:
        """Starts a step. `shards`: number of shards in the epoch. `sizes`: number of items that
        each lane contributes while enough items are left."""
        self.settled = False
        """True if the step has all its items: as many as requested, or all remaining items."""
        self._shards = shards
        self._total = sum(sizes)
        self._next = read.next_shard
        self._waiting = list(read.waiting)
        self._lanes = [
            _Lane(at=place, want=size) for place, size in zip(read.lanes, sizes, strict=True)
        ]
        self._advance()

    def to_read(self, lane: int) -> tuple[Place, int] | None:
        """Returns the shard position where the lane's owner must start reading in this round, and
        the maximum number of items. Returns None if the lane has nothing to read.

        If the maximum is 0, the owner only checks whether there are further items.
        """
        one = self._lanes[lane]
        return (
            (one.at, one.want - one.have)
            if one.at is not None and (one.lacks or not one.known)
            else None
        )

    def hear(self, reports: Sequence[Report | None]) -> None:
        """Processes the reports of a round, one for each lane. A report is None if the lane had
        nothing to read."""
        for lane, (one, report) in enumerate(zip(self._lanes, reports, strict=True)):
            if report is None or self.to_read(lane) is None:
                continue
            assert one.at is not None
            if report.items:
                one.segments.append(Segment(one.at.shard, one.at.offset, report.items))
            one.have += report.items
            after = one.at.offset + report.items
            one.at = (
                Place(one.at.shard, after, report.fingerprint, report.following)
                if report.more
                else None
            )
            one.known = True
        self._advance()

    def place(self, lane: int) -> Place | None:
        """Returns the lane's position in its shard; None if the lane has no shard."""
        return self._lanes[lane].at

    def hear_states(self, states: Sequence[str | None]) -> None:
        """Records, for each lane, the state of its shard's reader at the position after the step.
        Must not be called before `settled` is True."""
        for one, state in zip(self._lanes, states, strict=True):
            if one.at is not None:
                one.at = one.at._replace(state=state)

    def segments(self, lane: int) -> list[Segment]:
        """Returns the lane's items in this step, in order: ranges of items, each from one shard."""
        return self._lanes[lane].segments

    def counts(self) -> list[int]:
        """Returns the number of items that each lane contributes to this step."""
        return [lane.have for lane in self._lanes]

    @property
    def after(self) -> ShardsRead:
        """Position in the epoch once this step is committed."""
        return ShardsRead(
            lanes=tuple(lane.at for lane in self._lanes),
            next_shard=self._next,
            waiting=tuple(self._waiting),
        )

    def _advance(self) -> None:
        """Decides what to read in the next round. Sets `settled` if no further round is needed."""
        for lane in self._lanes:
            if lane.lacks and lane.at is None:
                self._give_shard(lane)
        if self._has_reading:
            return
        missing, going_on = (
            self._total - sum(lane.have for lane in self._lanes),
            [lane for lane in self._lanes if lane.at is not None],
        )
        if missing and going_on:  # no shard is left for lanes that have too few items
            each, more = divmod(missing, len(going_on))
            for lane in self._lanes:
                lane.want = lane.have
            for number, lane in enumerate(going_on):
                lane.want += each + (number < more)
        elif not going_on:
            # if nothing is left, the epoch ends here
            self._give_shard(self._lanes[0])
        self.settled = not self._has_reading

    def _give_shard(self, lane: _Lane) -> None:
        if self._waiting:
            lane.at, lane.known = self._waiting.pop(0), False
        elif self._next < self._shards:
            lane.at, lane.known = Place(self._next, 0, 0), False
            self._next += 1

    @property
    def _has_reading(self) -> bool:
        return any(self.to_read(lane) is not None for lane in range(len(self._lanes)))
