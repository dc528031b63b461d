"""The state that a joiner receives from another worker, because the servers do not have it:
registered objects, the optimizers' settings and position in the schedule, buffers, and the module's
extra state.

Synchronous training transfers state at step boundaries, while all ranks are stopped. Under
async_sgd, ranks never stop together, and with ssp a member may be waiting for the very joiner that
requests its state. Each worker therefore offers a copy of its state that was made at one of its
last step boundaries. Donor threads (elastic/group/transfer.py) send this offer to joiners, even
while the training thread is busy or waits. To request the offer, a joiner needs the donor's key,
which the coordinator reveals only to members.

A joiner's loader continues in the epoch of the state that it receives, so its schedule and its
epoch agree. If other workers are already in a later epoch, the joiner's script first goes through
the epochs between, whose batches have been leased to others. The copy is renewed in each epoch's
first step, so these are few.

The model's values are not included, because they are on the servers. Buffers are not synchronized:
from its first step on, each worker changes its own. But all workers start with the same buffers and
values, even if their scripts initialize these at random: initial workers receive rank 0's buffers,
and a joiner receives those of a peer. May be used only on the training thread.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Mapping
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
from shoal_worker.parameter_servers.coordination.job import Job

_log = logging.getLogger(__name__)

_REST: Final = 50
"""Minimum pause after a copy within an epoch, as a multiple of the copy's duration. The training
thread therefore spends at most about 1/50 of its time on copying, apart from one copy in each
epoch. A small state, such as the state of a scheduler, is copied at nearly every step boundary; a
large state, such as an average of the parameters, is copied only occasionally."""
_PATIENCE: Final = timedelta(seconds=5)
"""Maximum time that a joiner waits for one peer's state. A peer's offer is already available,
unless the peer has not reached its first step."""
_GONE: Final = timedelta(seconds=10)
"""Time after which a rank 0 that refuses connections counts as ended. If rank 0 has been killed, a
generation without it forms in about that time; if its script has finished, no such generation will
form."""
_PAUSE_S: Final = 0.1
"""Pause, in seconds, before rank 0 is asked again because it had no offer yet."""


class Handover:
    """Maintains the copy of this worker's state that is offered to joiners, and loads the copies
    that peers offer."""

    def __init__(
        self,
        donor: StateDonor,
        job: Job,
        registered: RegisteredState,
        optimizers: Optimizers,
        module: nn.Module,
    ) -> None:
        """`registered`, `optimizers`, `module`: this worker's objects. Their state is offered to
        joiners. If this worker is a joiner itself, a peer's state is loaded into them."""
        self._donor = donor
        self._job = job
        self._registered = registered
        self._optimizers = optimizers
        self._module = module
        self._offer = contextlib.ExitStack()
        self._due_at = 0.0
        self._epochs: dict[str, int] = {}
        """Loader name -> epoch of the step that begins or of the loader's last step. Joiners
        receive it with the state."""

    def refresh(self, loader: str | None, epoch: int) -> None:
        """Replaces the copy that is offered to joiners with a copy of the current state, if the
        loader is in another epoch than in the last copy, or enough time has passed since that copy.
        Must be called at each step boundary. `loader`, `epoch`: where the step that begins gets its
        batch; None if it has no loader."""
        begun = time.monotonic()
        if loader is not None and self._epochs.get(loader) != epoch:
            self._epochs[loader] = epoch
        elif begun < self._due_at:
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
            "epochs": dict(self._epochs),
        }
        state["extra"] = copy.deepcopy(other_entries(self._module))
        self._offer.close()
        self._offer.enter_context(self._donor.offering(state, self._donor.key))
        ended = time.monotonic()
        self._due_at = ended + _REST * (ended - begun)

    def take(self) -> Mapping[str, int] | None:
        """Loads the state that a peer offers. Returns the epochs to which that state belongs, by
        name of the loader; None if no peer offers a state."""
        for peer in self._job.peers_before():
            state = self._state_of(peer)
            if state is not None:
                self._optimizers.go_on_from(state)
                self._registered.restore(state["registered"])
                self._take_of_module(state)
                return dict(state["epochs"])
        return None

    def take_first_buffers(self) -> None:
        """Loads rank 0's buffers and extra state into this worker. Used by workers that have been
        in the job from the start. Waits until rank 0 reaches its first step. If that takes longer
        than the job's patience, or rank 0's process has ended, logs a warning and keeps this
        worker's own buffers and extra state.

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
                    "rank 0 sent no buffers within %.0f s, so this worker begins with its own; "
                    "they differ from other workers' if scripts initialize them at random",
                    now - begun,
                )
                return
            time.sleep(_PAUSE_S)

    def _take_of_module(self, state: Any) -> None:
        take_buffers(self._module, state["buffers"])
        load_captured(self._module, state["extra"])

    def _state_of(self, peer: Peer) -> Any:
        """Returns the state that a peer offers; None if it offers none or cannot be reached."""
        try:
            return self._ask(peer)
        except (UnavailableError, CorruptDataError) as error:
            _log.info("received no state from member %s: %s", peer.member_id, error)
            return None

    def _ask(self, peer: Peer) -> Any:
        """Requests and returns the state that a peer offers. Raises the same errors as
        `take_state`."""
        keys = [peer.donor_key] if self._donor.is_secure else []
        state, _ = take_state([peer.donor_address], peer.donor_key, timeout=_PATIENCE, keys=keys)
        return state

    def close(self) -> None:
        """Stops offering this worker's state to joiners. Idempotent."""
        self._offer.close()
