"""Row gradients of a step under ddp: the part that one rank has computed, and the sum of all ranks'
parts (step_tables.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from shoal_common.tables.values import Ids

from shoal_worker.sparse_tables.embedding import SparseEmbedding
from shoal_worker.state.serial import dump_tensors

_Sums = npt.NDArray[np.float64]


class RowSums:
    """The row gradients that this rank has computed in a step, weighted, by table and id. The
    values are float64, so that with micro-batches, whose weights are integers, the sum does not
    depend on which rank computed which micro-batch (see `replicated/buckets.py`)."""

    def __init__(self, tables: Sequence[SparseEmbedding]) -> None:
        self._tables = tables
        self._parts: dict[str, list[tuple[Ids, _Sums]]] = {}
        self._weight = 0.0
        """Total weight of the micro-batches included so far."""
        self.versions: dict[int, int] = {}
        """Versions of the rows used to compute the gradients."""

    def take(self, factor: float, *, weight: float = 0.0) -> None:
        """Takes the gradients from the tables, multiplies them by `factor` and adds them to this
        rank's sums. If `factor` is 0, the gradients are discarded. `weight`: weight of the
        micro-batch."""
        for table in self._tables:
            gradients = table.gradients()
            if gradients is not None and factor != 0:
                self._parts.setdefault(table.name, []).append(
                    (gradients.ids, gradients.values.astype(np.float64) * factor)
                )
                self.versions.update(gradients.versions)
            table.drop_gradients()
        self._weight += weight

    def clear(self) -> None:
        """Removes all gradients, versions and weights."""
        self._parts.clear()
        self.versions.clear()
        self._weight = 0.0

    def dump(self, metadata: Mapping[str, Any]) -> bytes:
        """Encodes this rank's sums for the other ranks. `metadata`: additional JSON-able values."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parts in self._parts.items():
            ids, sums = summed(parts)
            tensors |= {
                f"{name}/ids": torch.from_numpy(ids),
                f"{name}/sums": torch.from_numpy(sums),
            }
        return dump_tensors(tensors, {"weight": self._weight, **metadata})


def summed(parts: Sequence[tuple[Ids, _Sums]]) -> tuple[Ids, _Sums]:
    """Sums the parts of several ranks. Returns the ids, each once and in ascending order, and the
    sum of each id's gradients, added in the order of the parts."""
    ids = np.concatenate([ids for ids, _ in parts])
    order = np.argsort(ids, kind="stable")
    unique, first = np.unique(ids[order], return_index=True)
    return unique, np.add.reduceat(
        np.concatenate([sums for _, sums in parts])[order], first, axis=0
    ) if len(ids) else parts[0][1]
