"""Returns all ranks to the newest checkpoint if the remaining ranks together have only part of the
state.

All methods run on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal_worker.elastic.contract.loader_interface import StateLostError
from shoal_worker.elastic.recovery.step_boundaries import StepBoundaries
from shoal_worker.elastic.state.committed_state import CommittedState

_log = logging.getLogger(__name__)


class ReturnToCheckpoint:
    """Replaces a lost state with the newest checkpoint's state. All ranks take part."""

    def __init__(self, held: CommittedState, boundaries: StepBoundaries) -> None:
        self.load: Callable[[], str | None] | None = None
        """Function that replaces a lost state with the newest checkpoint's state, as a joint
        operation of all ranks. Returns the reason for a failure, or None. The attribute itself is
        None if there is no checkpoint."""
        self.under_way = False
        """True while the ranks are replacing a lost state."""
        self._held = held
        self._boundaries = boundaries

    def go_back(self, lost: StateLostError) -> None:
        """Returns to the newest checkpoint. Later steps are undone, and the loader repeats their
        samples.

        Raises:
            StateLostError: the ranks cannot return to a checkpoint.
        """
        if self.load is None or self.under_way:
            raise lost
        _log.warning("%s; returning to the newest checkpoint", lost)
        self.under_way = True
        try:
            with self._held.going_back():
                why_not = self._load(self.load)
        finally:
            self.under_way = False
        if why_not is not None:
            raise StateLostError(
                f"{lost}. The script cannot continue from the newest checkpoint without a "
                f"restart: {why_not}",
                reason=lost.reason,
            )

    def _load(self, load: Callable[[], str | None]) -> str | None:
        """Loads the checkpoint. If the ranks change while it is being loaded, the state is lost
        again, because only some of the ranks have read the checkpoint; it is then loaded again.
        Returns the reason for a failure, or None."""
        while True:
            # Loading must be the first operation on all ranks. Otherwise results of earlier
            # operations would be mistaken for its results.
            self._held.operations.restart(b"", passed=False)
            try:
                why_not = load()
            except StateLostError as again:
                _log.info("the ranks changed during the return to a checkpoint: %s", again)
            else:
                self._boundaries.went_back()
                step = self._held.step
                if step is not None and step.lost is None and why_not is None:
                    # a forward pass before an operation has begun the step with the lost state
                    step.abort()
                return why_not
