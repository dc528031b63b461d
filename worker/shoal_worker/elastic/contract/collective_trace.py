"""Trace of the collectives that this rank issues in a step. When ranks wait, their traces are
compared.

All ranks issue the same collectives, so of two ranks' traces one is a prefix of the other. If two
traces differ at one position, the scripts diverged: for example, one rank called an optimizer's
`step` while another omitted it and continued with the next pass. Each rank then waits in a
collective that the other rank never issues.

The training thread writes the trace, and so do the threads of backward passes while the training
thread waits. The desync detector's thread reads it.
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
    """Collectives that this rank has issued in the current step of one generation."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._issued: list[str] = []

    def begin(self, *place: int) -> None:
        """Begins the trace of a step at `place`. If an abandoned step began at the same place, the
        next step continues its trace."""
        if place != self._place:
            self._place, self._issued = place, []

    def add(self, what: str, of: str = "") -> None:
        """Adds a collective that is about to be issued. `what`: the action, starting with a verb.
        `of`: name of the model, if there are several."""
        self._issued.append(f"{what}, of {of}" if of else what)

    def encode(self, *, passes: bool) -> dict[str, Any]:
        """Returns the trace as JSON, for `apart` on another rank. Each distinct text is included
        once. `passes`: include the forward passes, which the ranks of one replica have in
        common."""
        issued = [each for each in list(self._issued) if passes or not each.startswith(FORWARD)]
        texts = list(dict.fromkeys(issued))
        numbers = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "issued": [numbers[text] for text in issued]}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Compares two ranks' traces (results of `CollectiveTrace.encode`). Returns both actions at the
    first position with different collectives, or None if the ranks did not diverge."""
    lists = ([each["texts"][number] for number in each["issued"]] for each in (one, other))
    return next(
        ((mine, theirs) for mine, theirs in zip(*lists, strict=False) if mine != theirs), None
    )
