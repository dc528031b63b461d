"""The membership of a rank of `shoal.launch`: who the ranks are is known from the start, and stays so to the end.

Why it exists: without it a launch would need a coordinator and a Redis beside it, only to be told what it has decided itself. With it the
session, its steps, operations and checkpoints are the very code that runs in a job, on the one generation that there is. What a coordinator
adds is missing, and is missing on purpose: the ranks are threads of one process, so none dies alone, and none can come later. When one
fails, all end, with its reason.

Used by the rank's thread alone; who trains which module is written in turns.
"""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Callable
from typing import Final, NoReturn

from shoal_common.errors import ConfigurationError, MembershipChanged
from shoal_protos.v1 import coordinator_pb2 as pb
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from shoal_worker.backends.inmemory import InMemoryBackend
from shoal_worker.backends.inmemory_worlds import Seat, own_world
from shoal_worker.elastic.generation import Generation, Peer
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.replica import Replica

_TRAINED_BY: Final[weakref.WeakKeyDictionary[nn.Module, Seat]] = weakref.WeakKeyDictionary()


def check_own(model: nn.Module) -> None:
    """Nothing where ranks are processes.

    Raises:
        ConfigurationError: another rank of this launch trains the very same module.
    """
    world = own_world()
    if world is None or world.seat is None:
        return
    seat, other = world.seat, _TRAINED_BY.get(model)
    if other is not None and other.store is seat.store and other.rank != seat.rank:
        raise ConfigurationError(
            f"ranks {other.rank} and {seat.rank} were given the same {type(model).__name__}: ranks of shoal.launch share what is made "
            "outside of them, so make the model inside, or give each rank copy.deepcopy(model)"
        )
    _TRAINED_BY[model] = seat


class FixedLink:
    """Says always the same: there is one generation, and nothing is to change."""

    newest = 1
    refused = None
    draining = None
    stopped = None

    def __init__(self, generation: Generation) -> None:
        self.newest_generation = generation
        self.progress: Callable[[], pb.Progress] = pb.Progress

    def ready(self) -> None:
        """The rank is given."""


class FixedMembership:
    """One rank's place in a launch. A `Member`."""

    only_backend = InMemoryBackend.name
    changes = False

    def __init__(self, seat: Seat, donor_address: str) -> None:
        self._seat = seat
        self._donor_address = donor_address
        self._backend: InMemoryBackend | None = None
        self._group: Group | None = None
        self.link = FixedLink(self._generation(nonce="", donors=[""] * seat.world_size))

    @property
    def group(self) -> Group | None:
        """See `Member`."""
        return self._group

    def join(self) -> pb.Welcome:
        """See `Member`: nobody has trained before."""
        return pb.Welcome()

    def serve(self, replica: Replica) -> None:
        """See `Member`."""
        if replica.asynchronous:
            raise ConfigurationError(
                f"strategy={replica.strategy!r} in shoal.launch: its workers and servers are processes; start them with `shoal run`"
            )
        if replica.backend_name != self.only_backend:
            raise ConfigurationError(
                f"backend={replica.backend_name!r} in shoal.launch: its ranks are threads; leave it out, or give {self.only_backend!r}"
            )

    def await_generation(self) -> Generation:
        """See `Member`."""
        return self.link.newest_generation

    def form(self) -> Group:
        """See `Member`. Waits for the other ranks."""
        seat, generation = self._seat, self.link.newest_generation
        if seat.world_size > 1:
            self._backend = InMemoryBackend()
            self._backend.initialize(
                rank=seat.rank,
                world_size=seat.world_size,
                store=PrefixStore("shoal-session", seat.store),
                timeout=seat.timeout,
                connect_timeout=seat.timeout,
            )
        told = Group(generation, self._backend, None).exchange(json.dumps([uuid.uuid4().hex, self._donor_address]).encode())
        nonces, donors = zip(*(json.loads(one) for one in told), strict=True)
        self.link.newest_generation = self._generation(nonce=nonces[0], donors=donors)
        self._group = Group(self.link.newest_generation, self._backend, None)
        return self._group

    def failed(self, error: BaseException) -> NoReturn:
        """See `Member`. Raises MembershipChanged: there is no other generation."""
        raise MembershipChanged(f"the launch is over, its ranks can only go on together: {error}") from error

    def check_current(self, generation: int) -> None:
        """See `Member`: nobody is put out."""

    def leave_group(self, reason: str) -> None:
        """See `Member`. The others fail when they need this rank, and not before."""
        self._group = None
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None

    def leave(self, reason: pb.Leave.Reason, detail: str = "") -> None:
        """See `Member`."""
        self.leave_group("this rank has ended")

    def _generation(self, *, nonce: str, donors: list[str] | tuple[str, ...]) -> Generation:
        size = self._seat.world_size
        peers = tuple(
            Peer(rank=rank, member_id=str(rank), host="", local_rank=rank, local_world_size=size, donor_address=donor, joining=False)
            for rank, donor in enumerate(donors)
        )
        return Generation(number=1, nonce=nonce, peers=peers, rank=self._seat.rank, interrupts_below=0)
