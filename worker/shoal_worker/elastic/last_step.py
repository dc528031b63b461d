"""End of a run: no rank leaves while a peer may be in doubt about the last step."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Final

from shoal_worker.elastic.committed_state import HeldState
from shoal_worker.elastic.formation import Formation

_log = logging.getLogger(__name__)

LAST_STEP_PATIENCE: Final = timedelta(seconds=30)
_LOOK: Final = timedelta(seconds=0.05)
"""Interval at which a leaving rank checks whether its peers have committed the last step, which
they report in heartbeats."""


def await_last_step(formation: Formation, held: HeldState) -> None:
    """Returns when all peers have committed the last step. One that is in doubt of it asks in the
    next generation, which this rank forms with it. Not while the coordinator is away for longer
    than LAST_STEP_PATIENCE."""
    give_up_at = time.monotonic() + LAST_STEP_PATIENCE.total_seconds()
    while not formation.must_move and not formation.peers_have(held.steps):
        formation.settle()
        if time.monotonic() > give_up_at:
            _log.warning(
                "leaving, although not all peers are known to have committed step %d after %.0f s",
                held.steps,
                LAST_STEP_PATIENCE.total_seconds(),
            )
            return
        time.sleep(_LOOK.total_seconds())
