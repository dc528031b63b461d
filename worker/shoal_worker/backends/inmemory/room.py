"""Meeting point of the threads that are the ranks of one in-memory group. It matches their
collectives and transfers, and makes all of them fail when one rank fails.

The nth collective of a rank matches the nth collective of every other rank. The last rank to arrive
computes the result for all ranks, so a collective completes on all ranks at the same time. If a
wait times out, the error says which ranks have arrived and what the other ranks are doing.

Threads: every rank's thread calls methods for its own rank. `turns.LOCK` guards the state, but is
not held during the computation.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
from shoal_common.errors import ConfigurationError, DeadlineError
from torch.distributed.distributed_c10d import Store

from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.collective import Collective, UnmatchedCollectiveError, execute
from shoal_worker.backends.inmemory import turns
from shoal_worker.backends.inmemory.turns import LOCK, Turns, own_turns

Ending = GroupEndedError | UnmatchedCollectiveError

_ROOMS: Final[weakref.WeakValueDictionary[str, Room]] = weakref.WeakValueDictionary()


class Meeting:
    """One collective, from the arrival of the first rank until the arrival of the last rank."""

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        """Rank that arrived first. The other ranks' calls are compared with this rank's call."""
        self.calls: dict[int, Collective] = {}
        self.done = False


class Reception:
    """Message that a rank is waiting for. `source` is the sender's rank; None while any rank may
    send."""

    def __init__(self, rank: int, source: int | None, tag: int, tensor: torch.Tensor) -> None:
        self.rank, self.source, self.tag, self.tensor = rank, source, tag, tensor
        self.done = False

    def takes(self, source: int, destination: int, tag: int) -> bool:
        """Returns whether this reception accepts a message from `source` to `destination` with
        `tag`."""
        return self.rank == destination and self.tag == tag and self.source in (None, source)

    def __str__(self) -> str:
        return (
            f"recv(from {'any rank' if self.source is None else f'rank {self.source}'}, tag "
            f"{self.tag})"
        )


class Message:
    """Message that has been sent but not received."""

    def __init__(self, source: int, destination: int, tag: int, tensor: torch.Tensor) -> None:
        self.source, self.destination, self.tag, self.tensor = source, destination, tag, tensor


class Room:
    """Meeting point, called `name`, for the collectives of `size` ranks."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.ended: Ending | None = None
        """Error that has ended the room; None while the room is open."""
        self.has_outsiders = False
        self._turns: Turns | None = None
        self._members: set[int] = set()
        self._left: dict[int, str] = {}
        self._counts = [0] * size
        self._last: list[str] = ["has issued nothing"] * size
        self._meetings: dict[int, Meeting] = {}
        self._messages: deque[Message] = deque()
        self._receptions: list[Reception] = []

    # --- entering and leaving

    def enter(self, rank: int, size: int) -> None:
        """Makes the calling thread enter as `rank`."""
        with LOCK:
            if size != self.size or rank in self._members:
                raise ConfigurationError(
                    f"rank {rank} of {size} tried to enter in-memory group {self.name}, which has "
                    f"{self.size} "
                    f"ranks{' and this one already' if rank in self._members else ''}: expected "
                    "each rank exactly once"
                )
            turns = own_turns()
            if self._members and turns is not self._turns:
                self.has_outsiders = True
            self._turns = self._turns or turns
            self._members.add(rank)
            if turns is not None:
                turns.rooms.add(self)
                if turns.over is not None:
                    self.end_for(turns.over)
            self._changed()

    def await_all(self, rank: int, timeout: timedelta) -> None:
        """Blocks until all ranks have entered. Raises DeadlineError naming the missing ranks, or
        the error that ended the room."""
        full = turns.wait(
            self,
            lambda: len(self._members) == self.size or self.ended is not None,
            timeout.total_seconds(),
            "for the other ranks to arrive",
        )
        self.check_live()
        if not full:
            absent = sorted(set(range(self.size)) - self._members)
            raise DeadlineError(
                f"connecting {self.size} in-memory ranks took longer than "
                f"connect_timeout={timeout.total_seconds():g} s: ranks {absent} did not arrive",
                reason="CONNECT_TIMEOUT",
            )

    def leave(self, rank: int, how: str = "left the group") -> None:
        """Removes `rank`. Collectives that still need the rank fail; collectives that it has
        entered continue."""
        with LOCK:
            self._left.setdefault(rank, how)
            if any(rank not in meeting.calls for meeting in self._meetings.values()) or any(
                one.source == rank for one in self._receptions
            ):
                self._end_without(rank)

    def end_for(self, reason: str) -> None:
        """Ends the room because a rank of the launch has failed, in this group or another."""
        self.end(GroupEndedError(reason))

    def end_deadlocked(self, text: str) -> None:
        """Ends the room because all its ranks are waiting for each other."""
        self.end(UnmatchedCollectiveError(text))

    def end(self, error: Ending) -> None:
        """Ends the room: pending and later calls fail with a copy of `error`, on all ranks. If the
        room has already ended, the first error is kept."""
        with LOCK:
            if self.ended is None:
                self.ended = error
                self._meetings.clear()
                self._receptions.clear()
                self._changed()

    # --- collectives

    def issue(self, rank: int, call: Collective) -> Meeting:
        """Enters `rank` into the next collective. Raises the error that ended the room. Raises
        UnmatchedCollectiveError, and ends the room, if the ranks' collectives do not match."""
        with LOCK:
            self._check(rank)
            number = self._counts[rank] = self._counts[rank] + 1
            self._last[rank] = f"is in {call} (collective {number})"
            meeting = self._meetings.setdefault(number, Meeting(number, rank))
            meeting.calls[rank] = call
            self._compare(meeting, rank)
            if len(meeting.calls) < self.size:
                for absent in self._left.keys() - meeting.calls.keys():
                    self._end_without(absent)
                self.check_live()
                return meeting
            del self._meetings[number]
        self._complete(meeting)
        return meeting

    def await_meeting(self, meeting: Meeting, rank: int, timeout: timedelta) -> None:
        """Blocks until all ranks have entered the collective. Ends the room after `timeout`. Raises
        the error that ended the room."""
        if meeting.done:
            return
        what = f"in {meeting.calls[rank]} (collective {meeting.number} of group {self.name})"
        ready = turns.wait(
            self, lambda: meeting.done or self.ended is not None, timeout.total_seconds(), what
        )
        if not ready:
            arrived = sorted(meeting.calls)
            others = sorted(set(range(self.size)) - meeting.calls.keys())
            self._end_late(
                f"rank {rank} waited {timeout.total_seconds():g} s {what}: ranks {arrived} have "
                f"arrived; {self._at(others)}"
            )
        if not meeting.done:
            self.check_live()

    # --- transfers

    def send(self, rank: int, destination: int, tag: int, tensor: torch.Tensor) -> None:
        """Stores a copy of `tensor` for rank `destination` and returns immediately."""
        with LOCK:
            self._check(rank)
            self._last[rank] = f"has sent to rank {destination}, tag {tag}"
            message = Message(rank, destination, tag, tensor.data.clone())
            _synchronize([message.tensor])
            reception = next(
                (one for one in self._receptions if one.takes(rank, destination, tag)), None
            )
            if reception is None:
                self._messages.append(message)
                return
            self._receptions.remove(reception)
            self._deliver(message, reception)

    def receive(self, rank: int, source: int | None, tag: int, tensor: torch.Tensor) -> Reception:
        """Registers that `rank` will receive the next message with this tag from `source` (None:
        from any rank) into `tensor`. Does not block."""
        with LOCK:
            self._check(rank)
            reception = Reception(rank, source, tag, tensor)
            self._last[rank] = f"is in {reception}"
            message = next(
                (
                    one
                    for one in self._messages
                    if reception.takes(one.source, one.destination, one.tag)
                ),
                None,
            )
            if message is not None:
                self._messages.remove(message)
                self._deliver(message, reception)
            elif source in self._left:
                self._end_without(source)
            else:
                self._receptions.append(reception)
            return reception

    def await_reception(self, reception: Reception, rank: int, timeout: timedelta) -> None:
        """Blocks until the message has arrived. Ends the room after `timeout`. Raises the error
        that ended the room."""
        what = f"in {reception} of group {self.name}"
        ready = turns.wait(
            self, lambda: reception.done or self.ended is not None, timeout.total_seconds(), what
        )
        if not ready:
            others = [
                one for one in range(self.size) if one != rank and reception.source in (None, one)
            ]
            self._end_late(
                f"rank {rank} waited {timeout.total_seconds():g} s {what}; {self._at(others)}"
            )
        if not reception.done:
            self.check_live()

    def check_live(self) -> None:
        """Raises a copy of the error that ended the room, if the room has ended. Each thread needs
        its own copy, because raising an error modifies it."""
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))

    # --- inside

    def _check(self, rank: int) -> None:
        self.check_live()
        if rank in self._left:
            raise GroupEndedError(f"rank {rank} {self._left[rank]}")
        if own_turns() is not self._turns:
            self.has_outsiders = True

    def _compare(self, meeting: Meeting, rank: int) -> None:
        if rank == meeting.first:
            return
        first = meeting.calls[meeting.first]
        call = meeting.calls[rank]
        if not call.matches(first):
            error = UnmatchedCollectiveError(
                f"collective {meeting.number} of group {self.name} is {first} on rank "
                f"{meeting.first}, but {call} on rank {rank}; expected the same collective on all "
                "ranks, in the same order"
            )
            self.end(error)
            raise error

    def _complete(self, meeting: Meeting) -> None:
        calls: Sequence[Collective] = [meeting.calls[rank] for rank in range(self.size)]
        try:
            tensors = [one for call in calls for one in (*call.inputs, *call.outputs)]
            _synchronize(tensors)
            execute(calls)
            _synchronize(tensors)
        except UnmatchedCollectiveError as error:
            self.end(error)
            raise
        except Exception as error:
            self.end(GroupEndedError(f"{calls[0]} failed: {error}"))
            raise
        with LOCK:
            meeting.done = True
            self._changed()

    def _deliver(self, message: Message, reception: Reception) -> None:
        given, tensor = message.tensor, reception.tensor
        if given.dtype != tensor.dtype or given.numel() != tensor.numel():
            self.end(
                UnmatchedCollectiveError(
                    f"rank {message.source} sent {given.dtype} {list(given.shape)} with tag "
                    f"{message.tag}, but rank {reception.rank} expects {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            )
            return
        with torch.no_grad():
            tensor.data.copy_(given.view_as(tensor))
        _synchronize([tensor])
        reception.source = message.source
        reception.done = True
        self._changed()

    def _end_without(self, rank: int) -> None:
        self.end(GroupEndedError(f"rank {rank} of group {self.name} {self._left[rank]}"))

    def _end_late(self, text: str) -> None:
        holder = self._turns.running if self._turns is not None else None
        if holder is not None:
            text += (
                f"; rank {holder} of the launch has been running all that time without waiting "
                "for other ranks"
            )
        self.end(GroupEndedError(text))

    def _at(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {one} {self._left.get(one, self._last[one])}" for one in ranks)

    def _changed(self) -> None:
        turns.changed(self._turns)


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Waits for the device. On a GPU, each rank has its own stream, so a rank must wait before it
    reads another rank's results."""
    for device in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.synchronize(device)


def room_for(store: Store, rank: int, size: int, name: str) -> Room:
    """Returns the room of the group that uses `store`, after entering it as `rank`. Does not block
    on the store. Raises ConfigurationError if ranks are in different processes."""
    token = f"{os.getpid()}-{uuid.uuid4().hex}"
    agreed = bytes(store.compare_set("room", "", token)).decode()
    if agreed.partition("-")[0] != str(os.getpid()):
        raise ConfigurationError(
            f"backend='inmemory': process {agreed.partition('-')[0]} also uses this store, but "
            "the ranks of an in-memory group are threads of one process (shoal.launch); for "
            "several processes use backend='gloo'"
        )
    # A group may be created again over the same store: the nth entry of every rank leads to the
    # same room.
    entry = store.add(f"entries of rank {rank}", 1)
    with LOCK:
        room = _ROOMS.setdefault(f"{agreed}/{entry}", Room(name, size))
    room.enter(rank, size)
    return room
