"""A worker's own state for joiners: what the user registered, and the optimizers' settings with the place in their schedule.

In synchronous training the state travels at borders, while all stand still. Here nobody does, and with ssp a member may be waiting for
the very joiner that asks. So each worker keeps an offer open, a copy made at one of its last borders, and its donor's threads serve
that whatever the training thread does (elastic/transfer.py). The name of an offer is its giver's key, which the coordinator tells
members alone.

The model's values are not in it: they come from the servers. All of it belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from datetime import timedelta
from typing import Final

from shoal_common.errors import CorruptDataError, UnavailableError

from shoal_worker.asynchronous.job import Job
from shoal_worker.asynchronous.optimizers import Optimizers
from shoal_worker.elastic.schedulers_and_scalers import RegisteredState
from shoal_worker.elastic.transfer import StateDonor, take_state

_log = logging.getLogger(__name__)

_REST: Final = 50
"""Copying may take one part of so many of the training thread's time: a scheduler's state is copied at nearly every border, a large one (an
average of the parameters, say) now and then."""
_PATIENCE: Final = timedelta(seconds=5)
"""How long a joiner waits for one peer's state. A peer's offer is open already, unless it has not come to its first step."""


class Handover:
    """This worker's offer, and what it takes of others'."""

    def __init__(self, donor: StateDonor, job: Job, registered: RegisteredState, optimizers: Optimizers) -> None:
        """`registered`, `optimizers`: this worker's, which are offered, and take over what a peer has."""
        self._donor = donor
        self._job = job
        self._registered = registered
        self._optimizers = optimizers
        self._offer = contextlib.ExitStack()
        self._due_at = 0.0

    def refresh(self) -> None:
        """At a border: what is offered must not grow too old."""
        begun = time.monotonic()
        if begun < self._due_at:
            return
        state = copy.deepcopy({"registered": self._registered.capture(), **self._optimizers.schedules()})
        self._offer.close()
        self._offer.enter_context(self._donor.offering(state, self._donor.key))
        ended = time.monotonic()
        self._due_at = ended + _REST * (ended - begun)

    def take(self) -> bool:
        """Goes on from a peer's state. False: none of them has any to give, or it could not be had."""
        for peer in self._job.peers_before():
            keys = [peer.donor_key] if self._donor.is_secure else []
            try:
                state, _ = take_state([peer.donor_address], peer.donor_key, timeout=_PATIENCE, keys=keys)
            except (UnavailableError, CorruptDataError) as error:
                _log.info("member %s gave no state: %s", peer.member_id, error)
            else:
                self._optimizers.go_on_from(state)
                self._registered.restore(state["registered"])
                return True
        return False

    def close(self) -> None:
        """Takes the offer back. Idempotent."""
        self._offer.close()
