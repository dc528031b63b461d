"""A module's buffers, and what they were when the last step was committed.

A step changes buffers already in its forward pass. If it is lost they are put back; if it is committed all ranks must hold the same. So the
ranks add up by how much each buffer changed, weighted, and go on from the committed value: one that no rank changed keeps its bits.

Buffers are found by where they hang, each time anew: modules also assign new tensors (`self.average = 0.9 * self.average + ...`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from shoal_common.errors import ConfigurationError
from torch import nn


class CommittedBuffers:
    """Owned by the training thread. Flat tensors hold the floating-point buffers first, then the counters."""

    def __init__(self, module: nn.Module) -> None:
        persistent = {id(t) for t in module.state_dict(keep_vars=True).values()}
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
        self.commit()

    @property
    def size(self) -> int:
        """Elements that all ranks must agree on: statistics and counters. Others (masks, tables) do not change, or alike on every rank."""
        return sum(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        """What their changes are to be added up in."""
        wide = any(buffer.dtype == torch.float64 for buffer in self._committed[self._floats])
        return torch.float64 if wide else torch.float32

    def commit(self) -> None:
        """What they are now is the committed state."""
        if not self._places:
            return
        now = self._now()
        if list(map(_kind, now)) == list(map(_kind, self._committed)):
            _copy(self._committed, now)
        else:
            self._committed = [buffer.clone() for buffer in now]
            self._sizes = [buffer.numel() for buffer in self._committed[: self._counters.stop]]

    def put_back(self) -> None:
        """What they were when the last step was committed."""
        if self._places:
            self._write(self._committed)

    def changes(self, like: torch.Tensor) -> torch.Tensor:
        """By how much the buffers that all ranks must agree on have changed, flat, of the dtype and on the device of `like`.

        Their weighted mean over the ranks is for `apply`.

        Raises:
            ConfigurationError: one of them has another shape than before.
        """
        if not self._sizes:
            return like.new_zeros(0)
        now, before = self._now(), self._committed
        for (owner, name), buffer, committed in zip(self._places, now, before[: self._counters.stop], strict=False):
            if buffer.shape != committed.shape:
                raise ConfigurationError(
                    f"buffer {name!r} of {type(owner).__name__} had shape {tuple(committed.shape)} and has {tuple(buffer.shape)} after the "
                    "forward pass; the ranks add up its changes, so its shape must stay: register a cache with persistent=False"
                )
        floats, committed = (_flat(of[self._floats], like.dtype, like.device) for of in (now, before))
        counted, counted_before = (_flat(of[self._counters], torch.int64, like.device) for of in (now, before))
        # Where equal, zero: the difference of two infinities is not.
        return torch.cat([torch.where(floats == committed, 0.0, floats - committed), (counted - counted_before).to(like.dtype)])

    def apply(self, changes: torch.Tensor) -> None:
        """They become what was committed plus `changes`, flat."""
        if not self._sizes:
            return
        statistics, counters = self._committed[self._floats], self._committed[self._counters]
        floats = sum(self._sizes[self._floats])
        moved = _flat(statistics, changes.dtype, changes.device) + changes[:floats]
        counted = _flat(counters, torch.int64, changes.device) + changes[floats:].round().to(torch.int64)
        self._write([*_split(moved, statistics), *_split(counted, counters)])

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
