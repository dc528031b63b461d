"""What `self.log` is given: over all ranks, and not before the step counts in which it was.

Lightning adds a value to what an epoch is the mean of when it is logged. A step may be void, and its values are this rank's. So they wait
here; when the step counts, or the evaluation has its sums, the mean over all samples is logged in their place, the same on all ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic import collectives
from shoal_worker.elastic.session import Session
from shoal_worker.elastic.step import Step

_log: Final = logging.getLogger(__name__)

_ARGUMENTS: Final = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
"""Arguments of `log` that go with a value."""


class Results(_ResultCollection):
    """Values that were logged. Between `hold` and `release` they are kept apart."""

    def __init__(self, *, training: bool) -> None:
        super().__init__(training=training)
        self._held: dict[str, list[tuple[float, float]]] | None = None
        self._weight = 1.0

    def hold(self) -> None:
        """What is logged from here on waits; what waited is dropped."""
        self._held, self._weight = {}, 1.0

    def weigh(self, weight: float) -> None:
        """What the next values weigh in the mean over all ranks."""
        self._weight = weight

    def release(self) -> dict[str, list[tuple[float, float]]]:
        """What waited, by what it was logged as: value and weight of each."""
        held, self._held = self._held or {}, None
        return held

    def log(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Lightning calls it, for `self.log`."""
        if self._held is None:
            super().log(fx, name, value, **arguments)
            return
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"self.log({name!r}, a {type(value).__name__}) in {fx}: it would count this worker's samples alone; log a number or a "
                "tensor that is a mean over the batch"
            )
        if arguments.get("reduce_fx", "mean") not in ("mean", "avg", torch.mean):
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={arguments['reduce_fx']!r}) in {fx}: expected 'mean': values are averaged over all ranks "
                "by samples; log a mean over the batch"
            )
        if arguments.get("on_step") and not self.training:
            raise ConfigurationError(
                f"self.log({name!r}, on_step=True) in {fx}: the batches of an evaluation are dealt to all ranks, and no order is theirs: "
                "leave on_step out"
            )
        known = json.dumps([fx, name, *(bool(arguments.get(each, each != "prog_bar")) for each in _ARGUMENTS)])
        self._held.setdefault(known, []).append((float(value.detach()), self._weight))

    def log_mean(self, known: str, value: float, weight: float) -> None:
        """Logs what is a mean over all ranks, under what `release` named it; it weighs `weight` in the mean over an epoch."""
        fx, name, *flags = json.loads(known)
        named = dict(zip(_ARGUMENTS, flags, strict=True))
        super().log(fx, name, torch.tensor(value), batch_size=max(1, round(weight)), **named)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Lightning calls it: at the end of an epoch, and for a hook's first values in one. Those are the epoch's first without it, and in
        a worker that joined within the epoch they are not."""
        if fx is None:
            super().reset(metrics, fx)

    def state_dict(self) -> list[list[Any]]:
        """What has been logged in this epoch, for joiners and checkpoints."""
        return [
            [key, self._known(key), float(one.value), int(one.cumulated_batch_size)]
            for key, one in self.items()
            if one.is_tensor and not one.has_reset and one.meta.on_epoch and one.meta.is_mean_reduction
        ]

    def load_state_dict(self, state: Iterable[list[Any]]) -> None:
        """Inverse of `state_dict`."""
        self.clear()
        for key, known, value, size in state:
            self.log_mean(known, 0.0, 1.0)
            self[key].value, self[key].cumulated_batch_size = torch.tensor(value), torch.tensor(size)

    def _known(self, key: str) -> str:
        meta = self[key].meta
        return json.dumps([meta.fx, meta.name, *(getattr(meta, each) for each in _ARGUMENTS)])


class Gathered:
    """Means over all ranks of what a step logged."""

    def __init__(self) -> None:
        self._warned = False

    def log(self, session: Session, results: Results, step: Step | None, *, own_loss: list[tuple[float, float]], ranks: int) -> None:
        """A step counts: logs what it held. Every rank calls it, behind the step.

        Args:
            session: this process's.
            results: of the training.
            step: with which the loss over all ranks came: exact, whoever died since.
            own_loss: the losses of this rank's batches, with what they weigh.
            ranks: how many took part in the step.
        """
        own = {known: [values, values == own_loss] for known, values in results.release().items()}
        everyones: list[Mapping[str, Any]] = collectives.gather(session, own)
        mean_loss, whole = (None, None) if step is None else (step.mean_loss, step.weight_of_all)
        for known in sorted({name for one in everyones for name in one}):
            told = [one[known] for one in everyones if known in one]
            values = [pair for pairs, _ in told for pair in pairs]
            weight = sum(each for _, each in values)
            if all(is_loss for _, is_loss in told) and mean_loss is not None:
                results.log_mean(known, mean_loss, whole or weight)
            elif weight > 0:
                results.log_mean(known, sum(value * each for value, each in values) / weight, whole or weight)
                self._warn(len(everyones) < ranks, known)

    def _warn(self, missing: bool, known: str) -> None:
        if missing and not self._warned:
            self._warned = True
            _log.warning(
                "self.log(%r): a worker died between a step and the gathering of what it had logged; the value of that step is a mean over "
                "the other workers' samples (the loss is exact, and so are the weights)",
                json.loads(known)[1],
            )
