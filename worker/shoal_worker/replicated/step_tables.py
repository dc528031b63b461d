"""Sparse tables of a model of which every rank holds the rest: what the engine asks of them, step
by step.

The rows are on parameter servers, of which this folder knows nothing: `asynchronous/step_tables.py`
has what speaks to them, and a strategy puts the two together. All calls come from the training
thread, in the order in which they stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal_worker.elastic.row_store import RowStore


class StepTables(Protocol):
    """All sparse tables of the model, in steps that all ranks take together."""

    def connect(self) -> None:
        """From now on rows come from the servers. Once, when the session has the engine.

        Raises:
            ConfigurationError: there are no servers, or a table was trained in this process before.
            DeadlineError: the servers did not come in time.
        """
        ...

    def step_begins(self) -> None:
        """The next step begins; what lookups before it have left is dropped."""
        ...

    def micro_batch_ends(self, weight: float) -> None:
        """The gradients since the last call are a micro-batch's, which weighs so much."""
        ...

    def reduce(self) -> None:
        """Adds the row gradients of all ranks up, or marks the step lost. When the dense gradients
        are summed, before the closing.

        Where servers would not take the sums, `Step.refused` says why, on all ranks alike:
        InvalidRequestError (GRADIENT_NOT_FINITE), LimitError (PAYLOAD_TOO_LARGE). Nothing of them
        is pushed then.
        """
        ...

    def commit(self) -> None:
        """The step counts."""
        ...

    def discard(self) -> None:
        """The step is void, or was not meant: nothing of it is pushed."""
        ...

    def deliver(self) -> None:
        """Pushes what the last step has left to push, as far as that is this rank's to do. After
        the step's end.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for too long.
        """
        ...

    def drop_gradients(self) -> None:
        """The user clears the gradients of the step in progress."""
        ...

    @property
    def store(self) -> RowStore:
        """The rows, for checkpoints. Once connected."""
        ...

    def capture(self) -> dict[str, Any]:
        """What a rank that joins has to know of the rows; empty before the first step."""
        ...

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Takes over what was captured; None: nothing is known, and the rows are as the servers
        have them."""
        ...
