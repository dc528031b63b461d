"""Interface between ddp's engine and the sparse tables of its model.

Every rank has all parameters of the model, but the tables' rows are on parameter servers. The
engine does not depend on these: `step_tables.py` contains the client, and a strategy combines the
two. All calls must come from the training thread, in the order of the methods below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal_worker.elastic.contract.row_store import RowStore


class StepTables(Protocol):
    """All sparse tables of a model whose ranks take all steps together."""

    def connect(self) -> None:
        """Connects to the servers, which provide the rows from now on. Must be called once, after
        the engine has been attached to the session.

        Raises:
            ConfigurationError: there are no servers, or a table has already been trained in this
                process.
            DeadlineError: the servers did not register in time.
        """
        ...

    def step_begins(self) -> None:
        """Begins a step and discards the gradients of earlier lookups."""
        ...

    def micro_batch_ends(self, weight: float) -> None:
        """Ends a micro-batch: multiplies the gradients collected since the last call by `weight`,
        the weight of the micro-batch, and adds them to the step's gradients."""
        ...

    def reduce(self) -> None:
        """Sums the row gradients of all ranks. If that fails, the step is marked as lost. Must be
        called after the dense gradients have been summed and before the commit all-reduce.

        If the servers would reject the sums, `Step.refused` is set to InvalidRequestError
        (GRADIENT_NOT_FINITE) or LimitError (PAYLOAD_TOO_LARGE) on all ranks, and nothing is pushed.
        """
        ...

    def commit(self) -> None:
        """Records that the step is committed."""
        ...

    def discard(self) -> None:
        """Discards the current step, because it was aborted, or because the passes were not part of
        a step. Nothing is pushed for it."""
        ...

    def deliver(self) -> None:
        """Pushes this rank's share of the last step to the servers, unless it has already done so.
        Must be called once the step has ended.

        Raises:
            DeadlineError (SERVER_AWAY): a server was unreachable for too long.
        """
        ...

    def drop_gradients(self) -> None:
        """Drops the gradients of the current step. Must be called when the user clears
        gradients."""
        ...

    @property
    def store(self) -> RowStore:
        """The tables' rows, for checkpoints. Available once connected."""
        ...

    def capture(self) -> dict[str, Any]:
        """Returns what a joiner must know to use the rows on the servers: the versions of the
        buckets, and the pushes of the last step that may not have arrived yet. Empty before the
        first step."""
        ...

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores the result of `capture`. If `state` is None, nothing is known about the rows,
        and the rows on the servers are used as they are."""
        ...
