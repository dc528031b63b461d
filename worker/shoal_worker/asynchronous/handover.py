"""A worker's own state for joiners: objects registered by the user, the optimizers' settings with
their position in the schedule, buffers, and the module's extra state.

In synchronous training the state is transferred at step boundaries, while all ranks are stopped.
Here ranks never stop together, and with ssp a member may be waiting for the very joiner that asks.
Each worker therefore keeps an offer available, a copy made at one of its last step boundaries, and
its donor threads serve the offer regardless of the training thread (elastic/group/transfer.py). An
offer is named by its giver's key, which the coordinator reveals to members only.

The model's values are not part of it, since they come from the servers. Buffers are not kept in
sync either: each worker changes its own from its first step on. But all workers start with the same
buffers and values, whatever each script has drawn: initial workers take rank 0's buffers, and a
joiner a peer's. Owned by the training thread.
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

from shoal_worker.asynchronous.optimizers import Optimizers
from shoal_worker.elastic.contract.generation import Peer
from shoal_worker.elastic.group.transfer import StateDonor, take_state
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState
from shoal_worker.engine.state.module_state import load_captured, other_entries
from shoal_worker.engine.state.parameters import take_buffers
from shoal_worker.parameter_servers.job import Job

_log = logging.getLogger(__name__)

_REST: Final = 50
"""Copying may take at most this fraction (1/50) of the training thread's time: a scheduler's state
is copied at nearly every step boundary, a large state (such as an average of the parameters) only
occasionally."""
_PATIENCE: Final = timedelta(seconds=5)
"""Time for which a joiner waits for one peer's state. A peer's offer is already available unless
the peer has not reached its first step."""
_GONE: Final = timedelta(seconds=10)
"""Time for which rank 0 may refuse connections before its process counts as ended. If it was
killed, a generation without it forms about as soon; if it has finished its script, none does."""
_PAUSE_S: Final = 0.1
"""Pause before rank 0 is asked again if it had nothing to give."""


class Handover:
    """Manages this worker's offer and adopts those of others."""

    def __init__(
        self,
        donor: StateDonor,
        job: Job,
        registered: RegisteredState,
        optimizers: Optimizers,
        module: nn.Module,
    ) -> None:
        """Creates a handover of this worker's `registered` objects, `optimizers` and the buffers of
        `module`, which are offered to joiners and adopted from peers."""
        self._donor = donor
        self._job = job
        self._registered = registered
        self._optimizers = optimizers
        self._module = module
        self._offer = contextlib.ExitStack()
        self._due_at = 0.0

    def refresh(self) -> None:
        """Renews the offer at a step boundary before it becomes too old."""
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
        """Adopts a peer's state. Returns False if no peer could provide one."""
        for peer in self._job.peers_before():
            state = self._state_of(peer)
            if state is not None:
                self._optimizers.go_on_from(state)
                self._registered.restore(state["registered"])
                self._take_of_module(state)
                return True
        return False

    def take_first_buffers(self) -> None:
        """Adopts rank 0's buffers in a worker that is there from the start. Waits until rank 0
        reaches its first step; if it does not within the job's patience, or its process has ended,
        this worker keeps its own buffers and logs that.

        Raises:
            StopTraining: this worker should leave.
        """
        if next(self._module.buffers(), None) is None and not other_entries(self._module):
            return
        begun = answered = time.monotonic()
        while (first := self._job.first_peer()) is not None:
            try:
                self._take_of_module(self._ask(first))
                return
            except (UnavailableError, CorruptDataError) as error:
                now = time.monotonic()
                if not isinstance(error.__cause__, ConnectionRefusedError):
                    answered = now
            if self._job.leaving:
                raise self._job.departure()
            if now > begun + self._job.patience.total_seconds() or (
                now > answered + _GONE.total_seconds()
            ):
                _log.warning(
                    "rank 0 sent no buffers within %.0f s: this worker begins with its own, which "
                    "differ if scripts draw them at random",
                    now - begun,
                )
                return
            time.sleep(_PAUSE_S)

    def _take_of_module(self, state: Any) -> None:
        take_buffers(self._module, state["buffers"])
        load_captured(self._module, state["extra"])

    def _state_of(self, peer: Peer) -> Any:
        """Returns a peer's offer, or None if it has none or cannot be reached."""
        try:
            return self._ask(peer)
        except (UnavailableError, CorruptDataError) as error:
            _log.info("member %s sent no state: %s", peer.member_id, error)
            return None

    def _ask(self, peer: Peer) -> Any:
        """Returns a peer's offer. Raises as `take_state`."""
        keys = [peer.donor_key] if self._donor.is_secure else []
        state, _ = take_state([peer.donor_address], peer.donor_key, timeout=_PATIENCE, keys=keys)
        return state

    def close(self) -> None:
        """Takes the offer back. Idempotent."""
        self._offer.close()
