"""Mutable working copy of a job's state within one transition.

A transition applies many events. A mapping of ten thousand members is copied only once, on its
first change, and changed keys are recorded so that only their values are written. A draft belongs
to one call to `transition` and is the only mutable object in the core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from shoal_coordinator.membership.model.batches import Epoch, Ledger, Loader, first_key_of
from shoal_coordinator.membership.model.effects import Effect, Record
from shoal_coordinator.membership.model.pulse import Pulse, Pulses
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import (
    Departure,
    JobPhase,
    JobState,
    Member,
    MemberPhase,
    Now,
    PastRun,
    RunId,
    Server,
)

_MAPPINGS = frozenset({"members", "departed", "servers", "loaders", "population"})
_WRITTEN_APART = frozenset({"generation", "layout", "moves"})
IN_MEMORY = frozenset(
    [
        "grace_until_ms",
        "incident",
        "formed_ms",
        "broken_streams",
        "recovery",
        "stall",
        "stragglers",
        "kept_out_until_ms",
        "standby_text",
        "standby_sent_ms",
        "servers_awaited",
        "looked_ms",
        "look_at_moves_ms",
        "failed_receivers",
        "failed_givers",
        "replicas",
        "deaths_ms",
        "fresh_failures",
    ]
)
"""Fields of JobState that are not stored and are empty when the coordinator starts."""
_NOT_WRITTEN = IN_MEMORY | {"population"}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Parts of the state that must be written to Redis: for mappings, the keys of changed entries;
    for all other parts, a flag."""

    header: bool
    """True if any of the small fields has changed, such as the phase, the number or the
    accusations."""
    generation: bool
    table: bool
    """True if the full rank table of the newest generation must be written, even if
    Generation.written would allow writing only a change."""
    dropped_changes: frozenset[int]
    """Generations whose stored changes can be deleted."""
    layout: bool
    moves: bool
    members: frozenset[str]
    departed: frozenset[str]
    servers: frozenset[str]
    loaders: frozenset[str]

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))


class Draft:
    """A job's state while events are applied to it, and the effects that result."""

    def __init__(
        self, state: JobState, *, now: Now, pulses: Pulses, nonce: str, policy: Policy
    ) -> None:
        self.now = now
        self.pulses = pulses
        self.nonce = nonce
        """Nonce for the generation that this transition may form; there is at most one."""
        self.policy = policy
        self.spec = state.spec

        self.run = state.run
        self.run_above = state.run_above
        self.run_aliases = state.run_aliases
        self.past_runs = state.past_runs
        self.phase = state.phase
        self.number = state.number
        self.generation = state.generation
        self.layout = state.layout
        self.moves = state.moves
        self.last_order = state.last_order
        self.accusations = state.accusations
        self.machines = state.machines
        self.ending = state.ending
        self.stop_reason = state.stop_reason
        self.ended_unix_ms = state.ended_unix_ms
        self.departing = state.departing
        self.grace_until_ms = state.grace_until_ms
        self.incident = state.incident
        self.formed_ms = state.formed_ms
        self.broken_streams = state.broken_streams
        self.recovery = state.recovery
        self.stall = state.stall
        self.stragglers = state.stragglers
        self.kept_out_until_ms = state.kept_out_until_ms
        self.standby_text = state.standby_text
        self.standby_sent_ms = state.standby_sent_ms
        self.looked_ms = state.looked_ms
        self.look_at_moves_ms = state.look_at_moves_ms
        self.failed_receivers = state.failed_receivers
        self.failed_givers = state.failed_givers
        self.servers_awaited = state.servers_awaited
        self.replicas = state.replicas
        self.deaths_ms = state.deaths_ms
        self.fresh_failures = state.fresh_failures

        self.broken: list[str] = []
        """Reasons why the newest generation, or an older one that members are still working in,
        cannot continue; empty if it can."""
        self.unplaced: dict[str, None] = {}
        """Members to be told why they are waiting, unless this transition gives them a rank."""
        self.effects: list[Effect] = []
        self.records: list[Record] = []
        self.reasons: list[str] = []

        self._before = state
        self._members: dict[str, Member] | None = None
        self._departed: dict[str, Departure] | None = None
        self._servers: dict[str, Server] | None = None
        self._loaders = state.loaders
        self._population = Counter(state.population)
        self._ledgers: dict[tuple[str, int], Ledger] = {}
        self._dropped_epochs: set[tuple[str, int]] = set()
        self._changed_members: set[str] = set()
        self._changed_departed: set[str] = set()
        self._changed_servers: set[str] = set()
        self._changed_loaders: set[str] = set()
        """Changed loaders without a working copy, which belong to a run that has ended."""

    # ----------------------------------------------------------------------------------------- runs

    @property
    def fewest_workers(self) -> int:
        """Current minimum world size for training."""
        return self.spec.min_workers if self.is_fresh else self.spec.min_survivors

    @property
    def is_fresh(self) -> bool:
        """True if the run has not formed a generation yet."""
        return self.number == self.run_above

    @property
    def is_untouched(self) -> bool:
        """True if the run has never had a member."""
        return self.is_fresh and not self.members and not self.departed

    @property
    def machines_changed(self) -> bool:
        """True if the condition of a machine has changed in this transition."""
        return self.machines is not self._before.machines

    def begin_run(self, spec: JobSpec, run: RunId) -> None:
        """Starts the next run. Of the run that has ended, only a summary is kept (in `past_runs`).
        Generation numbers continue."""
        past = PastRun(
            run=self.run,
            ended_unix_ms=self.ended_unix_ms,
            ending=self.ending,
            reason=self.stop_reason,
        )
        self._note_run_in_records()
        self._changed_members |= self.members.keys()
        self._changed_departed |= self.departed.keys()
        self._changed_servers |= self.servers.keys()
        self._changed_loaders |= self._loaders.keys() | {loader for loader, _ in self._ledgers}
        self._members, self._departed, self._servers, self._loaders, self._population = (
            {},
            {},
            {},
            {},
            Counter(),
        )
        self._ledgers.clear()
        self._dropped_epochs.clear()
        self.broken.clear()
        self.unplaced.clear()
        fresh = JobState(
            spec=spec,
            run=run,
            run_above=self.number,
            number=self.number,
            past_runs=(*self.past_runs, past)[-self.policy.most_past_runs :],
        )
        for name in _RESET:
            setattr(self, name, getattr(fresh, name))

    def _note_run_in_records(self) -> None:
        self.records[:] = [
            record if record.run else replace(record, run=self.run.number)
            for record in self.records
        ]

    # -------------------------------------------------------------------------------------- members

    @property
    def members(self) -> Mapping[str, Member]:
        return self._before.members if self._members is None else self._members

    @property
    def departed(self) -> Mapping[str, Departure]:
        return self._before.departed if self._departed is None else self._departed

    def in_phase(self, phase: MemberPhase) -> int:
        """Returns the number of members in `phase`."""
        return self._population[phase]

    def put_member(self, member: Member) -> None:
        """Adds a member, or replaces its record."""
        if self._members is None:
            self._members = dict(self._before.members)
        old = self._members.get(member.member_id)
        if old is not None:
            self._population[old.phase] -= 1
        self._population[member.phase] += 1
        self._members[member.member_id] = member
        self._changed_members.add(member.member_id)

    def remove_member(self, member_id: str, ending: str, steps: int | None = None) -> None:
        """Removes a member permanently: remembers its id, revokes its leases and drops accusations
        against it."""
        if self._members is None:
            self._members = dict(self._before.members)
        self._population[self._members.pop(member_id).phase] -= 1
        self._changed_members.add(member_id)
        if self._departed is None:
            self._departed = dict(self._before.departed)
        place = self.place_of(member_id)
        self._departed[member_id] = Departure(
            ending=ending,
            unix_ms=self.now.unix_ms,
            rank=-1 if place is None else place,
            steps=steps,
        )
        self._changed_departed.add(member_id)
        while len(self._departed) > self.policy.most_departed:
            oldest = next(iter(self._departed))
            del self._departed[oldest]
            self._changed_departed.add(oldest)
        for ledger in self._ledgers_holding(member_id):
            ledger.give_back(member_id)
        if self.accusations:
            self.accusations = {
                pair: count for pair, count in self.accusations.items() if member_id not in pair
            }
        self.unplaced.pop(member_id, None)

    def correct_ending(self, member_id: str, ending: str) -> None:
        """Replaces the recorded reason why a former member left."""
        if self._departed is None:
            self._departed = dict(self._before.departed)
        self._departed[member_id] = replace(self._departed[member_id], ending=ending)
        self._changed_departed.add(member_id)

    def pulse(self, member_id: str) -> Pulse | None:
        """Returns a member's last heartbeat state; None if it has not sent anything since it
        joined."""
        return self.pulses.members.get(member_id)

    def works_in(self, member_id: str) -> int:
        """Returns the newest generation that a member is known to have worked in; 0 if there is
        none."""
        pulse = self.pulses.members.get(member_id)
        return pulse.generation if pulse is not None else 0

    def waited_ms(self, pulse: Pulse) -> int:
        """Returns how long, in milliseconds, a member had been waiting for its peers of the newest
        generation at the time of its last heartbeat."""
        if self.formed_ms is None or pulse.generation >= self.number:
            return pulse.waited_ms
        # the member may have waited for peers of an older generation before that
        return max(0, min(pulse.waited_ms, pulse.heard_ms - self.formed_ms))

    def place_of(self, member_id: str) -> int | None:
        """Returns a member's rank in the newest generation, or None if it has none."""
        return None if self.generation is None else self.generation.rank_of.get(member_id)

    def training(self) -> tuple[str, ...]:
        """Returns the ids of the members that are training in the newest generation; none while the
        job is waiting."""
        if self.generation is None or self.phase is JobPhase.WAITING:
            return ()
        at_work = (MemberPhase.RANKED, MemberPhase.DRAINING)
        live = (self.members.get(rank.member_id) for rank in self.generation.ranks)
        return tuple(
            member.member_id for member in live if member is not None and member.phase in at_work
        )

    def key_digests(self, member_ids: Iterable[str]) -> tuple[str, ...]:
        """Returns the `Identity.key_digest` of each member; empty for a former member."""
        found = (self.members.get(member_id) for member_id in member_ids)
        return tuple("" if member is None else member.identity.key_digest for member in found)

    # -------------------------------------------------------------------------------------- servers

    @property
    def servers(self) -> Mapping[str, Server]:
        return self._before.servers if self._servers is None else self._servers

    def put_server(self, server: Server) -> None:
        """Adds a parameter server, or replaces its record."""
        if self._servers is None:
            self._servers = dict(self._before.servers)
        self._servers[server.server_id] = server
        self._changed_servers.add(server.server_id)

    def remove_server(self, server_id: str) -> None:
        """Removes a parameter server. Its place (its share of the tensors, and its role) becomes
        free."""
        if self._servers is None:
            self._servers = dict(self._before.servers)
        del self._servers[server_id]
        self._changed_servers.add(server_id)

    # -------------------------------------------------------------------------------------- batches

    def epochs_of(self, loader: str) -> set[int]:
        """Returns the epochs of a loader whose leases are on record."""
        kept = self._loaders.get(loader)
        before = (
            {epoch for epoch in kept.epochs if (loader, epoch) not in self._dropped_epochs}
            if kept is not None
            else set()
        )
        return before | {epoch for name, epoch in self._ledgers if name == loader}

    def count_loaders(self) -> int:
        """Returns the number of loaders whose leases are on record."""
        return len(self._loaders.keys() | {loader for loader, _ in self._ledgers})

    def holds_batches(self, member_id: str) -> bool:
        """Returns whether a member has leased batches that it has not finished."""
        return any(ledger.held(member_id) for ledger in self._ledgers_holding(member_id))

    def ledger(self, loader: str, epoch: int) -> Ledger:
        """Returns the working copy of an epoch, which must have leases."""
        if (loader, epoch) not in self._ledgers:
            self._ledgers[loader, epoch] = Ledger(self._loaders[loader].epochs[epoch])
        return self._ledgers[loader, epoch]

    def open_epoch(self, loader: str, epoch: int, batches: int) -> None:
        """Starts to record the leases of an epoch of a loader, and drops the loader's oldest epochs
        beyond Policy.epochs_kept."""
        first_key = first_key_of(self.spec.job_id, self.run.number, loader, epoch, self.now.unix_ms)
        before = self.epochs_of(loader)
        batch_ms = self.ledger(loader, max(before)).close().batch_ms if before else {}
        self._ledgers[loader, epoch] = Ledger(
            Epoch(batches=batches, first_key=first_key, batch_ms=batch_ms)
        )
        self._ledgers[loader, epoch].changed = True
        for oldest in sorted(self.epochs_of(loader))[: -self.policy.epochs_kept]:
            self._ledgers.pop((loader, oldest), None)
            self._dropped_epochs.add((loader, oldest))

    def _ledgers_holding(self, member_id: str) -> list[Ledger]:
        for name, loader in self._loaders.items():
            for epoch, kept in loader.epochs.items():
                known = any(
                    member_id in each for each in (kept.leased, kept.answers, kept.batch_ms)
                )
                if known and (name, epoch) not in self._dropped_epochs:
                    self.ledger(name, epoch)
        return [ledger for ledger in self._ledgers.values() if ledger.holds_of(member_id)]

    # ------------------------------------------------------------------------------------- freezing

    def freeze(self) -> tuple[JobState, Changes]:
        """Returns the state after all events, and the parts of the state that must be written."""
        # An epoch is dropped only when a newer one is opened, so the changed loaders are those with
        # ledgers.
        changed_loaders = frozenset(
            loader for (loader, _), ledger in self._ledgers.items() if ledger.changed
        )
        loaders = {**self._loaders, **{name: self._close_loader(name) for name in changed_loaders}}
        self._note_run_in_records()
        state = JobState(
            spec=self.spec,
            run=self.run,
            run_above=self.run_above,
            run_aliases=self.run_aliases,
            past_runs=self.past_runs,
            phase=self.phase,
            number=self.number,
            generation=self.generation,
            members=self.members,
            departed=self.departed,
            servers=self.servers,
            layout=self.layout,
            moves=self.moves,
            loaders=loaders if changed_loaders else self._loaders,
            last_order=self.last_order,
            accusations=self.accusations,
            machines=self.machines,
            ending=self.ending,
            stop_reason=self.stop_reason,
            ended_unix_ms=self.ended_unix_ms,
            departing=self.departing,
            population=self._population,
            grace_until_ms=self.grace_until_ms,
            incident=self.incident,
            formed_ms=self.formed_ms,
            broken_streams=self.broken_streams,
            recovery=self.recovery,
            stall=self.stall,
            stragglers=self.stragglers,
            kept_out_until_ms=self.kept_out_until_ms,
            standby_text=self.standby_text,
            standby_sent_ms=self.standby_sent_ms,
            looked_ms=self.looked_ms,
            look_at_moves_ms=self.look_at_moves_ms,
            failed_receivers=self.failed_receivers,
            failed_givers=self.failed_givers,
            servers_awaited=self.servers_awaited,
            replicas=self.replicas,
            deaths_ms=self.deaths_ms,
            fresh_failures=self.fresh_failures,
        )
        changes = Changes(
            header=any(getattr(state, name) != getattr(self._before, name) for name in _HEADER),
            generation=state.generation is not self._before.generation,
            table=False,
            dropped_changes=self._dropped_changes(),
            layout=state.layout is not self._before.layout,
            moves=state.moves != self._before.moves,
            members=frozenset(self._changed_members),
            departed=frozenset(self._changed_departed),
            servers=frozenset(self._changed_servers),
            loaders=changed_loaders | self._changed_loaders,
        )
        return state, changes

    def _dropped_changes(self) -> frozenset[int]:
        before, after = self._before.generation, self.generation
        if before is None or before is after or (after is not None and after.written):
            return frozenset()
        return frozenset(before.written or ())

    def _close_loader(self, name: str) -> Loader:
        epochs = {
            epoch: self._loaders[name].epochs[epoch]
            for epoch in self.epochs_of(name)
            if (name, epoch) not in self._ledgers
        }
        return Loader(
            epochs=epochs
            | {
                epoch: ledger.close()
                for (owner, epoch), ledger in self._ledgers.items()
                if owner == name
            }
        )


_RESET = tuple(item.name for item in fields(JobState) if item.name not in _MAPPINGS)
"""Fields that `begin_run` takes from the new run's initial state. It empties the other fields, the
mappings, separately."""
_HEADER = tuple(
    item.name
    for item in fields(JobState)
    if item.name not in _MAPPINGS | _WRITTEN_APART | _NOT_WRITTEN
)
