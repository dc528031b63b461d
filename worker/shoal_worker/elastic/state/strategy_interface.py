"""Interface between the session and a strategy's engine, in both directions.

The session calls the engine by `TrainingEngine`. The engine calls the session only by
`StrategySession`, and its step lifecycle only by `StepControl`. (The engine of async_sgd, which has
no common step, also opens a job of its own.) A new engine therefore depends only on this file and
its base class (`engine/base.py`). Loaders use another interface of the session,
`loader_interface.py`, and know no strategy.

The order of calls in one step, all on the training thread:

    step_begins
    micro_batch_begins, [forward and backward], micro_batch_ends(weight)
        once per micro-batch of this rank, possibly never
    reduce, sum_commit, take_commit
        at the end (`recovery/step_commit.py`); only `take_commit` if a peer saw the commit
        all-reduce and this rank did not
    commit_step
        after `apply` returned, or
    discard_step
        if the step is aborted or was not intended

In between, the strategy asks for `session.step` and reduces over `session.group`. When a collective
fails, it marks the step as lost instead of raising out of a backward pass. Once it has the sums, it
calls `lifecycle.prepare_step`. To get the final gradients earlier, for example to clip them, it
calls `lifecycle.reduce_and_commit`. Its optimizer's `step()` calls `lifecycle.finish_step(apply)`.
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
"""Name of the group that contains a model's buffers, in `TrainingEngine.in_common`."""


class TrainingEngine(abc.ABC):
    """Interface of a strategy's engine, with its model and optimizer, as used by the session. The
    defaults suit a single model that every rank holds unsharded, and ranks that take steps
    together."""

    asynchronous: ClassVar[bool] = False
    """True if there is no process group and ranks take independent steps (async_sgd)."""
    strategy: str
    """Name of the strategy."""
    backend_name: str
    least_samples: int
    """Value of `Placement.least_samples`; the same on all ranks."""

    @property
    def models(self) -> int:
        """Number of models that the engine trains, each with an optimizer."""
        return 1

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int:
        """Index of this rank's model replica, which determines its samples."""

    @property
    @abc.abstractmethod
    def data_parallel_size(self) -> int:
        """Number of model replicas."""

    @property
    def leads_replica(self) -> bool:
        """True if this rank is the first of the ranks that hold its replica of the model."""
        return True

    @property
    def idle(self) -> bool:
        """True if this rank is a spare. A spare has no part in the model and takes no steps until a
        later generation assigns it one."""
        return False

    @property
    def lacks_ranks(self) -> bool:
        """True if this rank has the entire state, but there are too few ranks for one replica of
        the model. No step begins before more ranks join."""
        return False

    @property
    def replica_size(self) -> int:
        """Number of ranks that together hold one replica of the model. 1 if the strategy never has
        spares."""
        return 1

    def issued(self) -> bytes:
        """Returns the encoded trace of the collectives that this rank has issued in the passes of
        the current step; b"" if there are none. Called on another thread while the training thread
        waits for its peers."""
        return b""

    def compare_issued(self, issued: Sequence[bytes]) -> None:
        """Compares the ranks' results of `issued`. Raises PreconditionError if the ranks would wait
        for each other forever."""

    @property
    def passes_with(self) -> str:
        """Name of the set of ranks that run the model's passes together with this rank; empty: all
        ranks."""
        return ""

    def working(self, group: Group) -> Group:
        """Returns the ranks of `group` that are not spares. Called after the model was resharded
        for `group`, and never on spares."""
        return group

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the entire state."""
        return False

    @property
    def holds(self) -> Sequence[str]:
        """Names of this rank's parts of the state. Ranks with the same part use the same name.
        Empty if the state is not sharded."""
        return ()

    @property
    def steps_alone(self) -> bool:
        """True if ranks take independent steps that need nothing from other ranks."""
        return False

    @property
    def within_round(self) -> bool:
        """True if this rank has committed steps that count only once a later step ends their round.
        This worker may leave only after that step. Only for asynchronous engines; others use
        `StrategySession.keep`."""
        return False

    @property
    @abc.abstractmethod
    def consistency_check_every(self) -> int:
        """Number of steps after which ranks compare their common state; 0: never."""

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the state that must be equal on several ranks after a step: name of a group ->
        tensors by name. A rank has all tensors of a group or none. The tensors share memory with
        the state."""
        return {}

    def whole_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the committed parameters and buffers that every rank holds unsharded until the
        next update: name of a group -> tensors by name. The tensors share memory with the state."""
        return {}

    @abc.abstractmethod
    def check_optimizer_state(self) -> None:
        """Checks that the optimizer's state can be sent to a joiner and saved. Otherwise raises
        ConfigurationError (STATE_UNSUPPORTED) with the parameter and the entry."""

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]:
        """Returns the committed state of model and optimizer, including buffers. The result shares
        memory with model and optimizer."""

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete committed state of model and optimizer as on a single process, for
        checkpoints. Part of an operation. Only the first rank of `channel` is guaranteed to receive
        the state. The result may share memory with the model."""
        return self.capture()

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the state that `assemble` returns, for a checkpoint that the
        ranks write together. If it returns None, which it then does on all ranks, `assemble` must
        be used. Part of an operation. The part shares memory with the state."""
        return None

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """Unshards the model within the block, so that this rank can compute with it without its
        peers. Entered by all ranks of an operation."""
        return nullcontext()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a state of `assemble`, or the state of a `part`, belongs to this model and
        optimizer. If the model is on the meta device, may create its parameters.

        Raises:
            CorruptDataError: `restore` would refuse the state.
        """

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads a captured or an assembled state."""

    def reshard(self, group: Group) -> None:
        """Reshards the state for a newly established group, whose ranks have all committed the same
        steps. All ranks must call it."""

    def consolidate(self, channel: Channel) -> None:
        """Brings the state that every rank holds unsharded between steps up to date on all ranks of
        `channel`. The channel's group may contain further ranks, which have no shards. Part of an
        operation."""

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """Copies each part of the state that only one rank of `channel` has to another rank, so
        that the next failure loses nothing. The copy is kept until the state is resharded. Part of
        an operation; on return, all ranks have their copies.

        `leaving`: ranks about to leave, whose copies do not count.
        """

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters that do not require gradients, by their names in the flattened
        result of `capture`. They have values on this rank unless the state is sharded, or the
        engine has none."""
        return {}

    @property
    def row_store(self) -> RowStore | None:
        """Rows of the model's sparse tables; None if there are none."""
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
            f"loader {loader!r} was created with batch_size=, which leases batches for "
            f"async_sgd, but the strategy is {self.strategy!r}; pass global_batch_size= instead"
        )

    def batch_begins(self) -> None:
        """Notifies the engine that the script receives this rank's batch of a step without
        micro-batches."""

    @abc.abstractmethod
    def micro_batch_begins(self) -> None:
        """Begins the next micro-batch: resets the buffers to their committed values and clears the
        gradients."""

    @abc.abstractmethod
    def micro_batch_ends(self, weight: float) -> None:
        """Ends the backward pass of a micro-batch. `weight`: the weight of the micro-batch."""

    @abc.abstractmethod
    def reduce(self, step: Step) -> None:
        """Sums the gradients of all ranks, obtains everything needed to apply the step, and
        prepares the step (`StepControl.prepare_step`). On failure the step is marked as lost.
        For a step that is already prepared or committed, checks that no gradients were added."""

    @abc.abstractmethod
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Runs the commit all-reduce of a prepared step over the ranks that take part in it.
        Returns the sum of `vote`, and a payload for `take_commit` that is the same on all ranks. If
        the all-reduce fails, raises MembershipChanged, and the step is lost or in doubt."""

    def take_commit(self, payload: Mapping[str, Any]) -> None:
        """Applies the payload of the current step's commit to the engine. The payload comes from
        `sum_commit`, or from a peer if this rank's group ended before it received the payload."""

    def commit_payload(self) -> dict[str, Any]:
        """Returns the payload of the last committed step, for a rank that prepared the step but
        missed the commit all-reduce."""
        return {}

    @property
    def partly_updated(self) -> bool:
        """True if only some of several models were updated in the current step
        (`features/several_models.py`)."""
        return False

    def withdraw_updates(self) -> None:
        """Undoes the current step's updates while its outcome is unknown, because the state may be
        sent to peers or saved. `reinstate_updates` or `discard_step` follows, or neither if the
        step is never finished."""

    def reinstate_updates(self) -> None:
        """Reapplies the updates that `withdraw_updates` undid, once the step continues or turns out
        to be committed. Does nothing if no updates were withdrawn."""

    def writes_apart(self) -> ShoalError:
        """Returns the error for ranks whose passes have written different values to parameters. All
        ranks raise it. By default an internal error, because engines that allow such writes
        override this method."""
        return InternalError(
            "the ranks reported a difference in written parameters, although "
            "this engine does not compare them"
        )

    @abc.abstractmethod
    def discard_step(self) -> None:
        """Undoes the step's changes to buffers, written parameters, module attributes, extra state
        and gradients."""

    @abc.abstractmethod
    def commit_step(self) -> None:
        """Commits a step that was applied: the buffers' new values become part of the committed
        state."""


class StepControl(Protocol):
    """Interface of the step lifecycle, as used by engines."""

    def ensure_step(self) -> Step:
        """Returns the current step. In a loop without a Shoal loader, begins a step if there is
        none. Called by each forward pass in training."""
        ...

    def settle_collectives(self) -> None:
        """Waits until all collectives ordered in the step have ended. If one failed, the step is
        marked as lost. On a device, a failure is noticed only here."""
        ...

    def prepare_step(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply the step. Waits for all ordered collectives (`Group.settle`). If one failed, marks
        the step as lost instead."""
        ...

    def mark_lost(self, error: BaseException) -> None:
        """Marks the step as lost because a collective failed. Nothing more is sent in the step.
        Changes nothing once this rank has seen the commit all-reduce. Thread-safe."""
        ...

    def abort_step(self, reason: str) -> None:
        """Aborts the current step. Every rank makes this decision on its own."""
        ...

    def reduce_and_commit(self) -> None:
        """Finishes the step's sums and runs its commit all-reduce (`recovery/step_commit.py`). On
        return, the step's outcome is known. Called on the training thread, outside of passes."""
        ...

    def reduce_if_whole(self) -> None:
        """Commits the step if the backward pass that just ended completed this rank's part of
        it."""
        ...

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Ends the step. If the step counts, calls `apply`, which updates the parameters. Every
        survivor returns the same status."""
        ...


class StrategySession(Protocol):
    """Interface of the session, as used by engines."""

    @property
    def lifecycle(self) -> StepControl:
        """The part of the session that begins, commits and aborts the steps of this engine's
        model."""
        ...

    @property
    def elastic(self) -> bool:
        """True if there are, or may be, other ranks. False in a world of one without a
        coordinator."""
        ...

    @property
    def group(self) -> Group | None:
        """Connected ranks of this generation. A different object in each generation."""
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
        """True if the ranks are those with which the run was started: no rank has left or joined
        yet."""
        ...

    @property
    def ranks_may_come(self) -> bool:
        """True if further processes may join the job."""
        ...

    @property
    def steps(self) -> int:
        """Number of committed steps of the run."""
        ...

    @property
    def is_joining(self) -> bool:
        """True if this process replays its script. No steps begin then, and collectives are
        answered locally."""
        ...

    @property
    def step(self) -> Step | None:
        """Step in progress."""
        ...

    @property
    def registered(self) -> RegisteredState:
        """Objects registered by the script besides model and optimizer."""
        ...

    def trains(self, engine: object) -> bool:
        """Returns whether `engine` is the one that trains the run's model, and not the engine of a
        clone of that model."""
        ...

    def attach(self, engine: TrainingEngine) -> None:
        """Makes `engine` the run's engine, and sends the first rank's weights to all ranks. Called
        once, before anything else."""
        ...

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Records which parameters of the model require gradients from this step on. All ranks must
        agree at the step's end."""
        ...

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the committed state. Until `release`, steps are committed on this rank alone. If a
        step is aborted, all of them are undone and the loader repeats their samples. `replica`:
        state of this rank's model and optimizer, for `restore`. Called in `step_begins`."""
        ...

    def release(self) -> None:
        """Confirms the steps since `keep` on all ranks. Called in `commit_step` of a step in which
        all ranks took part."""
        ...

    def operation(self, kind: str, body: Body) -> Any:
        """Runs `body` on all ranks between steps, and runs it again if the membership changes
        meanwhile."""
        ...
