"""What the groups of one generation are connected with (`group.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta

from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.elastic.generation import Generation
from shoal_worker.torch_internals import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """What the groups of one generation are connected with."""

    make_backend: Callable[[], CommunicationBackend]
    store: Callable[[str], Store]
    """A store that no group has used, by a name; the same for all ranks that say the name."""
    hostname: str | None
    connect_timeout: timedelta
    collective_timeout: timedelta

    def initialize(self, backend: CommunicationBackend, generation: Generation, store: Store, members: Sequence[int] | None = None) -> None:
        """Connects `backend`; `members`: see `CommunicationBackend.initialize`. Raises what that raises."""
        backend.initialize(
            rank=generation.rank,
            world_size=generation.world_size,
            store=store,
            timeout=self.collective_timeout,
            connect_timeout=self.connect_timeout,
            hostname=self.hostname,
            members=members,
        )
