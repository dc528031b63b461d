"""The seam between the session and an engine, from both sides.

A strategy's engine is a `TrainingEngine`: what the session calls. Of the session it calls what
`StrategySession` has, and nothing else (but async_sgd's, which has no common step, and opens a job
of its own). So a new engine is written against this file and its base class (`engine/base.py`);
loaders stand on the other side of the session, behind `loader_interface.py`, and know no strategy.

The order of calls in one step, all on the training thread:

    step_begins
      micro_batch_begins, [forward and backward], micro_batch_ends(weight)
          once per micro-batch of this rank, perhaps never
      finish_reduction
          may come several times; the first one reduces and closes
        take_closing
            where only a peer saw the closing
    commit_step
        after `apply` returned, or
    discard_step
        when the step is void or was not meant

In between a strategy asks for `session.step`, reduces over `session.group`, and marks the step lost
when a collective fails, instead of raising out of a backward pass. When the sums are there it calls
`seal_step`; then it sums the control word in the closing, one small all-reduce (`control_word`,
`take_control_word`); and at the end of `finish_reduction` it calls `settle_step`, which finds out
from the survivors what became of a step whose group failed. Its optimizer's `step()` is
`session.finish_step(apply)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol

import torch
from shoal_common.errors import ShoalError

from shoal_worker.elastic.channel import Channel
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.loader_interface import Leases, StepStatus
from shoal_worker.elastic.operations import Body
from shoal_worker.elastic.row_store import RowStore
from shoal_worker.elastic.schedulers_and_scalers import RegisteredState
from shoal_worker.elastic.step import Step
from shoal_worker.state.tree import StatePart

BUFFERS: Final = "the buffers"
"""The group of a model's buffers in `TrainingEngine.in_common`."""


class TrainingEngine(Protocol):
    """A strategy's engine, with its model and optimizer, as the session sees it."""

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        ...

    @property
    def models(self) -> int:
        """How many models it trains, each with an optimizer."""
        ...

    asynchronous: ClassVar[bool]
    """No process group: every iteration is a step of its own (async_sgd)."""
    backend_name: str

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model this rank belongs to: the one that samples are dealt to."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        ...

    @property
    def least_samples(self) -> int:
        """See `Placement`. The same on all ranks."""
        ...

    @property
    def leads_replica(self) -> bool:
        """This rank is the first of those that hold its replica of the model."""
        ...

    @property
    def idle(self) -> bool:
        """This rank is a spare: it has no part in the model, and takes no steps until a newer
        generation gives it one."""
        ...

    @property
    def lacks_ranks(self) -> bool:
        """There are fewer ranks than one replica of the model takes, and this one has all of the
        state: no step begins before more come."""
        ...

    @property
    def replica_size(self) -> int:
        """How many ranks hold one replica of the model together, where others are spares; 1 where
        there are none."""
        ...

    def issued(self) -> bytes:
        """What this rank has issued of the collectives that belong to passes, in the step in
        progress; b"": none. Asked on another thread, while the training thread waits for its
        peers."""
        ...

    def compare_issued(self, told: Sequence[bytes]) -> None:
        """`told`: what ranks say of that. Raises PreconditionError: they will wait for each other
        for ever."""
        ...

    @property
    def passes_with(self) -> str:
        """Names the ranks that go through the model's passes together with this one; empty: all
        do."""
        ...

    def working(self, group: Group) -> Group:
        """The ranks of `group`, for which the model was regrouped, that are no spares. Asked of
        those alone."""
        ...

    @property
    def in_parts(self) -> bool:
        """No rank has all of the state."""
        ...

    @property
    def holds(self) -> Sequence[str]:
        """Names of the parts of the state that this rank holds, the same on all ranks that hold
        them; empty where it is not in parts."""
        ...

    @property
    def steps_alone(self) -> bool:
        """Steps are this rank's own, and nothing of the other ranks' is to be known in them."""
        ...

    @property
    def within_round(self) -> bool:
        """Whether steps were committed here that count with a later one, behind which this worker
        may leave. Asked of asynchronous engines alone: of the others `StrategySession.keep` says
        it."""
        ...

    @property
    def consistency_check_every(self) -> int:
        """After how many steps ranks compare what they hold in common; 0: never."""
        ...

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """State that this rank and others hold after a step that all have applied:
        tensors by name, in groups that a rank holds as a whole or not at all. Equal on all ranks
        that hold them. Shares memory with the state."""
        ...

    def whole_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Parameters and buffers, as committed, that every rank holds as a whole until an update:
        tensors by name, in groups. Shares memory with the state."""
        ...

    def check_optimizer_state(self) -> None:
        """Raises ConfigurationError (STATE_UNSUPPORTED), which names the parameter and the entry:
        the optimizer keeps something that cannot be sent to a rank that joins, or saved."""
        ...

    def capture(self) -> dict[str, Any]:
        """The committed state of model and optimizer, buffers included. Shares memory with them."""
        ...

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """The whole committed state of model and optimizer, as one process would have it, on the
        first rank of `channel`; on others perhaps nothing: for checkpoints. Part of an operation.
        May share memory with the state."""
        ...

    def part(self, channel: Channel) -> StatePart | None:
        """This rank's part of what `assemble` gives, for a checkpoint that the ranks write
        together; None, on all ranks alike: `assemble` it. Part of an operation. Shares memory with
        the state."""
        ...

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """While open, this rank computes with the model without its peers. Opened by all ranks of
        an operation."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a captured or an assembled state."""
        ...

    def regroup(self, group: Group) -> None:
        """A new group stands and all its ranks hold the same steps: what is cut over the ranks is
        cut for these. A collective."""
        ...

    def bring_together(self, channel: Channel) -> None:
        """What every rank holds whole between steps is whole and newest again on all of `channel`,
        whose group holds others as well that nothing is cut for yet. An operation."""
        ...

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """Copies each part of the state that one rank of `channel` alone holds to another rank,
        which keeps it until the state is cut anew: the next death loses nothing. An operation; when
        it returns, all ranks have their copies.

        `leaving`: ranks that are about to leave, whose copies do not count.
        """
        ...

    @property
    def row_store(self) -> RowStore | None:
        """The rows of the model's sparse tables; None: it has none."""
        ...

    def has_values(self) -> bool:
        """False while parameters are on the meta device."""
        ...

    def step_begins(self) -> None:
        """The next step begins, with the ranks and the committed state that stand now."""
        ...

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
        """See `LoaderSession`. Raises ConfigurationError unless asynchronous."""
        ...

    def batch_begins(self) -> None:
        """The script gets this rank's batch of a step that is not in micro-batches."""
        ...

    def micro_batch_begins(self) -> None:
        """The next micro-batch starts from the committed buffers and from no gradient."""
        ...

    def micro_batch_ends(self, weight: float) -> None:
        """The backward pass of a micro-batch that weighs `weight` is done."""
        ...

    def finish_reduction(self) -> None:
        """Blocks until the gradients of all ranks are summed and the step is closed, or until the
        survivors agree that it is void."""
        ...

    def closing(self) -> dict[str, Any]:
        """What the closing of the last step committed told, beside the control word, for a rank
        that sealed the step and missed it."""
        ...

    def take_closing(self, told: Mapping[str, Any]) -> None:
        """The step in progress is sealed here, and a peer saw its closing: what `closing` gave
        there. Its group is over."""
        ...

    @property
    def partly_updated(self) -> bool:
        """Some of several models were updated in the step in progress, and others were not
        (`engine/several_models.py`)."""
        ...

    def withdraw_updates(self) -> None:
        """What the step in progress has updated is what it was before, while nobody knows whether
        the step counts: it may be given to peers, or saved. `reinstate_updates` or `discard_step`
        follows; or neither, if the step is never finished."""
        ...

    def reinstate_updates(self) -> None:
        """The step goes on, or counts: what was withdrawn is here again. Does nothing where nothing
        was."""
        ...

    def writes_apart(self) -> ShoalError:
        """The error for ranks whose passes have written different values to parameters. All ranks
        raise it."""
        ...

    def discard_step(self) -> None:
        """Puts back what the step changed: buffers, written parameters, attributes and extra state
        of modules, gradients."""
        ...

    def commit_step(self) -> None:
        """The step was applied: what it left in the buffers is now the committed state."""
        ...


class StrategySession(Protocol):
    """The session, as a strategy sees it."""

    @property
    def elastic(self) -> bool:
        """There are, or may be, other ranks. False: a world of one without a coordinator."""
        ...

    @property
    def group(self) -> Group | None:
        """The ranks of this generation, connected. Another object after each re-forming."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def begins(self) -> bool:
        """The ranks are those that the run was started with: none has gone yet, and none has come
        later."""
        ...

    @property
    def ranks_may_come(self) -> bool:
        """Further processes may join the job."""
        ...

    @property
    def steps(self) -> int:
        """Committed steps of the run."""
        ...

    @property
    def is_joining(self) -> bool:
        """This process replays its script: steps are not begun, collectives are answered
        locally."""
        ...

    @property
    def step(self) -> Step | None:
        """The step in progress."""
        ...

    @property
    def registered(self) -> RegisteredState:
        """What the loop has registered beside model and optimizer."""
        ...

    def trains(self, engine: object) -> bool:
        """Whether `engine` is the run's model; a clone of it is not."""
        ...

    def attach(self, engine: TrainingEngine) -> None:
        """Makes `engine` what the run trains, and gives all ranks the first rank's weights. Once,
        before any other call."""
        ...

    def ensure_step(self) -> Step:
        """The step in progress; begins one in a user's own loop, where no loader does. Called by
        each forward pass in training."""
        ...

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Which of the model's parameters want gradients, from this step on: the same on all ranks,
        or the step's end says so."""
        ...

    def control_word(self) -> list[float]:
        """What this rank adds to the step's control word: CONTROL_LENGTH numbers, to be summed over
        the ranks once per step."""
        ...

    def settle_collectives(self) -> None:
        """Returns when all collectives ordered in the step have ended; if not all did well it is
        marked lost. On a device a failure is heard of no earlier."""
        ...

    def seal_step(self) -> None:
        """The gradients are summed: this rank has all that it needs to apply the step. Waits for
        all that was ordered in it (`Group.settle`); if not all of that ended well the step is
        marked lost instead."""
        ...

    def take_control_word(self, summed: Sequence[float]) -> None:
        """The closing came back: the step counts, whatever fails from here on."""
        ...

    def mark_lost(self, error: BaseException) -> None:
        """A collective of the step failed: nothing more is sent in it. Changes nothing once the
        closing was seen. From any thread."""
        ...

    def void_step(self, reason: str) -> None:
        """The step in progress counts nowhere, as every rank concludes by itself."""
        ...

    def settle_step(self) -> None:
        """Returns when it is known what becomes of the step in progress. If its group failed before
        this rank saw the closing, forms the next generation and asks there: the step is decided if
        a survivor saw the closing, else void. On the training thread, outside of passes."""
        ...

    def finish_reduction_if_whole(self) -> None:
        """After a backward pass: reduces now if it was the whole of this rank's part in the
        step."""
        ...

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Ends the step: calls `apply`, which updates the parameters, if the step counts. Every
        survivor gets the same answer."""
        ...

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the committed state. The steps committed from here on are this rank's alone, and
        are undone by the next step that is void, until `release`: the loader hands out their
        samples again. `replica`: model and optimizer as this rank has them, for `restore`. In
        `step_begins`."""
        ...

    def release(self) -> None:
        """The steps since `keep` are every rank's. In `commit_step`, of a step that all ranks took
        part in."""
        ...

    def operation(self, kind: str, body: Body) -> Any:
        """Does something on all ranks between steps, again if the membership changes on the way."""
        ...
