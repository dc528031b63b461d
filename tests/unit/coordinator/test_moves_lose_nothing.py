"""Moves of partitions under random deaths: the real coordinator core with a model of the servers,
which follows docs/explanation/parameter-servers.md#moving-partitions.

A model server is the content of its disk: the number of pushes applied to each partition, the
partitions taken but not owned yet, and the partitions recorded as leaving. Invariants: at most one
server answers for a partition, it has applied each acknowledged push once, and moves end when no
server dies for a while.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shoal_common.errors import ShoalError
from shoal_coordinator.membership.model.effects import Effect, SendMove, SendSettled, StopServer
from shoal_coordinator.membership.model.events import (
    Ending,
    Event,
    MoveReported,
    ServerDrainRequested,
    ServerLost,
    ServerRegistered,
    TensorsDeclared,
)
from shoal_coordinator.membership.model.pulse import Pulses
from shoal_coordinator.membership.model.shards import TensorSpec
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import Drained, JobState, Move, Now, ServerRole
from shoal_coordinator.membership.transition import Transition, transition
from shoal_coordinator.state.codec import decode_state, encode_changes, everything

PARTITIONS = 6
LARGEST_PARTITION = 2 << 20
"""Number of float32 elements in 8 MiB."""
NAMES = [f"s{number}" for number in range(4)]


@dataclass
class Leaving:
    """A giver's journal entry about leaving partitions."""

    move: Move
    taken_by: str


@dataclass
class Disk:
    """A server's data after a crash."""

    applied: dict[int, int] = field(default_factory=dict)
    """Number of pushes by partition, for the partitions that this server believes it owns."""
    taken: dict[int, dict[int, int]] = field(default_factory=dict)
    """Content received with each move."""
    leaving: Leaving | None = None


@dataclass
class Copy:
    """Partitions that are being sent from one process to another."""

    move: int
    giver: str
    """Incarnations of the giver and the receiver."""
    receiver: str
    values: dict[int, int]


@dataclass
class Process:
    """One life of a server."""

    name: str
    incarnation: str
    disk: Disk
    inbox: dict[type[Effect], Effect] | None = None
    """Unread messages from the coordinator; None without a session."""
    asked: Move | None = None
    """The move that it is executing; the move's partitions are frozen."""
    heard: int = 0
    """Number of the last move that it has been told is settled."""
    handed_to: str = ""
    """The process that has taken the partitions."""
    given_up: int = 0
    """The newest move that it has given up and will not begin again."""

    def serves(self, partition: int) -> bool:
        leaving = self.disk.leaving is not None and partition in self.disk.leaving.move.partitions
        return (
            partition in self.disk.applied
            and not leaving
            and (self.asked is None or partition not in self.asked.partitions)
        )


class Moving(RuleBasedStateMachine):
    """Servers start, leave, die and restart while partitions are pushed to."""

    @initialize(first=st.integers(min_value=1, max_value=3))
    def begin(self, first: int) -> None:
        self.lives = itertools.count()
        self.ms = 0
        self.state = JobState(
            spec=JobSpec(
                job_id="j",
                min_workers=1,
                max_workers=1,
                parameter_servers=first,
                max_parameter_servers=3,
            )
        )
        self.redis = dict(encode_changes(self.state, everything(self.state)).put)
        self.disks = {name: Disk() for name in NAMES}
        self.processes: dict[str, Process] = {}
        self.on_their_way: list[Copy] = []
        self.acknowledged = dict.fromkeys(range(PARTITIONS), 0)
        self.drained: set[str] = set()
        for name in NAMES[:first]:
            self.start(name)
        tensor = TensorSpec(name="w", shape=(PARTITIONS * LARGEST_PARTITION,), dtype="float32")
        self.happen(TensorsDeclared(tensors=(tensor,)))
        for partition, owner in enumerate(self.owners()):
            self.at(owner).applied[partition] = 0

    # ---------------------------------------------------------------------------------- coordinator

    def happen(self, event: Event | None = None) -> Transition:
        now = Now(ms=self.ms, unix_ms=self.ms)
        before = self.state.servers
        decided = transition(
            self.state, now, [] if event is None else [event], pulses=Pulses(), nonce="0" * 32
        )
        left = [
            record.attributes["server_id"]
            for record in decided.records
            if record.kind == "server_drained"
        ]
        self.drained.update(before[name].incarnation for name in left)
        self.state = decided.state
        written = encode_changes(decided.state, decided.changes)
        self.redis.update(written.put)
        for name in written.remove:
            del self.redis[name]
        for effect in decided.effects:
            if isinstance(effect, SendSettled | SendMove | StopServer):
                inbox = (
                    self.processes[effect.server_id].inbox
                    if effect.server_id in self.processes
                    else None
                )
                if inbox is not None:
                    inbox.pop(type(effect), None)
                    inbox[type(effect)] = effect
        return decided

    def owners(self) -> list[str]:
        """Returns the server of each partition in the shard map."""
        assert self.state.layout is not None
        primaries = {
            server.index: server.server_id
            for server in self.state.servers.values()
            if server.role is ServerRole.PRIMARY
        }
        return [primaries[partition.primary] for partition in self.state.layout.partitions]

    def at(self, name: str) -> Disk:
        return self.disks[name]

    @rule()
    def restart_coordinator(self) -> None:
        self.state = decode_state(self.redis)
        for process in self.processes.values():
            process.inbox = None

    @rule(ms=st.sampled_from([10, 3000, 60_000]))
    def wait(self, ms: int) -> None:
        self.ms += ms
        self.happen()

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        self.happen(ServerDrainRequested(server_id=name, reason="r"))

    # -------------------------------------------------------------------------------------- servers

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        if name not in self.processes:
            self.processes[name] = Process(
                name=name, incarnation=str(next(self.lives)), disk=self.disks[name]
            )
            self.connect(name)

    @rule(name=st.sampled_from(NAMES))
    def connect(self, name: str) -> None:
        """Opens a new session with the coordinator."""
        process = self.processes.get(name)
        if process is None:
            return
        process.inbox = {}
        event = ServerRegistered(
            server_id=name,
            address=f"{name}:1",
            metrics_address="",
            host="h",
            pid=1,
            incarnation=process.incarnation,
        )
        (outcome,) = self.happen(event).outcomes
        if isinstance(outcome, ShoalError):
            assert outcome.reason == "SERVERS_COMPLETE"
            del self.processes[name]

    @rule(name=st.sampled_from(NAMES), noticed=st.sampled_from([True, True, False]))
    def kill(self, name: str, noticed: bool) -> None:
        if self.processes.pop(name, None) is not None and noticed:
            self.lose(name)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        """Makes the coordinator notice that a process no longer exists."""
        if name not in self.processes:
            self.happen(ServerLost(server_id=name, ending=Ending.STREAM_BROKEN))

    @rule(name=st.sampled_from(NAMES))
    def cut(self, name: str) -> None:
        """Breaks the stream of a living process; the messages in it are lost."""
        if name in self.processes:
            self.processes[name].inbox = None
            self.happen(ServerLost(server_id=name, ending=Ending.STREAM_BROKEN))

    @rule(choices=st.lists(st.integers(min_value=0, max_value=11), min_size=1, max_size=5))
    def go_on(self, choices: list[int]) -> None:
        """Lets servers take their next possible actions."""
        for choice in choices:
            able: list[tuple[Callable[[str], None], str]] = []
            for name, process in sorted(self.processes.items()):
                able += [(self.read, name)] if process.inbox else []
                able += (
                    [(self.hand_over, name), (self.arrive_first, name)]
                    if process.asked is not None
                    else []
                )
                able += [(self.note, name)] if process.handed_to else []
                able += [(self.report, name)] if process.disk.leaving is not None else []
            if able:
                act, name = able[choice % len(able)]
                act(name)

    def read(self, name: str) -> None:
        """Makes a server process the coordinator's next message."""
        process = self.processes.get(name)
        if process is None or not process.inbox:
            return
        match process.inbox.pop(next(iter(process.inbox))):
            case SendSettled(move=settled):
                self.receive_settled(process, settled)
            case SendMove(move=move):
                self.receive_move(process, move)
            case StopServer():
                assert not any(process.serves(partition) for partition in range(PARTITIONS)), (
                    "a server must give away all partitions before it stops"
                )
                self.kill(name, noticed=True)

    def receive_settled(self, process: Process, settled: int) -> None:
        disk = process.disk
        process.heard = max(process.heard, settled)
        owned = {
            partition for partition, owner in enumerate(self.owners()) if owner == process.name
        }
        for number in sorted((number for number in disk.taken if number <= settled), reverse=True):
            # older copies may arrive late
            came = disk.taken.pop(number)
            disk.applied.update(
                {
                    partition: pushes
                    for partition, pushes in came.items()
                    if partition in owned - disk.applied.keys()
                }
            )
        if disk.leaving is not None and disk.leaving.move.number <= settled:
            disk.leaving = None
        if process.asked is not None and process.asked.number <= settled:
            process.asked, process.handed_to = None, ""
        leaving = set() if disk.leaving is None else set(disk.leaving.move.partitions)
        for partition in disk.applied.keys() - owned - leaving:
            del disk.applied[partition]

    def receive_move(self, process: Process, move: Move) -> None:
        assert set(move.partitions) <= process.disk.applied.keys()
        if process.disk.leaving is not None:
            self.report(process.name)
        elif process.incarnation == move.giver_incarnation and move.number > process.given_up:
            process.asked = move
        else:
            self.refuse(process, move)

    def hand_over(self, name: str) -> None:
        """Makes the giver send a copy if the receiver is alive."""
        process = self.processes.get(name)
        if process is None or process.asked is None:
            return
        for server in self.state.servers.values():
            receiver = self.processes.get(server.server_id)
            if server.index == process.asked.receiver and receiver is not None:
                values = {
                    partition: process.disk.applied[partition]
                    for partition in process.asked.partitions
                }
                copy = Copy(
                    move=process.asked.number,
                    giver=process.incarnation,
                    receiver=receiver.incarnation,
                    values=values,
                )
                self.on_their_way.append(copy)

    def arrive_first(self, giver: str) -> None:
        for position, copy in enumerate(self.on_their_way):
            if copy.giver == self.processes[giver].incarnation:
                self.arrive(position)
                return

    def arrive(self, position: int) -> None:
        """Stores a copy on the receiver's disk and informs the giver, if both are still alive."""
        copy = self.on_their_way.pop(position)
        for receiver in self.processes.values():
            if receiver.incarnation == copy.receiver and copy.move > receiver.heard:
                receiver.disk.taken[copy.move] = copy.values
                for giver in self.processes.values():
                    if (
                        giver.incarnation == copy.giver
                        and giver.asked is not None
                        and giver.asked.number == copy.move
                    ):
                        giver.handed_to = copy.receiver

    def note(self, name: str) -> None:
        """Records in the giver's journal that the partitions are leaving."""
        process = self.processes.get(name)
        if process is not None and process.asked is not None and process.handed_to:
            process.disk.leaving = Leaving(move=process.asked, taken_by=process.handed_to)
            process.asked, process.handed_to = None, ""

    @rule(position=st.integers(min_value=0, max_value=9))
    def arrive_late(self, position: int) -> None:
        if self.on_their_way:
            self.arrive(position % len(self.on_their_way))

    @rule(name=st.sampled_from(NAMES))
    def give_up(self, name: str) -> None:
        """Makes a giver that has recorded nothing continue to serve. It reports this if it has a
        session."""
        process = self.processes.get(name)
        if process is not None and process.asked is not None:
            move, process.asked, process.handed_to = process.asked, None, ""
            process.given_up = move.number
            self.refuse(process, move)

    def refuse(self, process: Process, move: Move) -> None:
        if process.inbox is not None:
            self.happen(
                MoveReported(server_id=process.name, move=move.number, taken=False, reason="r")
            )

    def report(self, name: str) -> None:
        """Makes the giver report that the partitions were taken. It may report repeatedly."""
        process = self.processes.get(name)
        if (
            process is not None
            and process.inbox is not None
            and (leaving := process.disk.leaving) is not None
        ):
            event = MoveReported(
                server_id=name,
                move=leaving.move.number,
                taken=True,
                receiver_incarnation=leaving.taken_by,
            )
            self.happen(event)

    @rule(partition=st.integers(min_value=0, max_value=PARTITIONS - 1))
    def push(self, partition: int) -> None:
        """Pushes to the server that accepts the partition, as a worker with any shard map does."""
        for process in self.processes.values():
            if process.serves(partition):
                process.disk.applied[partition] += 1
                self.acknowledged[partition] += 1
                return

    # ----------------------------------------------------------------------------------- invariants

    @invariant()
    def at_most_one_server_answers_for_a_partition_and_has_all_acknowledged_pushes(self) -> None:
        for partition, pushes in self.acknowledged.items():
            serving = [process for process in self.processes.values() if process.serves(partition)]
            assert len(serving) <= 1
            assert all(process.disk.applied[partition] == pushes for process in serving)

    @invariant()
    def a_drained_process_never_gets_a_place_again(self) -> None:
        assert not self.drained & {server.incarnation for server in self.state.servers.values()}

    @invariant()
    def decisions_are_written(self) -> None:
        read = decode_state(self.redis)
        assert (read.moves, read.layout, read.servers) == (
            self.state.moves,
            self.state.layout,
            self.state.servers,
        )

    @invariant()
    def mapped_servers_have_all_acknowledged_pushes_on_disk(self) -> None:
        if self.state.layout is None:
            return
        for partition, owner in enumerate(self.owners()):
            disk = self.at(owner)
            came = [
                number
                for number, taken in disk.taken.items()
                if partition in taken and number <= self.state.moves.settled
            ]
            assert (
                disk.applied.get(partition, disk.taken[max(came)][partition] if came else None)
                == self.acknowledged[partition]
            )

    @precondition(lambda self: self.state.layout is not None)
    @rule()
    def calm(self) -> None:
        """Ends all deaths for a while: moves end, and all partitions are served with equal
        shares."""
        owning = {server.server_id for server in self.state.servers.values()}
        for name in sorted(owning):
            self.lose(name)
            self.start(name)
        for _ in range(40):
            self.ms += 60_000
            self.happen()
            for name in NAMES:
                if name in self.processes and self.processes[name].inbox is None:
                    self.connect(name)
                for step in (self.read, self.read, self.read, self.hand_over):
                    step(name)
                while self.on_their_way:
                    self.arrive(0)
                self.note(name)
                self.report(name)
        moves, layout = self.state.moves, self.state.layout
        assert layout is not None
        assert moves.under_way is None
        assert not moves.draining
        for partition, owner in enumerate(self.owners()):
            assert self.processes[owner].serves(partition)
        there = {server.index for server in self.state.servers.values() if server.alive}
        shares = [layout.shares[index].nbytes if index in layout.shares else 0 for index in there]
        assert max(shares) - min(shares) <= 4 * LARGEST_PARTITION


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_copy_sent_by_a_dead_source_is_not_mistaken_for_that_of_the_next_process() -> None:
    job = Moving()
    job.begin(first=1)
    job.start("s1")
    for _ in ("settled", "move"):
        job.read("s0")
    job.hand_over("s0")
    job.kill("s0", noticed=True)
    job.start("s0")
    (partition, *_) = job.on_their_way[0].values
    job.push(partition)
    for _ in ("settled", "move"):
        job.read("s0")
    job.wait(3000)
    for _ in ("settled", "move"):
        job.read("s0")
    job.hand_over("s0")
    late, now = job.on_their_way
    assert now.values[partition] == late.values[partition] + 1
    job.arrive(1)
    job.arrive(0)
    job.note("s0")
    job.report("s0")
    assert job.owners()[partition] == "s1"
    job.mapped_servers_have_all_acknowledged_pushes_on_disk()
    job.calm()


def test_last_hundred_drained_processes_are_remembered() -> None:
    job = Moving()
    job.begin(first=1)
    drained = {
        f"d{number}": Drained(incarnation=f"i{number}", index=1, reason="r")
        for number in range(100)
    }
    job.state = replace(job.state, moves=replace(job.state.moves, drained=drained))
    job.start("s1")
    for _ in ("settled", "move"):
        job.read("s0")
    job.give_up("s0")
    job.kill("s1", noticed=True)
    job.drain("s1")
    assert list(job.state.moves.drained) == [*list(drained)[1:], "s1"]
    assert decode_state(job.redis).moves == job.state.moves
