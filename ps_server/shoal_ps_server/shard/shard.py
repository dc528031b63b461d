"""Shard of a server: all its partitions, and the only functions that change a partition.

A change is made in two steps. `admit_push` makes all checks in advance, and determines the change's
position in the order of changes. Once the change is in the journal, `apply` makes it; if it cannot
be written to the journal, `refuse` withdraws it. Admitted changes are applied in the order of their
admission. If one is refused, all later ones are refused too.

The shard belongs to the event loop's thread: no method locks, waits, or may be called from another
thread (docs/explanation/parameter-servers.md#partitions has the measurement). While torch
applies a partition, it releases the GIL, and gRPC's own threads read the next chunks from the
network.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from shoal_common.errors import PreconditionError, UnavailableError
from shoal_common.formats import codecs
from shoal_common.tables.rows import Rows, RowsImage
from shoal_common.tables.values import Ids

from shoal_ps_server.shard.finished_batches import Batches
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.partition import Partition, PartitionImage
from shoal_ps_server.shard.payload import Upload, UploadHeader, describe
from shoal_ps_server.shard.reading import Copies, Reading
from shoal_ps_server.shard.table_rows import TableRows, new_partition, restored_partition

MOVING_RETRY: Final = timedelta(milliseconds=50)
"""Suggested delay before a client requests a partition again if it is being moved; a move takes a
fraction of a second."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one upload to a partition: a gradient, initial values or restored rows."""

    partition_id: int
    version: int
    """Version of the partition after the upload."""
    staleness: int = 0
    """Number of versions between the values that the gradient was computed on and the values that
    it was applied to."""
    duplicate: bool = False
    """True if the upload had been received before and therefore had no effect."""
    known_batch: bool = False
    """True if the batch of this push had been pushed before, by a different push; `duplicate` is
    then True too."""
    apply_seconds: float = 0.0
    """Seconds spent on the update and the final checks."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A change to a partition that has been validated and will be applied."""

    partition: Partition
    header: UploadHeader
    version: int
    """Version that the partition will have after the change."""
    values: torch.Tensor | None
    """Gradient or first values. None for a push whose batch has already been delivered by a
    different push: only its sequence number is used up."""
    first: bool = False
    """True if `values` are the partition's first values."""
    base: int = 0
    """Version whose values will compensate the gradient; 0: no compensation."""
    check_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Rows that will replace a bucket's rows, as requested by RestoreRows."""

    spec: PartitionSpec
    number: int
    """Number of the request (RowsHeader.restoration), by which a retry is recognized."""
    version: int
    rows: Rows
    """Validated rows (`Shard.prepared`), which will become the bucket's own."""
    payload: memoryview
    """Contents of the file that the rows were read from."""


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """Totals and versions for GetServer and the metrics."""

    versions: Mapping[int, int]
    """Partition id -> version, ascending; 0 if it has no values yet."""
    sequences: Mapping[int, int]
    """Partition id -> sequence number of the requested member's last push that was applied or is
    pending; only numbers above 0."""
    restorations: Mapping[int, int]
    """Partition id -> number of the last restoration; only numbers above 0."""
    stored_bytes: int
    stored_rows: int
    """Number of sparse-table rows."""
    pushes_applied: int
    pushes_deduplicated: int


class Shard:
    """All partitions of one server."""

    def __init__(
        self,
        *,
        optimizer: OptimizerSettings | None = None,
        restored: Iterable[PartitionImage] = (),
        batches: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Creates a shard, empty or from a snapshot.

        Args:
            optimizer: settings of the job's optimizer; None if they are not configured yet.
            restored: partitions from a snapshot.
            batches: ranges of keys of finished batches, as in `Batches`.
        """
        self.batches = Batches(batches)
        """Batches that are finished according to all applied changes, as stored in snapshots."""
        self._admitted_batches = Batches(self.batches.runs())
        """Batches that will be finished once all admitted changes are applied; used to check new
        pushes."""
        self._optimizer = optimizer
        self._partitions = {
            image.spec.partition_id: restored_partition(image, optimizer) for image in restored
        }
        self._frozen: frozenset[int] = frozenset()
        self._copies = Copies()
        self._pushes_applied = 0
        self._pushes_deduplicated = 0

    def adopt(self, layout: Layout) -> None:
        """Creates the partitions of a layout that do not exist yet. Existing partitions stay
        unchanged."""
        for partition_id, spec in layout.partitions.items():
            self._partitions.setdefault(partition_id, new_partition(spec))

    @property
    def frozen(self) -> frozenset[int]:
        """Ids of partitions that are being moved to another server and therefore can be neither
        pulled nor pushed."""
        return self._frozen

    def freeze(self, partition_ids: Iterable[int]) -> None:
        """Blocks pulls and pushes of these partitions. Changes that have already been admitted are
        still applied; after that, the partitions do not change."""
        self._frozen |= frozenset(partition_ids)

    def thaw(self, partition_ids: Iterable[int]) -> None:
        """Unfreezes these partitions, so that they can be pulled and pushed again."""
        self._frozen -= frozenset(partition_ids)

    def drop(self, partition_ids: Collection[int]) -> None:
        """Removes partitions that now belong to another server. Open readings can still finish."""
        for partition_id in partition_ids:
            del self._partitions[partition_id]
        self.thaw(partition_ids)

    def put(self, image: PartitionImage) -> None:
        """Adds a partition received from another server. The image's tensors become the partition's
        own."""
        assert image.spec.partition_id not in self._partitions, "one server has it"
        self._partitions[image.spec.partition_id] = restored_partition(image, self._optimizer)

    def check_open(self, spec: PartitionSpec) -> None:
        """Raises UnavailableError / PARTITION_MOVING for a frozen partition. Raises
        PreconditionError / STALE_SHARD_MAP for a partition that has moved to a different server
        since the request was checked."""
        if spec.partition_id in self._frozen:
            raise UnavailableError(
                f"{describe(spec)} is moving to another server; fetch the shard map again from "
                "the coordinator, and try again",
                reason="PARTITION_MOVING",
                retry_after=MOVING_RETRY,
            )
        if spec.partition_id not in self._partitions:
            raise PreconditionError(
                f"{describe(spec)} has moved to another server; fetch the shard map again from "
                "the coordinator",
                reason="STALE_SHARD_MAP",
            )

    def _open(self, spec: PartitionSpec) -> Partition:
        self.check_open(spec)
        return self._partitions[spec.partition_id]

    def add_batches(self, runs: Iterable[tuple[int, int]]) -> None:
        """Marks batches as finished because another server has recorded them as finished. `runs`:
        ranges of their keys."""
        runs = tuple(runs)
        for batches in (self.batches, self._admitted_batches):
            batches.add_runs(runs)

    def configure(self, optimizer: OptimizerSettings) -> None:
        """Sets the optimizer, or changes the hyperparameters of the current one."""
        self._optimizer = optimizer
        for partition in self._partitions.values():
            if partition.optimizer is not None:
                partition.optimizer.retune(optimizer)

    def admit_values(self, upload: Upload) -> Admitted | None:
        """Admits the first values of a partition. Returns None if the partition already has values
        or they are pending. Raises the errors of `check_open` and `Upload.values`."""
        started = time.perf_counter()
        header = upload.header
        partition = self._open(header.spec)
        if partition.version or partition.on_their_way:
            return None
        values = upload.values()
        partition.on_their_way += 1
        return Admitted(
            partition=partition,
            header=header,
            version=1,
            values=values,
            first=True,
            check_seconds=time.perf_counter() - started,
        )

    def is_settled(self, header: UploadHeader) -> bool:
        """Returns whether the sequence number of a push has been used, or will have been used once
        all pending pushes are applied. Raises the errors of `check_open`."""
        return not self._open(header.spec).is_next(header)

    def needs_trial(self, upload: Upload) -> bool:
        """Returns whether an update must first be tried on copies, once all earlier changes have
        been applied. This is necessary if its result may be infinite. It is also necessary while a
        restoration is pending, because a restoration changes the partition's version. Raises the
        errors of `admit_push`."""
        partition = self._open(upload.header.spec)
        if partition.is_restoring:
            return True
        if self._optimizer is None or self._is_known(partition, upload.header):
            return False
        return partition.needs_trial(upload.largest, self._optimizer)

    def admit_push(self, upload: Upload) -> Admitted | None:
        """Admits a gradient, which will then be applied once. Returns None if the push's sequence
        number shows that it has already been admitted. If `needs_trial` returns True for the push,
        no change to the partition may be pending.

        If an error is raised, this push is not admitted. In addition to the following errors,
        raises the errors of `check_open`, `Partition.is_duplicate` and `Upload.values`.

        Raises:
            PreconditionError: OPTIMIZER_UNCONFIGURED.
            LimitError: MEMORY_EXHAUSTED.
            InvalidRequestError: RESULT_NOT_FINITE.
        """
        started = time.perf_counter()
        header = upload.header
        partition = self._open(header.spec)
        if self._optimizer is None:
            raise PreconditionError(
                "this server has no optimizer; send ConfigureOptimizer before Push",
                reason="OPTIMIZER_UNCONFIGURED",
            )
        duplicate = self._is_known(partition, header)
        if duplicate and not partition.is_next(header):
            return None
        gradient, base = None, 0
        if not duplicate:
            gradient = upload.values()
            partition.reserve(gradient, header.absent, self._optimizer)
            if (
                self._optimizer.delay_compensation
                and partition.bases.pulled.get(header.member_id) == header.base_version
            ):
                base = header.base_version
            if self.needs_trial(upload):
                partition.check_trial(gradient, header.absent, self._optimizer, base)
            if base:
                partition.bases.expect(base)
        self._admitted_batches.add(header.finished_batches)
        version = partition.admit(header, self._admitted_batches, applies=not duplicate)
        seconds = time.perf_counter() - started
        return Admitted(
            partition=partition,
            header=header,
            version=version,
            values=gradient,
            base=base,
            check_seconds=seconds,
        )

    def apply(self, admitted: Admitted) -> Outcome:
        """Applies an admitted change, which must be its partition's earliest pending change."""
        started = time.perf_counter()
        partition, header, values = admitted.partition, admitted.header, admitted.values
        staleness = 0
        if admitted.first:
            assert values is not None
            partition.initialize(values)
            partition.on_their_way -= 1
        elif values is None:
            self.batches.add(header.finished_batches)
            partition.arrived(header, self.batches, applies=False)
            self._pushes_deduplicated += 1
        else:
            assert self._optimizer is not None, "nothing is admitted without"
            staleness = partition.version - header.base_version
            partition.apply(values, header.absent, self._optimizer, self._copies, admitted.base)
            self.batches.add(header.finished_batches)
            partition.arrived(header, self.batches, applies=True)
            self._pushes_applied += 1
        return Outcome(
            partition_id=header.spec.partition_id,
            version=partition.version,
            staleness=staleness,
            duplicate=values is None,
            known_batch=values is None,
            apply_seconds=admitted.check_seconds + time.perf_counter() - started,
        )

    def prepared(self, spec: PartitionSpec, image: RowsImage) -> Rows:
        """Converts the image of a bucket to the rows of a `Restoration`. May be called from any
        thread. Raises the errors of `TableRows.prepared`."""
        return TableRows.empty(spec).prepared(image)

    def admit_restoration(self, restoration: Restoration) -> bool:
        """Admits a restoration and returns True; the caller must then call `restore`. Returns False
        if the restoration has already been carried out. No change to the bucket may be pending.
        Raises the errors of `check_open`."""
        partition = self._bucket(restoration.spec)
        partition.is_restoring = partition.takes(restoration.number)
        return partition.is_restoring

    def restore(self, restoration: Restoration) -> Outcome:
        """Carries out a restoration that has been admitted by this process or an earlier one."""
        partition = self._partitions[restoration.spec.partition_id]
        assert isinstance(partition, TableRows), "it was looked at when it was admitted"
        partition.is_restoring = False
        partition.put_in_place(restoration.rows, restoration.version, restoration.number or 1)
        return Outcome(partition_id=restoration.spec.partition_id, version=partition.version)

    def refuse_restoration(self, restoration: Restoration) -> None:
        """Withdraws an admitted restoration."""
        self._partitions[restoration.spec.partition_id].is_restoring = False

    def restoration(self, partition_id: int) -> int:
        """Returns the number of a partition's last restoration; 0 if there was none."""
        return self._partitions[partition_id].restoration

    def bucket_image(self, spec: PartitionSpec) -> PartitionImage:
        """Returns a copy of a bucket of a sparse table. Raises the errors of `check_open`."""
        return self._bucket(spec).as_it_is()

    def bucket_bytes(self, spec: PartitionSpec) -> int:
        """Returns the maximum size of a copy of a bucket in bytes. Raises the errors of
        `check_open`."""
        return self._bucket(spec).stored_bytes

    def _bucket(self, spec: PartitionSpec) -> TableRows:
        partition = self._open(spec)
        assert isinstance(partition, TableRows), "the request was checked against the layout"
        return partition

    def refuse(self, admitted: Admitted) -> None:
        """Withdraws an admitted change. All changes to the partition that were admitted later must
        be withdrawn too."""
        if admitted.first:
            admitted.partition.on_their_way -= 1
        else:
            admitted.partition.arrived(
                admitted.header, self.batches, applies=admitted.values is not None, refused=True
            )
            if admitted.base:
                admitted.partition.bases.settle(admitted.base)

    def _is_known(self, partition: Partition, header: UploadHeader) -> bool:
        """Returns whether the sequence number or the batch of a push shows that it must not be
        applied again. Raises the errors of `Partition.is_duplicate`."""
        return partition.is_duplicate(header) or header.batch in self._admitted_batches

    def settle(self, header: UploadHeader) -> None:
        """Marks the sequence number of a push as used. Called for a push that need not be applied,
        because a different push of the same batch has already been applied."""
        self._partitions[header.spec.partition_id].settled.settle(header, self.batches)

    def redo(self, upload: Upload, *, compensated: bool = False) -> int:
        """Reapplies a push that an earlier process admitted and applied, and returns the resulting
        version. Raises the errors of `Upload.values`.

        `compensated`: True if the push was compensated and has been registered with `will_redo`.
        """
        assert self._optimizer is not None, "it was admitted with one"
        partition = self._partitions[upload.header.spec.partition_id]
        base = upload.header.base_version if compensated else 0
        partition.apply(upload.values(), upload.header.absent, self._optimizer, self._copies, base)
        partition.settled.settle(upload.header, self.batches)
        return partition.version

    def will_redo(self, partition_id: int, base_version: int) -> None:
        """Registers a push that was compensated with the values of `base_version` and will be
        applied again with `redo`."""
        self._partitions[partition_id].bases.expect(base_version)

    def note_pull(self, partition_id: int, member_id: str) -> None:
        """Records that a member has pulled the current values of a partition. With delay
        compensation, the values are kept for the member's next push."""
        if self._optimizer is not None and self._optimizer.delay_compensation:
            partition = self._partitions[partition_id]
            partition.bases.note_pull(member_id, partition.version)

    def keep_bases_of(self, members: Container[str]) -> None:
        """Drops the earlier values that are kept for delay compensation, except those for members
        in `members`."""
        for partition in self._partitions.values():
            partition.bases.forget_all_but(members)

    def pushed_before(self, header: UploadHeader) -> None:
        """Records the finished batches that a member reported with a push. The push itself was
        applied by an earlier process."""
        for batches in (self.batches, self._admitted_batches):
            batches.add(header.finished_batches)

    def known(self, header: UploadHeader) -> Outcome:
        """Returns the outcome of an upload that has no effect because it has already been received.
        Raises the errors of `check_open`."""
        partition = self._open(header.spec)
        if header.sequence:
            self._pushes_deduplicated += 1
        elsewhere = header.batch in self.batches or partition.has_of_another(header)
        return Outcome(
            partition_id=header.spec.partition_id,
            version=partition.version,
            duplicate=True,
            known_batch=elsewhere,
        )

    def initialize(self, upload: Upload) -> Outcome:
        """Admits and applies a partition's initial values. The outcome is a duplicate if the
        partition already has values. Raises the errors of `admit_values`."""
        admitted = self.admit_values(upload)
        return self.known(upload.header) if admitted is None else self.apply(admitted)

    def push(self, upload: Upload) -> Outcome:
        """Admits and applies one gradient. Raises the errors of `admit_push`; after an error, the
        shard is unchanged."""
        admitted = self.admit_push(upload)
        return self.known(upload.header) if admitted is None else self.apply(admitted)

    def version(self, partition_id: int) -> int:
        """Returns a partition's version; 0 if it has no values yet."""
        return self._partitions[partition_id].version

    @contextmanager
    def reading(self, partition_id: int, codec: int = codecs.RAW) -> Iterator[Reading]:
        """Yields a reading of a partition's current values, which can be read piece by piece. The
        partition must have values. Raises the errors of `encode_values`.

        `codec`: encoding of the values.
        """
        partition = self._partitions[partition_id]
        reading = partition.read(codec, self._copies)
        try:
            yield reading
        finally:
            partition.readings.discard(reading)

    def read_rows(self, partition_id: int, ids: Ids) -> Reading:
        """Returns a reading of the current rows `ids` of a bucket, which can be read piece by
        piece."""
        partition = self._partitions[partition_id]
        assert isinstance(partition, TableRows), "the request was checked against the layout"
        return partition.read_rows(ids, self._copies)

    def image(self, partition_id: int) -> PartitionImage | None:
        """Returns a copy of a partition for a snapshot or another server. Returns None if the
        partition has no values or is not in the shard."""
        partition = self._partitions.get(partition_id)
        return partition.image() if partition is not None and partition.version else None

    def frozen_image(self, partition_id: int) -> PartitionImage:
        """Returns an image of a frozen partition without pending changes. The image shares the
        partition's memory. Omits the versions that members have pulled (for delay compensation)."""
        partition = self._partitions[partition_id]
        assert partition_id in self._frozen, "it would change"
        assert not partition.on_their_way, "what was admitted is waited for"
        return partition.as_it_is()

    def is_trained(self, frozen: AbstractSet[str]) -> bool:
        """Returns whether members report clocks for this shard: whether it has a bucket of a sparse
        table, or values of a tensor that is not in `frozen`."""
        held = [partition.spec for partition in self._partitions.values() if partition.version]
        return any(
            spec.bucket is not None or any(piece.tensor not in frozen for piece in spec.pieces)
            for spec in held
        )

    def partition_ids(self) -> tuple[int, ...]:
        """Returns the ids of all partitions, with or without values, ascending."""
        return tuple(sorted(self._partitions))

    def forget(self, member_ids: Iterable[str]) -> None:
        """Drops the state of members that will not return."""
        for partition in self._partitions.values():
            for member_id in member_ids:
                partition.forget(member_id)

    def forget_all_but(self, known: AbstractSet[str]) -> None:
        """Drops the state of members that are not in `known`."""
        for partition in self._partitions.values():
            for member_id in partition.settled.sequences.keys() - known:
                partition.forget(member_id)

    def summary(self, member_id: str = "") -> ShardSummary:
        """Returns totals and versions of all partitions, and the sequence numbers of one member."""
        held = [self._partitions[partition_id] for partition_id in self.partition_ids()]
        return ShardSummary(
            versions={each.spec.partition_id: each.version for each in held},
            sequences={
                each.spec.partition_id: last
                for each in held
                if (last := each.last_sequence(member_id))
            },
            restorations={
                each.spec.partition_id: each.restoration for each in held if each.restoration
            },
            stored_bytes=sum(each.stored_bytes for each in held),
            stored_rows=sum(each.stored_rows for each in held),
            pushes_applied=self._pushes_applied,
            pushes_deduplicated=self._pushes_deduplicated,
        )
