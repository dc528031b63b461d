"""Mirrors of shards that lie in the host's memory, and come to the device while an update is made.

A mirror is another rank's shard and the optimizer's state of it, kept so that a death loses
nothing. It is updated by the same optimizer as this rank's own shard, and on the same device: an
update made on the host would be rounded otherwise, and a mirror is to be what its owner has, to the
bit. So it comes to the device before the update, and leaves it behind the update. In the passes,
where activations need most, it takes none of the device's memory; each way costs a step what the
mirror's bytes take on the bus.

Copies are queued in the order of the training thread's stream, and no host waits for them. That
thread owns all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import torch

from shoal_worker.engine.optimizer_state import is_element
from shoal_worker.sharding.unit import Holding, Unit

_log = logging.getLogger(__name__)

_LOOK_EVERY: Final = 16
"""Updates between two looks at the device's memory."""
_MUCH: Final = 0.8
"""A device of whose memory more than this share was in use at once is short of it."""


class HostMemory(Protocol):
    """The memory beside one device."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies there, and not on the device."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy there."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        ...

    def is_wanted(self) -> bool:
        """The device has been short of memory."""
        ...


class PinnedMemory:
    """See `HostMemory`. Pinned, so that copies are made beside the host's work, at the bus's full
    speed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `HostMemory`."""
        return tensor.is_cpu

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `HostMemory`."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `HostMemory`."""
        return tensor.to(self._device, non_blocking=True)

    def is_wanted(self) -> bool:
        """See `HostMemory`."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.max_memory_allocated(self._device) > _MUCH * total


def memory_beside(device: torch.device) -> HostMemory | None:
    """The host's memory beside `device`; None where that is the same."""
    return PinnedMemory(device) if device.type == "cuda" else None


class TravellingMirrors:
    """The mirrors of some units, on the device or away."""

    def __init__(self, units: Sequence[Unit], where: Literal["device", "host"] | None) -> None:
        """`where` they are between updates; None: on the device, and away from the first update on
        that finds it short of memory."""
        self._units = units
        self._where = where
        self._updates = 0
        self._memory = memory_beside(units[0].device) if units and where != "device" else None

    def bring(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Brings all mirrors to the device that are not there."""
        memory = self._memory
        if memory is not None:
            self._move(optimizer, memory.holds, memory.bring)

    def put_away(self, optimizer: torch.optim.Optimizer | None, *, updated: bool = False) -> None:
        """Puts all mirrors into the host's memory, if that is where they are to be; their gradients
        are dropped. `updated`: an update was made, so that it is time to look whether the device is
        short of memory: now and then, for that takes a tenth of a millisecond."""
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
                "the device is short of memory: mirrors of shards are in the host's memory but for "
                "the updates"
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
            if mirror.position is None or unit.home.apart:
                continue
            if unit.apart and wanted(mirror.shard):
                # else it is a part of the parameters, which every rank has whole
                mirror.move(move(mirror.shard), unit.layout)
            for state, key, value in _elements(optimizer, mirror):
                if wanted(value):
                    state[key] = move(value)


def _elements(
    optimizer: torch.optim.Optimizer | None, mirror: Holding
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The optimizer's state of the elements of a mirror: where it stands, its key, and itself."""
    for piece in mirror.pieces if optimizer is not None else ():
        state = optimizer.state.get(piece, {}) if optimizer is not None else {}
        for key, value in list(state.items()):
            if is_element(value, key, piece.shape) and value.numel():
                yield state, key, value
