"""Storage format of a job's state: one Redis hash per job, with JSON in its fields, so that a
transition writes only what it changed.

Fields:

- `header`: the small parts of the state.
- `generation`: the newest generation without its ranks.
- `ranks`: the full rank table of a generation, with the generation's number.
- `change:NUMBER`: how each later rank table differs from the previous one.
- `layout`, `moves`.
- `member:ID`, `departed:ID`, `server:ID`, `loader:NAME`: one field per entry of a mapping.

The store adds its own fields (store.py). Dataclasses are written with their field names, so that
later releases can add fields with defaults. `format` in the header is incremented by every change
that older releases could not read.

All data that this module reads was written by it. A field that cannot be parsed raises a
CorruptDataError that names the field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from typing import Any, Final, TypeVar, cast

from shoal_common.errors import CorruptDataError
from shoal_common.formats import rank_table
from shoal_common.tables.declaration import TableSpec

from shoal_coordinator.membership.model.batches import Answer, Epoch, Loader
from shoal_coordinator.membership.model.draft import Changes
from shoal_coordinator.membership.model.shards import (
    Bucket,
    Partition,
    Piece,
    ShardLayout,
    TensorSpec,
)
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    Cause,
    Departure,
    Drained,
    Generation,
    Identity,
    JobEnding,
    JobPhase,
    JobState,
    Machine,
    MachineCondition,
    Member,
    MemberPhase,
    Move,
    Moves,
    PastRun,
    Rank,
    RankChange,
    Recovery,
    RunId,
    Server,
    ServerRole,
    populate,
)

T = TypeVar("T")

FORMAT: Final = 4
_READABLE: Final = (3, 4)
"""Formats that this release can read. In format 3 the ranks were part of `generation`."""
_HEADER: Final = ("number", "last_order", "stop_reason", "departing")
_LATER: Final = ("run_above", "ended_unix_ms")
"""Numbers in the header that older releases did not write. Their default is 0."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Fields of a job's hash that are to be set or deleted."""

    put: Mapping[str, str]
    remove: tuple[str, ...]


def encode_changes(state: JobState, changes: Changes) -> Written:
    """Returns the fields to write for `state`. `changes`: what has changed since the last write."""
    put: dict[str, str] = {}
    remove: list[str] = []
    if changes.header:
        put["header"] = _dump(_header(state))
    if changes.generation:
        if state.generation is None:
            remove += ("generation", "ranks")
        else:
            put |= _generation(state.generation, whole=changes.table)
        remove += (f"change:{number}" for number in sorted(changes.dropped_changes))
    if changes.layout:
        _write(put, remove, "layout", None if state.layout is None else _layout(state.layout))
    if changes.moves:
        put["moves"] = _dump(asdict(state.moves))
    for name, value in _entries(state, changes):
        _write(put, remove, name, value)
    return Written(put=put, remove=tuple(remove))


def everything(state: JobState) -> Changes:
    """Returns `Changes` that mark every part of the state as changed, so that the complete state is
    written, as for a new job."""
    return Changes(
        header=True,
        generation=True,
        table=True,
        dropped_changes=frozenset(),
        layout=True,
        moves=True,
        members=frozenset(state.members),
        departed=frozenset(state.departed),
        servers=frozenset(state.servers),
        loaders=frozenset(state.loaders),
    )


def decode_state(written: Mapping[str, str]) -> JobState:
    """Restores a job's state from the fields of its hash. Ignores unknown fields. Raises
    CorruptDataError."""
    header = _read(written, "header", _parse_header)
    departed = _read_all(written, "departed", lambda _, value: Departure(**value))
    members = _read_all(written, "member", lambda _, value: _parse_member(value))
    generation = _read_generation(written) if "generation" in written else None
    return JobState(
        **header,
        generation=generation,
        recovery=_recovery(header, generation),
        layout=_read(written, "layout", _parse_layout) if "layout" in written else None,
        # older releases wrote none
        moves=_read(written, "moves", _parse_moves) if "moves" in written else Moves(),
        members=dict(sorted(members.items(), key=lambda item: (item[1].joined_unix_ms, item[0]))),
        population=populate(members),
        departed=dict(sorted(departed.items(), key=lambda item: (item[1].unix_ms, item[0]))),
        servers=_read_all(written, "server", _parse_server),
        loaders=_read_all(written, "loader", lambda _, value: _parse_loader(value)),
    )


def _recovery(header: Mapping[str, Any], generation: Generation | None) -> Recovery | None:
    """Returns the recovery that was in progress; None if there was none. A recovery was in progress
    if the stored number is above the number of the stored generation or, if no generation is
    stored, above all generations of previous runs. Members or servers have then reported
    generations that Redis has lost."""
    known = header.get("run_above", 0) if generation is None else generation.number
    if header["number"] <= known:
        return None
    return Recovery(known=known, newest=header["number"], world_size=0, until_ms=Recovery.FOUND)


# ------------------------------------------------------------------------------------------ writing


def _write(put: dict[str, str], remove: list[str], name: str, value: Any) -> None:
    """Adds a field to `put`, the fields to be set. If `value` is None, adds the field's name to
    `remove`, the fields to be deleted."""
    if value is None:
        remove.append(name)
    else:
        put[name] = _dump(value)


def _entries(state: JobState, changes: Changes) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields the field name and the value of each changed entry of a mapping; None for a removed
    entry."""
    for member_id in changes.members:
        member = state.members.get(member_id)
        yield (
            f"member:{member_id}",
            None
            if member is None
            else {"identity": _shallow(member.identity), **_shallow(member, "identity")},
        )
    for member_id in changes.departed:
        departure = state.departed.get(member_id)
        yield f"departed:{member_id}", None if departure is None else _shallow(departure)
    for server_id in changes.servers:
        server = state.servers.get(server_id)
        yield f"server:{server_id}", None if server is None else _shallow(server, "server_id")
    for name in changes.loaders:
        loader = state.loaders.get(name)
        yield (
            f"loader:{name}",
            None
            if loader is None
            else {str(number): _epoch(epoch) for number, epoch in loader.epochs.items()},
        )


def _header(state: JobState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "spec": asdict(state.spec),
        "run": asdict(state.run),
        "run_aliases": [asdict(run) for run in state.run_aliases],
        "past_runs": [asdict(past) for past in state.past_runs],
        "phase": state.phase,
        "ending": state.ending,
        "accusations": [[*pair, count] for pair, count in state.accusations.items()],
        "machines": {host: _shallow(machine) for host, machine in state.machines.items()},
        **{name: getattr(state, name) for name in (*_HEADER, *_LATER)},
    }


def _generation(generation: Generation, *, whole: bool) -> dict[str, str]:
    """Returns the fields of a generation. They contain only the change of its rank table, unless
    there is no change or `whole` is set."""
    head = _shallow(generation, "ranks", "change")
    head["change"] = None if generation.change is None else _shallow(generation.change)
    head["joining"] = rank_table.runs(
        position for position, rank in enumerate(generation.ranks) if rank.joining
    )
    put = {"generation": _dump(head)}
    change = generation.change
    if whole or not generation.written or change is None:
        put["ranks"] = _dump(
            {"number": generation.number, "ranks": [_rank(rank) for rank in generation.ranks]}
        )
    else:
        added = [[position, _rank(generation.ranks[position])] for position in change.added]
        put[f"change:{generation.number}"] = _dump({**_shallow(change), "added": added})
    return put


def _rank(rank: Rank) -> list[str]:
    """Returns the values of a rank that cannot be derived from the rest of the rank table."""
    return [rank.member_id, rank.host, rank.donor_address, rank.donor_key]


def _layout(layout: ShardLayout) -> dict[str, Any]:
    """Returns a layout as JSON-compatible values. Tensors and partitions are plain lists, since
    there may be a hundred thousand of them. The list of a bucket has two additional numbers."""
    return {
        "epoch": layout.epoch,
        "tensors": [[t.name, list(t.shape), t.dtype, t.frozen, t.apart] for t in layout.tensors],
        "tables": {
            number: t.table.to_json()
            for number, t in enumerate(layout.tensors)
            if t.table is not None
        },
        "partitions": [
            [p.primary, [[e.tensor_index, e.offset, e.length] for e in p.pieces]]
            + ([] if p.bucket is None else [p.bucket.tensor_index, p.bucket.number])
            for p in layout.partitions
        ],
    }


def _epoch(epoch: Epoch) -> dict[str, Any]:
    return {
        "batches": epoch.batches,
        "first_key": epoch.first_key,
        "dealt": epoch.dealt,
        "returned": _runs(epoch.returned),
        "leased": {member_id: _runs(batches) for member_id, batches in epoch.leased.items()},
        "answers": {
            member_id: [answer.sequence, _runs(answer.batches)]
            for member_id, answer in epoch.answers.items()
        },
        "batch_ms": dict(epoch.batch_ms),
    }


def _runs(batches: Iterable[int]) -> list[list[int]]:
    """Encodes batches as ranges of consecutive numbers, [first, count], in order."""
    runs: list[list[int]] = []
    for batch in batches:
        if runs and batch == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([batch, 1])
    return runs


def _shallow(value: Any, *without: str) -> dict[str, Any]:
    return {
        name: getattr(value, name) for name in _names(cast(Any, type(value))) if name not in without
    }


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


_dump: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


# ------------------------------------------------------------------------------------------ reading


def _read(written: Mapping[str, str], name: str, parse: Callable[[Any], T]) -> T:
    try:
        return parse(json.loads(written[name]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(
            f"cannot read field {name!r} of a job in Redis ({type(error).__name__}: {error}); "
            "another program has changed it, or a newer release has written it"
        ) from error


def _read_all(
    written: Mapping[str, str], kind: str, parse: Callable[[str, Any], T]
) -> dict[str, T]:
    prefix = f"{kind}:"
    found: dict[str, T] = {}
    for name in written:
        if name.startswith(prefix):
            entry = name.removeprefix(prefix)
            found[entry] = _read(written, name, partial(parse, entry))
    return found


def _parse_header(value: Any) -> dict[str, Any]:
    if value["format"] not in _READABLE:
        raise ValueError(
            f"format {value['format']} is not supported; this release reads "
            f"{' and '.join(map(str, _READABLE))}"
        )
    return {
        "spec": JobSpec(**value["spec"]),
        "phase": JobPhase(value["phase"]),
        "ending": JobEnding(value.get("ending", "")),
        "accusations": {(first, second): count for first, second, count in value["accusations"]},
        "machines": {
            # older releases wrote none
            host: Machine(**{**machine, "condition": MachineCondition(machine["condition"])})
            for host, machine in value.get("machines", {}).items()
        },
        "run": _parse_run(value.get("run", {})),
        "run_aliases": tuple(_parse_run(run) for run in value.get("run_aliases", ())),
        "past_runs": tuple(_parse_past_run(past) for past in value.get("past_runs", ())),
        **{name: value[name] for name in _HEADER},
        **{name: value.get(name, 0) for name in _LATER},
    }


def _parse_run(value: Any) -> RunId:
    return RunId(**value)


def _parse_past_run(value: Any) -> PastRun:
    return PastRun(
        **{**value, "run": _parse_run(value["run"]), "ending": JobEnding(value["ending"])}
    )


def _parse_member(value: Any) -> Member:
    return Member(
        **{**value, "identity": Identity(**value["identity"]), "phase": MemberPhase(value["phase"])}
    )


def _read_generation(written: Mapping[str, str]) -> Generation:
    head = _read(written, "generation", dict)
    if "ranks" in head:  # as an older release wrote it
        return _read(written, "generation", _parse_older_generation)
    number, table = _read(
        written, "ranks", lambda value: (int(value["number"]), list(value["ranks"]))
    )
    for later in sorted(later for later in head["written"] if later > number):
        name = f"change:{later}"
        number, table = later, _read(written, name, partial(_followed, table, number))
    if number != head["number"]:
        raise CorruptDataError(
            f"field 'ranks' and its changes end at generation {number}, but the newest generation "
            f"is {head['number']}"
        )
    return _read(written, "generation", partial(_parse_generation, table))


def _followed(table: list[list[str]], number: int, value: Any) -> list[list[str]]:
    if value["since"] != number:
        raise ValueError(
            f"a change is based on generation {value['since']}, but the generation before it is "
            f"{number}"
        )
    return rank_table.follow(
        table, value["removed"], [(position, rank) for position, rank in value["added"]]
    )


def _parse_generation(table: list[list[str]], value: Any) -> Generation:
    joining = set(rank_table.of_runs(value["joining"], len(table)))
    blocks = Counter(host for _, host, _, _ in table)
    seen: Counter[str] = Counter()
    ranks = []
    for position, (member_id, host, donor_address, donor_key) in enumerate(table):
        ranks.append(
            Rank(
                member_id=member_id,
                host=host,
                local_rank=seen[host],
                local_world_size=blocks[host],
                donor_address=donor_address,
                joining=position in joining,
                donor_key=donor_key,
            )
        )
        seen[host] += 1
    change = value["change"]
    return Generation(
        number=value["number"],
        nonce=value["nonce"],
        cause=Cause(value["cause"]),
        ranks=tuple(ranks),
        interrupts_below=value["interrupts_below"],
        created_unix_ms=value["created_unix_ms"],
        change=None
        if change is None
        else RankChange(
            since=change["since"], removed=tuple(change["removed"]), added=tuple(change["added"])
        ),
        written=tuple(value["written"]),
    )


def _parse_older_generation(value: Any) -> Generation:
    ranks = tuple(Rank(**rank) for rank in value["ranks"])
    return Generation(**{**value, "cause": Cause(value["cause"]), "ranks": ranks, "written": None})


def _parse_layout(value: Any) -> ShardLayout:
    # older releases wrote none
    tables = {
        int(number): TableSpec.from_json(table) for number, table in value.get("tables", {}).items()
    }
    return ShardLayout(
        epoch=value["epoch"],
        tensors=tuple(
            TensorSpec(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                frozen=frozen,
                apart=apart,
                table=tables.get(number),
            )
            for number, (name, shape, dtype, frozen, apart) in enumerate(value["tensors"])
        ),
        partitions=tuple(
            Partition(
                primary=primary,
                pieces=tuple(
                    Piece(tensor_index=tensor, offset=offset, length=length)
                    for tensor, offset, length in pieces
                ),
                bucket=Bucket(tensor_index=bucket[0], number=bucket[1]) if bucket else None,
            )
            for primary, pieces, *bucket in value["partitions"]
        ),
    )


def _parse_moves(value: Any) -> Moves:
    move = value["under_way"]
    return Moves(
        settled=value["settled"],
        under_way=None
        if move is None
        else Move(**{**move, "partitions": tuple(move["partitions"])}),
        draining={int(index): reason for index, reason in value["draining"].items()},
        # older releases wrote none
        drained={
            server_id: Drained(**drained) for server_id, drained in value.get("drained", {}).items()
        },
    )


def _parse_server(server_id: str, value: Any) -> Server:
    # a job written by an older release has only primaries
    role = ServerRole(value.get("role", ServerRole.PRIMARY))
    return Server(server_id=server_id, **{**value, "role": role})


def _parse_loader(value: Any) -> Loader:
    return Loader(epochs={int(number): _parse_epoch(epoch) for number, epoch in value.items()})


def _parse_runs(runs: list[list[int]]) -> tuple[int, ...]:
    return tuple(batch for first, count in runs for batch in range(first, first + count))


def _parse_epoch(value: Any) -> Epoch:
    return Epoch(
        batches=value["batches"],
        first_key=value["first_key"],
        dealt=value["dealt"],
        returned=_parse_runs(value["returned"]),
        leased={member_id: _parse_runs(batches) for member_id, batches in value["leased"].items()},
        answers={
            member_id: Answer(sequence=sequence, batches=_parse_runs(batches))
            for member_id, (sequence, batches) in value["answers"].items()
        },
        batch_ms=value.get("batch_ms", {}),
    )
