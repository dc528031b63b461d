"""A recorded history, read back from the files that `recording` wrote: its lines, and which of them
count.

With backups of servers, there is still only one history, and finding it needs no search. A primary
makes a change only once its backup in sync has it, and every caller learns of changes from a
primary. Therefore, everything that a primary did when it was asked to, and everything that it had
when it answered a caller, is permanent, no matter which server becomes the next primary. A backup
applies what is in its primary's journal. The same changes are made by the primary itself, by its
next process, or by the backup that replaces it.

Only the end of a journal may be void. A primary that is killed can have changes on its disk that no
backup has, and makes them again when it is restarted. It then serves no caller until it has
received its role. If it becomes a backup, the changes after the last one that it answered for are
void, and the changes that its successor makes in their place are the history. Void lines are
recognized as follows: a server made the change in a recovery before it served, its next role was
that of a backup, and the change is beyond all changes that it had made before.

A primary that has been replaced without noticing it must not acknowledge anything new either, but
it may answer with older versions. An older version than one that was reported before is therefore
no violation if another server had, by then, been assigned that place in a later epoch than the
sender's.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from shoal_common.formats.wire import checksum
from shoal_common.tables.rows import RowsImage


@dataclass(frozen=True)
class Line:
    """One line of a history."""

    fields: Mapping[str, Any]
    place: str = "made by hand"
    """File and line number."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __str__(self) -> str:
        short = {
            name: f"{value[:16]}..." if isinstance(value, str) and len(value) > 64 else value
            for name, value in self.fields.items()
        }
        return f"{self.place}: {json.dumps(short)}"


@dataclass(frozen=True)
class Violation:
    """A broken promise, and the lines that show it."""

    what: str
    lines: Sequence[Line] = ()

    def __str__(self) -> str:
        return "\n    ".join([self.what, *map(str, self.lines[:12])])


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A version of a partition that a worker received, from a pull or in the answer to a push."""

    partition: int
    version: int
    begun: int
    ended: int
    line: Line
    digest: str = ""
    """Digest of the values that came with it; empty if none came."""
    ids: str = ""
    """Ids of the rows whose values are in the line, in hex; empty: the values are those of the
    entire partition."""
    server: str = ""
    """Server that answered; empty if unknown."""


@dataclass
class History:
    """All lines, by server and by worker. If several processes ran in turn under one id (a
    restarted server), their lines follow each other, oldest process first. The lines of a process
    are in the order in which it wrote them."""

    servers: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    workers: Mapping[str, Sequence[Line]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> History:
        """Reads a history. The last line of a file may be incomplete."""
        files = []
        for path in directory.glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            files.append(
                [
                    Line(json.loads(text), f"{path.name}:{number}")
                    for number, text in enumerate(whole.split(b"\n"), 1)
                    if text
                ]
            )
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
        """Servers' lines of applied and restored changes in the order of writing, without void
        ones."""
        return sorted(
            itertools.chain(*map(_valid_lines, self.servers.values())), key=lambda line: line["t"]
        )

    @cached_property
    def changes(self) -> Mapping[int, Mapping[int, Line]]:
        """Partition -> version -> the first line of the change that produced it."""
        found: dict[int, dict[int, Line]] = defaultdict(dict)
        for line in self.valid:
            if line["kind"] == "applied":
                found[line["partition"]].setdefault(line["version"], line)
        return {
            partition: dict(sorted(versions.items()))
            for partition, versions in sorted(found.items())
        }

    @cached_property
    def buckets(self) -> Mapping[int, int]:
        """Partition -> number of its bucket, for partitions that are buckets of the
        sparse table."""
        begun = {
            partition: versions[1] for partition, versions in self.changes.items() if 1 in versions
        }
        return {
            partition: line["bucket"]
            for partition, line in begun.items()
            if "bucket" in line.fields
        }

    @cached_property
    def given(self) -> Mapping[tuple[int, str], Line]:
        """Partition and digest -> the line in which a worker sent these initial values or
        checkpoint rows."""
        return {
            (line["partition"], digest(bytes.fromhex(line["values"]))): line
            for line in self.of_workers("values")
        }

    @cached_property
    def placed(self) -> Mapping[str, Sequence[Line]]:
        """Server -> the places that it was assigned."""
        return {
            server: [line for line in lines if line["kind"] == "placed"]
            for server, lines in self.servers.items()
        }

    def primaries(self) -> Sequence[str]:
        """Returns the primary of each place at the end."""
        newest: dict[int, Line] = {}
        for line in sorted(itertools.chain(*self.placed.values()), key=lambda line: line["epoch"]):
            if not line["follows"]:
                newest[line["index"]] = line
        return [newest[index]["of"] for index in sorted(newest)]

    @property
    def promotions(self) -> int:
        """Number of times that another server became a place's primary."""
        holders: dict[int, dict[int, str]] = defaultdict(dict)
        for line in itertools.chain(*self.placed.values()):
            if not line["follows"]:
                holders[line["index"]][line["epoch"]] = line["of"]
        return sum(
            before != after
            for each in holders.values()
            for before, after in pairwise(each[epoch] for epoch in sorted(each))
        )

    def may_be_old(self, seen: Seen) -> bool:
        """Returns whether the server that sent this may have been replaced without noticing it."""
        heard = [line for line in self.placed.get(seen.server, ()) if line["t"] < seen.begun]
        if not heard or heard[-1]["follows"]:
            return False
        others = (
            line for server, lines in self.placed.items() if server != seen.server for line in lines
        )
        knew = heard[-1]
        return any(
            line["index"] == knew["index"]
            and not line["follows"]
            and line["epoch"] > knew["epoch"]
            and line["t"] < seen.ended
            for line in others
        )

    @cached_property
    def _pushes(self) -> Mapping[tuple[int, str, int, int, str], Line]:
        return {
            _push_key(line, digest(bytes.fromhex(line["gradient"]))): line
            for line in self.of_workers("push")
        }

    def push_of(self, change: Line) -> Line | None:
        """Returns the line of the push that was applied: of the same member, number, batch and
        gradient."""
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
                                ids=answer.get("ids", ""),
                                server=server_at.get(begun[line["call"]]["at"], ""),
                            )
                        )
        return found


def _valid_lines(lines: Sequence[Line]) -> Iterator[Line]:
    """Yields the lines of changes applied or restored on one server, without the void end of a
    journal (see the module's docstring)."""
    spans: list[tuple[int, int]] = []
    """The process number and span number of each line."""
    recovered: set[tuple[int, int]] = set()
    served: dict[tuple[int, int], int] = {}
    """Span -> number of the last line that shows that it served."""
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
        elif (
            is_backup_next and spans[number] in recovered and number > served.get(spans[number], -1)
        ):
            may_be_void.add(number)
    newest: dict[int, int] = {}
    for number, line in enumerate(lines):
        if line["kind"] not in ("applied", "restored"):
            continue
        partition, version = line["partition"], line["version"]
        if number not in may_be_void or version <= newest.get(partition, 0):
            newest[partition] = max(newest.get(partition, 0), version)
            yield line


def _push_key(line: Line, gradient: str) -> tuple[int, str, int, int, str]:
    return line["partition"], line["member"], line["sequence"], line["batch"], gradient


def digest(data: bytes | memoryview | torch.Tensor) -> str:
    return f"{checksum(data.numpy() if isinstance(data, torch.Tensor) else data):016x}"


def rows_digest(rows: RowsImage) -> str:
    """Returns a digest of the rows of a bucket, with their optimizer state and the version of their
    last push."""
    arrays = [
        rows.ids,
        rows.values,
        *(rows.state[name] for name in sorted(rows.state)),
        rows.updated_at,
    ]
    return digest(b"".join(array.tobytes() for array in arrays))
