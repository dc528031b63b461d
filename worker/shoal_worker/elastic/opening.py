"""Configuration for connecting the groups of one generation (`group.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta

from shoal_common.errors import ConfigurationError
from torch.distributed import Store

from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.elastic.generation import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """Configuration for connecting the groups of one generation."""

    make_backend: Callable[[], CommunicationBackend]
    store: Callable[[str], Store]
    """Returns a fresh store by name; the same for all ranks that use the name."""
    hostname: str | None
    connect_timeout: timedelta
    collective_timeout: timedelta

    def initialize(
        self,
        backend: CommunicationBackend,
        generation: Generation,
        store: Store,
        members: Sequence[int] | None = None,
    ) -> None:
        """Connects `backend`; `members`: see `CommunicationBackend.initialize`, whose errors it
        raises."""
        backend.initialize(
            rank=generation.rank,
            world_size=generation.world_size,
            store=store,
            timeout=self.collective_timeout,
            connect_timeout=self.connect_timeout,
            hostname=self.hostname,
            members=members,
        )


def number_of_part(
    members: Sequence[int], division: Sequence[Sequence[int]], world_size: int
) -> int | None:
    """Returns the index of the part of `division` with these members; None if the division does not
    name every rank once.

    Raises:
        ConfigurationError: it has no such part, or parts of different sizes.
    """
    parts = [list(part) for part in division]
    if sorted(rank for part in parts for rank in part) != list(range(world_size)):
        return None
    if list(members) not in parts or len({len(part) for part in parts}) > 1:
        raise ConfigurationError(
            f"subgroup({list(members)}) of division={parts}: expected one of these parts, and "
            "parts of equal size"
        )
    return parts.index(list(members))
