"""Format of rows on the wire: the ids and gradients of a push (PushHeader.rows), and the ids of a
pull (PartitionPull.ids)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal_common.tables.values import Ids, Values, buckets_of


def combined(ids: Ids, gradients: Values) -> tuple[Ids, Values]:
    """Adds up the gradients that have the same id, in the given order. Returns the distinct ids,
    ascending, and their gradients `[n, dim]`."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    first = (
        np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        if len(ids)
        else np.empty(0, dtype=np.int64)
    )
    if len(first) == len(ids):
        return ordered, np.ascontiguousarray(gradients[order], dtype=np.float32)
    return ordered[first], np.add.reduceat(gradients[order], first, axis=0, dtype=np.float32)


def by_bucket(ids: Ids, buckets: int) -> list[npt.NDArray[np.int64]]:
    """Groups ids by bucket. For each bucket, returns the positions of its ids in `ids`."""
    numbers = buckets_of(ids, buckets)
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(1, buckets))
    return np.split(order, bounds)


def pushed_payload(ids: Ids, gradients: Values) -> memoryview:
    """Returns the payload of a push: the distinct ids, ascending, followed by the gradients of
    their rows."""
    return memoryview(
        ids.astype("<i8", copy=False).tobytes() + gradients.astype("<f4", copy=False).tobytes()
    )


def pulled_ids(ids: Ids) -> bytes:
    """Encodes the ids of a pull."""
    return ids.astype("<i8", copy=False).tobytes()
