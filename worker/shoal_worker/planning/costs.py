"""Types for a rank's memory, by purpose, and for its traffic in a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory in bytes, by purpose, on the rank that uses the most."""

    parameters: float
    gradients: float
    """Gradients as the optimizer receives them. Gradients that are being sent are part of
    `staging`."""
    optimizer: float
    """State of the optimizer."""
    mirrors: float = 0.0
    """Parameters, gradients and optimizer state that the rank mirrors for another rank, so that the
    state survives if that rank fails."""
    staging: float = 0.0
    """Temporary memory: gathered blocks, reductions in progress, and local_sgd's copy of the model
    from the start of a round. Includes the model's buffers."""
    activations: float | None = None
    """Memory that autograd keeps for the backward pass; None: unknown, because no example inputs
    were given."""

    @property
    def held(self) -> float:
        """Sum of parameters, gradients, optimizer state and mirrors."""
        return self.parameters + self.gradients + self.optimizer + self.mirrors

    def roles(self) -> dict[str, float]:
        """Returns the bytes by purpose (the names of the fields). Unknown activations are included
        as 0."""
        return {field.name: getattr(self, field.name) or 0.0 for field in dataclasses.fields(self)}

    @property
    def total(self) -> float:
        """Sum of all fields. This is usually an upper bound on a step's peak, because the fields
        need not reach their maximum at the same time."""
        return sum(self.roles().values())


class When(enum.StrEnum):
    """Phase of a step in which something is sent."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALONE = "alone"
    """Sent while the rank does not compute."""
    IN_PIPELINE = "in pipeline"
    """Sent between pipeline stages. The wait for it is part of the pipeline's time."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind that a rank sends in a step."""

    what: str
    """Content of the message: gradients, parameters, mirrors, activations or averages."""
    sent: float
    """Bytes that a rank sends in a step, averaged across ranks."""
    when: When
    group: int
    """Number of adjacent ranks that exchange these messages. If all of them are on one host, the
    messages do not leave it."""
    messages: float = 1.0
    """Number of collectives in a step."""


def all_reduce(size: float, ranks: int) -> float:
    """Returns the bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2.0 * size * (ranks - 1) / ranks


def gather(size: float, ranks: int) -> float:
    """Returns the bytes that each rank sends in an all-gather or reduce-scatter. `size`: size of
    the gathered or summed tensor in bytes."""
    return size * (ranks - 1) / ranks


def sent(traffic: Iterable[Traffic]) -> float:
    """Returns the total bytes sent."""
    return sum(each.sent for each in traffic)
