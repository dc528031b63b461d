"""Types for a rank's memory, by role, and for its traffic in a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory on the rank that uses most, in bytes and by role."""

    parameters: float
    gradients: float
    """Gradients in the form in which the optimizer receives them. Gradients that are being sent
    count as staging."""
    optimizer: float
    """State of the optimizer."""
    mirrors: float = 0.0
    """Parameters, gradients and optimizer state that the rank mirrors for another rank, so that
    nothing is lost if that rank fails."""
    staging: float = 0.0
    """Temporary memory: gathered blocks, reductions in progress, and the start of a round. Includes
    the model's buffers."""
    activations: float | None = None
    """Memory that autograd keeps for the backward pass; None: unknown without an example."""

    @property
    def held(self) -> float:
        """Sum of parameters, gradients, optimizer state and mirrors."""
        return self.parameters + self.gradients + self.optimizer + self.mirrors

    def roles(self) -> dict[str, float]:
        """Returns the bytes by role. Unknown activations count as 0."""
        return {field.name: getattr(self, field.name) or 0.0 for field in dataclasses.fields(self)}

    @property
    def total(self) -> float:
        """Sum of all roles. The roles need not reach their maximum at the same time, so a step's
        peak is rarely higher."""
        return sum(self.roles().values())


class When(enum.StrEnum):
    """Part of the step during which something is sent."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALONE = "alone"
    """Sent while the rank computes nothing."""
    IN_PIPELINE = "in pipeline"
    """Sent between pipeline stages. The wait for it counts as part of the pipeline's time."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of message that a rank sends in a step."""

    what: str
    """Content of the message: gradients, parameters, mirrors, activations or averages."""
    sent: float
    """Bytes that a rank sends in a step, averaged over the ranks."""
    when: When
    group: int
    """Number of adjacent ranks between which the message travels. If they are all on one host, the
    message stays on that host."""
    messages: float = 1.0
    """Number of collectives in a step."""


def all_reduce(size: float, ranks: int) -> float:
    """Returns the bytes that a rank sends to sum `size` bytes over `ranks` ranks in a ring."""
    return 2.0 * size * (ranks - 1) / ranks


def gather(size: float, ranks: int) -> float:
    """Returns the bytes that a rank sends in an all-gather or reduce-scatter of `size` bytes in
    total."""
    return size * (ranks - 1) / ranks


def sent(traffic: Iterable[Traffic]) -> float:
    """Returns the total bytes sent."""
    return sum(each.sent for each in traffic)
