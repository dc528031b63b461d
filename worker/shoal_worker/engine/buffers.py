"""A module's buffers, and what they were when the last step was committed.

A step changes buffers already in its forward pass. If it is lost they are put back; if it is committed all ranks must hold the same. So the
ranks add up by how much each buffer changed, weighted, and go on from the committed value: one that no rank changed keeps its bits. What a
script changes behind that sum, in the same step, stays as this rank's script made it, as what it changes between two steps does.

Counters are integers, and stay exact: their changes are summed in float64, and one that is too large for that is refused. On a device
that is found out without waiting for it, a step later.

Buffers are found by where they hang, each time anew: modules also assign new tensors (`self.average = 0.9 * self.average + ...`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.engine.module_state import ModuleState

_LARGEST_CHANGE: Final = 2.0**40
"""The mean over 4000 ranks of integers up to this, in float64, is off by less than a half."""


class CommittedBuffers:
    """Owned by the training thread. Flat tensors hold the floating-point buffers first, then the counters."""

    def __init__(self, module: nn.Module) -> None:
        persistent = {id(tensor) for tensor in ModuleState(module).tensors.values()}
        floats: list[tuple[nn.Module, str]] = []
        counters: list[tuple[nn.Module, str]] = []
        others: list[tuple[nn.Module, str]] = []
        seen = set()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is None or buffer.is_meta or id(buffer) in seen:  # on the meta device: not of this rank's part
                    continue
                seen.add(id(buffer))
                statistic = buffer.is_floating_point() and id(buffer) in persistent
                (floats if statistic else counters if buffer.dtype == torch.int64 else others).append((owner, name))
        self._places = floats + counters + others
        self._floats = slice(0, len(floats))
        self._counters = slice(len(floats), len(floats) + len(counters))
        self._committed: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] = []
        self._base: tuple[torch.Tensor, torch.Tensor] | None = None
        """Statistics and counters as committed, flat, once they were asked for."""
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None
        """Statistics and counters, flat, as they were when their changes were taken; None: as committed."""
        self._seen: list[tuple[torch.Tensor | None, int]] = []
        """The tensors that they were then, and torch's count of changes to each in place."""
        self._largest: list[tuple[torch.Tensor, torch.Event]] = []
        """Largest changes of counters, on their way from a device; each is here when its event has happened."""
        self.commit()

    @property
    def size(self) -> int:
        """Elements that all ranks must agree on: statistics and counters. Others (masks, tables) do not change, or alike on every rank."""
        return sum(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        """What their changes are to be added up in."""
        wide = any(buffer.dtype in (torch.float64, torch.int64) for buffer in self._committed[: self._counters.stop])
        return torch.float64 if wide else torch.float32

    def commit(self) -> None:
        """What they are now is the committed state."""
        self._base = self._taken = None
        if not self._places:
            return
        now = self._now()
        if list(map(_kind, now)) == list(map(_kind, self._committed)):
            _copy(self._committed, now)
        else:
            self._committed = [buffer.clone() for buffer in now]
            self._sizes = [buffer.numel() for buffer in self._committed[: self._counters.stop]]
            self._shapes = [buffer.shape for buffer in self._committed[: self._counters.stop]]

    def put_back(self) -> None:
        """What they were when the last step was committed."""
        self._taken = None
        if self._places:
            self._write(self._committed)

    def changes(self, like: torch.Tensor) -> torch.Tensor:
        """By how much the buffers that all ranks must agree on have changed, flat, of the dtype and on the device of `like`.

        Their weighted mean over the ranks is for `apply`.

        Raises:
            ConfigurationError: one of them has another shape than before, or a counter has moved by more than can be summed exactly.
        """
        if not self._sizes:
            return like.new_zeros(0)
        now, before = self._shared(like), self._before(like)
        self._taken, self._seen = now, self._in_sight()
        counted = (now[1] - before[1]).to(like.dtype)
        self._check_exact(counted)
        return torch.cat([_moved(now[0], before[0]), counted])

    def leave_out(self, like: torch.Tensor) -> None:
        """What changed since the last commit is not for `changes`: it came of a pass that weighs nothing."""
        if self._sizes:
            self._taken, self._seen = self._shared(like), self._in_sight()

    @property
    def touched(self) -> bool:
        """A script has changed one since the changes were last taken; by way of `.data`, which torch does not count, it may have."""
        return self._taken is not None and any(
            then is not now or before != after for (then, before), (now, after) in zip(self._seen, self._in_sight(), strict=True)
        )

    def _in_sight(self) -> list[tuple[torch.Tensor | None, int]]:
        found = [owner._buffers.get(name) for owner, name in self._places[: self._counters.stop]]
        try:
            return [(buffer, 0 if buffer is None else buffer._version) for buffer in found]
        except RuntimeError:  # one was made in torch.inference_mode(), and has no count
            return [(buffer, 0) for buffer in found]

    def apply(self, changes: torch.Tensor) -> None:
        """They become what was committed plus `changes`, flat; and what has changed on this rank since those were taken.

        Raises:
            ConfigurationError: one of them has another shape than before.
        """
        if not self._sizes:
            return
        floats = sum(self._sizes[self._floats])
        committed, now = self._before(changes), self._shared(changes)
        taken = tuple(flat.to(changes.device) for flat in self._taken) if self._taken is not None else committed
        moved = committed[0] + changes[:floats] + _moved(now[0], taken[0].to(changes.dtype))
        counted = committed[1] + changes[floats:].round().to(torch.int64) + (now[1] - taken[1])
        self._write([*_split(moved, self._committed[self._floats]), *_split(counted, self._committed[self._counters])])

    def _shared(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Statistics and counters as they are now, flat. Raises ConfigurationError: one has another shape than before."""
        now = self._now()
        if [buffer.shape for buffer in now[: self._counters.stop]] != self._shapes:
            self._refuse_shapes(now)
        return _flat(now[self._floats], like.dtype, like.device), _flat(now[self._counters], torch.int64, like.device)

    def _refuse_shapes(self, now: list[torch.Tensor]) -> None:
        for (owner, name), buffer, committed in zip(self._places, now, self._committed[: self._counters.stop], strict=False):
            if buffer.shape != committed.shape:
                raise ConfigurationError(
                    f"buffer {name!r} of {type(owner).__name__} had shape {tuple(committed.shape)} and has {tuple(buffer.shape)} after the "
                    "forward pass; the ranks add up its changes, so its shape must stay: register a cache with persistent=False"
                )

    def _before(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Statistics and counters as they were committed, flat. Not to be written to."""
        if self._base is None or (self._base[0].dtype, self._base[0].device) != (like.dtype, like.device):
            statistics, counters = self._committed[self._floats], self._committed[self._counters]
            self._base = _flat(statistics, like.dtype, like.device), _flat(counters, torch.int64, like.device)
        return self._base

    def _check_exact(self, counted: torch.Tensor) -> None:
        """Raises ConfigurationError: a counter has moved too far, in this step or, on a device, in one before."""
        if not counted.numel():
            return
        largest = torch.linalg.vector_norm(counted, math.inf)
        if largest.device.type == "cpu":
            self._refuse(float(largest))
            return
        arrival = torch.Event(largest.device)
        self._largest.append((largest.to("cpu", non_blocking=True), arrival))
        arrival.record()
        while self._largest and self._largest[0][1].query():
            self._refuse(float(self._largest.pop(0)[0]))

    def _refuse(self, largest: float) -> None:
        if largest > _LARGEST_CHANGE:
            names = sorted({f"{type(owner).__name__}.{name}" for owner, name in self._places[self._counters]})
            raise ConfigurationError(
                f"one of the integer buffers {names[:5]} moved by {largest:.0f} in a step; the ranks sum their changes, which is exact up "
                "to 2^40: keep what is no count (a seed, a hash) in a plain attribute of the module"
            )

    def _now(self) -> list[torch.Tensor]:
        found = (owner._buffers.get(name) for owner, name in self._places)
        return [torch.empty(0) if buffer is None else buffer.detach() if buffer.requires_grad else buffer for buffer in found]

    def _write(self, values: list[torch.Tensor]) -> None:
        now = self._now()[: len(values)]
        for i, (value, buffer) in enumerate(zip(values, now, strict=True)):
            if value.shape != buffer.shape:
                owner, name = self._places[i]
                now[i] = torch.empty_like(value)
                owner._buffers[name] = now[i]
        # By way of .data: the backward pass of a forward that saw a buffer may be yet to come, as in a pipeline.
        _copy([buffer.data for buffer in now], values)


def kept_buffers(module: nn.Module) -> Callable[[], None]:
    """Returns a call that makes the module's buffers again what they are now."""
    places = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items() if buffer is not None]
    values = [buffer.clone() for _, _, buffer in places]

    def put_back() -> None:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer
        _copy([buffer.data for _, _, buffer in places], values)  # by way of .data, as above

    return put_back


def _moved(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The difference. Where equal, zero: the difference of two infinities is not, nor that of two values that are no numbers."""
    alike = (now == before) | (now.isnan() & before.isnan())
    return torch.where(alike, 0.0, now - before)


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return buffer.shape, buffer.dtype, buffer.device


def _flat(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors] or [torch.empty(0)]).to(device, dtype)


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like]) if like else ()
    return [part if tensor.dim() == 1 else part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
