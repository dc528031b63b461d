"""Logs values passed to `self.log` only once their step is committed, combined across all ranks.

Lightning adds a logged value to the epoch's results immediately. Here a step may be aborted, and a
rank knows only its own values. Values logged during a batch are therefore held back. When the step
is committed, or the evaluation is done, each rank logs the values of all ranks instead.

Values logged outside of batches are logged immediately and recorded. They must be the same on all
ranks; the ranks compare them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from shoal_common.errors import ConfigurationError, PreconditionError
from torchmetrics import Metric

from shoal.integrations.lightning.metrics import Counted, Metrics

_log = logging.getLogger(__name__)

_ARGUMENTS: Final = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
"""Arguments of `self.log` that are stored with a value."""

_REDUCTIONS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
}
"""Functions that combine the values of a step's parts, by the argument `reduce_fx`, except for the
mean."""


@dataclass(frozen=True)
class _Known:
    """Identity and settings of a logged value."""

    fx: str
    name: str
    reduction: str
    metric: str | None
    """Name of the logged torchmetrics module; None if a value is logged."""
    flags: tuple[bool, ...]
    """Values of `_ARGUMENTS`."""

    @property
    def arguments(self) -> dict[str, Any]:
        named: dict[str, Any] = dict(zip(_ARGUMENTS, self.flags, strict=True))
        return {
            **named,
            "reduce_fx": getattr(torch, self.reduction),
            "metric_attribute": self.metric,
        }

    def text(self) -> str:
        return json.dumps([self.fx, self.name, self.reduction, self.metric, list(self.flags)])

    @classmethod
    def of(cls, text: str) -> _Known:
        fx, name, reduction, metric, flags = json.loads(text)
        return cls(fx, name, reduction, metric, tuple(flags))


@dataclass(frozen=True)
class Missing:
    """Known facts about a step in which a worker died before its logged values were gathered."""

    mean_loss: float | None
    """Mean loss over all ranks' samples; None if it was not reported."""
    weight: float | None
    """Total weight of all ranks' samples; None if it was not reported."""


class Held:
    """Values logged during one part of a step or one batch of an evaluation. They are held back
    until the step is committed or the batch is evaluated."""

    def __init__(self, part: int, weight: Callable[[], float]) -> None:
        """
        Args:
            part: index of this part among the parts of all ranks; -1 for values logged before or
                after the parts of a step.
            weight: returns the weight of the part, usually its number of samples. A `batch_size`
                passed to `log` replaces it, unless it is 0 (a stand-in batch).
        """
        self.part = part
        self._weight = weight
        self._entries: list[list[Any]] = []

    def log(self, known: _Known, value: float | None, batch_size: int | None) -> None:
        """Adds a logged value. `value`: None if a metric is logged, because the metric itself
        stores its value. `batch_size`: as passed to `self.log`."""
        if value is None:
            weight = 1.0
        elif batch_size is None or self._weight() == 0:  # a stand-in batch has no weight
            weight = self._weight()
        else:
            weight = float(batch_size)
        self._entries.append([known.text(), value, weight])

    def encode(self, counted: Mapping[str, Counted]) -> dict[str, Any]:
        """Returns the logged values and metric contributions of the part, to be sent to other
        ranks."""
        return {"part": self.part, "entries": self._entries, "counted": dict(counted)}


class Results(_ResultCollection):
    """Values logged in an epoch. Replaces Lightning's own collection."""

    def __init__(self, *, training: bool) -> None:
        super().__init__(training=training)
        self._held: Held | None = None
        self._metrics: Metrics | None = None
        self._elsewhere: list[list[Any]] = []
        self._warned = False

    def attach(self, metrics: Metrics) -> None:
        """Sets the metrics of the module whose values are logged."""
        self._metrics = metrics

    @property
    def metrics_of_module(self) -> Metrics:
        """Metrics of the module whose values are logged."""
        assert self._metrics is not None
        return self._metrics

    def hold(self, held: Held | None) -> None:
        """Collects later logged values in `held` instead of logging them. None: logs them
        immediately."""
        self._held = held

    def log(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Logs a value, or adds it to the values held back. Called by Lightning for `self.log`."""
        if self._held is None:
            super().log(fx, name, value, **arguments)
            if not arguments.get("rank_zero_only"):
                self._elsewhere.append(
                    [fx, name, None if isinstance(value, Metric) else float(value)]
                )
            return
        reduction = arguments.get("reduce_fx", "mean")
        reduction = (
            reduction.lower()
            if isinstance(reduction, str)
            else getattr(reduction, "__name__", str(reduction))
        )
        reduction = "mean" if reduction == "avg" else reduction
        if reduction != "mean" and reduction not in _REDUCTIONS:
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduction!r}) in {fx}: expected 'mean', 'sum', "
                "'min' or 'max'"
            )
        known = _Known(
            fx,
            name,
            reduction,
            arguments.get("metric_attribute"),
            tuple(
                bool(arguments.get(each, each not in ("prog_bar", "on_step")))
                for each in _ARGUMENTS
            ),
        )
        if isinstance(value, Metric) and known.metric is None:
            raise ConfigurationError(
                f"self.log({name!r}, a {type(value).__name__}) in {fx}: the metric is not an "
                "attribute of the module; make it one"
            )
        self._held.log(
            known,
            None if isinstance(value, Metric) else float(value.detach()),
            arguments.get("batch_size"),
        )

    def log_step(
        self,
        received: Iterable[Mapping[str, Any]],
        *,
        missing: Missing | None,
        losses: Sequence[Sequence[float]],
    ) -> None:
        """Logs a committed step. Adds the metric contributions of its parts to the metrics, and
        logs one value per name, combined over all parts.

        Args:
            received: the parts of all ranks.
            missing: known facts about the step if a worker died before its parts were gathered, in
                which case a warning is logged once; None: all parts are available.
            losses: losses of the parts with their weights.
        """
        parts = sorted(received, key=lambda one: int(one["part"]))
        values: dict[str, list[tuple[float | None, float]]] = {}
        for one in parts:
            for known, value, weight in one["entries"]:
                values.setdefault(known, []).append((value, weight))
        if missing is not None and not self._warned:
            self._warned = True
            _log.warning(
                "a worker died after a step, before its logged values were gathered; the logged "
                "values and metrics of that step cover only the samples "
                "of the other workers (the loss and the model's parameters are exact)"
            )
        self._note_batch_values([one["counted"] for one in parts], values)
        self.metrics_of_module.add([one["counted"] for one in parts])
        for text, pairs in values.items():
            known = _Known.of(text)
            weight = math.fsum(each for _, each in pairs)
            numbers = [(value, each) for value, each in pairs if value is not None and each > 0]
            if known.metric is not None:
                self._log(known, None, 1.0)
            elif not numbers:
                continue  # stand-in batches
            elif missing is not None and known.reduction == "mean":
                is_loss = missing.mean_loss is not None and sorted(map(list, pairs)) == sorted(
                    map(list, losses)
                )
                mean = math.fsum(value * each for value, each in numbers) / weight
                self._log(known, missing.mean_loss if is_loss else mean, missing.weight or weight)
            elif known.reduction == "mean":
                self._log(
                    known, math.fsum(value * each for value, each in numbers) / weight, weight
                )
            else:
                self._log(
                    known, _REDUCTIONS[known.reduction]([value for value, _ in numbers]), weight
                )

    def log_batch(self, received: Mapping[str, Any]) -> None:
        """Logs the values of one evaluation batch as if this process had just computed it. Does not
        add the batch's contributions to metrics; the caller adds those of all batches at once."""
        self._note_batch_values(
            [received["counted"]], {known for known, _, _ in received["entries"]}
        )
        for text, value, weight in received["entries"]:
            self._log(_Known.of(text), value, weight)

    def _note_batch_values(
        self, batches: Sequence[Mapping[str, Counted]], texts: Iterable[str]
    ) -> None:
        for known in map(_Known.of, texts):
            if known.metric is not None and known.arguments["on_step"]:
                self.metrics_of_module.note_batch_value(known.metric, batches)

    def _log(self, known: _Known, value: float | None, weight: float) -> None:
        given: Any = (
            self.metrics_of_module.find(known.metric)
            if known.metric is not None
            else torch.tensor(value)
        )
        super().log(known.fx, known.name, given, batch_size=weight, **known.arguments)

    # ----------------------------------------------------------------- values logged on other ranks

    def take_elsewhere(self) -> list[list[Any]]:
        """Returns the values logged outside of batches since the last call, as lists of hook, name
        and value."""
        taken, self._elsewhere = self._elsewhere, []
        return taken

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Resets the results at the end of an epoch. Called by Lightning.

        Lightning also calls it for a hook's first values in an epoch. These calls are ignored,
        because a worker that joined in the middle of the epoch would lose the values received from
        the other workers.
        """
        if fx is None:
            super().reset(metrics, fx)

    def state_dict(self) -> list[list[Any]]:
        """Returns the values logged in this epoch, for joiners and checkpoints."""
        return [
            [
                key,
                self._known(key).text(),
                float(one.value) if one.is_tensor else None,
                float(one.cumulated_batch_size)
                if one.is_tensor and one.meta.is_mean_reduction
                else 1.0,
            ]
            for key, one in self.items()
            if not one.has_reset and one.meta.on_epoch
        ]

    def load_state_dict(self, state: Iterable[list[Any]]) -> None:
        """Restores logged values from the result of `state_dict`."""
        self.clear()
        for key, text, value, size in state:
            known = _Known.of(text)
            self._log(known, None if value is None else 0.0, 1.0)
            if value is not None:
                self[key].value = torch.tensor(value)
                if known.reduction == "mean":
                    self[key].cumulated_batch_size = torch.tensor(size)

    def _known(self, key: str) -> _Known:
        meta = self[key].meta
        flags = tuple(bool(getattr(meta, each)) for each in _ARGUMENTS)
        return _Known(meta.fx, meta.name, meta.reduce_fx.__name__, meta.metric_attribute, flags)


def check_alike(everyones: Sequence[list[list[Any]]]) -> None:
    """Raises PreconditionError, on all ranks, unless all ranks logged the same values outside of
    batches."""
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        for one, other in zip(first, theirs, strict=False):
            if one != other and not (
                one[:2] == other[:2] and one[2] != one[2] and other[2] != other[2]
            ):
                raise PreconditionError(
                    f"self.log({one[1]!r}) in {one[0]}: rank 0 logged {one[2]}, but rank {rank} "
                    f"logged {other[1]!r} with {other[2]}, since workers see different batches. "
                    "Log it in training_step, validation_step or test_step, combine the values "
                    "with shoal.gather first, or log one rank's value with rank_zero_only=True",
                    reason="RANKS_DIVERGED",
                )
        if len(first) != len(theirs):
            names = sorted({f"{fx}: {name}" for fx, name, _ in [*first, *theirs]})
            raise PreconditionError(
                f"self.log outside of batches: rank 0 logged {len(first)} values, but rank {rank} "
                f"logged {len(theirs)} ({', '.join(names)}); log the same values on every rank, "
                "or use rank_zero_only=True",
                reason="RANKS_DIVERGED",
            )
