"""Process groups of simulated ranks: which rank gets a collective's result, and when each rank
notices that its group has ended.

A collective has a result once all ranks whose input it needs have entered. The result reaches each
rank at a different time, and a rank whose group ends first never gets it. So some ranks may have
the result of a collective and others not, as with a process group over sockets. A rank that dies or
ends its group closes its connections. Each peer notices that at a different time, and nothing
reaches the peer from then on.

A failed collective leaves its outputs partly written. Outputs of sums become NaN, so that any use
is detected. Outputs that are copies contain the beginning of what was sent.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from shoal_common.errors import DeadlineError
from shoal_worker.backends.base import CommunicationBackend, GroupEndedError
from shoal_worker.backends.collective import Collective, Kind, execute
from shoal_worker.backends.python_group import PythonGroup
from torch._C._distributed_c10d import Work

from tests.simulation.scheduler import Killed, own_scheduler

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

_FASTEST_S, _SLOWEST_S = 0.0001, 0.003
_LONGEST_NOTICE_S = 0.006
_FROM_ROOT = (Kind.BROADCAST, Kind.SCATTER)
_TO_ROOT = (Kind.REDUCE, Kind.GATHER)
_COPIES = (Kind.BROADCAST, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
"""Collectives whose outputs are copies of inputs."""


class Meeting:
    """One collective among all ranks of a room."""

    def __init__(self, number: int, kind: Kind) -> None:
        self.number = number
        """Number among all collectives of its generation, from 1, in the order in which they
        began."""
        self.kind = kind
        self.works: dict[int, CollectiveWork] = {}
        self.results: list[Collective] | None = None
        self.torn = False
        self.held_back: dict[int, bool] = {}
        """Ranks that reach all others -> True if the partition delays their results as well."""


class Room:
    """The rendezvous of one process group's ranks."""

    def __init__(self, world: World, name: str, size: int) -> None:
        self.world, self.name, self.size = world, name, size
        self.sides: dict[int, Side] = {}
        self._counts = [0] * size
        self._meetings: dict[int, Meeting] = {}
        self._mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self._mailed: dict[tuple[int, int], float] = {}
        """Arrival time of the last message, by sender and receiver."""

    def is_open_to(self, process: Process) -> bool:
        """Returns whether all ranks have arrived, none has left, and `process` reaches all of
        them."""
        full = len(self.sides) == self.size and all(
            side.ended is None for side in self.sides.values()
        )
        return full and process.name not in self.world.network.separated(
            side.process.name for side in self.sides.values()
        )

    def issue(self, rank: int, call: Collective) -> CollectiveWork:
        """Enters `rank` into its next collective."""
        self._counts[rank] += 1
        number = self._counts[rank]
        if number not in self._meetings:
            self._meetings[number] = self.world.faults.meeting(
                self, Meeting(self.world.count_collective(self.name), call.kind)
            )
        meeting = self._meetings[number]
        side = self.sides[rank]
        self.world.faults.before_contributing(self, meeting, side.process)
        work = CollectiveWork(side, meeting, call)
        first = next(iter(meeting.works.values()), None)
        meeting.works[rank] = work
        if first is not None and first.call.signature != call.signature:
            text = (
                f"collective {meeting.number} of {self.name} is {first.call} on "
                f"{first.side.process.name}, {call} on {side.process.name}"
            )
            self.world.violated("unmatched", text)
            side.end(text)
            return work
        side.pending.append(work)
        self._look(meeting)
        return work

    def _look(self, meeting: Meeting) -> None:
        complete = len(meeting.works) == self.size
        if complete and meeting.torn:
            self._snapshot(meeting)
            self.world.faults.tear(self, meeting)
            return
        for rank, work in meeting.works.items():
            if (
                not work.coming
                and not meeting.torn
                and self._has_all_it_needs(meeting, rank, complete)
            ):
                work.coming = True
                if complete and meeting.results is None:
                    self._snapshot(meeting)
                self.world.scheduler.after(
                    self.world.delay(_FASTEST_S, _SLOWEST_S),
                    lambda rank=rank: self.deliver(meeting, rank),
                )

    def _has_all_it_needs(self, meeting: Meeting, rank: int, complete: bool) -> bool:
        root = meeting.works[rank].call.root
        if meeting.kind in _FROM_ROOT:
            return rank == root or root in meeting.works
        return complete or (meeting.kind in _TO_ROOT and rank != root)

    def _snapshot(self, meeting: Meeting) -> None:
        """Computes every rank's result in copies. Each rank gets its result later, or never."""
        copies = [meeting.works[rank].copy() for rank in range(self.size)]
        execute(copies)
        meeting.results = copies

    def deliver(self, meeting: Meeting, rank: int) -> None:
        """Delivers the result to `rank`, unless its group ended before."""
        work = meeting.works[rank]
        if work.side.ended is not None or work.done:
            return
        if self._is_held_back(meeting, rank):
            self.world.network.when_healed(lambda: self.deliver(meeting, rank))
            return
        if not all(map(_is_there, work.call.outputs)):
            self.world.violated(
                "memory",
                f"{work.side.process.name} freed an output of collective {meeting.number} of "
                f"{self.name}",
            )
            return
        with torch.no_grad():
            if meeting.results is not None:
                for output, result in zip(
                    work.call.outputs, meeting.results[rank].outputs, strict=True
                ):
                    _write(output, result)
            elif meeting.kind in _FROM_ROOT and rank != work.call.root:
                given = meeting.works[work.call.root or 0].given
                for output, result in zip(
                    work.call.outputs,
                    given if meeting.kind is Kind.BROADCAST else [given[rank]],
                    strict=True,
                ):
                    _write(output, result)
        work.done = True
        work.side.pending.remove(work)

    def _is_held_back(self, meeting: Meeting, rank: int) -> bool:
        """Returns whether a partition delays the result of `rank`. A rank that is cut off gets
        nothing. A rank that reaches all others gets the result or not, by chance: as in a ring, it
        may need data that must cross the cut."""
        separated = self.world.network.separated(side.process.name for side in self.sides.values())
        if not separated or (meeting.kind in _FROM_ROOT and rank == meeting.works[rank].call.root):
            return False
        if self.sides[rank].process.name in separated:
            return True
        if rank not in meeting.held_back:
            meeting.held_back[rank] = self.world.scheduler.random.random() < 0.5
        return meeting.held_back[rank]

    def send(self, rank: int, peer: int, tag: int, tensor: torch.Tensor) -> None:
        """Sends a message. It arrives even if the sender dies, after all messages sent before."""
        box, message, scheduler = (
            self._mail.setdefault((rank, peer, tag), []),
            tensor.detach().clone(),
            self.world.scheduler,
        )
        comes_at = (
            max(
                self._mailed.get((rank, peer), 0.0),
                scheduler.now + self.world.delay(_FASTEST_S, _SLOWEST_S),
            )
            + 1e-6
        )
        self._mailed[rank, peer] = comes_at
        sender, receiver = self.sides[rank].process, self.sides[peer].process
        scheduler.after(
            comes_at - scheduler.now,
            lambda: self.world.network.between(sender, receiver, lambda: box.append(message)),
        )

    def mail(self, source: int, rank: int, tag: int) -> list[torch.Tensor]:
        """Returns the messages that have arrived from `source`."""
        return self._mail.setdefault((source, rank, tag), [])


class Side:
    """One rank's end of a room."""

    def __init__(self, room: Room, rank: int, process: Process, backend: SimulatedBackend) -> None:
        self.room, self.rank, self.process, self.backend = room, rank, process, backend
        self.ended: str | None = None
        self.pending: list[CollectiveWork] = []
        room.sides[rank] = self
        process.sides.append(self)

    def end(self, reason: str) -> None:
        """Closes this rank's connections: its pending collectives fail, and the other ranks notice
        later."""
        if self.ended is not None:
            return
        self.ended = reason
        for work in self.pending:
            work.fail()
        self.pending.clear()
        world = self.room.world
        for other in self.room.sides.values():
            if other.ended is None:
                reason_there = f"{self.process.name} closed its connection ({reason[:60]})"
                tell = functools.partial(self._notify, other, reason_there)
                world.scheduler.after(world.delay(_FASTEST_S, _LONGEST_NOTICE_S), tell)

    def _notify(self, other: Side, reason: str) -> None:
        """Notifies the other rank that this connection has closed, once the two reach each
        other."""
        self.room.world.network.between(self.process, other.process, lambda: other.notice(reason))

    def notice(self, reason: str) -> None:
        """Aborts this rank's group because a peer is gone."""
        if self.ended is None and not self.process.dead:
            self.backend.abort(reason)


class CollectiveWork(Work):
    """One rank's part in a collective."""

    def __init__(self, side: Side, meeting: Meeting, call: Collective) -> None:
        super().__init__()
        self.side, self.meeting, self.call = side, meeting, call
        self.given = [one.detach().clone() for one in call.inputs]
        """Copies of the inputs, which reach the other ranks even if this one dies."""
        self.coming = self.done = False
        self.spins = False
        """True if the device's kernel never completes and the host does not know yet."""

    def copy(self) -> Collective:
        """Returns the collective on copies of the rank's tensors."""
        call = self.call
        outputs = (
            self.given
            if call.inputs is call.outputs
            else [torch.empty_like(one) for one in call.outputs]
        )
        return Collective(
            kind=call.kind, inputs=self.given, outputs=outputs, op=call.op, root=call.root
        )

    def fail(self) -> None:
        """Leaves failed outputs: a part of a copy may have arrived, and sums are NaN."""
        for index, output in enumerate(self.call.outputs):
            if not _is_there(output) or output.is_sparse:
                continue
            if self.meeting.kind in _COPIES:
                given = self._sent_for(index)
                if given is not None and output.is_contiguous():
                    come = self.side.room.world.scheduler.random.randrange(output.numel() + 1)
                    output.data.view(-1)[:come] = given.reshape(-1)[:come]
            elif output.is_floating_point():
                output.data.fill_(float("nan"))

    def comes(self) -> bool:
        """Waits as a device's stream does, and returns whether the result arrived. A collective
        that never completes ends the wait too."""
        self._wait(lambda: self.done or self.spins or self.side.ended is not None, None)
        return self.done

    def leave_garbage(self) -> None:
        """Fills the outputs of a collective that failed on a device with NaN, except this rank's
        inputs."""
        own = {one.untyped_storage().data_ptr() for one in self.call.inputs}
        for output in self.call.outputs:
            if (
                output.is_floating_point()
                and _is_there(output)
                and output.untyped_storage().data_ptr() not in own
            ):
                output.data.fill_(float("nan"))

    def _sent_for(self, index: int) -> torch.Tensor | None:
        """Returns the tensor that another rank sent for an output. None: nothing has been sent yet,
        or the output is this rank's own."""
        rank, size = self.side.rank, self.side.room.size
        # only matching collectives have inputs
        works = {
            r: work
            for r, work in self.meeting.works.items()
            if work.call.signature == self.call.signature
        }
        if self.meeting.kind is Kind.BROADCAST:
            sender, which = self.call.root or 0, index
        elif self.meeting.kind is Kind.ALL_GATHER:
            which, sender = divmod(index, size)
        else:
            sender, which = index, rank
        return works[sender].given[which] if sender != rank and sender in works else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result has arrived. Raises GroupEndedError."""
        self._wait(lambda: self.done or self.side.ended is not None, timeout)
        if not self.done:
            raise GroupEndedError(self.side.ended or "over")
        return True

    def _wait(self, condition: Callable[[], bool], timeout: timedelta | None) -> None:
        side, room = self.side, self.side.room
        what = f"in {self.meeting.kind.value}, collective {self.meeting.number} of {room.name}"
        limit = (timeout or side.backend.timeout).total_seconds()
        with side.backend.noted_wait(what):
            came = own_scheduler().wait(condition, limit, what)
        if not came:
            missing = [
                other.process.name
                for rank, other in room.sides.items()
                if rank not in self.meeting.works
            ]
            room.world.timed_out(f"{side.process.name} {what}: {', '.join(missing)} did not come")
            side.backend.abort(f"timed out after {limit:g} s {what}")

    def is_completed(self) -> bool:
        """Returns whether `wait` would return, or raise, immediately."""
        return self.done or self.side.ended is not None

    def is_success(self) -> bool:
        """Returns whether the result has arrived."""
        return self.done

    def result(self) -> list[Any]:
        """Returns the output tensors in the form in which torch passed them."""
        return self.call.result

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits and returns a completed future of the output tensors."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class _SendWork(Work):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return [self._tensor]


class _ReceiveWork(Work):
    def __init__(self, side: Side, source: int, tag: int, tensor: torch.Tensor) -> None:
        super().__init__()
        self._side, self._source, self._tag, self._tensor = side, source, tag, tensor
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done:
            return True
        side = self._side
        box = side.room.mail(self._source, side.rank, self._tag)
        limit = (timeout or side.backend.timeout).total_seconds()
        what = f"for a message of rank {self._source} of {side.room.name}"
        with side.backend.noted_wait(what):
            came = own_scheduler().wait(lambda: bool(box) or side.ended is not None, limit, what)
        if not came:
            side.room.world.timed_out(f"{side.process.name} {what}")
            side.backend.abort(f"timed out after {limit:g} s {what}")
        if side.ended is not None:
            raise GroupEndedError(side.ended)
        with torch.no_grad():
            self._tensor.copy_(box.pop(0).view_as(self._tensor))
        self._done = True
        return True

    def comes(self) -> bool:
        with contextlib.suppress(GroupEndedError):
            return self.wait()
        return False

    def leave_garbage(self) -> None:
        self._tensor.data.fill_(float("nan"))

    def is_completed(self) -> bool:
        return self._done or self._side.ended is not None

    def result(self) -> list[Any]:
        return [self._tensor]


class SimulatedGroup(PythonGroup):
    """A torch process group whose ranks meet in a room."""

    backend_name: ClassVar[str] = "shoal_simulated"

    def __init__(self, side: Side) -> None:
        super().__init__(side.rank, side.room.size, f"{side.room.name} {next(_numbers)}")
        self.side = side

    def _issue(self, call: Collective) -> Work:
        self._check()
        return self.side.room.issue(self.side.rank, call)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self._check()
        self.side.room.send(self.side.rank, peer, tag, tensor)
        return _SendWork(tensor)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        self._check()
        assert peer is not None
        return _ReceiveWork(self.side, peer, tag, tensor)

    def _check(self) -> None:
        if self.side.process.dead:
            raise Killed
        if self.side.ended is not None:
            raise GroupEndedError(self.side.ended)


_numbers = itertools.count()


class SimulatedBackend(CommunicationBackend):
    """Connects simulated ranks that use the same store."""

    name: ClassVar[str] = "gloo"
    averages_natively: ClassVar[bool] = True

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.timeout = timedelta(0)
        self._process = process
        self._side: Side | None = None
        self._unsettled: list[CollectiveWork | _ReceiveWork] = []

    def _connect(
        self, store: Any, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        self.timeout = timeout
        room = self._process.world.room(store.name, self.world_size)
        side = self._side = Side(room, self.rank, self._process, self)
        if self._reason is not None:
            side.end(self._reason)
        came = own_scheduler().wait(
            lambda: room.is_open_to(self._process) or side.ended is not None,
            connect_timeout.total_seconds(),
            f"for {room.name} to come",
        )
        if side.ended is not None:
            raise GroupEndedError(side.ended)
        if not came:
            side.end("not all came")
            raise DeadlineError(
                f"connecting {room.name} took longer than {connect_timeout.total_seconds():g} s",
                reason="CONNECT_TIMEOUT",
            )
        return SimulatedGroup(side)

    def noted_wait(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Records the wait for this rank's stall watch, if the scenario has partitions."""
        return (
            self.waits.of(what) if self._process.world.scenario.parted else contextlib.nullcontext()
        )

    def order(self, work: dist.Work) -> None:
        """Implements `CommunicationBackend.order`. On devices a lost collective leaves garbage and
        raises nothing before `settle`."""
        if not self._process.world.scenario.devices or not isinstance(
            work, CollectiveWork | _ReceiveWork
        ):
            work.wait()
            return
        self._unsettled.append(work)
        if not work.comes():
            work.leave_garbage()

    @property
    def unsettled(self) -> bool:
        """True while ordered collectives have not been settled."""
        return bool(self._unsettled)

    def settle(self) -> None:
        """Implements `CommunicationBackend.settle`."""
        works = list(self._unsettled)
        self._unsettled.clear()
        for work in works:
            work.wait()
        if self._reason is not None:
            raise GroupEndedError(self._reason)

    def _break(self) -> None:
        if self._side is not None and not self._process.dead:
            self._side.end(self._reason or "over")

    def _release(self) -> None:
        self._process_group = None

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group raises its own errors


def _is_there(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory is still allocated."""
    if tensor.is_sparse:
        return True
    return (
        tensor.untyped_storage().nbytes()
        >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    )


def _write(output: torch.Tensor, value: torch.Tensor) -> None:
    if output.is_sparse:
        output.copy_(value)
    else:
        output.data.copy_(value.view_as(output))
