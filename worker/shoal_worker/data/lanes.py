"""How a list of shards becomes steps: which lane reads which shard, and how many items of it a step
takes. Pure.

A step's global batch is cut into as many parts as there are *lanes*, whose number follows from the
sizes alone. A lane reads one shard after the other; at a time, a rank owns some lanes, and reads
their shards and no others. A lane that needs a shard gets the next one that nobody has read. When
no shard is left and some lanes have run dry, the others give more, so that every step but the last
is whole.

How many items a shard has only its reader finds out. So a step is settled in rounds (`Allotment`):
each owner reads what its lanes need, all owners tell each other what they got, and every rank
decides alike what is read next. Mostly one round is enough; one more is needed where a shard ends.
What comes out depends on the shards and the sizes, and not on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal_common.errors import CorruptDataError


class Place(NamedTuple):
    """How far a shard was read."""

    shard: int
    """Which shard, by its place in the epoch's order of shards."""
    offset: int
    """Items of it that are taken."""
    fingerprint: int
    """The fingerprint of those items."""
    following: int | None = None
    """The fingerprint of the item after them; None: not known."""
    state: str | None = None
    """The state of the shard's reader behind them; None: it has none."""


class Report(NamedTuple):
    """What a lane's owner got in a round."""

    items: int
    """How many, at most as many as it was to read."""
    more: bool
    """The shard has further items."""
    fingerprint: int
    """The fingerprint of the shard's items up to there."""
    following: int = 0
    """The fingerprint of the item after them; 0 if there is none."""
    state_bytes: int = 0
    """How long the state of the shard's reader is there; 0: it has none."""


class Segment(NamedTuple):
    """Neighbouring items of one shard."""

    shard: int
    offset: int
    items: int


@dataclass(frozen=True, kw_only=True)
class ShardsRead:
    """Where an epoch stands: what is committed of which shards."""

    lanes: tuple[Place | None, ...]
    """By lane, the number of items that were read of the shard which the lane has; None: the lane
    has read its last shard to the end."""
    next_shard: int = 0
    """First shard, in the epoch's order, that no lane was given."""
    waiting: tuple[Place, ...] = ()
    """Shards that were begun and are in no lane: the run went on with fewer lanes."""

    def is_over(self, shards: int) -> bool:
        """Nothing is left of `shards` shards, as far as one knows without opening any."""
        return self.next_shard >= shards and not self.waiting and not any(self.lanes)

    def with_lanes(self, lanes: int) -> ShardsRead:
        """Returns where the same epoch stands when it is read by another number of lanes."""
        kept, given_up = (
            self.lanes[:lanes],
            [place for place in self.lanes[lanes:] if place is not None],
        )
        filled = (*kept, *(None for _ in range(lanes - len(kept))))
        return ShardsRead(
            lanes=filled, next_shard=self.next_shard, waiting=(*self.waiting, *given_up)
        )

    def to_state(self) -> dict[str, Any]:
        """Returns it as what JSON can hold."""
        lanes = [place and list(place) for place in self.lanes]
        return {
            "lanes": lanes,
            "next_shard": self.next_shard,
            "waiting": [list(place) for place in self.waiting],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShardsRead:
        """The inverse. Raises CorruptDataError: this is no such state."""
        try:
            return cls(
                lanes=tuple(place and _place(place) for place in state["lanes"]),
                next_shard=_count(state["next_shard"]),
                waiting=tuple(map(_place, state["waiting"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"the loader's state of its shards cannot be read: {error!r}"
            ) from error


def _place(values: Sequence[Any]) -> Place:
    shard, offset, fingerprint = map(_count, values[:3])
    following, state = values[3:] or (None, None)  # earlier releases did not write them
    if not isinstance(state, (str, type(None))):
        raise ValueError(f"{state!r} where the state of a reader was expected")
    return Place(
        shard, offset, fingerprint, None if following is None else _count(following), state
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number of at least 0 was expected")
    return value


@dataclass(kw_only=True)
class _Lane:
    """One lane within a step."""

    at: Place | None
    want: int
    have: int = 0
    known: bool = True
    """That the shard at hand has a further item."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def lacks(self) -> bool:
        return self.have < self.want


class Allotment:
    """The items of one step, settled round by round. All ranks keep one each, alike."""

    def __init__(self, read: ShardsRead, *, shards: int, sizes: Sequence[int]) -> None:
        """`shards`: number of them in the epoch. `sizes`: items of each lane, as long as there are
        enough."""
        self.settled = False
        """The step has all its items: as many as are asked for, or all that are left."""
        self._shards = shards
        self._total = sum(sizes)
        self._next = read.next_shard
        self._waiting = list(read.waiting)
        self._lanes = [
            _Lane(at=place, want=size) for place, size in zip(read.lanes, sizes, strict=True)
        ]
        self._advance()

    def to_read(self, lane: int) -> tuple[Place, int] | None:
        """The place from which the lane's owner is to read in this round, and the most items that
        it is to read.

        0 items: only whether there are more is asked. None: there is nothing to read.
        """
        one = self._lanes[lane]
        return (
            (one.at, one.want - one.have)
            if one.at is not None and (one.lacks or not one.known)
            else None
        )

    def hear(self, reports: Sequence[Report | None]) -> None:
        """One round's reports, by lane; None where nothing was to be read."""
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
        """How far the lane's shard is read; None: it has none."""
        return self._lanes[lane].at

    def hear_states(self, states: Sequence[str | None]) -> None:
        """The states of the shards' readers at the places that the step leads to, by lane. Heard
        once the step is settled."""
        for one, state in zip(self._lanes, states, strict=True):
            if one.at is not None:
                one.at = one.at._replace(state=state)

    def segments(self, lane: int) -> list[Segment]:
        """The lane's items, in order."""
        return self._lanes[lane].segments

    def counts(self) -> list[int]:
        """How many items each lane has."""
        return [lane.have for lane in self._lanes]

    @property
    def after(self) -> ShardsRead:
        """Where the epoch stands when the step is committed."""
        return ShardsRead(
            lanes=tuple(lane.at for lane in self._lanes),
            next_shard=self._next,
            waiting=tuple(self._waiting),
        )

    def _advance(self) -> None:
        """Decides what is read in the next round; `settled` if there is none."""
        for lane in self._lanes:
            if lane.lacks and lane.at is None:
                self._give_shard(lane)
        if self._has_reading:
            return
        missing, going_on = (
            self._total - sum(lane.have for lane in self._lanes),
            [lane for lane in self._lanes if lane.at is not None],
        )
        if missing and going_on:  # no shard is left for the lanes that lack items
            each, more = divmod(missing, len(going_on))
            for lane in self._lanes:
                lane.want = lane.have
            for number, lane in enumerate(going_on):
                lane.want += each + (number < more)
        elif not going_on:
            # whether anything is left decides whether the epoch ends here
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
