"""What a model whose parameters are cut over the ranks does with a batch: its passes, and what
their gradients count.

The state that it computes with, and how a step ends, are `ShardedEngine`'s (`engine.py`); what is
gathered and reduced in the passes, when, is `ShardedExecution`'s (`execution.py`). All on the
training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal_worker.elastic.step import Step
from shoal_worker.engine.base import Setup
from shoal_worker.engine.compressed import compression_of
from shoal_worker.engine.failed_collectives import LosingStep
from shoal_worker.engine.partitioned import CutClosing, PartitionedEngine
from shoal_worker.engine.passes import Loss, call_module, check_reproducible, loss_of
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.sharded_state import ShardedState
from shoal_worker.sharding.unit import Stage
from shoal_worker.torch_internals import pytree


class ShardedPasses(PartitionedEngine[ShardedState, CutClosing]):
    """The passes of a model whose parameters, gradients or optimizer state are cut."""

    _execution: ShardedExecution
    """Runs the units of the module, once that has values."""

    def __init__(self, setup: Setup, stage: Stage) -> None:
        """`stage`: what is cut."""
        super().__init__(setup)
        self.stage = stage
        self._compression = compression_of(self.config.compressor, self._session)
        self._weighed = False
        """It is known what the gradients of this micro-batch count, or of this step."""
        self._frozen_pass = False
        """The last forward pass was one of the model with all parameters frozen."""

    def _passes_begin(self) -> None:
        """Those of a step do."""
        self._weighed = self._frozen_pass = False

    def _micro_batch_begins(self) -> None:
        """Those of a micro-batch do."""
        step = self._session.step
        self._weighed = False
        if step is not None:
            self._refuse_half_a_pass(step)
            self._prepare_pass(step)
        self._execution.begin_passes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; in training its backward pass reduces the gradients over all
        ranks."""
        self._frozen_pass = False
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
        return self._compute(*args, **kwargs)

    def _as_forward(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.module, name)
        return (
            self._execution.as_forward(self.module, method) if self._parts is not None else method
        )

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`. There is nothing to reduce in the backward pass."""
        self._execution.reduces_in_backward = False
        self._frozen_pass = True
        if self.config.param_dtype is not None:
            args, kwargs = in_dtype((args, kwargs), self.config.param_dtype)
        return super().forward_frozen(*args, **kwargs)

    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        loss.backward()
        return loss

    def _weigh(self, step: Step) -> None:
        """What the gradients of the coming pass count."""
        self._refuse_reduced(step)
        self._refuse_half_a_pass(step)
        self._weighed = True
        share = step.share
        self._execution.show_gradients()
        self._prepare_pass(step)
        if step.in_micro_batches:
            weight = step.micro_batch or 0.0
        elif share is None or not share.total_weight:
            weight = 0.0
        else:
            weight = share.weight / share.total_weight
        self._execution.factor = (
            weight if self.config.loss_reduction == "mean" else float(weight > 0)
        )

    def _before_backward(self) -> None:
        """Called before the gradients of a backward pass are taken, whose forward pass may have
        been one of a part of the module's."""
        step = self._session.step
        if step is None or step.share is None or self._frozen_pass:
            return
        self._carried |= self._execution.carries and not step.in_micro_batches
        if not self._setup.several:
            self._refuse_reduced(step)
        if not self._weighed:
            self._weigh(step)

    def _refuse_half_a_pass(self, step: Step) -> None:
        if step.lost is None:
            self._execution.refuse_half_a_pass()

    def _prepare_pass(self, step: Step) -> None:
        """Before a step's first collective."""
        self._execution.reduces_in_backward = (
            self.stage > Stage.OPTIMIZER or not step.in_micro_batches
        )
        if self._compression is not None:
            total = (
                step.share.total_weight
                if step.share is not None and step.in_micro_batches
                else None
            )
            self._compression.weigh(total or 1.0 if self.config.loss_reduction == "mean" else 1.0)
        group = self._session.group
        if (
            group is None
            or step.lost is not None
            or self.stage is not Stage.PARAMETERS
            or not step.in_micro_batches
        ):
            return
        with LosingStep(self._session):
            self._execution.learn_passes(group)


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors within `inputs`, converted."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        inputs,
    )
