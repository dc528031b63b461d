"""Engine of strategies in which every rank has a full replica of the model and gradients are summed
in every step.

The reductions are in `reduction.py` (steps without micro-batches; overlapped with the backward
pass) and `buckets.py` (micro-batches). `local_sgd.py` is based on this engine, but averages
parameters instead. All methods run on the training thread.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from shoal_common.errors import MembershipChanged, PreconditionError, ShoalError
from torch import nn
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.contract.reported_loss import read_later
from shoal_worker.elastic.contract.row_store import RowStore
from shoal_worker.elastic.contract.step import COMMIT, EXTREMES, Step, StepPhase
from shoal_worker.elastic.state.strategy_interface import BUFFERS
from shoal_worker.engine.base import Engine, Setup
from shoal_worker.engine.state.module_state import ModuleState, load_captured
from shoal_worker.engine.state.optimizer_state import load_optimizer
from shoal_worker.engine.state.parameters import (
    ModuleMembers,
    check_optimizer_covers,
    check_trains,
    has_values,
    materialize,
    take_unsaved,
    unsaved_buffers,
)
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.engine.step.compressed import compression_of
from shoal_worker.engine.step.failed_collectives import LosingStep
from shoal_worker.engine.step.pass_writes import ModuleAttributes, WrittenParameters
from shoal_worker.engine.step.passes import Loss, call_module, check_reproducible, loss_of
from shoal_worker.engine.step.tentative_update import TentativeUpdate
from shoal_worker.features.synchronized_norms import synchronize_norms
from shoal_worker.replicated.buckets import AccumulatedReduction
from shoal_worker.replicated.reduction import OverlappedReduction
from shoal_worker.sparse_tables.ddp_hook import StepTables
from shoal_worker.sparse_tables.embedding import check_unscaled
from shoal_worker.state.digest import state_tensors
from shoal_worker.torch_internals import uncompiled

_log = logging.getLogger(__name__)

_CLEAR = (
    "Call optimizer.zero_grad() in every step; to accumulate over several batches, pass "
    "micro_batch_size= to the loader"
)


class ReplicatedEngine(Engine):
    """Engine for strategies in which every rank has a full replica of the model and gradients are
    summed in every step."""

    keeps_parameters_unsharded = True

    def __init__(self, setup: Setup, tables: StepTables | None = None) -> None:
        """`tables`: sparse tables of the module; None if it has none."""
        super().__init__(setup)
        self._tables = tables
        self._compression = compression_of(self.config.compressor, self._session)
        self._skipped = False
        """True if a GradScaler found the step's gradients unusable."""
        self._uncleared_in: tuple[int, int] | None = None
        """Generation and number of ranks of the last committed step, if its gradients have not been
        cleared; otherwise None."""
        self._overlapped: OverlappedReduction | None = None
        self._accumulated: AccumulatedReduction | None = None
        self._attached = False
        check_trains(self.module)
        synchronize_norms(self.module, self._session, sums=self.config.loss_reduction == "sum")
        self._step_buffers = CommittedBuffers(self.module, self.extremes)
        self._members = ModuleMembers(self.module)
        self._find_members()

    def _find_members(self) -> None:
        self._writes = WrittenParameters(self.module.named_parameters(), self.strategy, whole=True)
        self._attributes = ModuleAttributes(self.module)

    @override
    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_optimizer_covers(self.module, optimizer)
        self.optimizer = optimizer
        self._attached = True
        self._session.attach(self)
        self._step_buffers.commit()
        if self._tables is not None:
            self._tables.connect()

    # ------------------------------------------------------------------------------------- training

    # the module that this method calls may be compiled
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass. In training mode, the backward pass reduces the gradients
        across all ranks.

        Outputs may be of any type. Parameters may be unused, and the unused parameters may differ
        between ranks.
        """
        reduces = self.module.training and torch.is_grad_enabled() and self._begin_pass()
        output = self._compute(*args, **kwargs)
        if reduces:
            self._follow(output)
        return output

    @uncompiled
    def _begin_pass(self) -> bool:
        """Prepares a training forward pass. Returns True if its backward pass reduces gradients."""
        if not self._attached:
            raise PreconditionError(
                "this model is a clone for evaluation; train the model that as_distributed returned"
            )
        step = self._session.lifecycle.ensure_step()
        if step.source is not None:  # otherwise this may be a dry run before the loop
            check_reproducible(self.config, step)
        if self._in_micro_batches:
            return False
        if step.phase is StepPhase.COMMITTED:
            raise PreconditionError(
                "the gradients of this step were already reduced, by train_step, clip_grad_norm_ "
                "or synchronize_gradients; run all backward passes of a step first. To "
                "accumulate gradients, pass micro_batch_size= to the loader and loop over "
                "loader.steps()"
            )
        if self._uncleared_in is not None and all(
            parameter.grad is None for parameter in self.module.parameters()
        ):
            self._uncleared_in = None
        if self._session.elastic:
            self._reduction().prepare(step)
        return self._session.elastic

    @uncompiled
    def _follow(self, output: Any) -> None:
        self._reduction().follow(output)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate this rank's gradients, as in torch's
        DDP. The next backward pass outside of the context reduces the accumulated gradients; if
        there is none, `optimizer.step()` does."""
        reduces = self._session.elastic and not self._in_micro_batches
        with self._reduction().paused() if reduces else contextlib.nullcontext():
            yield

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Runs the forward and backward passes of a batch and returns the loss, averaged across
        ranks if the other ranks' losses are known. The loss is part of the step vote, so it needs
        no separate collective.

        In `loader.steps()`, the batch is one of this rank's micro-batches, and its own loss is
        returned. `shoal status` shows the mean over the step.
        """
        session = self._session
        step = session.lifecycle.ensure_step()
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        reported = read_later(loss)
        step.loss = (
            reported
            if step.micro_batch is None or not self._in_micro_batches
            else self._accumulation().add_loss(reported, step.micro_batch)
        )
        loss.backward()
        if not self.config.auto_sync_gradients and not self._in_micro_batches:
            self.synchronize_gradients()
        session.lifecycle.reduce_if_complete()
        return (
            loss.detach()
            if step.loss_of_all is None
            else loss.detach().new_full((), step.loss_of_all)
        )

    def synchronize_gradients(self) -> None:
        """Reduces the gradients across ranks. Only needed with `auto_sync_gradients=False`, after
        the backward pass. Gradients that are already reduced are not reduced again."""
        step = self._session.step
        if step is not None:
            self._reduce_what_is_left(step)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clips the gradients and returns their norm. First finishes the reduction if necessary.
        Apart from that, needs no communication, because every rank has all gradients."""
        self._session.lifecycle.reduce_and_commit()
        return super().clip_grad_norm_(max_norm, norm_type)

    # -------------------------------------------------------------- TrainingEngine: for the session

    @property
    def _in_micro_batches(self) -> bool:
        step = self._session.step
        return step is not None and step.share is not None and step.share.micro_batches is not None

    @override
    def capture(self) -> dict[str, Any]:
        captured: dict[str, Any] = {
            "model": ModuleState(self.module).captured(),
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
        }
        if self._compression is not None:
            captured["compression"] = self._compression.capture()
        if self._tables is not None and (known := self._tables.capture()):
            captured["tables"] = known
        if written := self._writes.known:
            captured["written"] = written
        if self.extremes:
            captured["extremes"] = dict(self.extremes)
        buffers = unsaved_buffers(self.module)
        return captured | {"buffers": buffers} if buffers else captured

    @property
    @override
    def row_store(self) -> RowStore | None:
        return self._tables.store if self._tables is not None else None

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete state, with each rank's compression residuals."""
        if self._compression is None:
            return self.capture()
        return self.capture() | {"compression": self._compression.assemble(channel)}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        if not self.has_values():
            materialize(
                self.module, self.optimizer, self._session.device, buffers=state.get("buffers")
            )
            self._members = ModuleMembers(self.module)
            self.extremes |= state.get("extremes", {})
            self._step_buffers = CommittedBuffers(self.module, self.extremes)
            self._find_members()
        load_captured(self.module, state["model"])
        take_unsaved(self.module, state.get("buffers", {}))
        if self.optimizer is not None and state["optimizer"] is not None:
            own = ModuleState(self.module).tensors
            alike = all(
                each.dtype == state["model"][key].dtype
                for key, each in own.items()
                if key in state["model"]
            )
            load_optimizer(self.optimizer, state["optimizer"], exact=alike)
        if self._compression is not None:
            self._compression.restore(state.get("compression"))
        if self._tables is not None:
            self._tables.restore(state.get("tables"))
        self._step_buffers.replaced()
        self._writes.watch(state.get("written", ()))
        self._writes.replaced()
        self._attributes.forget()

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        self._check_fits(state["model"])
        if self.optimizer is not None and state["optimizer"] is not None:
            self._check_optimizer_fits(state["optimizer"])

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the complete state, in groups: all of it must be the same on all ranks."""
        optimizer = self.optimizer
        moments = (
            state_tensors(optimizer.state, dict(self.module.named_parameters()))
            if optimizer is not None
            else {}
        )
        model = {repr(name): tensor for name, tensor in ModuleState(self.module).tensors.items()}
        buffers = {
            name: model.pop(name)
            for name, tensor in [*model.items()]
            if not isinstance(tensor, nn.Parameter)
        }
        return {"the model": model, BUFFERS: buffers, "the optimizer's state": moments}

    def unsharded_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns all parameters and buffers, which are unsharded on every rank."""
        parameters = {
            repr(name): parameter.detach() for name, parameter in self.module.named_parameters()
        }
        return {"the parameters": parameters, "the buffers": self._step_buffers.begun_from()}

    @override
    def has_values(self) -> bool:
        return has_values(self.module)

    @torch.no_grad()
    def step_begins(self) -> None:
        """Begins a step. Changes that the user has made to buffers since the last step become part
        of the new step's starting state."""
        self._step_buffers.step_begins()
        self._skipped = False
        if self._setup.several:  # discards gradients that passes of other models have left
            for parameter in self.module.parameters():
                parameter.grad = None
        if self._compression is not None:
            self._compression.step_begins()
        if self._tables is not None:
            self._tables.step_begins()
        self._keep_for_redo()

    def _keep_for_redo(self) -> None:
        """Records the values that passes may change, so that they can be restored if the step is
        aborted. Buffers are recorded elsewhere."""
        if self._session.elastic:
            self._writes.begin()
            self._attributes.begin()

    @override
    def apply_tentatively(self, apply: Callable[[], None]) -> TentativeUpdate:
        self._writes.update_begins()
        return super().apply_tentatively(apply)

    @override
    def note_scaler(self, name: str) -> None:
        if self._compression is not None:
            self._compression.note_scaler(name)

    @override
    def writes_apart(self) -> ShoalError:
        names = self._writes.names()
        return (
            self._step_buffers.apart()
            if self._step_buffers.exact_names() and not names
            else self._writes.apart(names)
        )

    def batch_begins(self) -> None:
        """Starts observing gradients before the batch's first pass. `forward` cannot do this,
        because a pass need not go through it."""
        if (
            self._overlapped is None
            and self._session.elastic
            and any(p.requires_grad for p in self.module.parameters())
        ):
            self._reduction()

    @override
    def micro_batch_begins(self) -> None:
        self._writes.micro_batch_begins()
        self._accumulation().micro_batch_begins()

    @override
    def micro_batch_ends(self, weight: float) -> None:
        self._accumulation().micro_batch_ends(weight)
        step = self._session.step
        if step is not None and step.lost is None:
            # otherwise the passes may have used invalid values, and their results are not used
            self._writes.micro_batch_ends()
            if weight != 0:
                self._step_buffers.micro_batch_ends()
        if self._tables is not None:
            self._tables.micro_batch_ends(weight)

    @override
    def reduce(self, step: Step) -> None:
        by_hand = not self.config.auto_sync_gradients and not step.in_micro_batches
        if by_hand and step.phase is StepPhase.OPEN:
            raise PreconditionError(
                "the gradients of this step were not synchronized: with "
                "auto_sync_gradients=False, call model.synchronize_gradients() after the "
                "backward pass, before clipping and optimizer.step()"
            )
        self._reduce_what_is_left(step)
        if step.phase is StepPhase.PREPARED and step.lost is None:
            if self._tables is not None:
                self._tables.reduce()
            self._prepare_vote(step)

    def _prepare_vote(self, step: Step) -> None:
        """Prepares the step vote. Adds digests of the values that have been written to parameters
        and buffers, by passes or by the script. Also exchanges buffers that contain minima or
        maxima with the other ranks. On failure, marks the step as failed."""
        self._report_writes(step)
        if step.lost is None:
            self._agree_on_extremes(step)

    def _report_writes(self, step: Step) -> None:
        self._step_buffers.report_writes(step, self._writes)

    def _counts(self, step: Step) -> bool:
        """Returns whether this is a step without micro-batches in which this rank's batch has a
        weight above 0. Minima and maxima from its passes are used only in that case."""
        return not step.in_micro_batches and step.share is not None and step.share.weight > 0

    def _agree_on_extremes(self, step: Step) -> None:
        extremes = self._step_buffers.extremes
        if not extremes:
            return
        group = self._session.group
        made = extremes.made(counted=self._counts(step))
        step.issues(EXTREMES)
        with LosingStep(self._session):
            extremes.agree(group.exchange(made) if group is not None else [made])

    @torch.no_grad()
    @override
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Runs the commit all-reduce. The vote may show that, on some rank, the script has changed
        buffers after the backward pass. In that case, the step is not committed yet: the ranks sum
        the buffers' changes again and repeat the vote."""
        if not self._session.elastic:
            return [*vote], {}
        step.issues(COMMIT)
        group = self._session.group
        if group is None:
            raise MembershipChanged("there is no group")
        if step.in_micro_batches or not self._step_buffers.size:
            return group.sum_numbers(vote), {}
        while True:
            *summed, touched = group.sum_numbers([*vote, float(self._step_buffers.touched)])
            if not touched:
                return summed, {}
            self._reduction().sum_buffers_again(group, step)

    @property
    def holds_unreduced_gradients(self) -> bool:
        """True if some of this rank's gradients have not been reduced yet; `optimizer.step()` would
        reduce them."""
        step = self._session.step
        if not self._session.elastic or step is None or step.lost is not None:
            return False
        return step.phase is StepPhase.OPEN or (
            not self._in_micro_batches and self._reduction().pending
        )

    @torch.no_grad()
    def _reduce_what_is_left(self, step: Step) -> None:
        """Finishes the step's reduction. With micro-batches, this is the entire reduction;
        otherwise, only the part that was not done by hooks during the backward passes."""
        if step.share is None or step.lost is not None:
            return
        check_reproducible(self.config, step)
        self._members.check()
        if step.in_micro_batches:
            if step.micro_batch is not None:
                raise PreconditionError(
                    "gradients can be clipped or synchronized only after the loop over the "
                    "step's micro-batches, but this call is inside that loop, or the loop was "
                    "left early; call clip_grad_norm_() and synchronize_gradients() between `for "
                    "batch in step:` and optimizer.step()"
                )
            self._accumulation().finish()
        elif not self._session.elastic:
            self._session.lifecycle.prepare_step()
        elif step.phase is StepPhase.OPEN or self._reduction().pending:
            self._reduction().synchronize(step)
        else:
            self._reduction().check_complete()

    @torch.no_grad()
    @override
    def discard_step(self) -> None:
        step = self._session.step
        if step is not None and step.lost is not None and self._uncleared_in is not None:
            _log.warning(
                "this step was lost, and with it the gradients that earlier steps had "
                "accumulated and to which it would have added its own. %s",
                _CLEAR,
            )
        self._uncleared_in = None
        for reduction in (self._overlapped, self._accumulated):
            if reduction is not None:
                reduction.discard()
        self._step_buffers.put_back()
        if step is None or step.lost is not None:
            self._undo_writes()
        else:  # the step was not intended: keep the values that the script has written since
            self._writes.forget()
            self._attributes.forget()
        if self._compression is not None:
            self._compression.abort()
        if self._tables is not None:
            self._tables.discard()
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    @override
    def commit_step(self) -> None:
        if self._accumulated is not None and self._accumulated.open:
            self._accumulated.write_buffers()
        elif self._overlapped is not None:
            self._overlapped.write_buffers()
        if self._compression is not None:
            self._compression.commit(unusable=self._skipped)
        if self._tables is not None:
            self._tables.commit()
        self._writes.commit()
        self._step_buffers.step_committed()
        self._note_uncleared()

    def _undo_writes(self) -> None:
        self._writes.put_back()
        self._attributes.put_back()

    def _note_uncleared(self) -> None:
        """Records at the end of a step whether its gradients have been cleared. If not, the next
        backward pass adds to them. Logs a warning if this step has added to gradients of the
        previous step that newly joined ranks do not have."""
        group = self._session.group
        now = (group.generation.number, group.world_size) if group is not None else (0, 1)
        before = self._uncleared_in
        if before is not None and before[0] != now[0] and before[1] <= now[1]:
            _log.warning(
                "this step added its gradients to those of the previous step, which had not been "
                "cleared; ranks that have joined since then do not have those. %s",
                _CLEAR,
            )
        carries = not self._setup.several and any(
            p.grad is not None for p in self.module.parameters()
        )
        self._uncleared_in = now if carries else None

    def _accumulation(self) -> AccumulatedReduction:
        if self._accumulated is None:
            self._accumulated = AccumulatedReduction(
                self.module, self._step_buffers, self._session, self.config, self._compression
            )
        return self._accumulated

    def _reduction(self) -> OverlappedReduction:
        if self._overlapped is None:
            self._overlapped = OverlappedReduction(
                self.module, self._step_buffers, self._session, self.config, self._compression
            )
        return self._overlapped

    # ------------------------------------------------------------------------- for ShardedOptimizer

    @override
    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        if inspected and self.holds_unreduced_gradients:
            raise PreconditionError(
                "the GradScaler inspected gradients before they were reduced, so ranks would "
                "disagree on whether to skip the step; run the last backward pass outside "
                "no_sync(), or call model.synchronize_gradients() before scaler.unscale_() or "
                "step()"
            )
        if self._tables is None:
            return super().finish_step(update, scaled=scaled, inspected=inspected)
        check_unscaled(scaled=scaled or inspected)
        status = super().finish_step(update, scaled=scaled, inspected=inspected)
        self._tables.deliver()
        return status

    @property
    @override
    def keeps_zero_gradients(self) -> bool:
        """False if each step begins without gradients: with micro-batches, and with several
        models."""
        return self._accumulated is None and not self._setup.several

    @override
    def zero_grad(self, clear: Callable[[], None]) -> None:
        clear()
        self._uncleared_in = None
        if self._tables is not None:
            self._tables.drop_gradients()

    @property
    @override
    def changing_buffers(self) -> bool:
        return self._step_buffers.size > 0

    @override
    def skip(self) -> None:
        self._skipped = True

    # ---------------------------------------------------------------------------------------- state

    def clone(self, remake: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Returns a copy of the model as a separate `ShardedModel`, which is not trained."""
        return remake(copy.deepcopy(self.module))
