"""What zero1, zero2 and zero3 have in common: how a model is trained whose parts are cut over the ranks.

They differ in what is cut (`Stage`) and in what is gathered at once (`groups`). (Rajbhandari et al., "ZeRO", SC 2020, sections 5 and 7;
Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.) The optimizer updates flat pieces of parameters. That is right for optimizers that treat
each element by itself, which most do; others are refused.

A step ends as `in_parts.py` says. Its gradients are sealed when each rank has its shard's sum, and has passed it on to its buddy, who
mirrors the shard: parameters and optimizer state, as further pieces of the same optimizer. The closing also tells which parameters were
used and how the buffers changed. Owners and mirrors apply the same update. After a failure the shards are cut for the new group
(`regroup`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from shoal_common.errors import MembershipChanged, PreconditionError

from shoal_worker.elastic.contract import Share
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.step import Step
from shoal_worker.engine.closing import ClosingSum, CutClosing
from shoal_worker.failpoints import failpoint
from shoal_worker.sharding.issued import IssuedCollectives
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.base import call_module, check_reproducible, loss_of
from shoal_worker.strategies.cut_model import CutModel, in_dtype

_WIDE: Final = torch.empty(0, dtype=torch.float64)
"""What the closing is summed in, and where."""


class ShardedParametersModel(CutModel):
    """A model whose optimizer state, and perhaps gradients and parameters, are cut over the ranks, in training."""

    def initialize_sharding(self) -> None:
        """See `CutModel`."""
        super().initialize_sharding()
        self._weights = 0.0
        """Weight of the micro-batches of this rank in this step."""
        self._changes: torch.Tensor | None = None
        """By how much they changed the buffers, weighted."""

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; in training its backward pass reduces the gradients over all ranks."""
        if self._trains:
            step = self._session.ensure_step()
            if step.source is not None:  # else this may be a dry run before the loop, and no step
                check_reproducible(self.config, step)
            if step is self._session.step:
                self._weigh(step)
            else:  # a joiner's pass ahead of its loop
                self._execution.factor = 0.0
        if self.config.param_dtype is not None:
            args, kwargs = in_dtype((args, kwargs), self.config.param_dtype)
        return self._call(*args, **kwargs)

    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor:
        loss = loss_of(call_module(self, inputs), targets, loss_fn)
        loss.backward()
        return loss

    def _weigh(self, step: Step) -> None:
        """What the gradients of the coming pass count."""
        if step.control is not None:
            raise PreconditionError(
                "the gradients of this step are reduced already, by clip_grad_norm_, synchronize_gradients or a GradScaler: do all "
                "backward passes of a step before"
            )
        share = step.share
        self._execution.show_gradients()
        self._prepare_pass(step)
        if step.in_micro_batches:
            weight = step.micro_batch or 0.0
        elif share is None or not share.total_weight:
            weight = 0.0
        else:
            weight = share.weight / share.total_weight
        self._execution.factor = weight if self.config.loss_reduction == "mean" else float(weight > 0)

    def _prepare_pass(self, step: Step) -> None:
        """Before a step's first collective."""
        self._execution.reduces_in_backward = self.stage > Stage.OPTIMIZER or not step.in_micro_batches
        if self._compression is not None:
            total = step.share.total_weight if step.share is not None and step.in_micro_batches else None
            self._compression.weigh(total or 1.0 if self.config.loss_reduction == "mean" else 1.0)
        group = self._session.group
        if group is None or step.lost is not None or self.stage is not Stage.PARAMETERS or not step.in_micro_batches:
            return
        try:
            self._execution.learn_passes(group)
        except MembershipChanged as error:
            self._session.mark_lost(error)

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if self._held.whole:
            return self._held.capture_whole() | {"applied": self._applied}
        return self._held.capture_common() | {"applied": self._applied}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Replica`."""
        self._give_values(state)
        if "model" in state:
            self._held.restore_whole(state)
            self._applied = state.get("applied", 0)  # a checkpoint's ranks begin to count anew
            if self._compression is not None:
                self._compression.restore(state.get("compression"))
            self._closing = None
        else:
            if not self._held.whole and self._held.cut is not None and state["applied"] != self._applied:
                raise PreconditionError(
                    f"this rank has applied {self._applied} steps and its peers {state['applied']}: it holds shards of an older state, and "
                    "cannot follow; let it end, and start another in its place"
                )
            self._applied = state["applied"]
            self._held.restore_common(state)
        self._step_buffers.commit()

    def _hand_out(self, closing: CutClosing) -> None:
        self._gradients.hand_out(closing.divisor, closing.present)

    def _as_closing(self, told: Mapping[str, Any]) -> CutClosing:
        return CutClosing(**told)

    @torch.no_grad()
    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        IssuedCollectives.compare(group.exchange(self._execution.issued.encode() if self._parts is not None else b""), self.strategy)
        if self._parts is not None:
            self._execution.regrouped()
            self._parts.regroup(group)
        elif any(row[0] for row in group.all_gather_integers([0])):
            raise PreconditionError("this rank's model is on the meta device, and its peers' states are cut already: it should be a joiner")

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        step, group = self._session.step, self._session.group
        assert step is not None
        self._check_training()
        self._begin_step()
        self._execution.begin_step(self._applied + 1)
        self._weights, self._changes = 0.0, None
        if self._held.whole:
            hosts = [peer.host for peer in group.generation.peers] if group is not None else [""]
            self._held.cut_whole(number=step.placement.generation, rank=step.placement.rank, hosts=hosts)
        elif self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()  # where a failure kept it from being done after the update
        if self._compression is not None:
            trained = self._held.trained
            self._compression.laid_out("units", [unit.parameter_names for unit in trained], [u.layout.padded_numel for u in trained])
            self._compression.step_begins()

    def micro_batch_begins(self) -> None:
        """See `Replica`."""
        self._step_buffers.put_back()

    def micro_batch_ends(self, weight: float) -> None:
        """See `Replica`."""
        if weight > 0:
            self._weights += weight
            changes = self._step_buffers.changes(_WIDE) * weight
            self._changes = changes if self._changes is None else self._changes + changes

    @torch.no_grad()
    def _reduce(self, step: Step, share: Share) -> None:
        session = self._session
        check_reproducible(self.config, step)
        self._prepare_pass(step)
        if step.in_micro_batches and self.stage > Stage.OPTIMIZER:
            for _ in range(share.most_micro_batches - (share.micro_batches or 0)):
                self._execution.take_part()
        self._execution.reduce_rest()
        if step.lost is not None or not self._seal():
            return
        failpoint("sharded.sealed")
        gradients = self._gradients
        summing = ClosingSum(
            session.control_word(),
            self._execution.issued.word(),
            [self._weights],
            gradients.squared_norm_part(self._held.trained if self._held.division.replica(session.rank) == 0 else []),
            gradients.touched,
            self._buffer_changes(step),
        )
        summed = summing.to_send(session.group.device if session.group is not None else "cpu")
        if not self._collectives.all_reduce_short(summed) or not self._passes("step.closed"):
            return
        word, issued, weights, norm, present, changes = summing.split(summed)
        IssuedCollectives.check(issued.tolist(), self.strategy)
        total = (float(weights) or 1.0) if step.in_micro_batches else 1.0
        closing = CutClosing(
            number=self._applied + 1,
            divisor=total if self.config.loss_reduction == "mean" else 1.0,
            squared_norm=self._gradients.squared_norm(norm),
            present=[count > 0 for count in present.tolist()],
            changes=changes / total,
        )
        self._close(closing, word.tolist())

    def _buffer_changes(self, step: Step) -> torch.Tensor:
        """This rank's part in the changes of the buffers."""
        if step.in_micro_batches:
            return torch.zeros(self._step_buffers.size, dtype=torch.float64) if self._changes is None else self._changes
        share = step.share
        assert share is not None
        return self._step_buffers.changes(_WIDE) * (share.weight / (share.total_weight or 1.0))

    def _passes(self, name: str) -> bool:
        try:
            failpoint(name)
        except MembershipChanged as error:
            self._session.mark_lost(error)
            return False
        return True

    @property
    def _has_gradients(self) -> bool:
        return self._execution.came

    def _drop_gradients(self) -> None:
        self._execution.drop_gradients()

    def _seal(self) -> bool:
        """Passes the summed gradients on to the buddy. False: the step is lost."""
        if not self._gradients.pass_on(self._collectives, self._held.division) or not self._passes("reduction.completed"):
            return False
        self._session.seal_step()
        return True

    def _updated(self) -> None:
        """Fetches the other ranks' pieces where parameters are whole on every rank."""
        self._held.updated()
        self._execution.applied()

    @torch.no_grad()
    def discard_step(self) -> None:
        """See `Replica`."""
        self._execution.forget()
        self._step_buffers.put_back()

    @torch.no_grad()
    def commit_step(self) -> None:
        """See `Replica`."""
        assert self._closing is not None
        self._step_buffers.apply(self._closing.changes)
        self._execution.forget()
        self._step_buffers.commit()
        self._held.committed()
        if self._compression is not None:
            self._compression.commit(unusable=self._skipped)
