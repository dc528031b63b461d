"""The loss that a loop tells of itself. A loss on a device is copied when the device has come to it, and nobody waits for that."""

from __future__ import annotations

import math
import threading
from collections import deque

import torch
from shoal_common.errors import ConfigurationError
from torch.distributed.tensor import DTensor


class ToldLoss:
    """Told by the training thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = 0
        self._newest = (0, math.nan)
        self._on_their_way: deque[tuple[int, torch.Tensor, torch.Event]] = deque()
        """Copies of those told since, on the host; each is there when its event has happened."""

    def tell(self, loss: float | torch.Tensor) -> None:
        """Raises ConfigurationError: it is not one number that this rank has."""
        value = _one_number(loss)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            copy = value.to("cpu", non_blocking=True)  # into pinned memory
            arrival = torch.Event(value.device)
            arrival.record()
            with self._lock:
                self._told += 1
                self._on_their_way.append((self._told, copy, arrival))
                self._take()
            return
        with self._lock:
            self._told += 1
            self._on_their_way.clear()
            self._newest = (self._told, float(value))

    @property
    def value(self) -> float:
        """The newest that is known; NaN: none is."""
        return self.newest[1]

    @property
    def told(self) -> int:
        """How many were told, those included that are on their way."""
        with self._lock:
            return self._told

    @property
    def newest(self) -> tuple[int, float]:
        """The newest that is known, and which of all that were told it is, counted from 1; 0 and NaN: none is known."""
        with self._lock:
            self._take()
            return self._newest

    def _take(self) -> None:
        while self._on_their_way and self._on_their_way[0][2].query():
            ordinal, copy, _ = self._on_their_way.popleft()
            self._newest = (ordinal, float(copy))


def _one_number(loss: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise ConfigurationError(
                f"shoal.report(loss=...): the loss is a DTensor with placements {loss.placements}: no rank has its value; report "
                "loss.full_tensor(), on every rank"
            )
        loss = loss.to_local()
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_meta or loss.is_complex():
            raise ConfigurationError(
                f"shoal.report(loss=...): found a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype} on {loss.device}; expected "
                "one number, such as the mean over the batch"
            )
        return loss.detach()
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ConfigurationError(f"shoal.report(loss=...): found {loss!r}; expected one number, or a tensor of one element") from None
