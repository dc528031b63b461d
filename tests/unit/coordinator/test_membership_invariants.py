"""Invariants of the membership core under random sequences of events, checked after each
transition."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import groupby

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shoal_common.errors import InternalError, ShoalError
from shoal_coordinator.membership.members.joining import Joined
from shoal_coordinator.membership.model.draft import IN_MEMORY
from shoal_coordinator.membership.model.effects import AnnounceGeneration
from shoal_coordinator.membership.model.events import (
    BatchesLeased,
    CollectiveFailed,
    DrainRequested,
    Ending,
    Event,
    ExitReported,
    LeaseEnded,
    LeaveReason,
    MachineReported,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MemberReady,
    ServerLost,
    ServerRegistered,
    StopRequested,
    StreamBroken,
    TensorsDeclared,
)
from shoal_coordinator.membership.model.pulse import (
    Progress,
    Pulse,
    Pulses,
    attached,
    beaten,
    detached,
    expired,
)
from shoal_coordinator.membership.model.shards import TensorSpec
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import (
    Cause,
    Identity,
    JobPhase,
    JobState,
    MachineCondition,
    MemberPhase,
    Now,
    populate,
)
from shoal_coordinator.membership.transition import next_wake_ms, transition
from shoal_coordinator.state.codec import decode_state, encode_changes, everything

POLICY = Policy(most_members=12, most_departed=6, most_loaders=2)
NAMES = [f"m{number}" for number in range(10)]

names = st.sampled_from(NAMES)
generations = st.integers(min_value=0, max_value=12)


def _fewest(state: JobState) -> int:
    return state.spec.min_workers if state.number == state.run_above else state.spec.min_survivors


class Membership(RuleBasedStateMachine):
    """Random events, one or several per transition, and a disk that applies only the changes that
    each transition reports."""

    @initialize(
        smallest=st.integers(min_value=1, max_value=3),
        fewer=st.integers(min_value=0, max_value=2),
        more=st.integers(min_value=0, max_value=3),
        grace=st.sampled_from([0, 100]),
        servers=st.integers(min_value=0, max_value=2),
    )
    def create(self, smallest: int, fewer: int, more: int, grace: int, servers: int) -> None:
        spec = JobSpec(
            job_id="j",
            min_workers=smallest,
            min_survivors=max(1, smallest - fewer),
            max_workers=smallest + more,
            parameter_servers=servers,
            join_grace_ms=grace,
            lease_ms=10_000,
            stall_timeout_ms=1000,
        )
        self.state = JobState(spec=spec)
        self.disk = dict(encode_changes(self.state, everything(self.state)).put)
        self.pulses: dict[str, Pulse] = {}
        self.ms = 0
        self.together: list[Event] = []
        self.at_once = 1
        self.start_several(smallest + more, 0, "h1")
        self.all_beat()

    # --------------------------------------------------------------------------------------- events

    @rule(
        name=names,
        host=st.sampled_from(["h1", "h2", "h10"]),
        last=st.sampled_from([0, 0, 0, 1, 9]),
        of=st.sampled_from([0, 1, 2]),
    )
    def join(self, name: str, host: str, last: int, of: int = 0) -> None:
        identity = Identity(
            member_id=name,
            host=host,
            pid=1,
            launcher_id="l",
            local_index=NAMES.index(name) % 3,
            donor_address="",
            metrics_address="",
        )
        self.happen(MemberJoined(identity=identity, last_generation=last, last_world_size=of))

    @rule(
        count=st.integers(min_value=1, max_value=5),
        first=st.integers(min_value=0, max_value=5),
        host=st.sampled_from(["h1", "h2"]),
    )
    def start_several(self, count: int, first: int, host: str) -> None:
        for name in NAMES[first : first + count]:
            self.join(name, host, 0)
            self.ready(name)

    @rule(name=names)
    def ready(self, name: str) -> None:
        self.happen(MemberReady(member_id=name))

    @rule(name=names, ending=st.sampled_from(Ending))
    def lose(self, name: str, ending: Ending) -> None:
        self.happen(MemberLost(member_id=name, ending=ending, detail=""))

    @rule(name=names, reason=st.sampled_from(LeaveReason))
    def leave(self, name: str, reason: LeaveReason) -> None:
        self.happen(MemberLeft(member_id=name, reason=reason, detail=""))

    @rule(name=names, code=st.sampled_from([0, 1]), finished=st.booleans())
    def exit(self, name: str, code: int, finished: bool) -> None:
        self.happen(ExitReported(member_id=name, exit_code=code, signal=0, finished=finished))

    @rule(
        name=names,
        generation=generations,
        suspects=st.lists(st.integers(min_value=0, max_value=6), max_size=2),
        timed_out=st.booleans(),
        newest=st.booleans(),
    )
    def fail(
        self, name: str, generation: int, suspects: list[int], timed_out: bool, newest: bool
    ) -> None:
        self.happen(
            CollectiveFailed(
                member_id=name,
                generation=self.state.number if newest else generation,
                suspects=tuple(suspects),
                timed_out=timed_out,
                detail="",
            )
        )

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.happen(DrainRequested(member_id=name, rank=None, reason="r"))

    @rule(rank=st.integers(min_value=0, max_value=6))
    def drain_rank(self, rank: int) -> None:
        self.happen(DrainRequested(member_id=None, rank=rank, reason="r"))

    @precondition(lambda self: self.state.number > 5)
    @rule()
    def stop(self) -> None:
        self.happen(StopRequested(reason="r"))

    @rule(name=st.sampled_from(["s0", "s1", "s2"]), pid=st.sampled_from([1, 2]))
    def register(self, name: str, pid: int) -> None:
        self.happen(
            ServerRegistered(server_id=name, address="a:1", metrics_address="", host="h", pid=pid)
        )

    @rule(name=st.sampled_from(["s0", "s1", "s2"]))
    def lose_server(self, name: str) -> None:
        self.happen(ServerLost(server_id=name, ending=Ending.LEASE_EXPIRED))

    @rule(size=st.sampled_from([0, 10, 5_000_000]))
    def declare(self, size: int) -> None:
        self.happen(
            TensorsDeclared(tensors=(TensorSpec(name="w", shape=(size,), dtype="float32"),))
        )

    @rule(
        name=names,
        loader=st.sampled_from(["a", "b", "c"]),
        epoch=st.integers(min_value=0, max_value=4),
        want=st.integers(min_value=0, max_value=4),
        finished=st.lists(st.integers(min_value=0, max_value=7), max_size=4),
        sequence=st.integers(min_value=0, max_value=3),
        batch_ms=st.sampled_from([0, 1, 50, 86_400_000]),
    )
    def lease(
        self,
        name: str,
        loader: str,
        epoch: int,
        want: int,
        finished: list[int],
        sequence: int,
        batch_ms: int,
    ) -> None:
        self.happen(
            BatchesLeased(
                member_id=name,
                loader=loader,
                epoch=epoch,
                batches_in_epoch=8,
                want=want,
                finished=tuple(finished),
                sequence=sequence,
                batch_ms=batch_ms,
            )
        )

    # ---------------------------------------------------------------------------------- transitions

    def happen(self, event: Event) -> None:
        self.together.append(event)
        if len(self.together) >= self.at_once:
            self.flush()

    @rule(count=st.sampled_from([1, 1, 2, 4]))
    def fold_this_many_at_once(self, count: int) -> None:
        self.flush()
        self.at_once = count

    def flush(self) -> None:
        events, self.together = self.together, []
        self.transit(*events)

    @rule()
    def all_beat(self) -> None:
        self.flush()
        for name, pulse in self.pulses.items():
            self.pulses[name] = beaten(
                pulse, self.ms, self.state.number, Progress(sequence=pulse.progress.sequence + 1)
            )
        self.transit()

    @rule(ms=st.sampled_from([1, 80, 1100, 20_000]))
    def wait(self, ms: int) -> None:
        self.flush()
        until = self.ms + ms
        while (wake := next_wake_ms(self.state, self.ms, POLICY)) is not None and wake <= until:
            self.ms = wake
            self.transit()
        self.ms = until

    @rule(
        name=names,
        sequence=st.integers(min_value=0, max_value=9),
        behind=st.sampled_from([0, 0, 1]),
    )
    def beat(self, name: str, sequence: int, behind: int) -> None:
        if name in self.pulses:
            generation = max(0, self.state.number - behind)
            self.pulses[name] = beaten(
                self.pulses[name], self.ms, generation, Progress(sequence=sequence)
            )
            self.transit()

    @rule(name=names)
    def detach(self, name: str) -> None:
        if name in self.pulses:
            self.pulses[name] = detached(self.pulses[name], self.ms)

    @rule(broken=st.lists(names, unique=True))
    def break_streams(self, broken: list[str]) -> None:
        for name in broken:
            self.detach(name)
            self.happen(StreamBroken(member_id=name))

    @rule(
        name=names,
        waited=st.sampled_from([0.0, 2.0, 70.0]),
        out_of_reach=st.sampled_from([(), (0,), (1, 9)]),
    )
    def wait_for_peers(self, name: str, waited: float, out_of_reach: tuple[int, ...]) -> None:
        if name in self.pulses:
            pulse = self.pulses[name]
            progress = replace(
                pulse.progress,
                waiting_s=waited,
                waiting_in="all_reduce",
                cpu_s=1.0,
                step_time_s=1.0,
            )
            progress = replace(progress, out_of_reach=out_of_reach, busy_link=(1, 1e6))
            self.pulses[name] = beaten(pulse, self.ms, self.state.number, progress)
            self.transit()

    @rule(
        host=st.sampled_from(["h1", "h2"]),
        condition=st.sampled_from(
            [MachineCondition.HEALTHY, MachineCondition.LEAVING, MachineCondition.UNHEALTHY]
        ),
    )
    def report_machine(self, host: str, condition: MachineCondition) -> None:
        self.happen(MachineReported(host=host, condition=condition, reason="r"))

    @rule()
    def look_at_leases(self) -> None:
        for name in expired(self.pulses, self.ms, self.state.spec.lease_ms):
            self.happen(LeaseEnded(member_id=name))

    @rule()
    def restart_coordinator(self) -> None:
        self.state = decode_state(self.disk)
        self.pulses = {
            member_id: detached(attached(None, self.ms), self.ms)
            for member_id in self.state.members
        }
        self.transit()

    def transit(self, *events: Event) -> None:
        before = self.state
        now = Now(ms=self.ms, unix_ms=1_000_000 + self.ms)
        decided = transition(
            before,
            now,
            events,
            pulses=Pulses(members=self.pulses),
            nonce=f"{before.number + 1:032x}",
            policy=POLICY,
        )
        self.state = decided.state
        written = encode_changes(decided.state, decided.changes)
        self.disk.update(written.put)
        for name in written.remove:
            self.disk.pop(name, None)
        assert len(decided.outcomes) == len(events)
        for event, outcome in zip(events, decided.outcomes, strict=True):
            assert not isinstance(outcome, InternalError)
            if isinstance(event, MemberJoined) and isinstance(outcome, Joined):
                member_id = event.identity.member_id
                self.pulses[member_id] = attached(self.pulses.get(member_id), self.ms)
        self.pulses = {
            name: pulse for name, pulse in self.pulses.items() if name in self.state.members
        }
        self.check_generation(
            before, [e.generation for e in decided.effects if isinstance(e, AnnounceGeneration)]
        )
        if (
            all(isinstance(outcome, ShoalError) for outcome in decided.outcomes)
            and events
            and not decided.effects
        ):
            assert not decided.changes

    def check_generation(self, before: JobState, formed: list[object]) -> None:
        state = self.state
        if state.generation is before.generation:
            assert not formed
            assert state.number >= before.number
            return
        generation = state.generation
        assert generation is not None
        assert formed == [generation], "the generation is announced once, as it is stored"
        assert generation.number == state.number > before.number
        assert not before.is_over
        ids = [rank.member_id for rank in generation.ranks]
        assert _fewest(before) <= len(ids) <= state.spec.max_workers
        assert len(set(ids)) == len(ids)
        assert not set(ids) & state.departed.keys()
        assert all(
            state.members[member_id].phase in (MemberPhase.RANKED, MemberPhase.DRAINING)
            for member_id in ids
        )
        hosts = [host for host, _ in groupby(rank.host for rank in generation.ranks)]
        assert len(hosts) == len(set(hosts)), "ranks of one host are adjacent"
        for host, block in groupby(generation.ranks, key=lambda rank: rank.host):
            ranks = list(block)
            assert [rank.local_rank for rank in ranks] == list(range(len(ranks)))
            assert all(
                rank.local_world_size == len(ranks)
                and state.members[rank.member_id].identity.host == host
                for rank in ranks
            )
            is_new = [
                before.generation is None or rank.member_id not in before.generation.rank_of
                for rank in ranks
            ]
            assert is_new == sorted(is_new), "joiners follow the survivors of their host"
        if before.generation is not None:
            assert generation.interrupts_below >= before.generation.interrupts_below
            old = [rank.member_id for rank in before.generation.ranks if rank.member_id in ids]
            assert [member_id for member_id in ids if member_id in old] == old, (
                "survivors keep their order"
            )
        assert generation.interrupts_below <= generation.number
        assert generation.cause is not Cause.START or generation.number == 1
        if generation.cause is Cause.BORDER and before.generation is not None:
            left_out = {rank.member_id for rank in before.generation.ranks} - set(ids)
            assert all(
                state.members[m].phase is MemberPhase.DRAINING
                for m in left_out
                if m in state.members
            )
            assert all(m in state.members for m in left_out), (
                "leaving out a dead member requires an interruption"
            )

    # ----------------------------------------------------------------------------------- invariants

    @property
    def recovering(self) -> bool:
        """True if a new generation is due after one was lost, and will be formed once the members
        that know of the lost one are back."""
        return self.state.recovery is not None and self.state.recovery.until_ms is not None

    @invariant()
    def departed_members_never_return(self) -> None:
        assert not self.state.members.keys() & self.state.departed.keys()
        assert len(self.state.departed) <= POLICY.most_departed

    @invariant()
    def phases_agree_with_the_generation(self) -> None:
        state = self.state
        population = {phase: count for phase, count in state.population.items() if count}
        assert population == populate(state.members)
        ranks = {} if state.generation is None else state.generation.rank_of
        for member in state.members.values():
            if member.phase is MemberPhase.RANKED:
                assert member.member_id in ranks
            assert (member.phase is MemberPhase.QUARANTINED) == bool(member.apart_from)
            assert member.works_in == 0 or member.phase is MemberPhase.DRAINING
        if state.phase is JobPhase.RUNNING and not self.recovering:
            for member_id in ranks:
                assert state.members[member_id].phase in (MemberPhase.RANKED, MemberPhase.DRAINING)
        if state.phase is JobPhase.WAITING:
            assert state.in_phase(MemberPhase.RANKED) == 0

    @invariant()
    def enough_ready_members_do_not_wait_longer_than_the_grace(self) -> None:
        state = self.state
        if (
            state.phase is JobPhase.WAITING
            and state.in_phase(MemberPhase.READY) >= _fewest(state)
            and not self.recovering
        ):
            assert state.grace_until_ms is not None
            assert state.grace_until_ms > self.ms
            assert next_wake_ms(state, self.ms, POLICY) is not None

    @invariant()
    def no_batch_is_leased_twice(self) -> None:
        for loader in self.state.loaders.values():
            assert len(loader.epochs) <= POLICY.epochs_kept
            for epoch in loader.epochs.values():
                held = [
                    *epoch.returned,
                    *(batch for batches in epoch.leased.values() for batch in batches),
                ]
                assert len(set(held)) == len(held)
                assert all(0 <= batch < epoch.dealt for batch in held)
                assert epoch.leased.keys() <= self.state.members.keys()

    @invariant()
    def servers_have_places_of_their_own(self) -> None:
        indices = [server.index for server in self.state.servers.values()]
        assert len(set(indices)) == len(indices)
        assert all(0 <= index < self.state.spec.parameter_servers for index in indices)

    @invariant()
    def the_disk_holds_the_state(self) -> None:
        read = decode_state(self.disk)
        forgotten = {
            item.name: getattr(read, item.name)
            for item in fields(JobState)
            if item.name in IN_MEMORY
        }
        population = {phase: count for phase, count in self.state.population.items() if count}
        assert read == replace(self.state, **forgotten, population=population)


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
