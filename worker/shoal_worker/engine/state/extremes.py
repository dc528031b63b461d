"""Buffers that contain minima and maxima, as in observers of quantization-aware training.

A buffer is regarded as a minimum if all its elements are +inf when `as_distributed` is called, and
as a maximum if all are -inf. `min_val` and `max_val` of torch's observers, except histogram
observers, are always included. In every step, the ranks exchange these buffers before the commit
all-reduce, and all ranks store the minimum or maximum over all ranks' passes. For a running minimum
or maximum, or a moving average of minima or maxima, the result is the same as on a single process
with the complete batch. `scale` and `zero_point` of torch's fake quantization are computed from
these buffers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

Kind = Literal["min", "max"]

_OBSERVED: Final[Mapping[str, Kind]] = {"min_val": "min", "max_val": "max"}
_FOLLOWS: Final = frozenset({"scale", "zero_point"})


def find_extremes(module: nn.Module) -> dict[str, Kind]:
    """Returns, by name, the buffers that contain minima or maxima, each with its kind."""
    found: dict[str, Kind] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            kind = _kind(owner, name, buffer)
            if kind is not None:
                found[f"{prefix}.{name}" if prefix else name] = kind
    return found


def _kind(owner: nn.Module, name: str, buffer: torch.Tensor | None) -> Kind | None:
    if (
        buffer is None
        or not buffer.is_floating_point()
        or name in owner._non_persistent_buffers_set
    ):
        return None
    if name in _OBSERVED and _is_observer(owner):
        return _OBSERVED[name]
    if buffer.is_meta or not buffer.numel():
        return None
    if bool((buffer == torch.inf).all()):
        return "min"
    return "max" if bool((buffer == -torch.inf).all()) else None


def _is_observer(owner: object) -> bool:
    """Returns True for torch's observers, except histogram observers, whose bins depend on the
    range of values that a rank has seen."""
    names = {f"{each.__module__}.{each.__name__}" for each in type(owner).__mro__}
    observer = "torch.ao.quantization.observer."
    return (
        f"{observer}UniformQuantizationObserverBase" in names
        and f"{observer}HistogramObserver" not in names
    )


def follows_extremes(owner: nn.Module, name: str) -> bool:
    """Returns whether torch's fake quantization computes this buffer from the minimum and maximum
    of its observer."""
    return name in _FOLLOWS and _is_observer(getattr(owner, "activation_post_process", None))


class Extremes:
    """Synchronizes minima and maxima in the buffers of a module, or of this rank's part of it.
    Owned by the training thread."""

    def __init__(
        self,
        places: Iterable[tuple[str, nn.Module, str]],
        kinds: Mapping[str, Kind],
        followers: Iterable[nn.Module],
    ) -> None:
        """`places`: full name, owner and local name of each buffer. `kinds`: whether each buffer is
        a minimum or a maximum, by full name. `followers`: fake-quantization modules, whose scale
        and zero point are recomputed."""
        self._places = list(places)
        self._kinds = kinds
        self._shapes = {path: owner._buffers[name].shape for path, owner, name in self._places}  # type: ignore[union-attr]
        self._followers = list(dict.fromkeys(followers))
        self._folded: dict[str, torch.Tensor] | None = None
        """Minima and maxima over this rank's finished micro-batches of the step; None before the
        first micro-batch has finished."""
        self._agreed: dict[str, torch.Tensor] = {}
        """Minima and maxima over the passes of all ranks in the step."""

    def __bool__(self) -> bool:
        return bool(self._places)

    def refuse_other_shapes(self, strategy: str) -> None:
        """Checks that no pass has changed a buffer's shape since `as_distributed`; otherwise raises
        ConfigurationError. `strategy`: name of the strategy, whose distribution of the state across
        ranks depends on the shapes."""
        for path, owner, name in self._places:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.shape != self._shapes[path]:
                raise ConfigurationError(
                    f"buffer {path!r} had shape {tuple(self._shapes[path])} at as_distributed but "
                    f"has {tuple(buffer.shape)} after the forward pass, which "
                    f"strategy={strategy!r} does not support; pass a batch through the model "
                    "before as_distributed, or use ddp, zero or fsdp",
                    reason="BUFFERS_DIFFER",
                )

    def begin(self) -> None:
        """Begins a step: discards the extremes of earlier passes."""
        self._folded, self._agreed = None, {}

    def micro_batch_ends(self) -> None:
        """Adds the minima and maxima of a finished micro-batch to those of the step. Must be called
        only for micro-batches with a weight above 0."""
        if self._places:
            now = self._now()
            self._folded = now if self._folded is None else self._merged([self._folded, now])

    def made(self, *, counted: bool) -> bytes:
        """Returns the extremes of this rank's passes, encoded for `agree`. `counted`: for a step
        without micro-batches, True if the batch has a nonzero weight."""
        own = self._folded if self._folded is not None else self._now() if counted else {}
        return json.dumps(
            {
                path: [list(value.shape), value.double().view(-1).tolist()]
                for path, value in own.items()
            }
        ).encode()

    def agree(self, received: Sequence[bytes]) -> None:
        """Combines the extremes of all ranks, so that `write` can write them to the buffers.
        `received`: each rank's result of `made`. Raises ConfigurationError on all ranks if shapes
        differ."""
        ranks: list[dict[str, Any]] = [json.loads(each) for each in received]
        made = [
            {
                path: torch.tensor(values, dtype=torch.float64).view(shape)
                for path, (shape, values) in each.items()
            }
            for each in ranks
        ]
        self._agreed = self._merged([each for each in made if each])

    def write(self) -> None:
        """Writes the combined extremes to the buffers. Called when the step is committed."""
        for path, owner, name in self._places:
            value, buffer = self._agreed.get(path), owner._buffers[name]
            if value is None or buffer is None:
                continue
            if value.shape != buffer.shape:
                owner._buffers[name] = value.to(buffer.device, buffer.dtype)
            else:
                buffer.data.copy_(value)
        for owner in self._followers if self._agreed else ():
            self._follow(owner)
        self._agreed = {}

    @staticmethod
    def _follow(owner: Any) -> None:
        """Recomputes the scale and zero point of a fake quantization from its observer's extremes,
        as a forward pass would. Does nothing if the observer is disabled."""
        observer = owner.activation_post_process
        least, largest = observer.min_val, observer.max_val
        if int(owner.observer_enabled[0]) != 1 or not least.numel() or bool(least.isinf().any()):
            return
        known = torch.stack([least.reshape(-1), largest.reshape(-1)])
        if owner.is_per_channel:
            before, channels = owner.ch_axis, least.numel()
            known = (
                known.view(2, *[1] * (before - 1), channels) if before else known.t().contiguous()
            )
        type(owner).forward(owner, known)

    def _now(self) -> dict[str, torch.Tensor]:
        found = ((path, owner._buffers[name]) for path, owner, name in self._places)
        return {
            path: buffer.detach().to("cpu", torch.float64, copy=True)
            for path, buffer in found
            if buffer is not None
        }

    def _merged(self, several: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        merged: dict[str, torch.Tensor] = {}
        for each in several:
            for path, value in each.items():
                before = merged.get(path)
                if before is None:
                    merged[path] = value
                elif before.shape != value.shape:
                    raise ConfigurationError(
                        f"buffer {path!r} has shape {tuple(before.shape)} on one rank and "
                        f"{tuple(value.shape)} on another, so it has no minimum or maximum over "
                        "the ranks; give it the same shape for every batch",
                        reason="BUFFERS_DIFFER",
                    )
                else:
                    merged[path] = (
                        torch.minimum(before, value)
                        if self._kinds[path] == "min"
                        else torch.maximum(before, value)
                    )
        return merged
