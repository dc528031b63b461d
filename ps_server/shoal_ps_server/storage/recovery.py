"""From a snapshot and the journal after it to the server as it was: every change that was acknowledged, once, in the order it was made.

What is written of each kind of change, and how it is made again. A partition's changes carry the version that they led to: what the
snapshot of that partition has already is passed over. The arithmetic is the same as the first time, so the values are the same to the bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal_common.errors import CorruptDataError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.payload import Upload, UploadHeader
from shoal_ps_server.shard.shard import Admitted, Shard
from shoal_ps_server.storage.image import (
    Members,
    ServerImage,
    configuration_from_json,
    configuration_to_json,
    layout_from_json,
    layout_to_json,
    members_from_json,
    members_to_json,
)
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.segments import Segments

logger = logging.getLogger(__name__)

LAYOUT: Final = "layout"
MEMBERS: Final = "members"
CONFIGURATION: Final = "configuration"
VALUES: Final = "values"
PUSH: Final = "push"
CLOCK: Final = "clock"
"""A member told of finished iterations without a push."""
KNOWN: Final = "known"
"""A push that was known by its batch: its number is used up, and nothing else changes."""


def layout_record(layout: Layout) -> Record:
    """Makes the record of the shard map as this server knows it."""
    return Record(kind=LAYOUT, fields=layout_to_json(layout))


def members_record(members: Members) -> Record:
    """Makes the record of the fence, and of where the clocks stand."""
    return Record(kind=MEMBERS, fields=members_to_json(members))


def configuration_record(configuration: Configuration) -> Record:
    """Makes the record of the optimizer, with what a schedule has made of it."""
    return Record(kind=CONFIGURATION, fields=configuration_to_json(configuration))


def clock_record(member_id: str, clock: int) -> Record:
    """Makes the record of a member's word that it has finished so many iterations."""
    return Record(kind=CLOCK, fields={"member": member_id, "clock": clock})


def partition_record(admitted: Admitted, upload: Upload) -> Record:
    """Makes the record of a change of a partition, with its payload as it came."""
    header = admitted.header
    fields: dict[str, Any] = {"partition": header.spec.partition_id, "version": admitted.version}
    if admitted.first:
        return Record(kind=VALUES, fields=fields, payload=upload.payload)
    fields |= {"member": header.member_id, "sequence": header.sequence, "batch": header.batch, "clock": header.clock}
    if header.finished_batches:
        fields["finished"] = list(header.finished_batches)
    if admitted.values is None:
        return Record(kind=KNOWN, fields=fields)
    fields |= {"base": header.base_version, "codec": header.codec}
    if header.absent:
        fields["absent"] = list(header.absent)
    return Record(kind=PUSH, fields=fields, payload=upload.payload)


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """A server as it was."""

    shard: Shard
    layout: Layout | None = None
    """None: it knew no shard map yet."""
    configuration: Configuration | None = None
    members: Members = field(default_factory=Members)
    next_file: int = 0
    """Number of the journal's file to begin."""
    last_end: int = 0
    """How many bytes of the file before it count."""


def recover(segments: Segments, image: ServerImage | None) -> Recovered:
    """Raises CorruptDataError as `Segments.records`, and for records that contradict each other or the snapshot; OSError."""
    started = time.perf_counter()
    recovery = _Recovery(image)
    failpoint("recovery.begun")
    first = 0 if image is None else image.state.journal
    made = 0
    for made, record in enumerate(segments.records(first), 1):
        try:
            recovery.make(record)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, ShoalError) as error:
            raise CorruptDataError(
                f"record {made} of the journal ({record.kind}, {dict(record.fields)}) cannot be made again: {type(error).__name__}: "
                f"{error}; remove the data directory to start without values",
                reason="JOURNAL_CORRUPT",
            ) from error
        failpoint("recovery.record_made")
    failpoint("recovery.done")
    if made:
        logger.info("the journal was made again", extra={"records": made, "seconds": round(time.perf_counter() - started, 3)})
    return Recovered(
        shard=recovery.shard,
        layout=recovery.layout,
        configuration=recovery.configuration,
        members=recovery.members,
        next_file=max([0, *segments.numbers()]) + 1,
        last_end=segments.last_end,
    )


class _Recovery:
    def __init__(self, image: ServerImage | None) -> None:
        state = None if image is None else image.state
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
        if self.layout is not None:
            self.shard.adopt(self.layout)
        self._makers: Mapping[str, Callable[[Record], None]] = {
            LAYOUT: self._adopt,
            MEMBERS: self._learn,
            CONFIGURATION: self._configure,
            VALUES: self._change,
            PUSH: self._change,
            KNOWN: self._change,
            CLOCK: self._tick,
        }

    @property
    def members(self) -> Members:
        """Who may act, and the members' clocks after all records that were made."""
        return Members.of(self._members.fence(), self._clocks)

    def make(self, record: Record) -> None:
        """One change, again. Raises many things for a record that cannot be."""
        self._makers[record.kind](record)

    def _adopt(self, record: Record) -> None:
        self.layout = layout_from_json(record.fields)
        self.shard.adopt(self.layout)

    def _learn(self, record: Record) -> None:
        self._members = members_from_json(record.fields)
        self._clocks = self._members.restored_clocks()
        self.shard.forget_all_but(self._members.members | self._members.put_out.keys())

    def _tick(self, record: Record) -> None:
        self._finished(str(record.fields["member"]), int(record.fields["clock"]))

    def _finished(self, member_id: str, clock: int) -> None:
        if member_id in self._clocks.members:
            self._clocks.report(member_id, clock)

    def _configure(self, record: Record) -> None:
        self.configuration = configuration_from_json(record.fields)
        self.shard.configure(self.configuration.optimizer)

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
            # The iteration before it was finished for certain; this one may have come in part.
            self._finished(header.member_id, max(0, header.clock - 1))
        if record.kind == KNOWN:
            if have == 0:
                raise ValueError("the partition has no values")
            self.shard.settle(header)
            return
        if version <= have:
            return  # the snapshot has it
        if version != have + 1:
            raise ValueError(f"it leads to version {version}, the partition is at {have}")
        upload = Upload(header)
        upload.add(record.payload)
        if upload.missing:
            raise ValueError(f"{record.payload.nbytes} bytes for {header.length} elements")
        if record.kind == VALUES:
            self.shard.initialize(upload)
        else:
            self.shard.redo(upload)
