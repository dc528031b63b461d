"""What a rank holds, by role, and what it sends in a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the rank that holds most."""

    parameters: float
    gradients: float
    """Gradients as the optimizer gets them: those that are on their way count as staging."""
    optimizer: float
    """The optimizer's state."""
    mirrors: float = 0.0
    """Parameters, gradients and state that the rank holds for another one, so that a death loses
    nothing."""
    staging: float = 0.0
    """What is needed for a while: blocks that are gathered, sums on their way, the start of a
    round; and the model's buffers."""
    activations: float | None = None
    """What autograd keeps for the backward pass; None: there was no example."""

    @property
    def held(self) -> float:
        """Parameters, gradients, optimizer state and mirrors."""
        return self.parameters + self.gradients + self.optimizer + self.mirrors

    def roles(self) -> dict[str, float]:
        """Bytes by role; activations that are not known are 0."""
        return {field.name: getattr(self, field.name) or 0.0 for field in dataclasses.fields(self)}

    @property
    def total(self) -> float:
        """All roles together. They need not all be at their largest at once, so a step's peak is
        seldom higher."""
        return sum(self.roles().values())


class When(enum.StrEnum):
    """Beside which part of the step something is sent."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALONE = "alone"
    """Nothing is computed meanwhile."""
    IN_PIPELINE = "in pipeline"
    """Between stages: what waits for it is in the pipeline's time."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of message."""

    what: str
    """gradients, parameters, mirrors, activations or averages."""
    sent: float
    """Bytes that a rank sends in a step, in the mean over the ranks."""
    when: When
    group: int
    """How many neighbouring ranks the message's path spans: up to a host's size it stays on the
    host."""
    messages: float = 1.0
    """In how many collectives."""


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that a rank sends to sum `size` bytes over so many ranks, in a ring."""
    return 2.0 * size * (ranks - 1) / ranks


def gather(size: float, ranks: int) -> float:
    """Bytes that a rank sends so that all have `size` bytes of which each had a part; and to
    scatter a sum of them."""
    return size * (ranks - 1) / ranks


def sent(traffic: Iterable[Traffic]) -> float:
    """Bytes of all of it."""
    return sum(each.sent for each in traffic)
