"""State between the ranks of a group: those that hold it give it, those that lack it take it, and all leave together.

Giving and taking end with an exchange on the group, so that nobody changes its tensors while another reads them. The donor's own threads
serve the bytes (`transfer.py`); everything here runs on the training thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from shoal_common.errors import CorruptDataError, UnavailableError

from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.transfer import StateDonor, take_state
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

MOST_DONORS: Final = 16
"""That one receiver asks. More fill no link better, and each costs a thread, a connection and the description of the whole state."""


class StateExchange:
    """This rank's side of transfers."""

    def __init__(self, donor: StateDonor, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._donor = donor
        self._settings = settings
        self._metrics = metrics

    def expect(self, group: Group) -> None:
        """Peers of `group` may ask from here on, others no more."""
        self._donor.expect(group.generation.nonce)

    def give(self, group: Group, captured: object, *, until: Callable[[], object]) -> None:
        """Offers `captured` to the group's ranks while `until`, which waits for the receivers, runs.

        Raises:
            MembershipChanged: the group is over.
        """
        with self._donor.offering(captured, group.generation.nonce):
            until()

    def take(self, group: Group, donors: Sequence[int]) -> Any:
        """Fetches the state that the ranks `donors` give. Changes nothing here.

        Raises:
            UnavailableError: a donor went away, or what arrived was damaged: what the peers hold is whole, so ask again.
            MembershipChanged: the group is over.
        """
        started = time.monotonic()
        asked = share_of(donors, receiver=group.rank)
        addresses = [group.generation.peers[r].donor_address for r in asked]
        try:
            with group.guarding() as guard:
                # Aside: where ranks take turns, a donor may need its turn to offer what this one waits for.
                state, size = run_aside(
                    lambda: take_state(addresses, group.generation.nonce, timeout=self._settings.collective_timeout, guard=guard),
                    f"for the state of ranks {list(asked)}",
                )
        except CorruptDataError as damage:
            raise UnavailableError(str(damage), reason=damage.reason) from damage
        elapsed = time.monotonic() - started
        self._metrics.transferred(size, elapsed)
        _log.info("took %.1f MB of state from %d donor(s) in %.3f s", size / 1e6, len(asked), elapsed)
        return state

    def close(self) -> None:
        """Stops giving."""
        self._donor.close()


def share_of(donors: Sequence[int], *, receiver: int) -> Sequence[int]:
    """The donors that `receiver` asks: at most MOST_DONORS, other ones for other receivers as long as there are others."""
    first = receiver * MOST_DONORS % len(donors)
    return (*donors[first:], *donors[:first])[:MOST_DONORS]
