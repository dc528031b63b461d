"""Synchronizes a module's buffers across ranks, and restores them after an aborted step.

The forward pass changes buffers before the outcome of the step is known. If the step is aborted,
they are restored. If the step is committed, all ranks must have the same values afterwards. The
ranks therefore sum the weighted change of each floating-point buffer and add it to the committed
value. A buffer that no rank has changed keeps its exact value. Changes that the script itself makes
later in the same step stay local, like its changes between two steps.

Counters are int64 buffers and stay exact. Their changes are summed in float64, and a change that is
too large for an exact sum is refused; on a device, the error is raised one step later to avoid a
wait. If a counter changes by the same amount on all ranks, like a count of steps, the amount is
added once. Other changes are summed.

`extremes.py` handles minima and maxima. All other state (bool, other integers, complex numbers,
partially infinite tensors) must be changed identically on all ranks: its digest is part of the step
vote.

Buffers are looked up by name each time, because modules may also assign new tensors (`self.average
= 0.9 * self.average + ...`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import xxhash
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.elastic.contract.step import Step
from shoal_worker.engine.state.extremes import Extremes, Kind, follows_extremes
from shoal_worker.engine.state.module_state import ModuleState
from shoal_worker.engine.step.pass_writes import WrittenParameters, same
from shoal_worker.state.digest import digest_of

_log = logging.getLogger(__name__)

_ROWS: Final = 5
"""Number of values that are sent for each change of a counter: the change, its remainder modulo a
prime, the square of the remainder, whether the change equals the number of samples or their weight,
and the change again without a weight."""
_MODULUS: Final = 4093
"""Prime modulo which changes are compared. Changes that differ by a multiple of it count as
equal."""
_TOLERANCE: Final = 1e-5
"""Remainders count as equal if their variance across ranks is at most this value. The variance of
different remainders is at least the smallest weight of a pass."""
_LARGEST_CHANGE: Final = 2.0**40
"""Largest change of a counter in a step. Up to this size, and with 4000 ranks, the error of the
mean in float64 is less than a half."""
_WATCHED_SUMS: Final = 100
"""Number of steps, from the first, in which counters are checked for likely mistakes."""


class CommittedBuffers:
    """Buffers of a module and their committed values. Owned by the training thread. Buffers that
    are averaged are called statistics, integer buffers that are summed are called counters, and
    buffers that must change identically on all ranks are called exact. In flat tensors, statistics
    come before counters."""

    def __init__(self, module: nn.Module, kinds: Mapping[str, Kind] | None = None) -> None:
        """`kinds`: result of `find_extremes` for the module at `as_distributed`."""
        kinds = kinds or {}
        extremes: list[tuple[str, nn.Module, str]] = []
        followed: list[tuple[str, nn.Module, str]] = []
        followers: list[nn.Module] = []
        persistent = {id(tensor) for tensor in ModuleState(module).tensors.values()}
        floats: list[tuple[nn.Module, str]] = []
        counters: list[tuple[nn.Module, str]] = []
        self._sums_to_watch = self._steps_to_watch = _WATCHED_SUMS
        self._multiples: torch.Tensor | None = None
        """One flag for each element of the counters: True if its last change was a multiple of this
        rank's number of samples."""
        others: list[tuple[nn.Module, str]] = []
        statistics: list[tuple[str, nn.Module, str]] = []
        self._counted: list[tuple[str, nn.Module, str]] = []
        """Counters that are saved with the state, as (full name, owner, local name)."""
        self._exact: list[tuple[str, nn.Module, str]] = []
        """Saved buffers that can be neither averaged nor summed, as (full name, owner, local
        name)."""
        self._owners = [
            (prefix, owner, frozenset(owner._buffers)) for prefix, owner in module.named_modules()
        ]
        """All modules, as (full name, module, names of its buffers at `as_distributed`)."""
        self._unset: list[tuple[str, nn.Module, str]] = []
        """Saved buffers that were None at `as_distributed`."""
        seen = set()
        for prefix, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is None and name not in owner._non_persistent_buffers_set:
                    self._unset.append((f"{prefix}.{name}" if prefix else name, owner, name))
                if buffer is None or buffer.is_meta or id(buffer) in seen:
                    # on the meta device, so not part of this rank's state
                    continue
                seen.add(id(buffer))
                saved, place = (
                    id(buffer) in persistent,
                    (f"{prefix}.{name}" if prefix else name, owner, name),
                )
                if saved and (place[0] in kinds or follows_extremes(owner, name)):
                    (extremes if place[0] in kinds else followed).append(place)
                    followers.extend([owner] if follows_extremes(owner, name) else [])
                    others.append((owner, name))
                    continue
                statistic = buffer.is_floating_point() and saved
                counter = buffer.dtype == torch.int64 and saved
                if saved:
                    (statistics if statistic else self._counted if counter else self._exact).append(
                        place
                    )
                (floats if statistic else counters if counter else others).append((owner, name))
        self.extremes = Extremes(extremes, kinds, followers)
        """Buffers that contain minima and maxima."""
        self._saved = [*statistics, *self._counted, *self._exact, *extremes, *followed]
        """All saved buffers."""
        self._noted: list[tuple[torch.Tensor | None, int]] = []
        """Saved buffers, each with torch's count of its in-place changes, at the last commit; empty
        if no step has been committed."""
        self._between: dict[str, int] = {}
        """Digest of each buffer that was written between the last commit and the step's beginning,
        by name."""
        self.between = 0
        """Digest of all writes since the last commit; 0 if there were none. An aborted step does
        not change it."""
        self._infinite = [each for each in statistics if _has_infinite(each[1]._buffers[each[2]])]
        """Floating-point buffers whose committed value has infinite elements. They were initialized
        with infinities; once an element is finite, it stays finite."""
        self._marks: list[tuple[torch.Tensor | None, int]] = []
        """Exact buffers at the last commit, each with torch's count of its in-place changes."""
        self._within: int | None = None
        """Digest of the changes to exact buffers in the step's first micro-batch."""
        self._places = floats + counters + others
        self._floats = slice(0, len(floats))
        self._counters = slice(len(floats), len(floats) + len(counters))
        self._committed: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] = []
        self._base: tuple[torch.Tensor, torch.Tensor] | None = None
        """Committed statistics and counters, flat; computed on first use."""
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None
        """Statistics and counters, flat, when their changes were last read. None: the committed
        values."""
        self._seen: list[tuple[torch.Tensor | None, int]] = []
        """Buffers when their changes were last read, each with torch's count of its in-place
        changes."""
        self._largest: list[tuple[torch.Tensor, torch.Event]] = []
        """Largest changes of counters, while they are being copied from a device. A value is
        available once its event has occurred."""
        self.commit()

    @property
    def size(self) -> int:
        """Length of the result of `changes`; 0 if there are no statistics and counters."""
        return (
            sum(self._sizes[self._floats]) + _ROWS * sum(self._sizes[self._counters]) + 1
            if self._sizes
            else 0
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the buffers' changes while they are summed."""
        wide = any(
            buffer.dtype in (torch.float64, torch.int64)
            for buffer in self._committed[: self._counters.stop]
        )
        return torch.float64 if wide else torch.float32

    def step_begins(self) -> None:
        """Begins a step: records the buffers' current values, including changes that the script has
        made since the last step, as the step's starting values."""
        if self._noted:
            pairs = zip(self._saved, self._noted, _sight(self._saved), strict=True)
            touched = [
                place for place, then, now in pairs if then[0] is not now[0] or then[1] != now[1]
            ]
            for path, owner, name in touched:
                buffer = owner._buffers.get(name)
                if buffer is not None and self._is_other(owner, name):
                    self._between[path] = digest_of([buffer])
            written = repr(sorted(self._between.items())).encode()
            self.between = (xxhash.xxh3_64_intdigest(written) or 1) if self._between else 0
        self.commit()

    def step_committed(self) -> None:
        """Commits the current values of the buffers."""
        self.extremes.write()
        self._noted, self._between, self.between = _sight(self._saved), {}, 0
        self.commit()

    def replaced(self) -> None:
        """Commits the buffers' current values after a different state has been loaded. The
        difference from the last committed values is not regarded as a write."""
        self._noted, self._between, self.between = [], {}, 0
        self.commit()

    def statistics(self) -> list[torch.Tensor]:
        """Returns the floating-point buffers that are averaged across ranks."""
        return self._now()[self._floats]

    def counters(self) -> dict[str, torch.Tensor]:
        """Returns the counters that are part of the state, by name."""
        return {
            path: buffer
            for path, owner, name in self._counted
            if (buffer := owner._buffers.get(name)) is not None
        }

    def digest_of_alike(self) -> int:
        """Returns a digest of the current values of buffers that must be the same on all ranks."""
        found = [owner._buffers.get(name) for _, owner, name in self._exact]
        return digest_of([buffer for buffer in found if buffer is not None])

    def kept(self) -> Callable[[], None]:
        """Returns a function that restores the buffers of the state to the values that they have
        now."""
        places = [(owner, name, owner._buffers.get(name)) for _, owner, name in self._saved]
        values = [None if buffer is None else buffer.clone() for _, _, buffer in places]

        def put_back() -> None:
            for (owner, name, buffer), value in zip(places, values, strict=True):
                owner._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.data.copy_(value)

        return put_back

    def begun_from(self) -> dict[str, torch.Tensor]:
        """Returns the values of the state's buffers at the step's beginning, by name."""
        return {
            repr(path): self._committed[self._places.index((owner, name))]
            for path, owner, name in self._saved
        }

    def commit(self) -> None:
        """Makes the current values of the buffers the committed state."""
        self._base = self._taken = self._within = None
        self.extremes.begin()
        if not self._places:
            return
        now = self._now()
        if list(map(_kind, now)) == list(map(_kind, self._committed)):
            _copy(self._committed, now)
        else:
            self._committed = [buffer.clone() for buffer in now]
            self._sizes = [buffer.numel() for buffer in self._committed[: self._counters.stop]]
            self._shapes = [buffer.shape for buffer in self._committed[: self._counters.stop]]
        self._marks = _sight(self._exact)
        if self._infinite:
            self._infinite = [
                each for each in self._infinite if _has_infinite(each[1]._buffers.get(each[2]))
            ]

    def put_back(self) -> None:
        """Restores the buffers to their committed values. In a step, these are the values at its
        beginning."""
        self._taken = None
        if self._places:
            self._write(self._committed)

    def changes(
        self, like: torch.Tensor, factor: float, *, weight: float, samples: int
    ) -> torch.Tensor:
        """Returns the buffers' changes in this rank's passes, as a flat tensor of `size` numbers
        with the dtype and device of `like`. Their sum over passes and ranks is the input of
        `apply`. `factor`: factor of the changes in the sum. `weight`, `samples`: total weight and
        number of samples of the passes; 0 samples: unknown.

        Raises:
            ConfigurationError: a buffer has a new shape, or a counter has changed by too much to be
                summed exactly.
        """
        if not self._sizes:
            return like.new_zeros(0)
        now, before = self._shared(like), self._before(like)
        self._taken, self._seen = now, self._in_sight()
        counted = (now[1] - before[1]).to(like.dtype)
        self._check_exact(counted)
        rest = counted.remainder(_MODULUS)
        of_samples = self._count_samples(counted, samples) | self._count_samples(counted, weight)
        if self._steps_to_watch and samples > 1:
            self._multiples = (counted.abs() > samples) & (counted.remainder(samples) == 0)
        mean = (
            torch.cat(
                [
                    _moved(now[0], before[0]),
                    counted,
                    rest,
                    rest.square(),
                    of_samples.to(like.dtype),
                    like.new_ones(1),
                ]
            )
            * factor
        )
        return torch.cat([mean[:-1], counted, mean[-1:]])

    def _count_samples(self, counted: torch.Tensor, samples: float) -> torch.Tensor:
        """Returns one flag for each element of the counters: True if the element seems to count
        samples, because its change equals `samples`, their number or weight in the passes. All
        elements of a buffer are marked if their changes add up to this number, as in a
        histogram."""
        if samples <= 1:
            return torch.zeros_like(counted, dtype=torch.bool)
        found = counted == samples
        for part, each in zip(
            counted.split(self._sizes[self._counters]),
            found.split(self._sizes[self._counters]),
            strict=True,
        ):
            if part.numel() > 1:
                each |= part.sum() == samples
        return found

    def reweighted(self, changes: torch.Tensor, factor: float) -> torch.Tensor:
        """Returns what `changes` would be if the weights of the passes were multiplied by
        `factor`."""
        scaled, counted = changes * factor, sum(self._sizes[self._counters])
        if counted:
            scaled[-1 - counted : -1] = changes[-1 - counted : -1]
        return scaled

    def leave_out(self, like: torch.Tensor) -> None:
        """Makes `apply` discard the changes that this rank has made up to now, because they come
        from a pass of weight 0."""
        if self._sizes:
            self._taken, self._seen = self._shared(like), self._in_sight()

    @property
    def touched(self) -> bool:
        """True if the script has changed a buffer since the last call of `changes`. Changes through
        `.data`, which torch does not count, may be missed."""
        return self._taken is not None and any(
            then is not now or before != after
            for (then, before), (now, after) in zip(self._seen, self._in_sight(), strict=True)
        )

    def _in_sight(self) -> list[tuple[torch.Tensor | None, int]]:
        found = [owner._buffers.get(name) for owner, name in self._places[: self._counters.stop]]
        try:
            return [(buffer, 0 if buffer is None else buffer._version) for buffer in found]
        except RuntimeError:  # a buffer made in torch.inference_mode() has no count
            return [(buffer, 0) for buffer in found]

    def apply(self, changes: torch.Tensor) -> None:
        """Sets the buffers to the committed values plus the summed `changes` of all ranks. What has
        changed on this rank since its last call of `changes` is kept.

        Floating-point buffers change by the weighted mean. If all passes changed an element of an
        integer buffer by the same amount, as in a count of steps, the element changes by that
        amount, unless the amount is each pass's number of samples, or their weight. Other elements
        of integer buffers change by the sum, as in a count of samples.

        Raises:
            ConfigurationError: a buffer has a new shape.
        """
        if not self._sizes:
            return
        floats, count = sum(self._sizes[self._floats]), sum(self._sizes[self._counters])
        committed, now = self._before(changes), self._shared(changes)
        taken = (
            tuple(flat.to(changes.device) for flat in self._taken)
            if self._taken is not None
            else committed
        )
        total = torch.where(changes[-1] > 0, changes[-1], 1.0)
        means, summed = changes[: floats + 4 * count] / total, changes[floats + 4 * count : -1]
        once, rest, squares, of_samples = means[floats:].split(count) if count else (means[:0],) * 4
        moved = committed[0] + means[:floats] + _moved(now[0], taken[0].to(changes.dtype))
        # All ranks have computed the same values for infinite elements; `exact_digest` checks that.
        moved = torch.where(committed[0].isfinite(), moved, now[0])
        alike = (squares - rest.square() < _TOLERANCE) & (of_samples < 1 - _TOLERANCE)
        each = alike.split(self._sizes[self._counters]) if count else ()
        steps = torch.cat([part.all().expand(part.shape) for part in each]) if each else alike
        if count and self._sums_to_watch:
            self._watch_sums(~steps & (of_samples < 1 - _TOLERANCE) & (summed != 0))
        if count and self._steps_to_watch:
            self._watch_steps(steps)
        counted = (
            committed[1]
            + torch.where(steps, once, summed).round().to(torch.int64)
            + (now[1] - taken[1])
        )
        self._write(
            [
                *_split(moved, self._committed[self._floats]),
                *_split(counted, self._committed[self._counters]),
            ]
        )

    def _watch_steps(self, steps: torch.Tensor) -> None:
        """Warns once about counters that change by the same amount on all ranks, if the amount is a
        multiple of this rank's number of samples. It is added only once, although a sum across
        ranks may be intended. `steps`: one flag per element, True if its change is added once."""
        self._steps_to_watch -= 1
        multiples, self._multiples = self._multiples, None
        if multiples is None or not (doubtful := steps & multiples.to(steps.device)).any():
            return
        self._steps_to_watch = 0
        parts = doubtful.split(self._sizes[self._counters])
        _log.warning(
            "int64 buffers %s changed by the same amount on all ranks, which is a multiple of "
            "the number of samples in this rank's batch. The amount is added only once, as for a "
            "count of steps. If the buffers count a property of the samples, such as tokens, the "
            "total over all ranks is larger: count it outside the module, for example with "
            "shoal.all_reduce",
            [name for (name, _, _), part in zip(self._counted, parts, strict=False) if part.any()][
                :3
            ],
        )

    def _watch_sums(self, doubtful: torch.Tensor) -> None:
        """Warns once about int64 buffers that are treated as counters but may have a different
        meaning. `doubtful`: one flag per element, True if its changes are summed and differ from
        the number of samples."""
        self._sums_to_watch -= 1
        parts = doubtful.split(self._sizes[self._counters]) if doubtful.any() else ()
        pairs = zip(self._counted, parts, strict=False)
        names = [name for (name, _, _), part in pairs if part.any()]
        if names:
            self._sums_to_watch = 0
            _log.warning(
                "int64 buffers %s changed by different amounts on different ranks or in "
                "different micro-batches. The changes are summed, which is right only for a "
                "count. Keep a maximum or minimum in floating point, starting at infinity, and "
                "exclude other values (the last value, a position) from the state "
                "(persistent=False)",
                names[:3],
            )

    # ------------------------------------------------------- buffers that are neither averaged nor
    # summed

    def exact_names(self) -> list[str]:
        """Returns the names of changed buffers that must change identically on all ranks: bool,
        integers other than int64, complex numbers. Also includes floating-point buffers whose
        committed value has infinite elements."""
        now = _sight(self._exact)
        pairs = zip(self._exact, self._marks, now, strict=True)
        touched = [
            place for place, then, here in pairs if then[0] is not here[0] or then[1] != here[1]
        ]
        changed = {path for path, owner, name in touched if self._is_other(owner, name)}
        return sorted(changed | {path for path, _, _ in self._infinite})

    def alike_names(self) -> list[str]:
        """Returns the names of all buffers that must be the same on all ranks."""
        return [path for path, _, _ in self._exact]

    def _is_other(self, owner: nn.Module, name: str) -> bool:
        """Returns whether a buffer differs from its committed value. A write that leaves the values
        unchanged is ignored, because it may happen on only some ranks."""
        buffer = owner._buffers.get(name)
        committed = self._committed[self._places.index((owner, name))]
        return buffer is None or not same(buffer, committed)

    def report_writes(self, step: Step, writes: WrittenParameters) -> None:
        """Adds two digests to the step vote: one of what the forward and backward passes have
        written to parameters and exact buffers, and one of what the script has written to
        parameters and buffers since the last commit. `writes`: the writes to parameters."""
        step.writes = joined(writes.digest(), self.exact_digest())
        step.written_between = joined(writes.between, self.between)

    def exact_digest(self) -> int:
        """Returns a digest of the passes' changes to buffers that must change identically on all
        ranks; 0 if nothing has changed."""
        self.refuse_new()
        for path, owner, name in self._unset:
            if owner._buffers.get(name) is not None:
                raise ConfigurationError(
                    f"buffer {path!r} was None at as_distributed but is a tensor now, which the "
                    "other ranks do not expect. Register it with a value of its final shape, or "
                    "with persistent=False",
                    reason="BUFFERS_DIFFER",
                )
        return self._digest_of_exact() if self._within is None else self._within

    def refuse_new(self) -> None:
        """Checks that no module has registered a new saved buffer since `as_distributed`; otherwise
        raises ConfigurationError."""
        for prefix, owner, names in self._owners:
            if len(owner._buffers) == len(names):
                continue
            for name, buffer in owner._buffers.items():
                if (
                    name not in names
                    and buffer is not None
                    and name not in owner._non_persistent_buffers_set
                ):
                    raise ConfigurationError(
                        f"buffer {f'{prefix}.{name}' if prefix else name!r} was registered after "
                        "as_distributed (for example in forward()), so each rank would keep a "
                        "separate value. Either register it before as_distributed, already in "
                        "its final shape, or pass persistent=False to register_buffer",
                        reason="BUFFERS_DIFFER",
                    )

    def micro_batch_ends(self) -> None:
        """Processes the changes of a finished micro-batch. Must be called only for micro-batches
        with a weight above 0. Raises ConfigurationError if buffers that must change identically
        have not changed as in the first micro-batch."""
        self.extremes.micro_batch_ends()
        found = self._digest_of_exact()
        if self._within is not None and found != self._within:
            raise self.apart()
        self._within = found

    def _digest_of_exact(self) -> int:
        names = frozenset(self.exact_names())
        changed = [
            owner._buffers[name]
            for path, owner, name in (*self._exact, *self._infinite)
            if path in names
        ]
        tensors = [tensor for tensor in changed if tensor is not None]
        return (
            (xxhash.xxh3_64_intdigest(f"{sorted(names)}{digest_of(tensors)}".encode()) or 1)
            if tensors
            else 0
        )

    def apart(self, names: Sequence[str] | None = None) -> ConfigurationError:
        """Returns the error for buffers that changed differently between ranks or micro-batches.
        `names`: buffers that may have caused the difference."""
        names = self.exact_names() if names is None else names
        what = f"buffers {names[:3]} were changed" if names else "another rank changed a buffer"
        return ConfigurationError(
            f"{what} in a step to values that differ between ranks or micro-batches, and that "
            "cannot be averaged or summed: bool, integers other than int64, complex numbers, or "
            "floating-point buffers with some infinite elements. Compute the value from the "
            "whole batch (shoal.whole_batch(x)), count in int64, whose changes are summed, keep "
            "averages in floating point, or exclude the buffer from the state (persistent=False)",
            reason="BUFFERS_DIFFER",
        )

    def _shared(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the current statistics and counters, flat. Raises ConfigurationError if a buffer
        has a new shape."""
        now = self._now()
        if [buffer.shape for buffer in now[: self._counters.stop]] != self._shapes:
            self._refuse_shapes(now)
        return _flat(now[self._floats], like.dtype, like.device), _flat(
            now[self._counters], torch.int64, like.device
        )

    def _refuse_shapes(self, now: list[torch.Tensor]) -> None:
        for (owner, name), buffer, committed in zip(
            self._places, now, self._committed[: self._counters.stop], strict=False
        ):
            if buffer.shape != committed.shape:
                raise ConfigurationError(
                    f"buffer {name!r} of {type(owner).__name__} changed its shape from "
                    f"{tuple(committed.shape)} to {tuple(buffer.shape)} in the forward pass, but "
                    "the ranks sum its changes, so its shape must stay the same; register a "
                    "cache with persistent=False"
                )

    def _before(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the committed statistics and counters, flat. The caller must not modify the
        result."""
        if self._base is None or (self._base[0].dtype, self._base[0].device) != (
            like.dtype,
            like.device,
        ):
            statistics, counters = self._committed[self._floats], self._committed[self._counters]
            self._base = (
                _flat(statistics, like.dtype, like.device),
                _flat(counters, torch.int64, like.device),
            )
        return self._base

    def _check_exact(self, counted: torch.Tensor) -> None:
        """Checks that no counter has changed by too much; otherwise raises ConfigurationError. On a
        device, the error may be about an earlier step."""
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
            names = sorted(
                {f"{type(owner).__name__}.{name}" for owner, name in self._places[self._counters]}
            )
            raise ConfigurationError(
                f"one of the integer buffers {names[:5]} changed by {largest:.0f} in a step, but "
                "the ranks sum the changes, which is exact only up to 2^40; keep values that are "
                "not counts (a seed, a hash) in a plain attribute of the module"
            )

    def _now(self) -> list[torch.Tensor]:
        found = (owner._buffers.get(name) for owner, name in self._places)
        return [
            torch.empty(0)
            if buffer is None
            else buffer.detach()
            if buffer.requires_grad
            else buffer
            for buffer in found
        ]

    def _write(self, values: list[torch.Tensor]) -> None:
        now = self._now()[: len(values)]
        for i, (value, buffer) in enumerate(zip(values, now, strict=True)):
            if value.shape != buffer.shape:
                owner, name = self._places[i]
                now[i] = torch.empty_like(value)
                owner._buffers[name] = now[i]
        # Written through .data, because autograd may still need the buffer for a backward pass, as
        # in a pipeline.
        _copy([buffer.data for buffer in now], values)


def _sight(places: Sequence[tuple[str, nn.Module, str]]) -> list[tuple[torch.Tensor | None, int]]:
    found = [owner._buffers.get(name) for _, owner, name in places]
    return [
        (buffer, 0 if buffer is None or buffer.is_inference() else buffer._version)
        for buffer in found
    ]


def _has_infinite(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and not buffer.is_meta and bool(buffer.isinf().any())


@torch.no_grad()
def give_memory(module: nn.Module) -> None:
    """Replaces each buffer that is an expanded view with a copy in which every element has its own
    memory. Expanded views cannot be written to, restored or loaded."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta or buffer.layout is not torch.strided:
                continue
            if any(
                stride == 0 and size > 1
                for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                owner._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def kept_buffers(module: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the module's buffers to the values that they have now."""
    places = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    values = [buffer.clone() for _, _, buffer in places]

    def put_back() -> None:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer
        _copy([buffer.data for _, _, buffer in places], values)  # through .data, as in `_write`

    return put_back


def _moved(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Returns the elementwise difference. It is zero where the earlier value was infinite, and
    where both values are the same, even if they are NaN."""
    alike = (now == before) | (now.isnan() & before.isnan()) | before.isinf()
    return torch.where(alike, 0.0, now - before)


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return buffer.shape, buffer.dtype, buffer.device


def _flat(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.cat(
        [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        or [torch.empty(0)]
    ).to(device, dtype)


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like]) if like else ()
    return [
        part if tensor.dim() == 1 else part.view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)


def joined(writes: int, buffers: int) -> int:
    """Combines two digests of writes: to parameters (`writes`) and to buffers (`buffers`); 0 if
    both are 0."""
    return xxhash.xxh3_64_intdigest(f"{writes} {buffers}".encode()) or 1 if writes or buffers else 0
