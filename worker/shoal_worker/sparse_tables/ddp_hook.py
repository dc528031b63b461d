"""Interface of ddp's engine to the sparse tables of its model, which every rank holds otherwise.

The rows are on parameter servers, of which the engine knows nothing: `step_tables.py` has the
client, and a strategy combines the two. All calls come from the training thread, in the order given
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal_worker.elastic.contract.row_store import RowStore


class StepTables(Protocol):
    """All sparse tables of the model, in steps that all ranks take together."""

    def connect(self) -> None:
        """Starts using rows from the servers. Called once, when the session has the engine.

        Raises:
            ConfigurationError: there are no servers, or a table was trained in this process before.
            DeadlineError: the servers did not arrive in time.
        """
        ...

    def step_begins(self) -> None:
        """Begins a step, dropping the data of earlier lookups."""
        ...

    def micro_batch_ends(self, weight: float) -> None:
        """Assigns the gradients since the last call to a micro-batch of that weight."""
        ...

    def reduce(self) -> None:
        """Sums the row gradients of all ranks, or marks the step lost. Called when the dense
        gradients are summed, before the commit all-reduce.

        If servers would refuse the sums, `Step.refused` is set on all ranks: InvalidRequestError
        (GRADIENT_NOT_FINITE), LimitError (PAYLOAD_TOO_LARGE). Nothing is pushed then.
        """
        ...

    def commit(self) -> None:
        """The step counts."""
        ...

    def discard(self) -> None:
        """Discards an aborted or unintended step: nothing of it is pushed."""
        ...

    def deliver(self) -> None:
        """Pushes this rank's remaining part of the last step. Called after the step's end.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for too long.
        """
        ...

    def drop_gradients(self) -> None:
        """Drops the gradients of the current step, which the user clears."""
        ...

    @property
    def store(self) -> RowStore:
        """Rows for checkpoints. Available once connected."""
        ...

    def capture(self) -> dict[str, Any]:
        """Returns a joiner's required knowledge about the rows; empty before the first step."""
        ...

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores a captured state; None: nothing is known, and the servers' rows are used."""
        ...
