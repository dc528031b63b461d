"""The interfaces between the session and a strategy's engine, in both directions.

The session calls the engine through `TrainingEngine`. The engine calls the session only through
`StrategySession`, and its step lifecycle only through `StepControl`. (The engine of async_sgd,
whose workers have no common steps, also opens a job of its own.) A new engine therefore depends
only on this file and its base class (`engine/base.py`). Loaders use a different interface of the
session, `loader_interface.py`, and do not depend on strategies.

The session calls the engine in this order in one step, always on the training thread:

    step_begins
    micro_batch_begins, [forward and backward], micro_batch_ends(weight)
        once per micro-batch of this rank, possibly never
    reduce, sum_commit, take_commit
        at the end (`recovery/step_commit.py`); only `take_commit` if this rank missed the result
        of the commit all-reduce and received it from a peer
    commit_step
        if the step is committed, after `apply` has returned; otherwise
    discard_step
        if the step is aborted or was not intended

In between, the engine gets the current step from `session.step`, and reduces across
`session.group`. If a collective fails, it marks the step as failed instead of raising an exception
in a backward pass. Once it has the sums, it calls `lifecycle.prepare_step`. To get the final
gradients earlier, for example to clip them, it calls `lifecycle.reduce_and_commit`. Its optimizer's
`step()` calls `lifecycle.finish_step(apply)`.
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
    """Interface of a strategy's engine, including its model and optimizer, as used by the session.
    The defaults suit an engine with a single model, which is unsharded on every rank, and ranks
    that take steps together."""

    asynchronous: ClassVar[bool] = False
    """True if there is no process group and ranks take independent steps (async_sgd)."""
    strategy: str
    """Name of the strategy."""
    backend_name: str
    least_samples: int
    """Value of `Placement.least_samples`; must be the same on all ranks."""

    @property
    def models(self) -> int:
        """Number of models that the engine trains, each with its own optimizer."""
        return 1

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica of the model, which determines its samples."""

    @property
    @abc.abstractmethod
    def data_parallel_size(self) -> int:
        """Number of replicas of the model."""

    @property
    def leads_replica(self) -> bool:
        """True if this rank is the first rank of its replica of the model."""
        return True

    @property
    def idle(self) -> bool:
        """True if this rank is a spare. A spare has no part of the model, and does not take steps
        until a later generation assigns it a part."""
        return False

    @property
    def lacks_ranks(self) -> bool:
        """True if this rank has the complete state, but there are too few ranks for a replica of
        the model. In that case, no step begins before more ranks join."""
        return False

    @property
    def replica_size(self) -> int:
        """Number of ranks that one replica of the model is split across; 1 if the strategy never
        has spares."""
        return 1

    def issued(self) -> bytes:
        """Returns the encoded trace of the collectives that this rank has issued in the passes of
        the current step; b"" if there are none. Called on another thread while the training thread
        waits for its peers."""
        return b""

    def compare_issued(self, issued: Sequence[bytes]) -> None:
        """Compares the ranks' results of `issued`. Raises PreconditionError if the ranks are
        waiting for each other in different collectives."""

    @property
    def passes_with(self) -> str:
        """Name of the set of ranks that run the model's passes together with this rank; empty: all
        ranks."""
        return ""

    def working(self, group: Group) -> Group:
        """Returns the ranks of `group` that are not spares. Called after the model has been
        resharded for `group`, and never on spares."""
        return group

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the complete state."""
        return False

    @property
    def holds(self) -> Sequence[str]:
        """Names of this rank's parts of the state. A part has the same name on all ranks. Empty if
        the state is not sharded."""
        return ()

    @property
    def steps_alone(self) -> bool:
        """True if ranks take independent steps that need nothing from other ranks."""
        return False

    @property
    def within_round(self) -> bool:
        """True if this rank has committed steps that count only once a later step ends their round.
        This worker must not leave before that step. Used only by asynchronous engines; other
        engines use `StrategySession.keep`."""
        return False

    @property
    @abc.abstractmethod
    def consistency_check_every(self) -> int:
        """Number of steps between comparisons of the ranks' common state; 0: never."""

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the state that must be the same on several ranks after a step: name of a group ->
        tensors by name. A rank has either all tensors of a group or none. The tensors share memory
        with the state."""
        return {}

    def unsharded_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the committed parameters and buffers that are unsharded on every rank until the
        next update: name of a group -> tensors by name. The tensors share memory with the state."""
        return {}

    @abc.abstractmethod
    def check_optimizer_state(self) -> None:
        """Checks that the optimizer's state can be sent to a joiner and saved. Otherwise raises
        ConfigurationError (STATE_UNSUPPORTED), which names the parameter and the entry."""

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]:
        """Returns the committed state of model and optimizer, including buffers. The result shares
        memory with model and optimizer."""

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete committed state of model and optimizer as on a single process, for
        checkpoints. Must be called within an operation. Only the first rank of `channel` is
        guaranteed to receive the state. The result may share memory with the model."""
        return self.capture()

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the state that `assemble` returns, for a checkpoint that the
        ranks write together. Returns None on all ranks if the caller must use `assemble` instead.
        Must be called within an operation. The part shares memory with the state."""
        return None

    def unsharded_for(self, channel: Channel) -> AbstractContextManager[None]:
        """Unshards the model within the block, so that this rank can use it without its peers. Must
        be entered on all ranks of an operation."""
        return nullcontext()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a state returned by `assemble`, or the state in a result of `part`, belongs
        to this model and optimizer. If the model is on the meta device, may create its parameters.

        Raises:
            CorruptDataError: `restore` would refuse the state.
        """

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads a captured or an assembled state."""

    def reshard(self, group: Group) -> None:
        """Reshards the state for a newly established group, whose ranks have all committed the same
        steps. Must be called on all ranks."""

    def consolidate(self, channel: Channel) -> None:
        """Updates, on all ranks of `channel`, the part of the state that is unsharded on every rank
        between steps. The channel's group may contain further ranks, which have no shards. Must be
        called within an operation."""

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """Copies parts of the state between ranks of `channel`, so that each part is on at least
        two ranks if possible and survives the next failure. The copies are kept until the state is
        resharded. Must be called within an operation; on return, all ranks have their copies.

        `leaving`: ranks that are about to leave, so that their copies do not count.
        """

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters that do not require gradients, by their names in the flattened
        result of `capture`. They have values on this rank unless the state is sharded or the model
        is on the meta device."""
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
        """Leases batches, as in `LoaderSession`. By default raises ConfigurationError, because all
        ranks take each step together; asynchronous engines override it."""
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
        """Finishes a micro-batch, after its backward pass. `weight`: weight of the micro-batch."""

    @abc.abstractmethod
    def reduce(self, step: Step) -> None:
        """Sums the gradients of all ranks, obtains everything needed to apply the step, and
        prepares the step (`StepControl.prepare_step`). On failure, marks the step as failed. If the
        step is already prepared or committed, only checks that no gradients have been added."""

    @abc.abstractmethod
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Runs the commit all-reduce of a prepared step across the ranks that take part in the
        step. Returns the sum of `vote`, and a payload for `take_commit` that is the same on all
        ranks. If the all-reduce fails, raises MembershipChanged, and the step is aborted or in
        doubt."""

    def take_commit(self, payload: Mapping[str, Any]) -> None:
        """Uses the commit payload of the current step, for example to set gradients. The payload
        comes from `sum_commit`, or from a peer if this rank's group ended before `sum_commit`
        returned."""

    def commit_payload(self) -> dict[str, Any]:
        """Returns the payload of the last committed step, for a rank that has prepared the step but
        missed the commit all-reduce."""
        return {}

    @property
    def partly_updated(self) -> bool:
        """True if only some of several models have been updated in the current step
        (`features/several_models.py`)."""
        return False

    def withdraw_updates(self) -> None:
        """Undoes the current step's updates while its outcome is unknown, because the state may be
        sent to peers or saved. Followed by `reinstate_updates` or `discard_step`, or by neither if
        the step is never finished."""

    def reinstate_updates(self) -> None:
        """Reapplies the updates that `withdraw_updates` has undone, once the step continues or
        turns out to be committed. Does nothing if no updates were withdrawn."""

    def writes_apart(self) -> ShoalError:
        """Returns the error that all ranks raise if their forward or backward passes have written
        different values to parameters, or to buffers that must stay the same on all ranks. By
        default, returns InternalError, because every engine that compares these writes overrides
        this method."""
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
        """Commits a step that has been applied: the buffers' new values become part of the
        committed state."""


class StepControl(Protocol):
    """Interface of the step lifecycle, as used by engines."""

    def ensure_step(self) -> Step:
        """Returns the current step. In a loop without a Shoal loader, begins a step if there is
        none. Called in each forward pass in training mode."""
        ...

    def settle_collectives(self) -> None:
        """Waits until all collectives passed to `Group.order` in the step have ended. If one has
        failed, marks the step as failed. If the tensors are on a device, failures are noticed only
        here."""
        ...

    def prepare_step(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply the step. First waits for all ordered collectives (`Group.settle`). If one has
        failed, marks the step as failed instead."""
        ...

    def mark_lost(self, error: BaseException) -> None:
        """Marks the step as failed because a collective has failed. The step then sends nothing
        more. Changes nothing once this rank has received the result of the commit all-reduce.
        Thread-safe."""
        ...

    def abort_step(self, reason: str) -> None:
        """Aborts the current step, without communication. Ranks that take steps together must make
        the same decision."""
        ...

    def reduce_and_commit(self) -> None:
        """Finishes the step's sums and runs its commit all-reduce (`recovery/step_commit.py`). On
        return, the step's outcome is known. Must be called on the training thread, outside of
        passes."""
        ...

    def reduce_if_complete(self) -> None:
        """Commits the step if the backward pass that has just ended was the last part of this
        rank's step. Does nothing in a step with micro-batches."""
        ...

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Ends the step. If the step is committed, calls `apply`, which updates the parameters.
        Every survivor returns the same status."""
        ...


class StrategySession(Protocol):
    """Interface of the session, as used by engines."""

    @property
    def lifecycle(self) -> StepControl:
        """Step lifecycle, which begins, commits and aborts the steps of this engine's model."""
        ...

    @property
    def elastic(self) -> bool:
        """True if there are, or may be, other ranks. False in a world of one without a
        coordinator."""
        ...

    @property
    def group(self) -> Group | None:
        """Connected ranks of the current generation. Each generation has its own `Group` object."""
        ...

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        ...

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def begins(self) -> bool:
        """True if the run still has its initial ranks: no rank has left or joined yet."""
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
        """True if this process is replaying its script. In that case, no steps begin, and
        collectives are answered locally."""
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
        """Returns whether `engine` trains the run's model, and not a clone of it."""
        ...

    def attach(self, engine: TrainingEngine) -> None:
        """Makes `engine` the run's engine, and sends the first rank's weights to all ranks. Must be
        called once, before anything else."""
        ...

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Records which parameters of the model require gradients from this step on. All ranks must
        agree at the step's end."""
        ...

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the committed state. Until `release`, steps are committed on this rank only. If a
        step is aborted, all steps since `keep` are undone, and the loader repeats their samples.
        `replica`: state of this rank's model and optimizer, for `restore`. Called in
        `step_begins`."""
        ...

    def release(self) -> None:
        """Confirms the steps since `keep` on all ranks. Called in `commit_step` of a step that all
        ranks took part in."""
        ...

    def operation(self, kind: str, body: Body) -> Any:
        """Runs `body` on all ranks between steps, and runs it again if the membership changes while
        it runs."""
        ...
