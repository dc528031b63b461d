"""Trained rows of a table or of one of its buckets: their values, their optimizer state, and the
step of each row's last update.

Rows are in slots 0 to n - 1 of growing arrays. An open-addressing hash table finds the slots of a
batch of ids in one operation. Results depend only on ids, never on slots, so that training with
restored rows continues bitwise identically. torch performs the arithmetic: the rows of an update
are gathered, updated by a torch optimizer as one tensor, and written back.

A `Rows` object belongs to one thread.
"""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shoal_common.optimizers.for_servers import Unit
from shoal_common.tables.declaration import TableSpec
from shoal_common.tables.values import Ids, Values, hashed, initial_rows, mixed

_FEWEST: Final = 64
_NO_SLOT: Final = -1
_SECRET: Final = np.uint64(secrets.randbits(64))
"""Random number of this process, which makes positions in the hash table unpredictable."""
Slots = npt.NDArray[np.int64]
_PARTS: Final = 16
"""Factor by which evictions are batched, because each eviction must scan all rows. Rows that are
too old are evicted every `max_age` / 16 steps. If there are too many rows, a sixteenth of the
maximum number is evicted in addition to the excess."""


@dataclass(frozen=True, kw_only=True)
class RowsImage:
    """Copy of rows at one moment, by ascending id."""

    ids: Ids
    values: Values
    """Values of the rows, `[n, dim]`."""
    state: Mapping[str, Values]
    """Optimizer state by torch's names: `[n, dim]`, or `[n]` if there is one number per row."""
    updated_at: npt.NDArray[np.int64]
    """Step of each row's last update."""


@dataclass(frozen=True, kw_only=True)
class RowsUpdate:
    """New values and state of the rows that an update affects."""

    values: Values
    state: Mapping[str, Values]


class Rows:
    """Trained rows of one bucket of a sparse table, by id. Callers must call `update` once for each
    step, even if the step has no rows; steps are numbered from 1."""

    def __init__(self, spec: TableSpec, dim: int, image: RowsImage | None = None) -> None:
        """`image`: initial rows; None: no rows."""
        self._spec = spec
        self._dim = dim
        declared = spec.declared
        self._begins = dict(spec.hyperparameters).get("initial_accumulator_value", 0.0)
        state_shape = () if declared.unit is Unit.ROW else (dim,)
        names = (
            sorted(declared.state - {"step"})
            if declared.state_tensors(dict(spec.hyperparameters))
            else []
        )
        self._count = 0
        self._ids = np.empty(0, dtype=np.int64)
        self._values = np.empty((0, dim), dtype=np.float32)
        self._state = {name: np.empty((0, *state_shape), dtype=np.float32) for name in names}
        self._updated_at = np.empty(0, dtype=np.int64)
        self._table = _SlotTable(self._ids, room=_FEWEST)
        self._torch: torch.optim.Optimizer = declared.optimizer_class()(
            [torch.zeros(1)], **declared.arguments(dict(spec.hyperparameters))
        )
        if image is not None:
            self._restore(image)

    # -------------------------------------------------------------------------------------- reading

    def __len__(self) -> int:
        """Returns the number of stored rows."""
        return self._count

    @property
    def row_bytes(self) -> int:
        """Number of bytes per row, including its entry in the hash table."""
        state = sum(4 * math.prod(self.state_shape(name)) for name in self._state)
        return 4 * self._dim + state + 2 * 8 + 4 * 4

    @property
    def nbytes(self) -> int:
        """Number of bytes of memory for all rows, including unused capacity."""
        return self._table.nbytes + sum(array.nbytes for array in self._arrays())

    @property
    def largest(self) -> float:
        """Largest magnitude among the values of all rows; 0 if there are no rows."""
        values = self._values[: self._count]
        return float(max(values.max(), -values.min())) if values.size else 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors."""
        return tuple(self._state)

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the state that the optimizer keeps for one row under `name`:
        `(dim,)`, or `()` for a single number."""
        return tuple(self._state[name].shape[1:])

    def values(self, ids: Ids) -> Values:
        """Returns the values of the rows with the given ids, `[len(ids), dim]`, in a new array.
        For rows that are not stored, returns their initial values. Ids may occur several times."""
        return self._values_at(ids, self._find(ids))

    def _values_at(self, ids: Ids, slots: Slots) -> Values:
        known = slots >= 0
        if known.all():
            return self._values[slots]
        found = np.empty((len(ids), self._dim), dtype=np.float32)
        found[known] = self._values[slots[known]]
        found[~known] = self._initial(ids[~known])
        return found

    def image(self) -> RowsImage:
        """Returns a copy of all rows."""
        order = np.argsort(self._ids[: self._count])
        return RowsImage(
            ids=self._ids[order],
            values=self._values[order],
            state={name: array[order] for name, array in self._state.items()},
            updated_at=self._updated_at[order],
        )

    def misfit(self, image: RowsImage) -> str:
        """Returns why an image cannot belong to this table: wrong shapes or dtypes, or ids that are
        not unique and ascending. Empty if the image fits."""
        count = len(image.ids)
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "ids": ((count,), np.int64),
            "rows": ((count, self._dim), np.float32),
            "updated_at": ((count,), np.int64),
            **{
                f"state/{name}": ((count, *self.state_shape(name)), np.float32)
                for name in self.state_names
            },
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "ids": image.ids,
            "rows": image.values,
            "updated_at": image.updated_at,
        }
        found = {name: (array.shape, array.dtype.type) for name, array in arrays.items()}
        found |= {
            f"state/{name}": (array.shape, array.dtype.type) for name, array in image.state.items()
        }
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                shape, dtype = found.get(name, ("nothing", None))
                return (
                    f"{name} is {shape}{f' of {dtype.__name__}' if dtype else ''}; expected "
                    f"{expected.get(name, ('nothing', ''))[0]}"
                )
        if (image.ids[1:] <= image.ids[:-1]).any():
            return "ids: expected unique ids in ascending order"
        return ""

    # ------------------------------------------------------------------------------------- changing

    def count_new(self, ids: Ids) -> int:
        """Returns the number of ids whose rows are not stored yet."""
        return int((self._find(ids) < 0).sum())

    def reserve(self, more: int) -> None:
        """Reserves space for `more` rows. If this raises MemoryError, the table is unchanged."""
        needed = self._count + more
        if needed > len(self._ids):
            room = max(needed, len(self._ids) * 3 // 2, _FEWEST)
            ids, values, updated_at = (
                _grown(array, room) for array in (self._ids, self._values, self._updated_at)
            )
            state = {name: _grown(array, room) for name, array in self._state.items()}
            self._ids, self._values, self._updated_at, self._state = ids, values, updated_at, state
        if not self._table.has_room(needed):
            self._table = _SlotTable(self._ids[: self._count], room=needed)

    def updated(self, ids: Ids, gradients: Values, step: int) -> RowsUpdate:
        """Computes the result of an update without changing any row.

        `ids`: distinct ids. `gradients`: `[len(ids), dim]`. `step`: step number, from 1.
        """
        return self._updated(ids, self._find(ids), gradients, step)

    def _updated(self, ids: Ids, slots: Slots, gradients: Values, step: int) -> RowsUpdate:
        known = slots >= 0
        values = torch.from_numpy(self._values_at(ids, slots))
        state: dict[str, Any] = {}
        for name, array in self._state.items():
            begun = np.full((len(ids), *array.shape[1:]), self._begins, dtype=np.float32)
            begun[known] = array[slots[known]]
            state[name] = torch.from_numpy(begun)
        self._step(values, state, torch.from_numpy(gradients), step)
        return RowsUpdate(
            values=values.numpy(), state={name: state[name].numpy() for name in self._state}
        )

    def update(self, ids: Ids, gradients: Values, step: int) -> None:
        """Applies the update of step `step`, and evicts rows if necessary. Raises MemoryError if
        the space was not reserved."""
        if len(ids):
            slots = self._find(ids)
            made = self._updated(ids, slots, gradients, step)
            self._add(ids, slots)
            self._values[slots] = made.values
            for name, array in made.state.items():
                self._state[name][slots] = array
            self._updated_at[slots] = step
        self._evict(step)

    def _step(
        self, values: torch.Tensor, state: dict[str, Any], gradients: torch.Tensor, step: int
    ) -> None:
        """Performs a step of the torch optimizer, which updates `values` and `state` in place."""
        if not len(values):
            return
        optimizer, name = self._torch, self._spec.optimizer
        if name == "sparse_adam":
            state["step"] = step - 1
            values.grad = torch.sparse_coo_tensor(
                torch.arange(len(values)).unsqueeze(0),
                gradients,
                values.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        else:
            state["step"] = torch.tensor(float(step - 1))
            values.grad = gradients
        optimizer.param_groups[0]["params"] = [values]
        optimizer.state = collections.defaultdict(dict, {values: state} if self._state else {})
        optimizer.step()
        optimizer.state = collections.defaultdict(dict)
        optimizer.param_groups[0]["params"] = []
        values.grad = None

    # ------------------------------------------------------------------------------------- evicting

    def _evict(self, step: int) -> None:
        """Evicts rows that are too old and, if there are too many rows, the least recently updated
        ones. The result depends only on `step` and on the ids and last updates of the rows, so
        repeating an update evicts the same rows."""
        age = self._spec.max_age
        if age and step % max(1, age // _PARTS) == 0:
            self._drop(self._updated_at[: self._count] <= step - age)
        most = self._spec.most_rows
        if most and self._count > most:
            self._drop(self._oldest(self._count - most + most // _PARTS))

    def _oldest(self, count: int) -> npt.NDArray[np.bool_]:
        """Returns a mask, by slot, that selects the `count` least recently updated rows. Among rows
        updated in the same step, smaller ids are selected first."""
        updated_at = self._updated_at[: self._count]
        border = np.partition(updated_at, count - 1)[count - 1]
        chosen: npt.NDArray[np.bool_] = updated_at < border
        at_border = np.flatnonzero(updated_at == border)
        more = count - int(chosen.sum())
        chosen[at_border[np.argsort(self._ids[at_border])[:more]]] = True
        return chosen

    def _drop(self, gone: npt.NDArray[np.bool_]) -> None:
        """Removes the rows selected by the mask `gone`. Rows in the last slots move into the
        gaps."""
        if not gone.any():
            return
        left = self._count - int(gone.sum())
        holes = np.flatnonzero(gone[:left])
        movers = left + np.flatnonzero(~gone[left:])
        for array in self._arrays():
            array[holes] = array[movers]
        self._count = left
        # keeps the size of the reserved space
        self._table = _SlotTable(self._ids[:left], room=len(self._ids))

    # -------------------------------------------------------------------------------- finding slots

    def _arrays(self) -> list[npt.NDArray[Any]]:
        """Returns all arrays with data of rows, each indexed by slot."""
        return [self._ids, self._values, self._updated_at, *self._state.values()]

    def _find(self, ids: Ids) -> Slots:
        return self._table.find(ids, self._ids)

    def _add(self, ids: Ids, slots: Slots) -> None:
        """Assigns a slot to each id without one, and writes it to `slots`."""
        fresh = np.flatnonzero(slots < 0)
        if len(fresh):
            self.reserve(len(fresh))
            slots[fresh] = np.arange(self._count, self._count + len(fresh))
            self._ids[slots[fresh]] = ids[fresh]
            self._count += len(fresh)
            self._table.enter(ids[fresh], slots[fresh])

    def _restore(self, image: RowsImage) -> None:
        self.reserve(len(image.ids))
        self._count = count = len(image.ids)
        self._ids[:count] = image.ids
        self._values[:count] = image.values
        self._updated_at[:count] = image.updated_at
        for name, array in self._state.items():
            array[:count] = image.state[name]
        self._table = _SlotTable(self._ids[:count], room=count)

    def _initial(self, ids: Ids) -> Values:
        spec = self._spec
        return initial_rows(
            ids, self._dim, seed=spec.seed, initializer=spec.initializer, scale=spec.scale
        )


class _SlotTable:
    """Hash table from id to slot: open addressing with linear probing, in arrays. `Rows` stores the
    ids themselves."""

    def __init__(self, ids: Ids, *, room: int) -> None:
        """`ids`: ids of the slots 0, 1, 2, ... `room`: maximum number of rows."""
        # The table is at most half full, so that few lookups need more than one probe.
        self._slots = np.full(
            1 << (2 * max(room, len(ids), _FEWEST) - 1).bit_length(), _NO_SLOT, dtype=np.int32
        )
        self.enter(ids, np.arange(len(ids)))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the hash table, without the rows."""
        return self._slots.nbytes

    def has_room(self, rows: int) -> bool:
        """Returns whether the table has space for `rows` rows in total."""
        return 2 * rows <= len(self._slots)

    def find(self, wanted: Ids, ids: Ids) -> Slots:
        """Returns the slot of each wanted id; _NO_SLOT for an id that is not in the table. `ids`:
        ids by slot."""
        found = np.full(len(wanted), _NO_SLOT, dtype=np.int64)
        places = self._first(wanted)
        searching = np.arange(len(wanted))
        while len(searching):
            slots = self._slots[places[searching]]
            there = slots != _NO_SLOT
            searching, slots = searching[there], slots[there]
            hit = ids[slots] == wanted[searching]
            found[searching[hit]] = slots[hit]
            searching = searching[~hit]
            places[searching] = (places[searching] + 1) & (len(self._slots) - 1)
        return found

    def enter(self, ids: Ids, slots: Slots) -> None:
        """Inserts ids with their slots. The ids must not be in the table."""
        places = self._first(ids)
        waiting = np.arange(len(ids))
        while len(waiting):
            at = places[waiting]
            free = self._slots[at] == _NO_SLOT
            self._slots[at[free]] = slots[waiting[free]]
            # If several ids hashed to the same position, one of them is stored there now.
            waiting = waiting[self._slots[at] != slots[waiting]]
            places[waiting] = (places[waiting] + 1) & (len(self._slots) - 1)

    def _first(self, ids: Ids) -> Slots:
        """Returns the first position to probe for each id. It depends on a secret, so that an
        attacker cannot choose ids that all collide. The secret affects only where rows are stored,
        not the results."""
        return (mixed(hashed(ids) ^ _SECRET) >> np.uint64(32)).astype(np.int64) & (
            len(self._slots) - 1
        )


def _grown(array: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    grown = np.empty((room, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
