"""Numbers reported by a training loop (`ReportedLoss`), and losses that are read from the device
only when they are needed (`read_later`)."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import SupportsFloat

import torch
from shoal_common.errors import ConfigurationError
from torch.distributed.tensor import DTensor


class ReportedLoss:
    """Latest value of one number that the training loop reports, usually the loss. Written by the
    training thread and read by any thread."""

    def __init__(self, name: str = "loss") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._newest = (0, math.nan)
        self._on_their_way: deque[tuple[int, torch.Tensor, torch.Event]] = deque()
        """Losses reported after `_newest` that are still being copied to the host, as (index, copy,
        CUDA event recorded after the copy)."""

    def report(self, loss: float | torch.Tensor) -> None:
        """Records a loss. Raises ConfigurationError unless it is a single number on this rank."""
        value = _one_number(loss, self._name)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            copy, arrival = _sent_to_host(value)
            with self._lock:
                self._count += 1
                self._on_their_way.append((self._count, copy, arrival))
                self._take()
            return
        with self._lock:
            self._count += 1
            self._on_their_way.clear()
            self._newest = (self._count, float(value))

    @property
    def value(self) -> float:
        """Newest known loss; NaN if none is known."""
        return self.newest[1]

    @property
    def count(self) -> int:
        """Number of reported losses, including those still being copied."""
        with self._lock:
            return self._count

    @property
    def newest(self) -> tuple[int, float]:
        """Index and value of the newest known loss. The index counts all reported losses from 1; 0
        and NaN if none is known."""
        with self._lock:
            self._take()
            return self._newest

    def _take(self) -> None:
        while self._on_their_way and self._on_their_way[0][2].query():
            ordinal, copy, _ = self._on_their_way.popleft()
            self._newest = (ordinal, float(copy))


class LossOnItsWay:
    """Loss that the device may still be computing. `float()` waits for the device."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._copy, self._arrival = _sent_to_host(loss)

    def __float__(self) -> float:
        self._arrival.synchronize()
        return float(self._copy)


class MeanLoss:
    """Weighted mean of losses; 0 if all weights are 0. `float()` waits until all losses are
    computed."""

    def __init__(self) -> None:
        self._losses: list[tuple[SupportsFloat, float]] = []

    def add(self, loss: SupportsFloat, weight: float) -> None:
        """Adds a loss with its weight. A loss of weight 0 is ignored, even if it is NaN."""
        if weight != 0:
            self._losses.append((loss, weight))

    def __float__(self) -> float:
        total = sum(weight for _, weight in self._losses)
        return sum(float(loss) * weight for loss, weight in self._losses) / total if total else 0.0


def read_later(loss: torch.Tensor) -> SupportsFloat:
    """Returns the loss as a number. A loss on a device is read only when `float()` is called on the
    result, so this function does not wait for the device."""
    value = loss.detach()
    return (
        float(value)
        if value.device.type == "cpu" or isinstance(value, DTensor)
        else LossOnItsWay(value)
    )


def _sent_to_host(value: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
    """Starts a copy to pinned host memory. Returns the copy, and an event recorded after it: once
    the event has completed, the copy can be read."""
    copy = value.to("cpu", non_blocking=True)
    arrival = torch.Event(value.device)
    arrival.record()
    return copy, arrival


def _one_number(loss: float | torch.Tensor, name: str) -> float | torch.Tensor:
    """Returns the loss as a float, or as a detached tensor of one element. Raises
    ConfigurationError unless it is a single number on this rank."""
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise ConfigurationError(
                f"shoal.report({name}=...): got a DTensor with placements {loss.placements}; no "
                f"rank has its full value; report {name}.full_tensor(), on every rank"
            )
        loss = loss.to_local()
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_meta or loss.is_complex():
            raise ConfigurationError(
                f"shoal.report({name}=...): got a tensor of shape {tuple(loss.shape)} and dtype "
                f"{loss.dtype} on {loss.device}; expected one number, such as the mean over the "
                "batch"
            )
        return loss.detach()
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"shoal.report({name}=...): got {loss!r}; expected one number, or a tensor of one "
            "element"
        ) from None
