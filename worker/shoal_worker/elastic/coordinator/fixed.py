"""Membership of a rank of `shoal.launch` or `mpiexec`. The ranks are known from the start and never
change.

The launcher assigns the ranks, so neither a coordinator nor Redis is needed. Sessions, steps,
operations and checkpoints use the same code as in a job, with a single generation. The
coordinator's other functions are not needed, because no rank fails alone and none can join later:
the ranks are threads of one process, or MPI terminates all of them when one fails.

Used only by the rank's thread, except `has_left`. The registry of trained modules needs no lock,
because ranks that are threads take turns."""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Final, NoReturn

from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from shoal_worker.backends.inmemory.turns import own_turns
from shoal_worker.backends.registry import backend_class
from shoal_worker.backends.worlds import Seat, own_world
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.group import Group, GroupConfiguration
from shoal_worker.elastic.state.strategy_interface import TrainingEngine

_TRAINED_BY: Final[weakref.WeakKeyDictionary[nn.Module, Seat]] = weakref.WeakKeyDictionary()


def check_own(model: nn.Module) -> None:
    """Checks that each rank trains its own module. Does nothing if the ranks are processes.

    Raises:
        ConfigurationError: another rank of this launch trains the same module object.
    """
    world = own_world()
    if world is None or world.seat is None:
        return
    seat, other = world.seat, _TRAINED_BY.get(model)
    if other is not None and other.store is seat.store and other.rank != seat.rank:
        raise ConfigurationError(
            f"ranks {other.rank} and {seat.rank} passed the same {type(model).__name__} object, "
            "but each rank of shoal.launch needs its own: create the model inside the launched "
            "function, or pass copy.deepcopy(model) on each rank"
        )
    _TRAINED_BY[model] = seat


class FixedLink:
    """Implementation of `Notices` without a coordinator: there is only one generation, and no
    notices arrive."""

    newest = 1
    refused = None
    draining = None
    excluded = False
    stopped = None
    finished_steps = None

    def __init__(self, generation: Generation) -> None:
        self.newest_generation = generation

    def ready(self) -> None:
        """Does nothing, because the rank is assigned from the start."""

    def become_spare(self) -> None:
        """Does nothing, because there is no coordinator to inform."""


class FixedMembership:
    """Membership of one rank in a fixed world. Implements `Member`."""

    def __init__(self, seat: Seat, donor_address: str, host: str = "") -> None:
        """`seat`: the rank's seat in the launch. `host`: machine of this rank; empty on all ranks
        if there is only one machine."""
        self._seat = seat
        self._backend_class = backend_class(seat.backend)
        self._where = "shoal.launch" if own_world() is not None else "a fixed group of processes"
        self._donor_address = donor_address
        self._host = host
        self._turns = own_turns()
        self.group: Group | None = None
        """The last group that was formed; None before the first and after `leave_group`."""
        self.link = FixedLink(self._generation("", [("", "")] * seat.world_size))

    @property
    def only_backend(self) -> str:
        """Backend of the launch that started the ranks."""
        return self._seat.backend

    def observe(self, progress: ProgressMeter) -> None:
        """Does nothing, because there is no coordinator to inform."""

    def join(self) -> bool:
        """Returns False, because no rank has trained before."""
        return False

    def serve(self, engine: TrainingEngine) -> None:
        """Checks that the engine fits this launch. Raises ConfigurationError for an asynchronous
        engine, or for a backend other than the backend that connects the ranks."""
        if engine.asynchronous:
            raise ConfigurationError(
                f"strategy={engine.strategy!r} in {self._where}: its workers and servers are "
                "separate processes; start them with `shoal run`"
            )
        if engine.backend_name != self.only_backend:
            raise ConfigurationError(
                f"backend={engine.backend_name!r} cannot be used in {self._where}, whose ranks "
                f"are connected by {self.only_backend!r}; leave backend out, or start ranks on "
                "other backends as processes with `shoal run`"
            )

    def await_generation(self, timeout: timedelta | None = None) -> Generation:
        """Returns the only generation."""
        return self.link.newest_generation

    def form(self) -> Group:
        """Connects the group of the only generation. Waits for the other ranks."""
        seat, generation = self._seat, self.link.newest_generation
        configuration = GroupConfiguration(
            make_backend=self._backend_class,
            store=lambda name: PrefixStore(f"shoal-session/{name}", seat.store),
            hostname=None,
            connect_timeout=seat.timeout,
            collective_timeout=seat.timeout,
        )
        backend = None
        if seat.world_size > 1:
            backend = self._backend_class()
            configuration.initialize(backend, generation, PrefixStore("shoal-session", seat.store))
        replies = Group(generation, backend, None).exchange(
            json.dumps([uuid.uuid4().hex, self._host, self._donor_address]).encode()
        )
        nonces, *places = zip(*(json.loads(one) for one in replies), strict=True)
        self.link.newest_generation = self._generation(nonces[0], list(zip(*places, strict=True)))
        self.group = Group(self.link.newest_generation, backend, None, configuration)
        return self.group

    def failed(self, error: BaseException) -> NoReturn:
        """Raises MembershipChanged, because a fixed set of ranks cannot form another group."""
        raise MembershipChanged(
            f"the launch has ended, because its ranks can only continue together: {error}"
        ) from error

    def give_up_place(self, why: str) -> NoReturn:
        """Raises PreconditionError. Never called, because the ranks take all steps together."""
        raise PreconditionError(why, reason="MEMBER_BEHIND")

    def check_current(self, generation: int) -> None:
        """Does nothing, because no rank is evicted."""

    def has_left(self, member_id: str) -> bool:
        """Returns whether the launch has ended. All members count as having left once any rank has
        failed."""
        return self._turns is not None and self._turns.over is not None

    def all_have(self, generation: Generation, apart_from: Collection[int], step: int) -> bool:
        """Returns True. No rank fails alone, so no rank can be in doubt about a step."""
        return True

    def last_departures(self) -> Sequence[str]:
        """Returns an empty tuple, because no rank leaves alone."""
        return ()

    def leave_group(self, reason: str) -> None:
        """Leaves the group without informing the other ranks. They fail only if they run a
        collective that needs this rank."""
        group, self.group = self.group, None
        if group is not None:
            group.leave()

    def leave(
        self,
        reason: LeaveReason,
        detail: str = "",
        *,
        alone: bool = False,
        steps: int = 0,
        held: LastState | None = None,
    ) -> str:
        """Ends this rank's part in the launch. Returns a description of how its last state differs
        from the last state of a rank that has already finished; empty if it does not differ. MPI
        ranks have no shared store, so they do not compare states."""
        if reason == LeaveReason.FINISHED and self.group is not None:
            self.group.all_leave()
        self.leave_group("this rank has ended")
        return "" if held is None or reason != LeaveReason.FINISHED else self._compare(held)

    def _compare(self, held: LastState) -> str:
        """Compares the digests `held` with the digests that the first rank to leave has put into
        the store. Returns a description of the difference; empty if there is none."""
        mine, said = str(self._seat.rank), {}
        for group, digest in held.digests.items():
            key = f"shoal-session/held/{held.step}/{group}"
            first = self._seat.store.compare_set(key, "", f"{digest} {mine}").decode()
            said[group] = first.split()
        apart = [group for group, (digest, _) in said.items() if digest != str(held.digests[group])]
        if not apart:
            return ""
        others = (
            f"ranks {said[apart[0]][1]} and {self._seat.rank} hold different values of "
            f"{', '.join(apart)}"
        )
        since = (
            f"all ranks agreed after step {held.agreed}"
            if held.agreed
            else "the ranks had not been compared before"
        )
        return f"after step {held.step}, the last one, {others}; {since}"

    def _generation(self, nonce: str, places: list[tuple[str, str]]) -> Generation:
        """Returns the only generation. `places`: each rank's host and donor address."""
        peers = tuple(
            Peer(rank=rank, member_id=str(rank), host=host, donor_address=donor, joining=False)
            for rank, (host, donor) in enumerate(places)
        )
        return Generation(
            number=1,
            nonce=nonce,
            peers=peers,
            rank=self._seat.rank,
            interrupts_below=0,
            begins_run=True,
        )
