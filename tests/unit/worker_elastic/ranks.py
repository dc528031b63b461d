"""Ranks as threads of one process, for tests of the formation of generations: a scripted
coordinator, collectives between the threads, and real state transfers over sockets."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import torch
from shoal_common.errors import MembershipChanged
from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.transfer import StateDonor, StateExchange
from shoal_worker.elastic.group.waiting import Waiting
from shoal_worker.elastic.recovery.formation import Formation
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.engine.state.parameters import materialize
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from torch import nn

_PATIENCE_S = 60.0


class Room:
    """The collectives of one generation. After a rank has left, the collectives that it did not
    take part in fail."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._rounds: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._gone = False

    def gather(self, number: int, rank: int, value: Any) -> list[Any]:
        """Runs the collective with this number for a rank and returns the values of all ranks."""
        with self._changed:
            values = self._rounds[number]
            values[rank] = value
            self._changed.notify_all()
            complete = (
                self._changed.wait_for(lambda: len(values) == self._size or self._gone, _PATIENCE_S)
                and len(values) == self._size
            )
        if not complete:
            raise MembershipChanged("a rank is gone")
        return [values[r] for r in range(self._size)]

    def leave(self) -> None:
        with self._changed:
            self._gone = True
            self._changed.notify_all()


class RoomGroup:
    """One rank's view of a room."""

    def __init__(self, room: Room, generation: Generation) -> None:
        self._room = room
        self.generation = generation
        self.rank, self.world_size = generation.rank, generation.world_size
        self.broken: str | None = None
        self.waiting = Waiting(None)
        self._numbers = itertools.count()

    def rendezvous(self) -> None:
        self.exchange(b"")

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._room.gather(next(self._numbers), self.rank, payload)

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return self._room.gather(next(self._numbers), self.rank, list(values))

    def abort(self, reason: str) -> None:
        self.broken = self.broken or reason

    @contextlib.contextmanager
    def guarding(self) -> Iterator[Callable[[object], None]]:
        yield lambda connection: None


class Model(TrainingEngine):
    """The smallest training engine that a session accepts."""

    strategy, backend_name, least_samples = "test", "gloo", 1
    data_parallel_rank, data_parallel_size, consistency_check_every = 0, 1, 0

    def __init__(self, value: float, *, meta: bool = False) -> None:
        with torch.device("meta" if meta else "cpu"):
            self.module = nn.Linear(2, 1)
        if not meta:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.fill_(value)

    def consolidate(self, channel: Channel) -> None:
        """Consolidates as strategies with sharded models do: a rank without values contributes
        nothing."""
        if self.has_values():
            channel.exchange(b"")

    def check_optimizer_state(self) -> None:
        """Accepts any state, since there is no optimizer."""

    def capture(self) -> dict[str, Any]:
        return {"model": self.module.state_dict()}

    def restore(self, state: Any) -> None:
        if not self.has_values():
            materialize(self.module, None, torch.device("cpu"))
        self.module.load_state_dict(state["model"])

    def has_values(self) -> bool:
        return not any(p.is_meta for p in self.module.parameters())

    def step_begins(self) -> None: ...
    def micro_batch_begins(self) -> None: ...
    def micro_batch_ends(self, weight: float) -> None: ...
    def reduce(self, step: Step) -> None: ...

    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        raise AssertionError("no step of this engine is prepared")

    def discard_step(self) -> None: ...
    def commit_step(self) -> None: ...

    @property
    def value(self) -> float:
        (value,) = {float(v) for p in self.module.parameters() for v in p.detach().flatten()}
        return value


class Member:
    """One rank, with its model, its committed state and its formation."""

    def __init__(
        self, model: Model, *, state: StateName | None = None, live: bool = True, torn: bool = False
    ) -> None:
        self.model = model
        self.held = CommittedState(live=live)
        self.held.set_engine(cast(Any, model))
        self.held.name = state
        if torn:
            self.held.phase.tear()
        self.donor = StateDonor("127.0.0.1")
        self.group: RoomGroup | None = None
        self.next: list[RoomGroup] = []
        link = SimpleNamespace(
            newest=1,
            newest_generation=None,
            refused=None,
            stopped=None,
            draining=None,
            ready=lambda: None,
        )
        self.membership = SimpleNamespace(
            link=link, group=None, form=self._form, failed=lambda error: None
        )
        settings, metrics = (
            WorkerSettings(rendezvous_timeout_s=60, collective_timeout_s=60),
            WorkerMetrics(),
        )
        self.formation = Formation(
            cast(Membership, self.membership),
            self.held,
            StateExchange(self.donor, settings, metrics),
            settings=settings,
            metrics=metrics,
            progress=ProgressMeter(metrics),
        )

    def _form(self) -> Group:
        self.membership.group = self.next.pop(0)
        return cast(Group, self.membership.group)


def form(members: Sequence[Member], work: Callable[[Member], Any]) -> list[Any]:
    """Makes all `members` form one generation, with ranks in the given order, by running `work` on
    each. Returns what `work` returned or raised."""
    room = Room(len(members))
    for rank, member in enumerate(members):
        peers = tuple(
            Peer(
                rank=r,
                member_id=str(r),
                host="localhost",
                donor_address=members[r].donor.address,
                joining=not members[r].held.phase.holds_state,
            )
            for r in range(len(members))
        )
        member.next.append(
            RoomGroup(
                room,
                Generation(number=1, nonce="0" * 32, peers=peers, rank=rank, interrupts_below=0),
            )
        )

    def run(member: Member) -> Any:
        try:
            return work(member)
        except Exception as error:  # any exception is an outcome
            room.leave()
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        outcomes = list(pool.map(run, members))
    for member in members:
        member.donor.close()
    return outcomes
