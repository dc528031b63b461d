"""Judges a recorded history (recording.py): each promise is a function that returns the violations it finds. Pure, but for reading files.

The order of a partition's changes is that of its versions, as its servers wrote them when they made them; what a recovery made again must
be the same, and so must what a backup made. So there is one history of each partition, and all else is held against it:

    changes_are_one_history    a version is one change with one outcome, over all servers and restarts, and none is left out
    applied_once               no push is applied twice, and no batch; only what a worker has sent is applied, in the order of its numbers
    none_lost                  what was acknowledged is in the history, at the version that was told
    versions_are_monotonic     whoever asks later sees no older version; each version has the same values for all who see it
    optimizer_is_adam          the changes, made by torch's Adam in one process, give the same bits in each version, and the same moments
    bound_is_kept              no member's turn came while it was more than the bound ahead of the slowest
    iterations_are_apart       with bsp all pushes of an iteration were computed on what the one before ended with
    samples_count_once         every sample of every epoch that began counts once, and every batch is on every partition

With backups of servers the history is still one, and takes no search. A primary makes a change only when its backup in sync has it, and
whoever was told of a change was told by a primary; so what a primary made when it was asked to, and what it had when it answered anybody,
is for ever, whoever is the primary next. A backup makes what its primary's journal has, which the primary makes too, or its next process,
or the backup itself in its place. What alone may be void is the end of a journal: a primary that is killed can have changes on its disk
that no backup has, and makes them again when it is started. It serves nobody then until it has heard what it is. If it hears that it is a
backup, the changes after the last that it answered for are void, and those that its successor makes in their place are the history. They
are found by the lines: what a server made in a recovery before it served, where the next that it was told was that it is a backup, and
beyond all that it had made before.

Nor may a primary that was replaced and has not heard of it acknowledge anything new; but it may answer with older versions. So an older
version than another that was told before is no violation where another server had been told, by then, that it has that place in a later
epoch than the one that its sender knew.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from shoal_common.errors import ShoalError
from shoal_common.wire import checksum
from shoal_worker.data.record import audit

_LARGEST_CLOCK = 2**62
"""Servers' clocks go no further."""


@dataclass(frozen=True)
class Line:
    """One line of a history."""

    fields: Mapping[str, Any]
    place: str = "made by hand"
    """File and line."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __str__(self) -> str:
        short = {name: f"{value[:16]}..." if isinstance(value, str) and len(value) > 64 else value for name, value in self.fields.items()}
        return f"{self.place}: {json.dumps(short)}"


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, and the lines that show it."""

    what: str
    lines: Sequence[Line] = ()

    def __str__(self) -> str:
        return "\n    ".join([self.what, *map(str, self.lines[:12])])


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A version of a partition that was told to a worker: by a pull, or as the answer to a push."""

    partition: int
    version: int
    begun: int
    ended: int
    line: Line
    digest: str = ""
    """Digest of the values that came with it; empty where none came."""
    server: str = ""
    """Who told; empty: not known."""


@dataclass
class History:
    """All lines, those of one process in their order; servers' by the server, one life after the other."""

    servers: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    workers: Mapping[str, Sequence[Line]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> History:
        """A last line may be torn."""
        files = []
        for path in directory.glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            files.append([Line(json.loads(text), f"{path.name}:{number}") for number, text in enumerate(whole.split(b"\n"), 1) if text])
        servers: dict[str, list[Line]] = defaultdict(list)
        workers: dict[str, list[Line]] = defaultdict(list)
        for lines in sorted(filter(None, files), key=lambda lines: lines[0]["t"]):
            (servers if lines[0]["kind"] == "starts" else workers)[lines[0]["of"]] += lines
        return cls(servers=servers, workers=workers)

    def of_servers(self, *kinds: str) -> Iterator[Line]:
        return (line for lines in self.servers.values() for line in lines if line["kind"] in kinds)

    def of_workers(self, *kinds: str) -> Iterator[Line]:
        return (line for lines in self.workers.values() for line in lines if line["kind"] in kinds)

    @cached_property
    def valid(self) -> Sequence[Line]:
        """Servers' lines of what was applied, or restored, in the order in which they were written, without what is void."""
        return sorted(itertools.chain(*map(_valid_lines, self.servers.values())), key=lambda line: line["t"])

    @cached_property
    def changes(self) -> Mapping[int, Mapping[int, Line]]:
        """Partition -> version -> the line of the change that led to it, as it was written first."""
        found: dict[int, dict[int, Line]] = defaultdict(dict)
        for line in self.valid:
            if line["kind"] == "applied":
                found[line["partition"]].setdefault(line["version"], line)
        return {partition: dict(sorted(versions.items())) for partition, versions in sorted(found.items())}

    @cached_property
    def placed(self) -> Mapping[str, Sequence[Line]]:
        """Server -> what it heard that it is."""
        return {server: [line for line in lines if line["kind"] == "placed"] for server, lines in self.servers.items()}

    def primaries(self) -> Sequence[str]:
        """Who has a place at the end, by the index of the place."""
        newest: dict[int, Line] = {}
        for line in sorted(itertools.chain(*self.placed.values()), key=lambda line: line["epoch"]):
            if not line["follows"]:
                newest[line["index"]] = line
        return [newest[index]["of"] for index in sorted(newest)]

    @property
    def promotions(self) -> int:
        """How often a place's next primary was another server."""
        holders: dict[int, dict[int, str]] = defaultdict(dict)
        for line in itertools.chain(*self.placed.values()):
            if not line["follows"]:
                holders[line["index"]][line["epoch"]] = line["of"]
        return sum(before != after for each in holders.values() for before, after in pairwise(each[epoch] for epoch in sorted(each)))

    def may_be_old(self, seen: Seen) -> bool:
        """Whether who told that may have been replaced without knowing it."""
        heard = [line for line in self.placed.get(seen.server, ()) if line["t"] < seen.begun]
        if not heard or heard[-1]["follows"]:
            return False
        others = (line for server, lines in self.placed.items() if server != seen.server for line in lines)
        knew = heard[-1]
        return any(
            line["index"] == knew["index"] and not line["follows"] and line["epoch"] > knew["epoch"] and line["t"] < seen.ended
            for line in others
        )

    @cached_property
    def _pushes(self) -> Mapping[tuple[int, str, int, int, str], Line]:
        return {_push_key(line, _digest(bytes.fromhex(line["gradient"]))): line for line in self.of_workers("push")}

    def push_of(self, change: Line) -> Line | None:
        """The line of the push that was applied: of its member, number and batch, with its gradient."""
        return self._pushes.get(_push_key(change, change["gradient"]))

    @cached_property
    def seen(self) -> Sequence[Seen]:
        """All answers to pulls and pushes."""
        found = []
        server_at = {line["address"]: line["of"] for line in self.of_servers("starts")}
        for lines in self.workers.values():
            begun: dict[int, Line] = {}
            for line in lines:
                if line["kind"] in ("pull", "push"):
                    begun.setdefault(line["call"], line)
                elif line["kind"] in ("pulled", "pushed"):
                    for answer in line["answers"]:
                        found.append(
                            Seen(
                                partition=answer["partition"],
                                version=answer["version"],
                                begun=begun[line["call"]]["t"],
                                ended=line["t"],
                                line=line,
                                digest=answer.get("digest", ""),
                                server=server_at.get(begun[line["call"]]["at"], ""),
                            )
                        )
        return found


def _valid_lines(lines: Sequence[Line]) -> Iterator[Line]:
    """What was applied or restored on one server, without what is void: see above."""
    spans: list[tuple[int, int]] = []
    """Of each line: the number of the process, and that of the span in it."""
    recovered: set[tuple[int, int]] = set()
    served: dict[tuple[int, int], int] = {}
    """Span -> the number of the last line that shows that it served."""
    process, copies = 0, False
    for number, line in enumerate(lines):
        if line["kind"] == "starts":
            process, copies = process + 1, False
        span = process, line.fields.get("span", 0)
        spans.append(span)
        if not copies:
            recovered.add(span)
        if line["kind"] in ("known", "sent") or (line["kind"] == "applied" and not line["again"]):
            served[span] = number
        elif line["kind"] == "placed":
            copies = line["follows"]
            if line["serves"]:
                served[span] = number
    may_be_void: set[int] = set()
    is_backup_next = False
    for number, line in reversed(list(enumerate(lines))):
        if line["kind"] == "placed" and (line["follows"] or line["serves"]):
            is_backup_next = line["follows"]
        elif is_backup_next and spans[number] in recovered and number > served.get(spans[number], -1):
            may_be_void.add(number)
    newest: dict[int, int] = {}
    for number, line in enumerate(lines):
        if line["kind"] not in ("applied", "restored"):
            continue
        partition, version = line["partition"], line["version"]
        if number not in may_be_void or version <= newest.get(partition, 0):
            newest[partition] = max(newest.get(partition, 0), version)
            yield line


# ----------------------------------------------------------------------------------------------------------- the servers' changes


def changes_are_one_history(history: History) -> Iterator[Violation]:
    made: dict[tuple[int, int], Line] = {}
    for line in history.valid:
        partition, version = line["partition"], line["version"]
        first = history.changes.get(partition, {}).get(version)
        if first is None:
            yield Violation(f"partition {partition} came out of a snapshot at version {version}, to which no change has led", [line])
            continue
        same = ["digest"] if line["kind"] == "restored" else ["sequence", "batch", "gradient", "digest"]
        if line["kind"] == "applied" and line["sequence"]:  # whose first values they were nobody keeps
            same.append("member")
        if any(first[name] != line[name] for name in same):
            yield Violation(f"version {version} of partition {partition} is not what it was when it was made first", [first, line])
        elif line["kind"] == "applied" and not line["again"] and (other := made.setdefault((partition, version), line)) is not line:
            yield Violation(
                f"{other['of']} and {line['of']} both made version {version} of partition {partition} as primaries", [other, line]
            )
    for partition, versions in history.changes.items():
        missing = sorted(set(range(1, max(versions) + 1)) - versions.keys())
        if missing:
            yield Violation(f"partition {partition} came to version {max(versions)} without a change to version {missing[0]}")


def applied_once(history: History) -> Iterator[Violation]:
    for partition, versions in history.changes.items():
        pushes: dict[tuple[str, int], Line] = {}
        batches: dict[int, Line] = {}
        newest: dict[str, Line] = {}
        for line in versions.values():
            if not line["sequence"]:
                continue
            member, sequence, batch = line["member"], line["sequence"], line["batch"]
            if (other := pushes.setdefault((member, sequence), line)) is not line:
                yield Violation(f"push {sequence} of {member} was applied twice to partition {partition}", [other, line])
            if batch and (other := batches.setdefault(batch, line)) is not line:
                yield Violation(f"batch {batch} was applied twice to partition {partition}", [other, line])
            if (before := newest.get(member)) is not None and before["sequence"] > sequence:
                yield Violation(f"push {sequence} of {member} was applied to partition {partition} after a later one", [before, line])
            newest[member] = line
            if history.push_of(line) is None:
                yield Violation(f"what was applied to partition {partition} as push {sequence} of {member} was never sent", [line])


def none_lost(history: History) -> Iterator[Violation]:
    pushes = {(p, c["member"], c["sequence"]): c for p, versions in history.changes.items() for c in versions.values() if c["sequence"]}
    batches = {(p, c["batch"]): c for p, versions in history.changes.items() for c in versions.values() if c["batch"]}
    answers = [(line["of"], answer, line, True) for line in history.of_workers("pushed") for answer in line["answers"]]
    answers += [(line["member"], line.fields, line, False) for line in history.of_servers("known")]
    for member, answer, line, by_worker in answers:
        partition, sequence, batch = answer["partition"], answer["sequence"], answer["batch"]
        push, same_batch = pushes.get((partition, member, sequence)), batches.get((partition, batch))
        if push is not None and push["batch"] != batch:
            push = None
        known = not by_worker or answer["duplicate"]
        made = push or same_batch if known else push
        name = f"push {sequence} of {member} (batch {batch}) to partition {partition}"
        if made is None:
            another = pushes.get((partition, member, sequence))
            yield Violation(f"{name} was acknowledged, and is lost", [line] if another is None else [line, another])
        elif made["version"] > answer["version"] or (not known and made["version"] != answer["version"]):
            yield Violation(f"{name} was acknowledged at version {answer['version']}, and led to {made['version']}", [line, made])


def versions_are_monotonic(history: History) -> Iterator[Violation]:
    by_partition: dict[int, list[Seen]] = defaultdict(list)
    for seen in history.seen:
        by_partition[seen.partition].append(seen)
        if seen.digest:
            change = history.changes.get(seen.partition, {}).get(seen.version)
            if change is None:
                yield Violation(f"a pull gave version {seen.version} of partition {seen.partition}, which no server has had", [seen.line])
            elif change["digest"] != seen.digest:
                what = f"a pull gave version {seen.version} of partition {seen.partition} with other values than the server had"
                yield Violation(what, [change, seen.line])
    for partition, all_seen in by_partition.items():
        ended = sorted(all_seen, key=lambda seen: seen.ended)
        newest: list[Seen] = []
        """For each of those, the newest version among it and those before it."""
        for seen in ended:
            newest.append(seen if not newest or seen.version >= newest[-1].version else newest[-1])
        ends = [seen.ended for seen in ended]
        for seen in all_seen:
            place = bisect.bisect_left(ends, seen.begun) - 1
            if place >= 0 and newest[place].version > seen.version and not history.may_be_old(seen):
                what = f"version {seen.version} of partition {partition} was told after version {newest[place].version} had been"
                yield Violation(what, [newest[place].line, seen.line])


def optimizer_is_adam(history: History, snapshots: Sequence[Path], settings: Mapping[str, Any]) -> Iterator[Violation]:
    """`snapshots`: what the servers wrote when they ended. `settings`: of torch.optim.Adam."""
    first_values = {(line["partition"], _digest(bytes.fromhex(line["values"]))): line for line in history.of_workers("values")}
    held: set[int] = set()
    for path in snapshots:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["shoal"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        pieces = {number: [piece[2] for piece in pieces] for number, _, pieces in state["state"]["layout"]["partitions"]}
        for entry in state["partitions"]:
            partition = entry["partition_id"]
            held.add(partition)
            yield from _steps_like_adam(history, partition, pieces[partition], entry, tensors, first_values, settings)
    for partition in sorted(history.changes.keys() - held):
        yield Violation(f"no snapshot has partition {partition}")


def _steps_like_adam(
    history: History,
    partition: int,
    lengths: Sequence[int],
    entry: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    first_values: Mapping[tuple[int, str], Line],
    settings: Mapping[str, Any],
) -> Iterator[Violation]:
    changes = list(history.changes[partition].values())
    if entry["version"] != changes[-1]["version"]:
        what = f"partition {partition} came to version {changes[-1]['version']}, and ended at {entry['version']}"
        yield Violation(what, [changes[-1]])
        return
    given = first_values.get((partition, changes[0]["gradient"]))
    if given is None:
        yield Violation(f"partition {partition} began with values that no worker gave", [changes[0]])
        return
    # What has the same hyperparameters and past is one tensor to torch: cut elsewhere, the last bits of some elements would be others.
    ends = [sum(lengths[:end]) for _, end in entry["runs"]]
    cut = [end - begin for begin, end in pairwise((0, *ends))]
    parameters = [torch.nn.Parameter(part.clone()) for part in _floats(given["values"]).split(cut)]
    optimizer = torch.optim.Adam(parameters, fused=True, **settings)
    for change in changes[1:]:
        sent = history.push_of(change)
        if sent is None:
            return  # applied_once says so
        assert not sent["absent"], "every parameter of the workers' network has a gradient"
        for parameter, gradient in zip(parameters, _floats(sent["gradient"]).split(cut), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if _digest(_joined(parameters)) != change["digest"]:
            yield Violation(f"version {change['version']} of partition {partition} is not what Adam makes of its pushes", [sent, change])
            return
    found = {"values": tensors[f"{partition}:values"]}
    mine = {"values": _joined(parameters)}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        found[name] = torch.cat([tensors[f"{partition}:state:{place}:{name}"].reshape(-1) for place in range(len(cut))])
        mine[name] = _joined([optimizer.state[parameter][name].reshape(-1) for parameter in parameters])
    for name, tensor in found.items():
        if not torch.equal(tensor, mine[name]):
            yield Violation(f"{name} of partition {partition} differ in the snapshot from what Adam has in one process")


def _push_key(line: Line, gradient: str) -> tuple[int, str, int, int, str]:
    return line["partition"], line["member"], line["sequence"], line["batch"], gradient


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts])


def _floats(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.float32).copy())


def _digest(data: bytes | torch.Tensor) -> str:
    return f"{checksum(data.numpy() if isinstance(data, torch.Tensor) else data):016x}"


# ----------------------------------------------------------------------------------------------------------------------- the bound


@dataclass
class _Clock:
    """Where a member stands, by what it said to one server."""

    clock: int
    origin: int | None = None
    """`clock` = origin + the iterations that it counts; None: it has not spoken since it came, or since it rested."""
    rests: bool = False
    least: int = 0
    """Where it stands by what the journal has for certain: where it was placed, and its pushes."""

    def __post_init__(self) -> None:
        self.least = self.clock

    def at(self, finished: int) -> int:
        assert self.origin is not None
        return min(self.origin + finished, _LARGEST_CLOCK)

    def says(self, finished: int, place: int, slowest: int) -> None:
        if finished >= _LARGEST_CLOCK:
            self.origin, self.rests = None, True
            return
        if self.rests:
            self.clock = max(self.clock, slowest)
        if place or self.origin is None:
            self.origin = max(self.clock, place) - finished
        self.clock, self.rests = max(self.clock, self.at(finished)), False


def bound_is_kept(history: History, bound: int) -> Iterator[Violation]:
    """On each server by itself: a member is one of the newest generation that the server had been told of, and what counts is how many
    iterations each member had said, to this server, that it finished, since its first word; a joiner begins where the slowest then was, and
    so does who rested. Nobody waits for a member that rests. After a restart members stand where they stood, but for what was said without
    a push, and for the end of each one's last push."""
    said: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for line in history.of_workers("push", "pull", "clock"):
        said[line["member"]].add((line["clock"], line.fields.get("place", 0)))
    for server, lines in history.servers.items():
        clocks: dict[str, _Clock] = {}
        slowest = 0
        for number, line in enumerate(lines):
            match line["kind"]:
                case "applied" | "known" if line["sequence"] and line["member"] in clocks:
                    each = clocks[line["member"]]
                    if each.origin is not None:
                        each.least = max(each.least, each.at(line["clock"] - 1))
                case "clocks":
                    yield from _stand_where_they_stood(server, line, clocks)
                    clocks = {
                        member: _Clock(clock=clock, origin=origin, rests=member in line["resting"])
                        for member, (clock, origin) in line["clocks"].items()
                    }
                    slowest = line["slowest"]
                case "members":
                    clocks = {member: clocks.get(member) or _Clock(clock=slowest) for member in line["members"]}
                case "finished" if line["member"] in clocks:
                    if (line["clock"], line["place"]) not in said[line["member"]]:
                        what = f"server {server} counts {line['clock']} iterations of {line['member']}, which did not say so"
                        yield Violation(what, [line])
                    clocks[line["member"]].says(line["clock"], line["place"], slowest)
                case "turn":
                    lead = clocks[line["member"]].clock - slowest
                    if lead > bound:
                        what = f"the turn of {line['member']} came on server {server} {lead} ahead of the slowest, with a bound of {bound}"
                        slow = next((m for m, each in clocks.items() if each.clock == slowest and not each.rests), "nobody")
                        told = [other for other in lines[:number] if other["kind"] == "finished" and other["member"] == slow]
                        yield Violation(what, [*told[-1:], line])
            slowest = min((each.clock for each in clocks.values() if not each.rests), default=slowest)


def _stand_where_they_stood(server: str, line: Line, clocks: Mapping[str, _Clock]) -> Iterator[Violation]:
    """Whoever pushed iteration n, in a push that the journal has, has finished the one before, also if the server had not counted it."""
    for member, (clock, _) in line["clocks"].items():
        before = clocks.get(member)
        if before is not None and not before.least <= clock <= max(before.clock, before.least):
            yield Violation(f"server {server} came back with {member} at clock {clock}, where it had {before.clock}", [line])
    awaited = [clock for member, (clock, _) in line["clocks"].items() if member not in line["resting"]]
    if any(clock < line["slowest"] for clock in awaited):
        yield Violation(f"server {server} came back with a member behind the slowest, at {line['slowest']}", [line])


def iterations_are_apart(history: History) -> Iterator[Violation]:
    """In the order of a partition's changes, a push was computed on the same version as the one before it, by another member, or on the one
    that this led to: then the next iteration begins. Members number their iterations each for itself, so that their numbers say nothing."""
    for partition, versions in history.changes.items():
        base, pushed = 0, dict[str, Line]()
        """The version that this iteration's pushes are computed on, and the change of each member in it."""
        for change in versions.values():
            sent = history.push_of(change) if change["sequence"] else None
            if sent is None:
                continue
            if sent["base"] == change["version"] - 1:
                base, pushed = sent["base"], {}
            elif sent["base"] != base:
                named = f"version {change['version']} of partition {partition}"
                yield Violation(f"{named} is of a push on version {sent['base']}, where the iteration's are on {base}", [sent, change])
            if (other := pushed.setdefault(change["member"], change)) is not change:
                yield Violation(f"{change['member']} pushed twice to partition {partition} in one iteration", [other, change])


# --------------------------------------------------------------------------------------------------------------------- the samples


def samples_count_once(history: History, records: Path, batch_size: int) -> Iterator[Violation]:
    """`records`: the samples' (shoal_worker.data.record)."""
    try:
        verdict = audit(records)
    except ShoalError as error:
        yield Violation(f"the record of samples contradicts itself: {error}")
        return
    batches = 0
    for epoch in verdict.epochs:
        batches += -(-epoch.expected // batch_size)
        if not epoch.exactly_once:
            yield Violation(
                f"epoch {epoch.epoch}: {epoch.lost} samples lost {epoch.lost_samples}, {epoch.repeated} repeated {epoch.repeated_samples}"
            )
    keys = {partition: {c["batch"] for c in versions.values() if c["sequence"]} for partition, versions in history.changes.items()}
    for partition, here in keys.items():
        if len(here) != batches:
            elsewhere = set.union(*keys.values()) - here
            what = f"{batches} batches were dealt and finished, partition {partition} has {len(here)} of them"
            yield Violation(what, [line for line in history.of_workers("push") if line["batch"] in elsewhere])


# --------------------------------------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a history is judged against."""

    records: Path
    snapshots: Sequence[Path]
    adam: Mapping[str, Any]
    batch_size: int
    bound: int | None = None
    """Clocks, with ssp."""
    in_step: bool = False
    """With bsp."""


def promises(history: History, job: Job, *, ended_well: bool) -> Mapping[str, Callable[[], Iterator[Violation]]]:
    """Each promise in a sentence, and what finds its violations. A history that breaks off says nothing of its end."""
    held: dict[str, Callable[[], Iterator[Violation]]] = {
        "no acknowledged push is lost": lambda: none_lost(history),
        "no push and no batch is applied twice": lambda: applied_once(history),
        "a restart changes nothing that was there": lambda: changes_are_one_history(history),
        "versions only grow, and each has one set of values": lambda: versions_are_monotonic(history),
    }
    if ended_well:
        held["values and moments are those of Adam in one process, to the bit"] = lambda: optimizer_is_adam(
            history, job.snapshots, job.adam
        )
        held["each sample of an epoch counts once"] = lambda: samples_count_once(history, job.records, job.batch_size)
    if (bound := job.bound) is not None:
        held[f"nobody goes on more than {bound} ahead of the slowest"] = lambda: bound_is_kept(history, bound)
    if job.in_step:
        held["all compute an iteration on what the one before ended with"] = lambda: iterations_are_apart(history)
    return held
