"""Recovers a server from a snapshot and the journal after it: replays each acknowledged change
once, in the original order.

This module defines the records of all kinds of changes and how they are replayed. The record of a
change contains the version of the partition after the change; changes that the snapshot already
contains are skipped. A replay repeats the computations of the original change, so the values are
bitwise identical.

A push that was compensated for its delay (shard/compensation.py) needs the values of an earlier
version, which are not normally kept. If a job uses compensation, the journal is therefore searched
for such pushes before the replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal_common.errors import CorruptDataError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_common.tables.file import read_bucket
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import ConsistencyMode
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.payload import Upload, UploadHeader
from shoal_ps_server.shard.shard import Admitted, Restoration, Shard
from shoal_ps_server.storage.image import (
    Members,
    ServerImage,
    configuration_from_json,
    configuration_to_json,
    layout_from_json,
    layout_to_json,
    members_from_json,
    members_to_json,
    spec_from_json,
    spec_to_json,
)
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.segments import Segments
from shoal_ps_server.storage.snapshot import partition_from_bytes, partition_to_bytes

logger = logging.getLogger(__name__)

LAYOUT: Final = "layout"
MEMBERS: Final = "members"
CONFIGURATION: Final = "configuration"
VALUES: Final = "values"
PUSH: Final = "push"
CLOCK: Final = "clock"
"""Kind of record: a member has reported finished iterations without a push."""
BACKUP: Final = "backup"
"""Kind of record: from here on, each change had to wait for the named backup before it was applied.
Without a name, changes did not wait for a backup."""
KNOWN: Final = "known"
"""Kind of record: a push whose batch had been pushed before. It changes only the member's sequence
number."""
RESTORED: Final = "restored"
"""Kind of record: the rows of a bucket were restored from a checkpoint. Later versions count from
the restored version, so the record of each push contains the number of the last restoration before
it."""
COMING: Final = "coming"
"""Kind of record: a partition that another server is handing over to this server."""
TAKEN: Final = "taken"
"""Kind of record: all partitions of a move have arrived. They belong to this server once a shard
map assigns them to it."""
LEAVING: Final = "leaving"
"""Kind of record: another server has received partitions of this server, which no longer change
here. They are dropped when a shard map assigns them to the other server."""
SETTLED: Final = "settled"
"""Kind of record: the coordinator has decided all moves up to the given number. The last recorded
shard map contains the outcome."""


def layout_record(layout: Layout) -> Record:
    """Returns the record of this server's part of the shard map."""
    return Record(kind=LAYOUT, fields=layout_to_json(layout))


def members_record(members: Members) -> Record:
    """Returns the record of the members and their clocks."""
    return Record(kind=MEMBERS, fields=members_to_json(members))


def configuration_record(configuration: Configuration) -> Record:
    """Returns the record of the job's configuration, including changes by a schedule."""
    return Record(kind=CONFIGURATION, fields=configuration_to_json(configuration))


def clock_record(member_id: str, clock: int, *, place: int = 0) -> Record:
    """Returns the record of the iterations that a member has finished.

    `place`: clock that corresponds to the report; 0 if the member did not report any.
    """
    return Record(
        kind=CLOCK,
        fields={"member": member_id, "clock": clock} | ({"place": place} if place else {}),
    )


def backup_record(server_id: str) -> Record:
    """Returns a record that names a backup. Each change after this record must be confirmed by this
    backup before it is applied. `server_id`: id of the backup; empty if changes do not wait for a
    backup."""
    return Record(kind=BACKUP, fields={"server_id": server_id})


def coming_record(move: int, entry: Mapping[str, Any], payload: memoryview) -> Record:
    """Returns the record of a partition that another server is handing over. `entry`: description
    of the partition, from `coming_fields`. `payload`: the partition's tensors."""
    return Record(kind=COMING, fields={**entry, "move": move}, payload=payload)


def coming_fields(image: PartitionImage) -> tuple[dict[str, Any], bytes]:
    """Returns the description and the tensors of a partition that is handed over."""
    entry, data = partition_to_bytes(image)
    return entry | {"spec": spec_to_json(image.spec)}, data


def coming_image(
    entry: Mapping[str, Any], data: memoryview, optimizer: OptimizerSettings | None
) -> PartitionImage:
    """Restores a partition from the result of `coming_fields`. `data`: the partition's tensors.
    Raises the errors of `partition_from_bytes`."""
    return partition_from_bytes(entry, data, spec_from_json(entry["spec"]), optimizer)


def taken_record(
    move: int, partition_ids: Iterable[int], batches: Iterable[tuple[int, int]]
) -> Record:
    """Returns the record of a move whose partitions have all arrived. `batches`: finished batches,
    as recorded by the server that sent the partitions."""
    return Record(
        kind=TAKEN,
        fields={"move": move, "partitions": list(partition_ids), "batches": list(batches)},
    )


def leaving_record(move: int, partition_ids: Iterable[int]) -> Record:
    """Returns the record of partitions that another server has received."""
    return Record(kind=LEAVING, fields={"move": move, "partitions": list(partition_ids)})


def settled_record(move: int) -> Record:
    """Returns the record of the coordinator's decision about all moves up to `move`."""
    return Record(kind=SETTLED, fields={"move": move})


def moves_records(moves: Moves) -> Iterator[Record]:
    """Yields the records to send to a new follower for the partitions that other servers have
    handed over to this server, but that it does not serve yet. The payloads are copies."""
    for taken in (moves.taken, moves.coming):
        if taken is not None:
            for image in taken.images.values():
                entry, data = coming_fields(image)
                yield coming_record(taken.move, entry, memoryview(data))
            if taken is moves.taken:
                yield taken_record(taken.move, taken.images, ())


def partition_record(admitted: Admitted, upload: Upload) -> Record:
    """Returns the record of a change to a partition, with its payload as received."""
    header = admitted.header
    fields: dict[str, Any] = {"partition": header.spec.partition_id, "version": admitted.version}
    if admitted.first:
        return Record(kind=VALUES, fields=fields, payload=upload.payload)
    fields |= {
        "member": header.member_id,
        "sequence": header.sequence,
        "batch": header.batch,
        "clock": header.clock,
    }
    if header.finished_batches:
        fields["finished"] = list(header.finished_batches)
    if admitted.values is None:
        return Record(kind=KNOWN, fields=fields)
    fields |= {"base": header.base_version, "codec": header.codec}
    if admitted.partition.restoration:
        fields["restoration"] = admitted.partition.restoration
    if admitted.base:
        fields["compensated"] = True
    if header.absent:
        fields["absent"] = list(header.absent)
    return Record(kind=PUSH, fields=fields, payload=upload.payload)


def restoration_record(restoration: Restoration) -> Record:
    """Returns the record of rows that replace a bucket's rows."""
    fields = {
        "partition": restoration.spec.partition_id,
        "version": restoration.version,
        "restoration": restoration.number or 1,
    }
    return Record(kind=RESTORED, fields=fields, payload=restoration.payload)


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """State of a recovered server."""

    shard: Shard
    moves: Moves
    """Partitions that are moving to or from this server."""
    layout: Layout | None = None
    """The server's last shard map; None if it had none."""
    configuration: Configuration | None = None
    members: Members = field(default_factory=Members)
    backup: str = ""
    """Id of the backup that had to receive all acknowledged changes and may have taken over since;
    empty if there is none."""
    next_file: int = 0
    """Number of the next journal file."""
    last_end: int = 0
    """Number of valid bytes in the file before the next one."""


def recover(segments: Segments, image: ServerImage | None) -> Recovered:
    """Recovers a server from its journal and an optional snapshot. Raises OSError, and
    CorruptDataError like `Segments.records` and for records that contradict each other or the
    snapshot."""
    started = time.perf_counter()
    failpoint("recovery.begun")
    first = 0 if image is None else image.state.journal
    replay = Replay(image, lambda: segments.records(first))
    made = 0
    for made, record in enumerate(segments.records(first), 1):
        try:
            replay.make(record)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            ShoalError,
        ) as error:
            raise CorruptDataError(
                f"cannot replay record {made} of the journal ({record.kind}, "
                f"{dict(record.fields)}): {type(error).__name__}: {error}; remove the data "
                "directory to start without values",
                reason="JOURNAL_CORRUPT",
            ) from error
        failpoint("recovery.record_made")
    failpoint("recovery.done")
    if made:
        logger.info(
            "replayed the journal",
            extra={"records": made, "seconds": round(time.perf_counter() - started, 3)},
        )
    return replay.recovered(next_file=max([0, *segments.numbers()]) + 1, last_end=segments.last_end)


class Replay:
    """Replays records, in order, on the state of a server."""

    def __init__(
        self, image: ServerImage | None, records: Callable[[], Iterable[Record]] = tuple
    ) -> None:
        """`image`: state of the server before the records, whose tensors become the shard's own;
        None if the server was empty. `records`: returns the records that will be replayed, so that
        they can be searched in advance; by default, none are known."""
        self._records = records
        self._looked_ahead: frozenset[int] = frozenset()
        """Partitions of the layout that the journal has already been searched for."""
        state = None if image is None else image.state
        self._backup = "" if state is None else state.backup
        self.layout = None if state is None else state.layout
        self.configuration = None if state is None else state.configuration
        self._members = Members() if state is None else state.membership
        self._clocks = self._members.restored_clocks()
        optimizer = None if self.configuration is None else self.configuration.optimizer
        self.shard = Shard(
            optimizer=optimizer,
            restored=() if image is None else image.partitions,
            batches=() if state is None else state.batches,
        )
        self.moves = Moves(
            self.shard,
            settled=0 if state is None else state.settled,
            leaving=None if state is None else state.leaving,
            taken=None if image is None else image.taken,
            coming=None if image is None else image.coming,
        )
        if self.layout is not None:
            self.shard.adopt(self.layout)
        self._look_ahead()
        self._makers: Mapping[str, Callable[[Record], None]] = {
            LAYOUT: self._adopt,
            MEMBERS: self._learn,
            CONFIGURATION: self._configure,
            VALUES: self._change,
            PUSH: self._change,
            KNOWN: self._change,
            RESTORED: self._restore,
            CLOCK: self._tick,
            BACKUP: self._hold,
            COMING: self._bring,
            TAKEN: self._take,
            LEAVING: self._leave,
            SETTLED: self._settle,
        }

    @property
    def members(self) -> Members:
        """Membership and clocks after the records replayed so far."""
        return Members.of(self._members.fence(), self._clocks)

    def recovered(self, *, next_file: int, last_end: int) -> Recovered:
        """Returns the state of the server after the records replayed so far."""
        return Recovered(
            shard=self.shard,
            moves=self.moves,
            layout=self.layout,
            configuration=self.configuration,
            members=self.members,
            backup=self._backup,
            next_file=next_file,
            last_end=last_end,
        )

    def make(self, record: Record) -> None:
        """Replays one change. Raises an error of any type if the record cannot be replayed."""
        self._makers[record.kind](record)

    def _hold(self, record: Record) -> None:
        self._backup = str(record.fields["server_id"])

    def _adopt(self, record: Record) -> None:
        before, self.layout = self.layout, layout_from_json(record.fields)
        self.moves.adopt(self.layout, before=before, members=self._known_members())
        self._look_ahead()

    def _bring(self, record: Record) -> None:
        optimizer = None if self.configuration is None else self.configuration.optimizer
        self.moves.bring(
            int(record.fields["move"]), coming_image(record.fields, record.payload, optimizer)
        )

    def _take(self, record: Record) -> None:
        fields = record.fields
        batches = [(int(first), int(end)) for first, end in fields["batches"]]
        self.moves.take(int(fields["move"]), map(int, fields["partitions"]), batches)

    def _leave(self, record: Record) -> None:
        self.moves.leave(int(record.fields["move"]), map(int, record.fields["partitions"]))

    def _settle(self, record: Record) -> None:
        self.moves.settle(int(record.fields["move"]))

    def _look_ahead(self) -> None:
        """Searches the journal for compensated pushes, and registers the values that they need.
        Called once compensation is configured, and again when partitions are added later."""
        compensates = (
            self.configuration is not None and self.configuration.optimizer.delay_compensation
        )
        if not compensates or self.layout is None:
            return
        fresh = self.layout.partitions.keys() - self._looked_ahead
        self._looked_ahead = frozenset(self.layout.partitions)
        for record in self._records() if fresh else ():
            fields = record.fields
            if (
                record.kind != PUSH
                or not fields.get("compensated")
                or fields["partition"] not in fresh
            ):
                continue
            if int(fields["version"]) > self.shard.version(fields["partition"]):
                self.shard.will_redo(fields["partition"], int(fields["base"]))

    def _learn(self, record: Record) -> None:
        self._members = members_from_json(record.fields)
        self._clocks = self._members.restored_clocks()
        self.shard.forget_all_but(self._known_members())
        self.shard.keep_bases_of(self._members.members)

    def _known_members(self) -> frozenset[str]:
        return self._members.members | self._members.evicted.keys()

    def _tick(self, record: Record) -> None:
        fields = record.fields
        self._finished(
            str(fields["member"]), int(fields["clock"]), place=int(fields.get("place", 0))
        )

    def _finished(self, member_id: str, clock: int, *, place: int = 0) -> None:
        if member_id in self._clocks.members:
            self._clocks.report(member_id, clock, place=place)

    def _let_in(self, push: UploadHeader) -> None:
        """Records that the member has finished the iteration before the one that a push belongs to.
        Further pushes of the push's own iteration may follow."""
        self._finished(push.member_id, max(0, push.clock - 1))
        if (
            self.configuration is not None
            and self.configuration.consistency.mode is ConsistencyMode.BSP
        ):
            origin = (
                self._clocks.members[push.member_id].origin
                if push.member_id in self._clocks.members
                else None
            )
            if origin is not None:
                self._clocks.open(origin + push.clock)
                self._clocks.has_pushed(push.member_id)

    def _configure(self, record: Record) -> None:
        self.configuration = configuration_from_json(record.fields)
        self.shard.configure(self.configuration.optimizer)
        self._look_ahead()

    def _change(self, record: Record) -> None:
        fields = record.fields
        assert self.layout is not None, "it stands before all partitions"
        spec = self.layout.partitions[fields["partition"]]
        header = UploadHeader(
            spec=spec,
            member_id=str(fields.get("member", "")),
            generation=0,
            sequence=int(fields.get("sequence", 0)),
            base_version=int(fields.get("base", 0)),
            clock=int(fields.get("clock", 0)),
            codec=int(fields.get("codec", pb.CODEC_RAW)),
            payload_bytes=record.payload.nbytes,
            checksum=0,
            batch=int(fields.get("batch", 0)),
            absent=tuple(map(int, fields.get("absent", ()))),
            finished_batches=tuple(map(int, fields.get("finished", ()))),
        )
        have, version = self.shard.version(spec.partition_id), int(fields["version"])
        if record.kind != VALUES:
            self.shard.pushed_before(header)
            self._let_in(header)
        if record.kind == KNOWN:
            if have == 0:
                raise ValueError("the partition has no values")
            self.shard.settle(header)
            return
        restoration, newest = (
            int(fields.get("restoration", 0)),
            self.shard.restoration(spec.partition_id),
        )
        if restoration < newest or (restoration == newest and version <= have):
            return  # the snapshot contains the change, or contains rows that were restored after it
        if restoration > newest:
            raise ValueError(
                f"it was made after restoration {restoration}, but the partition is at restoration "
                f"{newest}"
            )
        if version != have + 1:
            raise ValueError(
                f"it leads to version {version}, but the partition is at version {have}"
            )
        upload = Upload(header)
        upload.add(record.payload)
        if upload.missing:
            raise ValueError(f"it has {record.payload.nbytes} bytes for {header.length} elements")
        if record.kind == VALUES:
            self.shard.initialize(upload)
        else:
            self.shard.redo(upload, compensated=bool(fields.get("compensated")))

    def _restore(self, record: Record) -> None:
        assert self.layout is not None, "it stands before all partitions"
        spec, number = (
            self.layout.partitions[record.fields["partition"]],
            int(record.fields["restoration"]),
        )
        if number <= self.shard.restoration(spec.partition_id):
            return  # the snapshot contains it
        rows = self.shard.prepared(spec, read_bucket(record.payload).rows)
        version = int(record.fields["version"])
        self.shard.restore(
            Restoration(
                spec=spec, number=number, version=version, rows=rows, payload=record.payload
            )
        )
