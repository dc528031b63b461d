"""Ranks as threads of one process, for notebooks, tests and debugging: `shoal.launch(fn,
world_size=4)`.

Results do not depend on timing: reductions add in rank order, and the ranks of a `launch` take
turns (turns.py). When a rank fails, the group ends on all ranks, with the reason in the error.
Speed is not a goal.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import Store

from shoal_worker.backends.base import CommunicationBackend, GroupEndedError
from shoal_worker.backends.collective import Collective
from shoal_worker.backends.inmemory.room import Meeting, Reception, Room, room_for
from shoal_worker.backends.python_group import PythonGroup
from shoal_worker.torch_internals import _DistributedBackendOptions

# -------------------------------------------------------------------------------- the process group
#
# A torch process group whose ranks are threads of one process, which exchange data in a room
# (room.py).
#
# Threads: a group belongs to the thread that is its rank; any thread may call `abort`.


class InMemoryGroup(PythonGroup):
    """Process group of `rank`, which has entered `room`."""

    backend_name: ClassVar[str] = "shoal_inmemory"

    def __init__(self, room: Room, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, room.size, room.name)
        self.room = room
        self._timeout = timeout
        self._leave = weakref.finalize(self, room.leave, rank, "has released the group")

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Aborts the group on all ranks: pending and later collectives raise
        GroupEndedError(reason)."""
        self.room.end(GroupEndedError(reason))

    def shutdown(self) -> None:
        """Leaves the group. The other ranks fail only if they still need this rank. Idempotent."""
        self.room.leave(self.rank(), "has left the group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later waits for other ranks."""
        self._timeout = timeout

    def _issue(self, call: Collective) -> Work:
        call.check()
        return CollectiveWork(
            self.room, self.room.issue(self.rank(), call), self.rank(), self._timeout
        )

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self.room.send(self.rank(), peer, tag, tensor)
        return SendWork(tensor)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        reception = self.room.receive(self.rank(), peer, tag, tensor)
        return ReceiveWork(self.room, reception, self.rank(), self._timeout)


class _InMemoryWork(Work):
    """Work of a collective or a message. `get_future` returns only completed futures, so callbacks
    run on the thread of their own rank and not on a peer's thread. DDP and functional collectives
    would otherwise wait for the future in C++, where the rank cannot pass on its turn
    (turns.py)."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise NotImplementedError

    def is_completed(self) -> bool:
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Returns the output tensors."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Returns whether the result is in place."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits and returns a completed future of the output tensors."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class CollectiveWork(_InMemoryWork):
    """Work of a collective, on one of its ranks."""

    def __init__(self, room: Room, meeting: Meeting, rank: int, timeout: timedelta) -> None:
        super().__init__()
        self._room, self._meeting, self._rank, self._timeout = room, meeting, rank, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result has arrived. A `timeout` of None or 0 means the group's timeout.

        Raises GroupEndedError if the group has ended, or if this call aborts it because a rank did
        not issue the collective in time. Raises UnmatchedCollectiveError if the ranks' collectives
        do not match.
        """
        self._room.await_meeting(self._meeting, self._rank, timeout or self._timeout)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self._meeting.done or self._room.ended is not None

    def is_success(self) -> bool:
        """Returns whether the result is in place."""
        return self._meeting.done

    def result(self) -> list[Any]:
        """Returns the output tensors, structured as torch passed them."""
        return self._meeting.calls[self._rank].result


class SendWork(_InMemoryWork):
    """Work of a sent message. It is complete immediately, because the message has been copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns immediately, because the message was copied when it was sent."""
        return True

    def is_completed(self) -> bool:
        """Returns True, because the message was copied when it was sent."""
        return True

    def result(self) -> list[Any]:
        """Returns the tensor that was sent, in a list."""
        return [self._tensor]


class ReceiveWork(_InMemoryWork):
    """Work of a message that is being received."""

    def __init__(self, room: Room, reception: Reception, rank: int, timeout: timedelta) -> None:
        super().__init__()
        self._room, self._reception, self._rank, self._timeout = room, reception, rank, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the message has arrived. Raises the same errors as `CollectiveWork.wait`."""
        self._room.await_reception(self._reception, self._rank, timeout or self._timeout)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self._reception.done or self._room.ended is not None

    def is_success(self) -> bool:
        """Returns whether the message has arrived."""
        return self._reception.done

    def result(self) -> list[Any]:
        """Returns the tensor with the received message, in a list."""
        return [self._reception.tensor]

    def _source_rank(self) -> int:
        """Returns the sender's rank. Called by torch after `wait`."""
        assert self._reception.source is not None
        return self._reception.source


# -------------------------------------------------------------------------------------- the backend


class InMemoryBackend(CommunicationBackend):
    """Backend whose ranks are threads of this process. The store only determines which threads form
    a group, so a `torch.distributed.HashStore` suffices."""

    name: ClassVar[str] = "inmemory"
    averages_natively: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._room: Room | None = None

    @property
    def is_initialized(self) -> bool:
        """True if collectives can be issued: the group is initialized and has not ended on any
        rank."""
        return super().is_initialized and self._room is not None and self._room.ended is None

    def _connect(
        self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        room = self._room = room_for(store, self.rank, self.world_size, "inmemory")
        if self._reason is not None:
            room.end(GroupEndedError(self._reason))
        group = InMemoryGroup(room, self.rank, timeout)
        room.await_all(self.rank, connect_timeout)
        return group

    def shutdown(self) -> None:
        """Leaves the group. The other ranks fail only if they run a collective that needs this
        rank. Idempotent."""
        if self._room is not None:
            self._room.leave(self.rank, "has shut its backend down")
        with self._lock:
            self._reason = self._reason or f"backend {self.name!r} was shut down"
        self._release()

    def _break(self) -> None:
        room, reason = self._room, self._reason
        assert reason is not None
        if room is not None:
            room.end(GroupEndedError(reason))

    def _release(self) -> None:
        self._process_group = None

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group itself raises the proper error


def create_group(options: _DistributedBackendOptions, _: Any) -> InMemoryGroup:
    """Creates the default group or a group for new_group. Called by torch. Does not wait for the
    other ranks; the first collective does."""
    room = room_for(options.store, options.group_rank, options.group_size, options.group_id)
    return InMemoryGroup(room, options.group_rank, options.timeout)
