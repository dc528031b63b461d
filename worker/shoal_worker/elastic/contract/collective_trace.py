"""Trace of the collectives issued by this rank in a step, for comparison when ranks wait.

All ranks issue the same collectives, so one of two ranks' traces is a prefix of the other, however
far each has come. If two traces differ at one position, the scripts diverged: for example, one rank
called an optimizer's `step` while another omitted it and continued with the next pass. Each then
waits in a collective that the other never issues.

Written by the training thread, and by the threads of backward passes while that one waits; read by
the desync detector's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GRADIENTS = "reduces gradients of a backward pass"
FORWARD = "runs a forward pass of the model"
EXTREMES = "reduces buffers that hold minima and maxima"
SUM = "reduces the step's gradients"
COMMIT = (
    "commits the step (optimizer.step(), or train_step, clip_grad_norm_ and others that commit "
    "early)"
)
BATCH = "ends the batch (steps the last of all optimizers, or requests the next batch)"


class CollectiveTrace:
    """Collectives issued by this rank since a committed step, in one generation."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._issued: list[str] = []

    def begin(self, *place: int) -> None:
        """Begins a step at `place`. Consecutive steps that begin at the same place, because the
        first was abandoned, share one trace."""
        if place != self._place:
            self._place, self._issued = place, []

    def add(self, what: str, of: str = "") -> None:
        """Adds a collective that is about to be issued. `what`: the action, starting with a verb.
        `of`: the model, if there are several."""
        self._issued.append(f"{what}, of {of}" if of else what)

    def encode(self, *, passes: bool) -> dict[str, Any]:
        """Returns the trace as JSON for `apart` on another rank; each text is contained once.
        `passes`: include the forward passes, which the ranks of one replica have in common."""
        issued = [each for each in list(self._issued) if passes or not each.startswith(FORWARD)]
        texts = list(dict.fromkeys(issued))
        numbers = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "issued": [numbers[text] for text in issued]}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the actions of two ranks at the first position at which they issued different
    collectives; None if they did not diverge. Arguments: results of `CollectiveTrace.encode`."""
    lists = ([each["texts"][number] for number in each["issued"]] for each in (one, other))
    return next(
        ((mine, theirs) for mine, theirs in zip(*lists, strict=False) if mine != theirs), None
    )
