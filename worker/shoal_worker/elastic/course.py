"""What this rank has issued of the collectives of a step, in their order, to be compared when ranks
wait.

All ranks issue the same ones, so of two ranks' lists one is the beginning of the other, however far
each has come. Where two lists differ at one place the ranks diverged: one rank told an
optimizer to step, say, and another one left that out and went on with the next pass. Each then
waits in a collective that the other never issues.

The training thread adds to it, and the threads on which backward passes run while that one waits;
the desync detector's thread reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GRADIENTS = "sums gradients of a backward pass"
FORWARD = "takes the model through a forward pass"
EXTREMES = "agrees on buffers that hold minima and maxima"
SUM = "sums the step's gradients"
CLOSING = (
    "ends the step (optimizer.step(), or train_step, clip_grad_norm_ and the like, which do "
    "it ahead)"
)
BATCH = "ends the batch (it steps the last of all optimizers, or asks for the next batch)"


class Course:
    """The collectives that this rank has issued since one committed step, in one generation."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._issued: list[str] = []

    def begin(self, *place: int) -> None:
        """A step begins at `place`. Steps that begin at one place one after the other, since the
        first was left, are one list."""
        if place != self._place:
            self._place, self._issued = place, []

    def add(self, what: str, of: str = "") -> None:
        """A collective is about to be issued. `what`: what the rank does, a verb first. `of`: which
        model's, where there are several."""
        self._issued.append(f"{what}, of {of}" if of else what)

    def told(self, *, passes: bool) -> dict[str, Any]:
        """The list in a form that JSON can carry, for `apart` on another rank; each text is in it
        once. `passes`: with the forward passes, which the ranks of one replica have in common."""
        issued = [each for each in list(self._issued) if passes or not each.startswith(FORWARD)]
        texts = list(dict.fromkeys(issued))
        numbers = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "issued": [numbers[text] for text in issued]}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """What two ranks do at the first place at which they have issued different collectives; None:
    neither has gone another way. Each: `Course.told`."""
    lists = ([each["texts"][number] for number in each["issued"]] for each in (one, other))
    return next(
        ((mine, theirs) for mine, theirs in zip(*lists, strict=False) if mine != theirs), None
    )
