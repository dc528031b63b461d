"""The seam between the session and an engine, from both sides.

A strategy's engine is a `TrainingEngine`: what the session calls. Of the session it calls what
`StrategySession` has, and nothing else (but async_sgd's, which has no common step, and opens a job
of its own). So a new engine is written against this file and its base class (`engine/base.py`);
loaders stand on the other side of the session, behind `loader_interface.py`, and know no strategy.

The order of calls in one step, all on the training thread:

    step_begins
      micro_batch_begins, [forward and backward], micro_batch_ends(weight)
          once per micro-batch of this rank, perhaps never
      reduce, sum_commit, take_commit
          at the end (`recovery/step_commit.py`); `take_commit` alone where only a peer saw the
          commit all-reduce
    commit_step
        after `apply` returned, or
    discard_step
        when the step is aborted or was not meant

In between a strategy asks for `session.step`, reduces over `session.group`, and marks the step lost
when a collective fails, instead of raising out of a backward pass. When the sums are there it calls
`prepare_step`. Whenever it needs the final gradients (to clip them, say) it calls
`session.reduce_and_commit`. Its optimizer's `step()` is `session.finish_step(apply)`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Protocol

import torch
from shoal_common.errors import ConfigurationError, InternalError, ShoalError

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.loader_interface import Leases, StepStatus
from shoal_worker.elastic.contract.row_store import RowStore
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import Body
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState
from shoal_worker.state.tree import StatePart

BUFFERS: Final = "the buffers"
"""Name of the group of a model's buffers in `TrainingEngine.in_common`."""


class TrainingEngine(abc.ABC):
    """A strategy's engine, with its model and optimizer, from the session's perspective. The
    defaults are those of one model that every rank holds unsharded, and of ranks that take steps
    together."""

    asynchronous: ClassVar[bool] = False
    """True if there is no process group and every iteration is a separate step (async_sgd)."""
    strategy: str
    """Name of the strategy."""
    backend_name: str
    least_samples: int
    """Minimum samples, as in `Placement`; the same on all ranks."""

    @property
    def models(self) -> int:
        """Number of models that it trains, each with an optimizer."""
        return 1

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this rank belongs to, which determines its samples."""

    @property
    @abc.abstractmethod
    def data_parallel_size(self) -> int:
        """Number of replicas."""

    @property
    def leads_replica(self) -> bool:
        """True if this rank is the first of those that hold its replica of the model."""
        return True

    @property
    def idle(self) -> bool:
        """True if this rank is a spare: it has no part in the model, and takes no steps until a
        newer generation gives it one."""
        return False

    @property
    def lacks_ranks(self) -> bool:
        """True if there are fewer ranks than one replica of the model needs, while this one has the
        entire state: no step begins before more arrive."""
        return False

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold one replica of the model together, if others are spares; 1 if
        there are none."""
        return 1

    def issued(self) -> bytes:
        """Returns this rank's trace of the collectives in the current step's passes; b"" if none.
        Called on another thread while the training thread waits for its peers."""
        return b""

    def compare_issued(self, issued: Sequence[bytes]) -> None:
        """Compares the ranks' traces. Raises PreconditionError if they would wait for each other
        forever."""

    @property
    def passes_with(self) -> str:
        """Names the ranks that go through the model's passes together with this one; empty: all
        do."""
        return ""

    def working(self, group: Group) -> Group:
        """Returns the ranks of `group`, for which the model was resharded, that are not spares.
        Called only on those."""
        return group

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the entire state."""
        return False

    @property
    def holds(self) -> Sequence[str]:
        """Names of the parts of the state that this rank holds, the same on all ranks that hold
        them; empty if the state is not sharded."""
        return ()

    @property
    def steps_alone(self) -> bool:
        """True if ranks take independent steps that need nothing of other ranks."""
        return False

    @property
    def within_round(self) -> bool:
        """True if steps were committed here that count only with a later one, after which this
        worker may leave. Only for asynchronous engines; others use `StrategySession.keep`."""
        return False

    @property
    @abc.abstractmethod
    def consistency_check_every(self) -> int:
        """Number of steps after which ranks compare their common state; 0: never."""

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns state that this rank and others have in common after a step applied by all:
        tensors by name, in groups that a rank holds entirely or not at all. Shares memory with the
        state."""
        return {}

    def whole_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns committed parameters and buffers that every rank holds unsharded until an update:
        tensors by name, in groups. Shares memory with the state."""
        return {}

    @abc.abstractmethod
    def check_optimizer_state(self) -> None:
        """Raises ConfigurationError (STATE_UNSUPPORTED), which names the parameter and the entry:
        the optimizer keeps something that cannot be sent to a rank that joins, or saved."""

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]:
        """Returns the committed state of model and optimizer, including buffers. Shares memory with
        them."""

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete committed state of model and optimizer, as on a single process, on
        the first rank of `channel` and possibly nothing on others: for checkpoints. Part of an
        operation. May share memory with the state."""
        return self.capture()

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the result of `assemble`, for a checkpoint that the ranks
        write together; None, on all ranks: use `assemble`. Part of an operation. Shares memory with
        the state."""
        return None

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """Lets this rank compute with the model without its peers within the block. Entered by all
        ranks of an operation."""
        return nullcontext()

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a captured or an assembled state."""

    def reshard(self, group: Group) -> None:
        """Reshards the state for a newly established group, all of whose ranks hold the same steps.
        A collective."""

    def consolidate(self, channel: Channel) -> None:
        """Makes state that every rank holds unsharded between steps complete and current again on
        all of `channel`, whose group may contain further ranks without shards. An operation."""

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """Copies each part of the state held by only one rank of `channel` to another rank, which
        keeps it until the state is resharded, so that the next death loses nothing. An operation;
        when it returns, all ranks have their copies.

        `leaving`: ranks about to leave, whose copies do not count.
        """

    @property
    def row_store(self) -> RowStore | None:
        """Rows of the model's sparse tables; None if it has none."""
        return None

    @abc.abstractmethod
    def has_values(self) -> bool:
        """Returns False while parameters are on the meta device."""

    @abc.abstractmethod
    def step_begins(self) -> None:
        """Begins the next step with the current ranks and committed state."""

    def lease_batches(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Leases batches, as in `LoaderSession`. Raises ConfigurationError unless asynchronous: a
        step belongs to all ranks."""
        raise ConfigurationError(
            f"loader {loader!r}: batch_size= leases batches for async_sgd, but the strategy is "
            f"{self.strategy!r}; pass global_batch_size="
        )

    def batch_begins(self) -> None:
        """Handles that the script gets this rank's batch of a step without micro-batches."""

    @abc.abstractmethod
    def micro_batch_begins(self) -> None:
        """Starts the next micro-batch from the committed buffers and without gradient."""

    @abc.abstractmethod
    def micro_batch_ends(self, weight: float) -> None:
        """Ends the backward pass of a micro-batch of that weight."""

    @abc.abstractmethod
    def reduce(self, step: Step) -> None:
        """Sums the gradients of all ranks, makes everything available that is needed to apply the
        step, and prepares it (`StrategySession.prepare_step`); or the step is marked lost. For a
        step that is prepared or committed already, checks that no gradients were added."""

    @abc.abstractmethod
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Runs the commit all-reduce of a prepared step over the ranks that take it. Returns the
        sum of `vote`, and the payload of the commit: the same on all ranks, for `take_commit`.
        Raises MembershipChanged if it failed: the step is lost, or in doubt."""

    def take_commit(self, payload: Mapping[str, Any]) -> None:
        """Takes the payload of the current step's commit, from `sum_commit` or from a peer that saw
        it after the group had ended."""

    def commit_payload(self) -> dict[str, Any]:
        """Returns the payload of the last committed step, for a rank that prepared the step and
        missed the commit all-reduce."""
        return {}

    @property
    def partly_updated(self) -> bool:
        """True if some of several models were updated in the current step, and others were not
        (`features/several_models.py`)."""
        return False

    def withdraw_updates(self) -> None:
        """Undoes the current step's updates while its outcome is unknown, since the state may be
        sent to peers or saved. `reinstate_updates` or `discard_step` follows; or neither, if the
        step is never finished."""

    def reinstate_updates(self) -> None:
        """Restores withdrawn updates because the step continues or counts. Does nothing if there
        are none."""

    def writes_apart(self) -> ShoalError:
        """Returns the error for ranks whose passes have written different values to parameters.
        Raised by all ranks. By default an internal error, since passes may write none."""
        return InternalError("ranks that do not compare written parameters reported a difference")

    @abc.abstractmethod
    def discard_step(self) -> None:
        """Restores what the step changed: buffers, written parameters, attributes and extra state
        of modules, gradients."""

    @abc.abstractmethod
    def commit_step(self) -> None:
        """Makes the buffers after an applied step the committed state."""


class StrategySession(Protocol):
    """The session from a strategy's perspective."""

    @property
    def elastic(self) -> bool:
        """True if there are, or may be, other ranks. False in a world of one without a
        coordinator."""
        ...

    @property
    def group(self) -> Group | None:
        """Connected ranks of this generation. Another object after each re-forming."""
        ...

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        ...

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def begins(self) -> bool:
        """True if the ranks are those that the run was started with: none has left or joined
        yet."""
        ...

    @property
    def ranks_may_come(self) -> bool:
        """True if further processes may join the job."""
        ...

    @property
    def steps(self) -> int:
        """Committed steps of the run."""
        ...

    @property
    def is_joining(self) -> bool:
        """True if this process replays its script: steps are not begun, collectives are answered
        locally."""
        ...

    @property
    def step(self) -> Step | None:
        """Step in progress."""
        ...

    @property
    def registered(self) -> RegisteredState:
        """Objects registered by the loop besides model and optimizer."""
        ...

    def trains(self, engine: object) -> bool:
        """Returns whether `engine` is the run's model; a clone of it is not."""
        ...

    def attach(self, engine: TrainingEngine) -> None:
        """Makes `engine` the run's, and gives all ranks the first rank's weights. Call once, before
        anything else."""
        ...

    def ensure_step(self) -> Step:
        """Returns the current step; begins one in a user's own loop, where no loader does. Called
        by each forward pass in training."""
        ...

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Records which of the model's parameters require gradients from this step on, which must
        agree on all ranks at the step's end."""
        ...

    def settle_collectives(self) -> None:
        """Returns when all collectives ordered in the step have ended; if not all did well it is
        marked lost. On a device a failure is heard of no earlier."""
        ...

    def prepare_step(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply it. Waits for all ordered collectives (`Group.settle`); if any failed, the step is
        marked lost instead."""
        ...

    def mark_lost(self, error: BaseException) -> None:
        """Marks the step as lost because a collective failed: nothing more is sent in it. Changes
        nothing once the commit all-reduce was seen. Thread-safe."""
        ...

    def abort_step(self, reason: str) -> None:
        """Aborts the current step, as every rank concludes by itself."""
        ...

    def reduce_and_commit(self) -> None:
        """Returns when the outcome of the current step is known (`recovery/step_commit.py`). On the
        training thread, outside of passes."""
        ...

    def reduce_if_whole(self) -> None:
        """Commits the step after a backward pass if it completed this rank's part of the
        step."""
        ...

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Ends the step: calls `apply`, which updates the parameters, if the step counts. Every
        survivor gets the same answer."""
        ...

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the committed state. Steps committed from here on are this rank's alone, and are
        undone by the next aborted step, until `release`: the loader repeats their samples.
        `replica`: this rank's model and optimizer, for `restore`. Call in `step_begins`."""
        ...

    def release(self) -> None:
        """Confirms the steps since `keep` on all ranks. Call in `commit_step` of a step that all
        ranks took part in."""
        ...

    def operation(self, kind: str, body: Body) -> Any:
        """Runs something on all ranks between steps, again if the membership changes meanwhile."""
        ...
