"""Checks of the rows of the sparse table in a recorded history.

The checks in `checking` treat a bucket like any other partition: they find lost, doubled and
reordered pushes, and versions that decrease. This module checks the rows. It rebuilds each bucket
from its pushes in the order of versions, as a dictionary of rows that torch's Adagrad updates in
one process, and evicts rows as docs/sparse-tables.md describes. Rows that were never pushed follow
from the table's seed. Any difference is a violation: in any version, in any lookup, or on a
server's disk at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from shoal_common.tables.file import BucketImage, read_bucket
from shoal_common.tables.rows import RowsImage
from shoal_common.tables.values import Ids, Values, initial_rows
from shoal_worker.sparse_tables.embedding import SparseEmbedding

from tests.history.lines import History, Line, Seen, Violation, digest, rows_digest
from tests.history.snapshots import read_snapshot

_PARTS = 16
"""Rows are evicted in batches of a sixteenth of the row limit, or of the maximum age."""


@dataclass(kw_only=True)
class _Row:
    values: Values
    sum: Values
    """Adagrad's sum of squares."""
    updated_at: int


class _Bucket:
    """The rows of one bucket that were pushed and not evicted."""

    def __init__(self, table: SparseEmbedding) -> None:
        self._table = table
        self._settings = dict(table.spec.hyperparameters)
        self._rows: dict[int, _Row] = {}
        self.version = 1

    def look_up(self, ids: Ids) -> Values:
        spec = self._table.spec
        found = initial_rows(
            ids,
            self._table.embedding_dim,
            seed=spec.seed,
            initializer=spec.initializer,
            scale=spec.scale,
        )
        for place, number in enumerate(ids.tolist()):
            if (row := self._rows.get(number)) is not None:
                found[place] = row.values
        return found

    def put_in_place(self, image: BucketImage) -> None:
        rows = image.rows
        arrays = zip(
            rows.ids.tolist(), rows.values, rows.state["sum"], rows.updated_at.tolist(), strict=True
        )
        self._rows = {
            number: _Row(values=values, sum=total, updated_at=step)
            for number, values, total, step in arrays
        }
        self.version = image.version

    def read_push(self, sent: Line) -> tuple[Ids, Values]:
        payload, dim = bytes.fromhex(sent["gradient"]), self._table.embedding_dim
        count = len(payload) // (8 + 4 * dim)
        return np.frombuffer(payload, np.int64, count), np.frombuffer(
            payload, np.float32, offset=8 * count
        ).reshape(count, dim)

    def push(self, ids: Ids, gradients: Values) -> None:
        """Applies a push. The step number is the version before it; a push without rows
        counts too."""
        step, numbers = self.version, ids.tolist()
        if numbers:
            rows = torch.nn.Parameter(torch.from_numpy(self.look_up(ids)))
            begins = np.full(
                self._table.embedding_dim,
                self._settings["initial_accumulator_value"],
                dtype=np.float32,
            )
            sums = np.stack(
                [self._rows[number].sum if number in self._rows else begins for number in numbers]
            )
            names = ("lr", "lr_decay", "eps")
            adagrad = torch.optim.Adagrad([rows], **{name: self._settings[name] for name in names})
            adagrad.state[rows] = {
                "step": torch.tensor(float(step - 1)),
                "sum": torch.from_numpy(sums),
            }
            rows.grad = torch.from_numpy(gradients.copy())
            adagrad.step()
            for number, values, total in zip(
                numbers, rows.detach().numpy(), adagrad.state[rows]["sum"].numpy(), strict=True
            ):
                self._rows[number] = _Row(values=values, sum=total, updated_at=step)
        self._forget(step)
        self.version += 1

    def _forget(self, step: int) -> None:
        age, most = self._table.spec.max_age, self._table.spec.most_rows
        if age and step % max(1, age // _PARTS) == 0:
            self._rows = {
                number: row for number, row in self._rows.items() if row.updated_at > step - age
            }
        if most and len(self._rows) > most:
            oldest = sorted(self._rows, key=lambda number: (self._rows[number].updated_at, number))
            for number in oldest[: len(oldest) - most + most // _PARTS]:
                del self._rows[number]

    def image(self) -> RowsImage:
        dim, numbers = self._table.embedding_dim, sorted(self._rows)
        rows = [self._rows[number] for number in numbers]
        return RowsImage(
            ids=np.array(numbers, dtype=np.int64),
            values=np.array([row.values for row in rows], dtype=np.float32).reshape(len(rows), dim),
            state={
                "sum": np.array([row.sum for row in rows], dtype=np.float32).reshape(len(rows), dim)
            },
            updated_at=np.array([row.updated_at for row in rows], dtype=np.int64),
        )


def rows_are_their_pushes(
    history: History, snapshots: Sequence[Path] | None, table: SparseEmbedding
) -> Iterator[Violation]:
    """`snapshots`: written by the servers when they ended; None: not all servers have
    written one."""
    looked_up: dict[tuple[int, int], list[Seen]] = defaultdict(list)
    for seen in history.seen:
        if seen.ids:
            looked_up[seen.partition, seen.version].append(seen)
    at_the_end = None if snapshots is None else _buckets_of(snapshots)
    if len(history.buckets) != table.spec.buckets:
        yield Violation(
            f"the table has {table.spec.buckets} buckets, and servers began {len(history.buckets)}"
        )
    homes: dict[int, int] = {}
    """Id -> the partition to which it was pushed."""
    for partition in history.buckets:
        bucket = _Bucket(table)
        found = list(_bucket_is_its_pushes(history, partition, bucket, looked_up, homes))
        yield from found
        if not found and at_the_end is not None:
            ended = at_the_end.get(partition)
            if ended != (bucket.version, rows_digest(bucket.image())):
                received = (
                    "in no snapshot" if ended is None else f"at version {ended[0]} in the snapshot"
                )
                yield Violation(
                    f"the rows of partition {partition}, which came to version {bucket.version}, "
                    f"are others {received}"
                )


def _bucket_is_its_pushes(
    history: History,
    partition: int,
    bucket: _Bucket,
    looked_up: Mapping[tuple[int, int], Sequence[Seen]],
    homes: dict[int, int],
) -> Iterator[Violation]:
    """Applies the changes to `bucket`, up to the first wrong one."""
    for version, change in history.changes[partition].items():
        sent: Line | None = None
        if "restoration" in change.fields:
            sent = history.given.get((partition, change["gradient"]))
            if sent is None:
                yield Violation(
                    f"partition {partition} was given rows that no worker sent", [change]
                )
                return
            bucket.put_in_place(read_bucket(memoryview(bytes.fromhex(sent["values"]))))
        elif version > 1:
            sent = history.push_of(change)
            if sent is None or version != bucket.version + 1:
                return  # applied_once and changes_are_one_history report it
            ids, gradients = bucket.read_push(sent)
            for number in ids.tolist():
                if homes.setdefault(number, partition) != partition:
                    yield Violation(
                        f"id {number} is in partitions {homes[number]} and {partition}", [change]
                    )
            bucket.push(ids, gradients)
        if version != bucket.version or rows_digest(bucket.image()) != change["digest"]:
            what = (
                f"version {version} of partition {partition} does not have the rows that its "
                "pushes make"
            )
            yield Violation(what, [change] if sent is None else [sent, change])
            return
        for seen in looked_up.get((partition, version), ()):
            if digest(bucket.look_up(_ids(seen.ids)).tobytes()) != seen.digest:
                what = (
                    f"a lookup found other rows in version {version} of partition {partition} "
                    "than its pushes make"
                )
                yield Violation(what, [change, seen.line])


def _buckets_of(snapshots: Sequence[Path]) -> dict[int, tuple[int, str]]:
    """Returns partition -> version and digest, for the partitions that are buckets."""
    found = {}
    for path in snapshots:
        state, tensors = read_snapshot(path)
        for entry in state["partitions"]:
            prefix = f"{entry['partition_id']}:rows:"
            arrays = {
                name.removeprefix(prefix): tensor.numpy()
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            if arrays:
                kept = {
                    name.removeprefix("state:"): array
                    for name, array in arrays.items()
                    if name.startswith("state:")
                }
                rows = RowsImage(
                    ids=arrays["ids"],
                    values=arrays["values"],
                    state=kept,
                    updated_at=arrays["updated_at"],
                )
                found[entry["partition_id"]] = entry["version"], rows_digest(rows)
    return found


def _ids(text: str) -> Ids:
    return np.frombuffer(bytes.fromhex(text), np.int64)
