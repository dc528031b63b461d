"""Golden scenarios of the membership core. Each file in scenarios/ is a readable story of events
and decisions.

A line that starts with `> ` is a decision; every other line is a command, a comment (#) or blank.
The commands are the methods of Story. Times are milliseconds since the story's start; `at` runs
every deadline that passes, as the service does. To regenerate the decisions after a change of
rules, run with SHOAL_REWRITE_SCENARIOS=1 and read the diff.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from shoal_common.errors import ShoalError
from shoal_coordinator.membership.leases import Leased
from shoal_coordinator.membership.members.joining import Joined
from shoal_coordinator.membership.members.leaving import ExitNoted
from shoal_coordinator.membership.model import effects as fx
from shoal_coordinator.membership.model.events import (
    BackupReported,
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
    MoveReported,
    OfRun,
    RunWanted,
    ServerDrainRequested,
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
    located,
)
from shoal_coordinator.membership.model.replicas import Replicas
from shoal_coordinator.membership.model.shards import Piece, ShardLayout, TensorSpec
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    Identity,
    JobEnding,
    JobState,
    MachineCondition,
    Now,
    RunId,
    ServerRole,
)
from shoal_coordinator.membership.runs import RunEnding, RunGranted
from shoal_coordinator.membership.servers.servers import Registered, ServersAwaited
from shoal_coordinator.membership.transition import (
    Outcome,
    Transition,
    job_created,
    next_wake_ms,
    transition,
)
from shoal_coordinator.state.codec import decode_state, encode_changes, everything

LOOK_MS = 1000
_SPEC = {
    "min": "min_workers",
    "survivors": "min_survivors",
    "max": "max_workers",
    "servers": "parameter_servers",
    "backups": "parameter_server_backups",
    "most_servers": "max_parameter_servers",
    "grace": "join_grace_ms",
    "lease": "lease_ms",
    "stall": "stall_timeout_ms",
}
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_matches_its_file(path: Path) -> None:
    written = path.read_text()
    unfolded = Story().unfold(written)
    if os.environ.get("SHOAL_REWRITE_SCENARIOS"):
        path.write_text(unfolded)
    assert unfolded == written


@dataclass
class Acting:
    """The current action of a member."""

    what: str
    since_ms: int
    heartbeat: dict[str, str]


class Story:
    """Runs the commands of one scenario."""

    def __init__(self) -> None:
        self.ms = 0
        self.state: JobState
        self.pulses: dict[str, Pulse] = {}
        self.acting: dict[str, Acting] = {}
        self.collected: list[Event] | None = None
        self.out: list[str] = []

    def unfold(self, text: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("> "):
                continue
            lines.append(line)
            words = shlex.split(line, comments=True)
            if words:
                self.out = []
                positional = [word for word in words[1:] if "=" not in word]
                options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                command: Callable[..., None] = getattr(self, words[0].replace("-", "_"))
                command(*positional, **options)
                lines.extend(f"> {decision}" for decision in self.out)
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------------------------------- commands

    def job(self, **options: str) -> None:
        self.ms = 0
        self.pulses = {}
        self.acting = {}
        self.state = JobState(
            spec=JobSpec(
                job_id="digits", **{_SPEC[key]: int(value) for key, value in options.items()}
            )
        )  # type: ignore[arg-type]

    def create(self, run: str = "", resume: str = "", follow: str = "", **options: str) -> None:
        """Creates a job that already exists. `run` is its number, or number@milliseconds with the
        time when it began. Other options are as in `job`."""
        spec = replace(
            self.state.spec, **{_SPEC[key]: int(value) for key, value in options.items()}
        )  # type: ignore[arg-type]
        self.happen(
            RunWanted(
                spec=spec,
                run=run_id(run) if run else None,
                resume=bool(resume),
                follow=bool(follow),
            )
        )

    def runs(self) -> None:
        newest = f"{self.state.run}@{self.state.run.began_unix_ms} is the newest"
        past = [
            f"{past.run}@{past.run.began_unix_ms} {past.ending} at {past.ended_unix_ms}"
            for past in self.state.past_runs
        ]
        self.out.append(", ".join([*past, newest]))

    def lost_by_redis(self) -> None:
        """Simulates that Redis has lost the job, and that the job is created again now."""
        self.state = job_created(self.state.spec, RunId(number=1, began_unix_ms=self.ms))
        self.pulses = {}

    def at(self, ms: str) -> None:
        while (due := self.next_deadline()) is not None and due <= int(ms):
            self.ms = due
            self.happen(
                *[
                    LeaseEnded(member_id=m)
                    for m in expired(self.pulses, self.ms, self.state.spec.lease_ms)
                ]
            )
        self.ms = int(ms)

    def late(self, ms: str) -> None:
        """Moves the clock without acting on deadlines, as if the coordinator had no time to run."""
        self.ms = int(ms)

    def next_deadline(self) -> int | None:
        """Returns the next time at which the service would act. The service checks leases and
        stalled steps twice a second; here it does so only when the check can change something."""
        ended = [pulse.heard_ms + self.state.spec.lease_ms + 1 for pulse in self.pulses.values()]
        dues = [due if due > self.ms else self.ms + LOOK_MS for due in ended]
        if (
            any(pulse.waited_ms for pulse in self.pulses.values())
            or self.state.stall is not None
            or self.state.incident is not None
        ):
            dues.append(self.ms + LOOK_MS)
        wake = next_wake_ms(self.state, self.ms)
        return min([*dues, *([] if wake is None else [wake])], default=None)

    def together(self) -> None:
        """Collects the events up to `end` and folds them in one transition."""
        self.collected = []

    def end(self) -> None:
        events, self.collected = self.collected or [], None
        self.happen(*events)

    def restart(self) -> None:
        """Kills and restarts the coordinator: it forgets everything that is not in Redis, and all
        leases begin again."""
        self.state = decode_state(encode_changes(self.state, everything(self.state)).put)
        self.pulses = {
            member_id: detached(attached(None, self.ms), self.ms)
            for member_id in self.state.members
        }
        self.happen()

    def join(
        self,
        member: str,
        host: str = "h1",
        index: str = "0",
        pid: str = "1",
        last: str = "0",
        of: str = "0",
        run: str = "",
    ) -> None:
        """Makes a member join.

        last: the newest generation that it knows.
        of: number of ranks in that generation.
        run: the run to which it belongs, as in `create`.
        """
        identity = Identity(
            member_id=member,
            host=host,
            pid=int(pid),
            launcher_id=host,
            local_index=int(index),
            donor_address=f"{host}:1",
            metrics_address="",
        )
        joined = MemberJoined(
            identity=identity,
            last_generation=int(last),
            last_world_size=int(of),
            works_in=int(last),
        )
        self.happen(OfRun(run=run_id(run), event=joined) if run else joined)

    def ready(self, member: str) -> None:
        self.happen(MemberReady(member_id=member))

    def start(self, *members: str, host: str = "h1") -> None:
        """Makes members join and report ready immediately."""
        for member in members:
            self.join(member, host=host)
            self.ready(member)

    def lost(self, member: str, how: str = "stream_broken") -> None:
        self.happen(MemberLost(member_id=member, ending=Ending(how), detail=how.replace("_", " ")))

    def broken(self, *members: str) -> None:
        """Breaks the members' streams without a leave message, one after another at the same
        time."""
        for member in members:
            self.detach(member)
            self.happen(StreamBroken(member_id=member))

    def left(
        self,
        member: str,
        reason: str,
        alone: str = "",
        steps: str = "",
        agreed: str = "0",
        **held: str,
    ) -> None:
        """Makes a member leave. `held` has the digests of its tensors after its last step, by
        tensor group."""
        replicas = None
        if held:
            digests = {group.replace("_", " "): int(digest) for group, digest in held.items()}
            replicas = Replicas(
                generation=self.state.number, step=int(steps), agreed=int(agreed), digests=digests
            )
        left = MemberLeft(
            member_id=member,
            reason=LeaveReason(reason),
            detail="",
            alone=bool(alone),
            steps=int(steps) if steps else None,
            replicas=replicas,
        )
        self.happen(left)

    def exit(
        self, member: str, code: str = "0", signal: str = "0", failure: str = "", finished: str = ""
    ) -> None:
        self.happen(
            ExitReported(
                member_id=member,
                exit_code=int(code),
                signal=int(signal),
                failure=failure,
                finished=bool(finished),
            )
        )

    def detach(self, member: str) -> None:
        """Ends the member's stream, which has no effect within reconnect_grace."""
        self.pulses[member] = detached(self.pulses[member], self.ms)

    def fail(self, *words: str, generation: str, suspects: str = "") -> None:
        """Reports a failed collective from each named member. The word `timeout` means that it
        timed out."""
        ranks = tuple(int(rank) for rank in suspects.split(",") if rank)
        for member in (word for word in words if word != "timeout"):
            self.happen(
                CollectiveFailed(
                    member_id=member,
                    generation=int(generation),
                    suspects=ranks,
                    timed_out="timeout" in words,
                    detail="connection closed",
                )
            )

    def beat(
        self,
        *members: str,
        generation: str = "0",
        sequence: str = "0",
        waited: str = "0",
        cpu: str = "0",
        step: str = "0",
        busy: str = "0",
        share: str = "0",
        link: str = "",
        unreached: str = "",
        reaches: str = "",
        spare: str = "",
        server: str = "0",
        line: str = "",
    ) -> None:
        """Sends heartbeats. `waited`, `step` (duration of a step), `busy` and `server` (the wait
        for one) are in seconds, `link` is rank:bytes-per-second, and `unreached` is a list of
        ranks."""
        progress = Progress(
            sequence=int(sequence),
            waiting_s=float(waited),
            waiting_in="all_reduce",
            cpu_s=float(cpu),
            server_wait_s=float(server),
            awaited_server="parameter server 0 at h9:7100",
            script_line=line.replace("_", " "),
            step_time_s=float(step),
            busy_time_s=float(busy),
            share=float(share),
            in_reach=bool(reaches),
            spare=bool(spare),
            out_of_reach=tuple(int(rank) for rank in unreached.split(",") if rank),
            busy_link=(int(link.split(":")[0]), float(link.split(":")[1])) if link else None,
        )
        for member in members:
            self.pulses[member] = beaten(self.pulses[member], self.ms, int(generation), progress)
        self.happen()

    def locates(self, reader: str, member: str, line: str) -> None:
        """Reports the stacks of a silent member, as the service does it (member_sessions.py)."""
        assert self.state.stall is not None
        assert self.state.stall.readers[member] == reader
        self.pulses[member] = located(self.pulses[member], line.replace("_", " "), "stacks")
        self.happen()

    def does(self, what: str, *members: str, **heartbeat: str) -> None:
        """Sets what the members do from now on while time passes in `live`: train (steps end), work
        (no steps end), hang (no processor time either), wait for peers, or cut (no heartbeats).
        `heartbeat` is added to their heartbeats."""
        for member in members:
            self.acting[member] = Acting(what=what, since_ms=self.ms, heartbeat=heartbeat)

    def live(self, ms: str) -> None:
        """Advances to `ms` with one heartbeat per second from each member that does something."""
        while self.ms < int(ms):
            self.at(str(min(self.ms + 1000, int(ms))))
            for member in [
                m for m in self.acting if m in self.pulses and self.acting[m].what != "cut"
            ]:
                acting, before = self.acting[member], self.pulses[member].progress
                waited = (
                    (self.ms - max(acting.since_ms, self.state.formed_ms or 0)) / 1000
                    if acting.what == "wait"
                    else 0
                )
                sequence = before.sequence + (acting.what == "train")
                cpu = before.cpu_s + (acting.what in ("train", "work"))
                ranked = (
                    self.state.generation is not None and member in self.state.generation.rank_of
                )
                generation = self.state.number if ranked else 0
                heartbeat = {
                    "generation": str(generation),
                    "sequence": str(sequence),
                    "waited": str(waited),
                    "cpu": str(cpu),
                }
                self.beat(member, **heartbeat | acting.heartbeat)

    def drain(self, member: str | None = None, rank: str | None = None) -> None:
        self.happen(
            DrainRequested(
                member_id=member, rank=None if rank is None else int(rank), reason="asked to"
            )
        )

    def machine(self, host: str, condition: str, reason: str = "") -> None:
        self.happen(
            MachineReported(host=host, condition=MachineCondition(condition), reason=reason)
        )

    def stop(self, ending: str = "stopped") -> None:
        self.happen(StopRequested(reason="asked to", ending=JobEnding(ending)))

    def server(
        self,
        server: str,
        pid: str = "1",
        serves: str = "yes",
        life: str = "1",
        run: str = "",
        last: str = "0",
        holds: str = "",
    ) -> None:
        """Registers a server. `last` is the newest generation that it knows; `holds` is the place
        whose partitions it has."""
        address = f"{server}:{pid}" if serves == "yes" else ""
        event = ServerRegistered(
            server_id=server,
            address=address,
            metrics_address="",
            host="h1",
            pid=int(pid),
            incarnation=life,
            generation=int(last),
            held_index=int(holds) if holds else None,
        )
        self.happen(OfRun(run=run_id(run), event=event) if run else event)

    def backup_report(self, primary: str, epoch: str, word: str) -> None:
        self.happen(BackupReported(server_id=primary, epoch=int(epoch), in_sync=word == "in-sync"))

    def server_lost(self, server: str) -> None:
        self.happen(ServerLost(server_id=server, ending=Ending.STREAM_BROKEN))

    def report(self, giver: str, move: str, what: str, life: str = "1") -> None:
        """Reports a move to the coordinator as its giver: `taken` by the receiver's process `life`,
        `kept` because of the receiver, or `failed` because of the giver itself."""
        taken = what == "taken"
        reasons = {
            "taken": "",
            "kept": "the receiver is too slow",
            "failed": "the giver's disk is full",
        }
        self.happen(
            MoveReported(
                server_id=giver,
                move=int(move),
                taken=taken,
                receiver_incarnation=life if taken else "",
                reason=reasons[what],
                giver_failed=what == "failed",
            )
        )

    def drain_server(self, server: str) -> None:
        self.happen(ServerDrainRequested(server_id=server, reason="asked to"))

    def shares(self) -> None:
        """Prints the partitions of each place in the shard map."""
        assert self.state.layout is not None
        owned: dict[int, list[int]] = {}
        for number, partition in enumerate(self.state.layout.partitions):
            owned.setdefault(partition.primary, []).append(number)
        shares = " ".join(
            f"{index}:{','.join(map(str, ids))}" for index, ids in sorted(owned.items())
        )
        self.out.append(f"epoch {self.state.layout.epoch}: {shares}")

    def declare(self, **tensors: str) -> None:
        """Declares float32 tensors as name=elements. Those with names in capitals are frozen."""
        specs = tuple(
            TensorSpec(name=name, shape=(int(size),), dtype="float32", frozen=name.isupper())
            for name, size in tensors.items()
        )
        self.happen(TensorsDeclared(tensors=specs))

    def lease(
        self,
        member: str,
        *,
        want: str,
        of: str,
        epoch: str = "0",
        finished: str = "",
        sequence: str = "0",
        takes_ms: str = "0",
    ) -> None:
        self.happen(
            BatchesLeased(
                member_id=member,
                loader="train",
                epoch=int(epoch),
                batches_in_epoch=int(of),
                want=int(want),
                finished=tuple(int(batch) for batch in finished.split(",") if batch),
                sequence=int(sequence),
                batch_ms=int(takes_ms),
            )
        )

    def status(self) -> None:
        phases = " ".join(f"{m.member_id}={m.phase}" for m in self.state.members.values())
        ending = ", failed" if self.state.ending is JobEnding.FAILED else ""
        self.out.append(
            f"{self.state.phase}{ending}, generation {self.state.number}: {phases}".rstrip(": ")
        )

    # ------------------------------------------------------------------------------------ decisions

    def happen(self, *happened: Event) -> None:
        if self.collected is not None:
            self.collected.extend(happened)
            return
        now = Now(ms=self.ms, unix_ms=self.ms)
        pulses = Pulses(members=self.pulses)
        decided = transition(
            self.state, now, happened, pulses=pulses, nonce=f"{self.state.number + 1:032x}"
        )
        self.state = decided.state
        events = [event.event if isinstance(event, OfRun) else event for event in happened]
        for event, outcome in zip(events, decided.outcomes, strict=True):
            if isinstance(event, MemberJoined) and isinstance(outcome, Joined):
                member_id = event.identity.member_id
                self.pulses[member_id] = attached(self.pulses.get(member_id), self.ms)
        self.pulses = {m: pulse for m, pulse in self.pulses.items() if m in self.state.members}
        self.tell(events, decided)

    def tell(self, events: Sequence[Event], decided: Transition) -> None:
        for event, outcome in zip(events, decided.outcomes, strict=True):
            if (line := format_outcome(event, outcome)) is not None:
                self.out.append(line)
        self.out.extend(
            line for record in decided.records if (line := format_record(record)) is not None
        )
        formed = any(isinstance(effect, fx.AnnounceGeneration) for effect in decided.effects)
        self.out.extend(
            line
            for effect in decided.effects
            # servers are told of each generation, so this is not written out
            if not (formed and isinstance(effect, fx.SendMembers) and effect.server_id is None)
            and (line := format_effect(effect)) is not None
        )


def run_id(text: str) -> RunId:
    """Parses a run from `2` or `2@500`."""
    number, _, began = text.partition("@")
    return RunId(number=int(number), began_unix_ms=int(began or 0))


def format_outcome(event: Event, outcome: Outcome) -> str | None:
    who = getattr(event, "member_id", "") or (
        event.identity.member_id if isinstance(event, MemberJoined) else ""
    )
    prefix = f"{who}: " if who else ""
    match outcome:
        case RunGranted():
            return f"run {outcome.run}" + (" begins, or goes on" if outcome.begun else "")
        case RunEnding():
            return f"ask again: {outcome.why}"
        case ShoalError() if isinstance(event, RunWanted):
            return f"refused, {outcome.code} / {outcome.reason}: {outcome}"
        case ShoalError():
            return f"{prefix}refused, {outcome.code} / {outcome.reason}"
        case Joined(resumed=True):
            return f"{prefix}welcome back"
        case Joined(replays=True):
            return f"{prefix}welcome, replays its script"
        case ExitNoted():
            rank = f" of rank {outcome.rank}" if outcome.rank >= 0 else ""
            return f"{prefix}was {'a' if outcome.was_member else 'no'} member{rank}"
        case Registered():
            return f"server {outcome.index}"
        case ServersAwaited():
            return f"waits for servers: {outcome.registered} of {outcome.wanted} are registered"
        case ShardLayout():
            owners = [
                f"{'+'.join(format_piece(outcome, piece) for piece in p.pieces)}@{p.primary}"
                for p in outcome.partitions
            ]
            return f"epoch {outcome.epoch}: {' '.join(owners)}"
        case Leased():
            wait = f", ask again in {outcome.retry_after_ms} ms" if outcome.retry_after_ms else ""
            return (
                f"{prefix}batches "
                f"{list(outcome.batches)}{', epoch done' if outcome.epoch_done else ''}{wait}"
            )
        case _:
            return None


def format_piece(layout: ShardLayout, piece: Piece) -> str:
    return (
        f"{layout.tensors[piece.tensor_index].name}[{piece.offset}:{piece.offset + piece.length}]"
    )


def format_record(record: fx.Record) -> str | None:
    """Formats the records of the event log about moves, machines, quarantined members and exits."""
    attributes = record.attributes
    match record.kind:
        case "member_quarantined":
            return f"member_quarantined: {attributes['who']}, rank {attributes['rank']}"
        case kind if kind.startswith("machine_"):
            return f"{kind}: {attributes['host']}, {attributes['reason']}"
        case "member_exited":
            return f"member_exited: rank {attributes['rank']}, {attributes['detail']}"
        case "server_draining" | "server_drained":
            return f"{record.kind}: {attributes['server_id']}"
        case "partitions_moved":
            return (
                f"partitions_moved: {attributes['partitions']} of {attributes['bytes']} bytes from "
                f"{attributes['from']} to {attributes['to']}"
            )
        case "move_failed":
            return f"move_failed: {attributes['reason']}"
        case _:
            return None


def format_effect(effect: fx.Effect) -> str | None:
    match effect:
        case fx.AnnounceGeneration(generation=g):
            ranks = " ".join(
                f"{i}:{r.member_id}@{r.host}{'*' if r.joining else ''}"
                for i, r in enumerate(g.ranks)
            )
            return (
                f"generation {g.number} {g.cause}, interrupts below {g.interrupts_below}: {ranks}"
            )
        case fx.SendGeneration(generation=g):
            return f"{effect.member_id}: generation {g.number} again"
        case fx.SendStandby():
            return f"{effect.member_id}: standby, {effect.reason}"
        case fx.SendNotice():
            silent = [
                f"; {each.read_by} reads the stacks of {each.member_id}"
                f"{' and logs' if each.logs else ''}"
                for each in effect.silent
            ]
            return f"all: {effect.text or 'it goes on'}{''.join(silent)}"
        case fx.SendDrain():
            return f"{effect.member_id}: drain, {effect.reason}"
        case fx.SendStop():
            how = (" now" if effect.now else "") + (", it is behind" if effect.behind else "")
            after = (
                f" after {effect.finished_steps} steps" if effect.finished_steps is not None else ""
            )
            return f"{effect.member_id}: stop{how}, {effect.reason}{after}"
        case fx.EndSession():
            return f"{effect.member_id}: session ends" + (
                "" if effect.error is None else f", {effect.error.reason}"
            )
        case fx.EndServerSession():
            return f"server {effect.server_id}: session ends, {effect.error.reason}"
        case fx.SendMembers(member_ids=members):
            to = "servers" if effect.server_id is None else f"server {effect.server_id}"
            return f"{to}: generation {effect.generation}, {' '.join(members) or 'nobody'}"
        case fx.SendPlace():
            if effect.role is ServerRole.BACKUP:
                follows = f"follows {effect.primary_address or 'nobody yet'}"
                return (
                    f"server {effect.server_id}: epoch {effect.epoch}, "
                    f"{follows}{', in sync' if effect.in_sync else ''}"
                )
            backup = (
                f", backup {effect.backup_id}{' in sync' if effect.in_sync else ''}"
                if effect.backup_id
                else ""
            )
            return f"server {effect.server_id}: epoch {effect.epoch}, primary{backup}"
        case fx.SendSettled():
            return f"server {effect.server_id}: settled {effect.move}, epoch {effect.epoch}"
        case fx.SendMove(move=move):
            moving = (
                f"{','.join(map(str, move.partitions))} to {move.receiver} at "
                f"{effect.receiver_address or 'nowhere'}"
            )
            return (
                f"server {effect.server_id}: move {move.number}, {moving}, by life "
                f"{move.giver_incarnation}"
            )
        case fx.StopServer():
            return f"server {effect.server_id}: stop, {effect.reason}"
        case fx.StopServers():
            return f"servers: stop, {effect.reason}"
