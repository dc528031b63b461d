"""Moves mirrors of shards between host memory, where they are stored, and the device, where they
are updated.

A mirror is a copy of another rank's shard with its optimizer state, so that the state survives if
that rank dies. A mirror must equal the owner's shard bit for bit, but an update on the host would
be rounded differently. Before each update, the mirror is therefore moved to the device, where this
rank's optimizer updates it together with the rank's own shard. Afterwards, it is moved back. During
the passes, when activations need the most memory, mirrors do not use device memory. The price is
two transfers of the mirror over the bus per step.

Copies are queued on the training thread's stream, and the host does not wait for them. May be used
only on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import torch

from shoal_worker.engine.state.optimizer_state import is_element
from shoal_worker.sharding.unit import Holding, Unit

_log = logging.getLogger(__name__)

_LOOK_EVERY: Final = 16
"""Number of updates between two checks of the device's free memory."""
_MUCH: Final = 0.8
"""Used fraction of the device's memory above which the device counts as short of memory."""


class HostMemory(Protocol):
    """Interface to host memory that stores tensors of a device."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is in this host memory, not on the device."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` in this host memory."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` on the device."""
        ...

    def is_wanted(self) -> bool:
        """Returns whether tensors should be moved here, because the device has been short of
        memory."""
        ...


class PinnedMemory:
    """Pinned host memory, so that copies use the full speed of the bus and run in parallel with
    work on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is in host memory."""
        return tensor.is_cpu

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` in pinned host memory."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` on the device."""
        return tensor.to(self._device, non_blocking=True)

    def is_wanted(self) -> bool:
        """Returns whether the device has been short of memory, judged by its peak memory use."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.max_memory_allocated(self._device) > _MUCH * total


def memory_beside(device: torch.device) -> HostMemory | None:
    """Returns the host memory for `device`; None if the device itself uses host memory."""
    return PinnedMemory(device) if device.type == "cuda" else None


class TravellingMirrors:
    """Moves the mirrors of some units between the device, for updates, and host memory, where they
    may be stored between updates."""

    def __init__(self, units: Sequence[Unit], where: Literal["device", "host"] | None) -> None:
        """`where`: memory of the mirrors between updates. None: mirrors stay on the device until it
        is found to be short of memory during an update, and are stored in host memory from then
        on."""
        self._units = units
        self._where = where
        self._updates = 0
        self._memory = memory_beside(units[0].device) if units and where != "device" else None

    def bring(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Moves all mirrors that are in host memory to the device."""
        memory = self._memory
        if memory is not None:
            self._move(optimizer, memory.holds, memory.bring)

    def put_away(self, optimizer: torch.optim.Optimizer | None, *, updated: bool = False) -> None:
        """Moves the mirrors to host memory and drops their gradients, if they are stored there
        between updates. `updated`: True if the mirrors have been updated. With `where=None`, every
        16th such call checks whether the device has been short of memory, which takes 0.1 ms."""
        memory = self._memory
        if memory is None:
            return
        self._updates += updated
        if (
            self._where is None
            and updated
            and self._updates % _LOOK_EVERY == 1
            and memory.is_wanted()
        ):
            self._where = "host"
            _log.info(
                "the device is short of memory; the mirrors of other ranks' shards are now stored "
                "in host memory and moved to the device only for updates"
            )
        if self._where == "host":
            self._move(optimizer, lambda tensor: not memory.holds(tensor), memory.put)

    def _move(
        self,
        optimizer: torch.optim.Optimizer | None,
        wanted: Callable[[torch.Tensor], bool],
        move: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        for unit in self._units:
            mirror = unit.mirror
            if mirror.position is None or unit.placement.apart:
                continue
            if unit.apart and wanted(mirror.shard):
                # otherwise the mirror is part of the parameters, which every rank has unsharded
                mirror.move(move(mirror.shard), unit.layout)
            for state, key, value in _elements(optimizer, mirror):
                if wanted(value):
                    state[key] = move(value)


def _elements(
    optimizer: torch.optim.Optimizer | None, mirror: Holding
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yields the tensors in a mirror's optimizer state that have one element per element of a
    piece, each with the dict that contains it and its key."""
    for piece in mirror.pieces if optimizer is not None else ():
        state = optimizer.state.get(piece, {}) if optimizer is not None else {}
        for key, value in list(state.items()):
            if is_element(value, key, piece.shape) and value.numel():
                yield state, key, value
