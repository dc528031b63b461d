"""A worker's own state for joiners: what the user registered, the optimizers' settings with the
place in their schedule, buffers, and the module's extra state.

In synchronous training the state travels at borders, while all stand still. Here nobody does, and
with ssp a member may be waiting for the very joiner that asks. So each worker keeps an offer open,
a copy made at one of its last borders, and its donor's threads serve that whatever the training
thread does (elastic/transfer.py). The name of an offer is its giver's key, which the coordinator
tells members alone.

The model's values are not in it: they come from the servers. Buffers do not: from its first step on
each worker changes its own. But all begin with the same ones, as they begin with the same values,
whatever each script has drawn: those who begin together with rank 0's, and a joiner with a peer's.
All of it belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from datetime import timedelta
from typing import Any, Final

from shoal_common.errors import CorruptDataError, UnavailableError
from torch import nn

from shoal_worker.asynchronous.job import Job
from shoal_worker.asynchronous.optimizers import Optimizers
from shoal_worker.elastic.generation import Peer
from shoal_worker.elastic.schedulers_and_scalers import RegisteredState
from shoal_worker.elastic.transfer import StateDonor, take_state
from shoal_worker.engine.module_state import load_captured, other_entries
from shoal_worker.engine.parameters import take_buffers

_log = logging.getLogger(__name__)

_REST: Final = 50
"""Copying may take one part of so many of the training thread's time: a scheduler's state is copied
at nearly every border, a large one (an average of the parameters, say) now and then."""
_PATIENCE: Final = timedelta(seconds=5)
"""How long a joiner waits for one peer's state. A peer's offer is open already, unless it has not
come to its first step."""
_PAUSE_S: Final = 0.1
"""Before rank 0, which had nothing to give, is asked again."""


class Handover:
    """This worker's offer, and what it takes of others'."""

    def __init__(
        self,
        donor: StateDonor,
        job: Job,
        registered: RegisteredState,
        optimizers: Optimizers,
        module: nn.Module,
    ) -> None:
        """`registered`, `optimizers`, and the buffers of `module`: this worker's, which are
        offered, and take over what a peer has."""
        self._donor = donor
        self._job = job
        self._registered = registered
        self._optimizers = optimizers
        self._module = module
        self._offer = contextlib.ExitStack()
        self._due_at = 0.0

    def refresh(self) -> None:
        """At a border: what is offered must not grow too old."""
        begun = time.monotonic()
        if begun < self._due_at:
            return
        buffers = {
            name: each.detach().to("cpu", copy=True)
            for name, each in self._module.named_buffers(remove_duplicate=False)
        }
        state = {
            **copy.deepcopy(
                {"registered": self._registered.capture(), **self._optimizers.schedules()}
            ),
            "buffers": buffers,
        }
        state["extra"] = copy.deepcopy(other_entries(self._module))
        self._offer.close()
        self._offer.enter_context(self._donor.offering(state, self._donor.key))
        ended = time.monotonic()
        self._due_at = ended + _REST * (ended - begun)

    def take(self) -> bool:
        """Goes on from a peer's state. False: none of them has any to give, or it could not be
        had."""
        for peer in self._job.peers_before():
            state = self._state_of(peer)
            if state is not None:
                self._optimizers.go_on_from(state)
                self._registered.restore(state["registered"])
                self._take_of_module(state)
                return True
        return False

    def take_first_buffers(self) -> None:
        """Begins with rank 0's buffers, in a worker that is there from the beginning. Waits until
        rank 0 has come to its first step; if it does not in the job's patience, this worker keeps
        its own, and says so.

        Raises:
            StopTraining: this worker is to leave.
        """
        if next(self._module.buffers(), None) is None and not other_entries(self._module):
            return
        deadline = time.monotonic() + self._job.patience.total_seconds()
        while (first := self._job.first_peer()) is not None:
            state = self._state_of(first)
            if state is not None:
                self._take_of_module(state)
                return
            if self._job.leaving:
                raise self._job.departure()
            if time.monotonic() > deadline:
                _log.warning(
                    "rank 0 gave no buffers in %.0f s: this worker begins with its own, which are "
                    "others where scripts draw them at random",
                    self._job.patience.total_seconds(),
                )
                return
            time.sleep(_PAUSE_S)

    def _take_of_module(self, state: Any) -> None:
        take_buffers(self._module, state["buffers"])
        load_captured(self._module, state["extra"])

    def _state_of(self, peer: Peer) -> Any:
        """What a peer offers; None: nothing, or it could not be had."""
        keys = [peer.donor_key] if self._donor.is_secure else []
        try:
            state, _ = take_state(
                [peer.donor_address], peer.donor_key, timeout=_PATIENCE, keys=keys
            )
        except (UnavailableError, CorruptDataError) as error:
            _log.info("member %s gave no state: %s", peer.member_id, error)
            return None
        return state

    def close(self) -> None:
        """Takes the offer back. Idempotent."""
        self._offer.close()
