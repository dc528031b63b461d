"""The coordinator of simulated members: the product's pure core in a shell that uses virtual time.

The shell replaces `service/job_loop.py` and `service/member_sessions.py`, which use gRPC and Redis.
Timers drive it: events gather while a commit is under way, the core folds them, and the effects
travel as the same messages as over a real stream. A stream delivers in order. It breaks when its
process dies or the coordinator goes away, and the member's own link opens a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal_common.errors import InvalidRequestError, PreconditionError, ShoalError, UnavailableError
from shoal_common.formats.rank_table import MOST_SENT_WHOLE
from shoal_coordinator.membership.members.joining import Joined
from shoal_coordinator.membership.model.effects import (
    AnnounceGeneration,
    EndSession,
    SendDrain,
    SendGeneration,
    SendNotice,
    SendStandby,
    SendStop,
)
from shoal_coordinator.membership.model.events import (
    Ending,
    Event,
    LeaseEnded,
    MemberJoined,
    MemberLost,
    MemberReady,
    StreamBroken,
)
from shoal_coordinator.membership.model.pulse import (
    Pulse,
    Pulses,
    attached,
    beaten,
    detached,
    expired,
)
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import Generation, MemberPhase, Now, RunId
from shoal_coordinator.membership.transition import (
    Outcome,
    Transition,
    job_created,
    next_wake_ms,
    transition,
)
from shoal_coordinator.service.messages.requests import (
    parse_collective_failure,
    parse_heartbeat,
    parse_join,
    parse_leave,
    parse_ranks,
)
from shoal_coordinator.service.messages.responses import announcement, job_message, ranks_message
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.simulation.processes import Process
from tests.simulation.scheduler import current_actor, own_scheduler

if TYPE_CHECKING:
    from tests.simulation.world import World

_SCAN_S = 0.5
_KEPT_OUT_MS = 5_000
"""Quarantine in milliseconds. It is shorter than the product's, so that a quarantined member
returns within a run of a few steps."""
_FASTEST_S, _SLOWEST_S = 0.0003, 0.004


class Stream:
    """One session between a member and the coordinator, with the state of both ends."""

    def __init__(self, world: World, process: Process) -> None:
        self.process = process
        self.inbox: deque[pb.MemberDirective] = deque()
        self.unread: list[pb.MemberMessage] = []
        """Messages received before the coordinator admitted the member."""
        self.ended = False
        self.error: ShoalError | None = None
        self._world = world
        self._down_at = self._up_at = 0.0

    def down(self, deliver: Callable[[], None]) -> None:
        """Delivers something to the member, after everything sent to it before."""
        scheduler = self._world.scheduler
        self._down_at = max(
            self._down_at, scheduler.now + self._world.delay(_FASTEST_S, _SLOWEST_S)
        )
        scheduler.after(self._down_at - scheduler.now, deliver)

    def up(self, deliver: Callable[[], None]) -> None:
        """Delivers something to the coordinator, after everything the member sent before."""
        scheduler = self._world.scheduler
        self._up_at = max(self._up_at, scheduler.now + self._world.delay(_FASTEST_S, _SLOWEST_S))
        scheduler.after(self._up_at - scheduler.now, deliver)

    def end(self, error: ShoalError | None) -> None:
        """Ends the stream. The member notices after it has received everything sent before."""

        def close() -> None:
            self.ended, self.error = True, error

        self.down(close)


class Coordinator:
    """The coordinator of one job."""

    def __init__(self, world: World, spec: JobSpec) -> None:
        self.world = world
        self.state = job_created(spec, RunId())
        self.away = False
        self._policy = Policy(kept_out_ms=_KEPT_OUT_MS) if world.scenario.parted else Policy()
        self._streams: dict[str, Stream] = {}
        self._configuration: list[Stream] = []
        """Streams whose members are not admitted yet."""
        self._pulses: dict[str, Pulse] = {}
        self._queue: list[tuple[Event, Callable[[Outcome], None] | None]] = []
        self._stepping = False
        self._incarnation = 0
        self.members_of: dict[int, list[tuple[str, str]]] = {}
        """Member and host of each rank of every generation. Only the simulator reads it."""
        self._nonces = 0
        self._folded_ms = 0
        world.scheduler.after(_SCAN_S, self._scan)

    # --------------------------------------------------------------------------------- from outside

    def submit(self, event: Event, done: Callable[[Outcome], None] | None = None) -> None:
        """Queues an event. The event is dropped while the coordinator is away."""
        if self.away:
            return
        self._queue.append((event, done))
        self._wake()

    def go_away(self) -> None:
        """Stops the coordinator and breaks the streams of all members."""
        self.away, self._stepping = True, False
        self._incarnation += 1
        for member_id, stream in list(self._streams.items()):
            stream.end(UnavailableError("the coordinator is away"))
            self._detach(member_id, stream)
        for stream in self._configuration:
            stream.end(UnavailableError("the coordinator is away"))
        self._configuration.clear()
        self._queue.clear()

    def come_back(self) -> None:
        """Starts the coordinator again. State kept only in memory is lost, and every member gets a
        full lease."""
        self.away = False
        now_ms = self._now().ms
        self._pulses = {
            member_id: detached(attached(None, now_ms), now_ms) for member_id in self.state.members
        }
        self.state = replace(
            self.state,
            grace_until_ms=None,
            incident=None,
            formed_ms=None,
            broken_streams={},
            fresh_failures=0,
        )
        self._wake()

    def broken(self, stream: Stream) -> None:
        """Handles the end of a stream whose member's process is gone."""
        member_id = stream.process.name
        if self._streams.get(member_id) is stream:
            self._detach(member_id, stream)
            self.submit(StreamBroken(member_id=member_id))

    def lookup(self, *, member_id: str, below_step: int) -> Any:
        """Answers GetJob."""
        self._check_there()
        return job_message(
            self.state, Pulses(members=self._pulses), 0, member_id=member_id, below_step=below_step
        )

    def ranks(self, request: pb.GetRanksRequest) -> pb.GetRanksResponse:
        """Answers GetRanks."""
        self._check_there()
        generation, positions = parse_ranks(request, self.state)
        return ranks_message(generation, positions or range(len(generation.ranks)))

    def _check_there(self) -> None:
        if self.away:
            raise UnavailableError("the coordinator is away")

    # -------------------------------------------------------------------------------------- streams

    def open(self, stream: Stream, first: pb.MemberMessage) -> None:
        """Handles a member that opens a session."""
        if self.away:
            stream.end(UnavailableError("the coordinator is away"))
            return
        self._configuration.append(stream)
        _, event = parse_join(first.join)
        self.submit(event, lambda outcome: self._joined(stream, event, outcome))

    def _joined(self, stream: Stream, event: MemberJoined, outcome: Outcome) -> None:
        self._configuration.remove(stream)
        if isinstance(outcome, ShoalError):
            stream.end(outcome)
            return
        assert isinstance(outcome, Joined)
        member_id = event.identity.member_id
        welcome = pb.Welcome(
            heartbeat_interval_ms=self.state.spec.heartbeat_interval_ms,
            joining=outcome.replays,
            store_url="redis://none",
        )
        older = self._streams.get(member_id)
        if older is not None:
            older.end(None)
        self._streams[member_id] = stream
        self._pulses[member_id] = attached(self._pulses.get(member_id), self._now().ms)
        self._tell(member_id, pb.MemberDirective(welcome=welcome))
        for message in stream.unread:
            self.take(stream, message)
        if stream.process.dead:
            self.broken(stream)

    def take(self, stream: Stream, message: pb.MemberMessage) -> None:
        """Handles a message from a member."""
        member_id = stream.process.name
        if self._streams.get(member_id) is not stream:
            stream.unread.append(message)
            return
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self._beat(stream, message.heartbeat)
        elif kind == "ready":
            self._submit_for(stream, MemberReady(member_id=member_id))
        elif kind == "collective_failure":
            self._submit_for(
                stream, parse_collective_failure(member_id, message.collective_failure)
            )
        elif kind == "leave":
            stream.process.left_at = self.world.scheduler.now
            self._submit_for(stream, parse_leave(member_id, message.leave))

    def _submit_for(self, stream: Stream, event: Event) -> None:
        def done(outcome: Outcome) -> None:
            if isinstance(outcome, ShoalError):
                self._refuse(stream, outcome)

        self.submit(event, done)

    def _refuse(self, stream: Stream, error: ShoalError) -> None:
        """Ends the session and the membership of a member that sent an invalid message."""
        member_id = stream.process.name
        if self._streams.get(member_id) is stream:
            self._note_end(stream, error)
            self._detach(member_id, stream)
            self.submit(StreamBroken(member_id=member_id))
            self.submit(
                MemberLost(
                    member_id=member_id,
                    ending=Ending.STREAM_BROKEN,
                    detail=f"its session was ended: {error}",
                )
            )

    def _beat(self, stream: Stream, message: pb.Heartbeat) -> None:
        member_id = stream.process.name
        before = self._pulses.get(member_id)
        if before is None:
            return
        generation, progress = parse_heartbeat(message)
        if generation > self.state.number:
            self._refuse(
                stream,
                InvalidRequestError(
                    f"heartbeat.generation={generation}: the newest is {self.state.number}"
                ),
            )
            return
        self._pulses[member_id] = beaten(before, self._now().ms, generation, progress)
        if generation > before.generation:
            self._wake()

    def _detach(self, member_id: str, stream: Stream) -> None:
        if self._streams.get(member_id) is stream:
            del self._streams[member_id]
        if member_id in self._pulses:
            self._pulses[member_id] = detached(self._pulses[member_id], self._now().ms)

    def _tell(self, member_id: str, directive: pb.MemberDirective) -> None:
        stream = self._streams.get(member_id)
        if stream is not None:
            stream.down(lambda: stream.inbox.append(directive))

    def _end(self, member_id: str, error: ShoalError | None) -> None:
        stream = self._streams.pop(member_id, None)
        if stream is not None:
            self._note_end(stream, error)

    @staticmethod
    def _note_end(stream: Stream, error: ShoalError | None) -> None:
        stream.process.evicted |= (
            isinstance(error, PreconditionError) and error.reason != "RUN_ENDED"
        )
        stream.end(error)

    # ------------------------------------------------------------------------------------- the loop

    def _now(self) -> Now:
        ms = int(self.world.scheduler.now * 1000)
        return Now(ms=ms, unix_ms=ms)

    def _wake(self) -> None:
        if not self._stepping and not self.away:
            self._stepping = True
            incarnation = self._incarnation
            self.world.scheduler.after(
                self.world.delay(_FASTEST_S, _SLOWEST_S), lambda: self._step(incarnation)
            )

    def _scan(self) -> None:
        """Checks leases and due timers."""
        self.world.scheduler.after(_SCAN_S, self._scan)
        if not self.away:
            for member_id in expired(self._pulses, self._now().ms, self.state.spec.lease_ms):
                self.submit(LeaseEnded(member_id=member_id))
            if self.world.scenario.parted:
                self._wake()  # heartbeats may have reported stalled steps or reachable peers

    def _step(self, incarnation: int) -> None:
        self._stepping = False
        if self.away or incarnation != self._incarnation:
            return
        batch, self._queue = self._queue, []
        self._nonces += 1
        now = self._now()
        decided = transition(
            self.state,
            now,
            [event for event, _ in batch],
            pulses=Pulses(members=dict(self._pulses)),
            nonce=f"{self._nonces:032x}",
            policy=self._policy,
        )
        self.state = decided.state
        for member in self.state.members.values():
            if member.phase is MemberPhase.QUARANTINED:
                self.world.kept_out(member.identity.member_id)
        self._deliver([done for _, done in batch], decided)
        self._folded_ms = now.ms
        wake_ms = next_wake_ms(self.state, now.ms, self._policy)
        if wake_ms is not None:
            self.world.scheduler.after((wake_ms - now.ms) / 1000 + 0.001, self._wake)

    def _deliver(self, dones: list[Callable[[Outcome], None] | None], decided: Transition) -> None:
        for done, outcome in zip(dones, decided.outcomes, strict=True):
            if done is not None:
                done(outcome)
        for reason in decided.reasons:
            self.world.note(f"coordinator: {reason}")
        for effect in decided.effects:
            match effect:
                case AnnounceGeneration(generation=generation):
                    self.members_of[generation.number] = [
                        (rank.member_id, rank.host) for rank in generation.ranks
                    ]
                    for rank in generation.ranks:
                        self._tell(rank.member_id, _announced(generation, rank.member_id))
                case SendGeneration(generation=generation):
                    self._tell(effect.member_id, _announced(generation, effect.member_id))
                case SendStandby():
                    self._tell(
                        effect.member_id,
                        pb.MemberDirective(
                            standby=pb.Standby(reason=effect.reason, apart_from=effect.apart_from)
                        ),
                    )
                case SendNotice(generation=generation):
                    for rank in generation.ranks:
                        self._tell(
                            rank.member_id, pb.MemberDirective(notice=pb.Notice(text=effect.text))
                        )
                case SendDrain():
                    self._tell(
                        effect.member_id, pb.MemberDirective(drain=pb.Drain(reason=effect.reason))
                    )
                case SendStop():
                    self._tell(
                        effect.member_id,
                        pb.MemberDirective(
                            stop=pb.Stop(
                                reason=effect.reason,
                                now=effect.now,
                                behind=effect.behind,
                                finished_steps=effect.finished_steps,
                            )
                        ),
                    )
                case EndSession():
                    self._end(effect.member_id, effect.error)
        for member_id in decided.changes.members:
            if member_id not in self.state.members:
                self._pulses.pop(member_id, None)
                self.world.left_out(member_id)


def _announced(generation: Generation, member_id: str) -> pb.MemberDirective:
    """Builds a generation's announcement for a member. Every second generation is announced as in a
    large world: the member receives the changes to its table, or requests the table."""
    announce = announcement(generation, most_whole=0 if generation.number % 2 else MOST_SENT_WHOLE)
    return pb.MemberDirective.FromString(announce(generation.rank_of[member_id]))


class SimulatedClient:
    """Replaces `CoordinatorClient` for one process."""

    def __init__(self, process: Process, coordinator: Coordinator) -> None:
        self._process, self._coordinator = process, coordinator
        self.run: pb.RunId | None = None

    def find_obstacle(self) -> None:
        """Finds nothing: the network is simulated, so there is no socket to probe."""

    def join_session(self, messages: Iterator[pb.MemberMessage]) -> Iterator[pb.MemberDirective]:
        """Implements `CoordinatorClient.join_session` with one simulated stream."""
        coordinator, scheduler, process = self._coordinator, own_scheduler(), self._process
        stream = process.stream = Stream(process.world, process)
        first = next(messages)
        stream.up(lambda: coordinator.open(stream, first))
        scheduler.spawn(
            process, "its messages to the coordinator", lambda: self._draw(stream, messages)
        )
        while True:
            scheduler.wait(
                lambda: bool(stream.inbox) or stream.ended, None, "for a message of the coordinator"
            )
            if stream.inbox:
                yield stream.inbox.popleft()
            elif stream.error is not None:
                raise stream.error
            else:
                return

    def _draw(self, stream: Stream, messages: Iterator[pb.MemberMessage]) -> None:
        for message in messages:
            if stream.ended:
                return
            stream.up(lambda message=message: self._coordinator.take(stream, message))

    def get_job(self, _: str, *, member_id: str = "", below_step: int = 0) -> Any:
        """Implements `CoordinatorClient.get_job`."""
        self._to_and_fro()
        return self._coordinator.lookup(member_id=member_id, below_step=below_step)

    def get_ranks(
        self, _: str, *, generation: int, nonce: str, ranks: Sequence[int] = ()
    ) -> pb.GetRanksResponse:
        """Implements `CoordinatorClient.get_ranks`."""
        self._to_and_fro()
        return self._coordinator.ranks(
            pb.GetRanksRequest(job_id="job", generation=generation, nonce=nonce, ranks=ranks)
        )

    def _to_and_fro(self) -> None:
        if current_actor() is not None:
            own_scheduler().sleep(2 * self._process.world.delay(_FASTEST_S, _SLOWEST_S))

    def watch_events(self, _: str, **__: Any) -> Iterator[pb.Event]:
        """Yields nothing: the simulator keeps its own history of events."""
        return iter(())

    def close(self) -> None:
        """Does nothing: the stream has already ended."""
