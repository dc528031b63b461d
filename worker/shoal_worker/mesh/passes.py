"""What a model that is laid out over ranks does with a batch: one pass after another, or all of a
pipeline's at once.

The state that it computes with, and what becomes of the gradients, are `MeshEngine`'s
(`engine.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shoal_worker.elastic.course import FORWARD
from shoal_worker.elastic.step import Step
from shoal_worker.engine.base import Setup
from shoal_worker.engine.failed_collectives import LosingStep
from shoal_worker.engine.hidden_parameters import refuse_hooks
from shoal_worker.engine.parameters import check_shaped
from shoal_worker.engine.partitioned import Closing, PartitionedEngine
from shoal_worker.engine.passes import Loss, call_module, loss_of, when_gradients_come
from shoal_worker.mesh.layouts import Layouts, MeshPlan, template_of, whole_module, zeros
from shoal_worker.mesh.parts import ModelParts
from shoal_worker.mesh.rank_mesh import RankMesh
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.tensor_parallel.context import DropoutRandomness
from shoal_worker.tensor_parallel.region import loss_parallel
from shoal_worker.torch_internals import pytree


class MeshPasses(PartitionedEngine[ModelParts, Closing]):
    """The passes of a model that several ranks hold together. All on the training thread."""

    def __init__(self, setup: Setup, plan: MeshPlan) -> None:
        super().__init__(setup)
        check_shaped(self.module)
        refuse_hooks(self.module.named_parameters(), self.strategy)
        if self.config.deterministic:
            raise ConfigurationError(
                f"deterministic=True with strategy={self.strategy!r}: how a model is split changes "
                "the order of its own sums, so results cannot be bitwise those of another number "
                "of ranks; leave it out, or take ddp, zero1, zero2, zero3 or fsdp"
            )
        own = self._options
        dropout = own.get("dropout", DropoutRandomness.PER_SHARD)
        if dropout not in list(DropoutRandomness):
            raise ConfigurationError(
                f"dropout={dropout!r}: expected one of {', '.join(DropoutRandomness)}"
            )
        self._dropout = DropoutRandomness(dropout)
        self._plan = plan
        self._checkpointed = tuple(
            name for name, part in self.module.named_modules() if "forward" in part.__dict__
        )
        """Names of modules whose activations are computed again: their forward passes stand in
        them, not in their classes."""
        self._template = template_of(self.module, self.config, own, pipelined=plan.pipelined)
        if plan.sharding is not None and plan.sharding.blocks is not None:
            # raises for names that the model does not have
            plan.sharding.blocks(self._template.module)
        self.layouts = Layouts(plan, self._template)
        self._knows_others = False
        """It is one of several models, and `layouts` know what the others allow."""
        self._mesh: RankMesh | None = None
        """None until the first step, in a spare, and where laying it out has failed."""
        self._in_passes = False
        """Between a forward pass and its backward pass."""
        self._begun = -1
        """How many steps had been applied when the last one began."""
        self._came = False
        """A backward pass of the step in progress has begun."""
        self._standing_in: nn.Module | None = None
        self._build()

    @property
    def _laid_out(self) -> RankMesh:
        if self._mesh is None:
            raise PreconditionError(
                "the model is not laid out over the ranks: that happens when the first step begins"
            )
        return self._mesh

    @property
    @override
    def in_parts(self) -> bool:
        return self._parts is not None and not self._parts.is_whole

    @property
    def idle(self) -> bool:
        """This rank is a spare: no whole replica could be made with it."""
        return self._parts is not None and self._parts.is_empty

    replaces_parameters = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on all ranks of a replica together.

        Raises:
            ConfigurationError: in training, of a pipeline: only train_step can take a batch through
                it.
        """
        training = self._trains
        if training and self.module.training and self._plan.pipelined:
            raise ConfigurationError(
                f"model(x) with strategy={self.strategy!r}: in training a pipeline takes a batch "
                "through both passes at once; call loss = model.train_step(x, y, loss_fn) in the "
                "place of the forward pass, the loss and backward()"
            )
        # In a loop without a loader of Shoal's a spare waits here, where its next step begins.
        begun = training and self.idle and self._session.step is None and self._begin_pass()
        if self._ahead or (training and not begun and not self._begin_pass()):
            return self._stand_in()(*args, **kwargs)
        self._note_pass()
        with self._passing():
            if self._pipeline_here:
                return self._through_pipeline(kwargs if kwargs and not args else args)
            output = self.module(*args, **kwargs)
        if training:
            self._await_gradients(output)
        return output

    @override
    def check_forward_method(self, name: str) -> None:
        raise ConfigurationError(
            f"register_forward_method({name!r}) with strategy={self.strategy!r}: layers and stages "
            "are split along the module's forward pass, which alone can go through them. Have "
            "forward() call the method, as told by an argument; or take zero3 or fsdp"
        )

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`. The ranks of a replica meet in it as in every pass."""
        if self._ahead:
            return self._stand_in()(*args, **kwargs)
        if self._mesh is not None and self._mesh.execution is not None:
            self._mesh.execution.reduces_in_backward = False
        self._note_pass()
        with self._passing():
            output = self.module(*args, **kwargs)
        if any(
            tensor.requires_grad
            for tensor in pytree.tree_leaves(output)
            if isinstance(tensor, torch.Tensor)
        ):
            self._await_gradients(output)
        return output

    def _await_gradients(self, output: Any) -> None:
        """What the module computes with is shown until a backward pass has gone through it, or the
        step is over."""
        if self._parts is not None:
            self._parts.hidden.show()
            self._in_passes = True
            when_gradients_come(output, lambda _: self._before_backward(), mode="any")

    def _before_backward(self) -> None:
        step = self._session.step
        if torch.is_grad_enabled() and self._held.hidden.are_split:
            raise PreconditionError(
                f"a backward pass with create_graph=True, with strategy={self.strategy!r}: "
                "gradients of gradients do not come out right through layers that are split over "
                "ranks; take zero2 or fsdp, or leave a penalty on gradients out"
            )
        if step is not None and not self._came:
            self._carried = self._held.hidden.carries and not step.in_micro_batches
            self._came = True
        Variable._execution_engine.queue_callback(self._after_passes)

    def _after_passes(self) -> None:
        self._in_passes = False
        self._held.hidden.hide()

    def _begin_pass(self) -> bool:
        """Before passes of training. True if they are part of a step."""
        step = self._session.ensure_step()
        if step is not self._session.step:
            return False  # a joiner's pass ahead of its loop
        self._refuse_reduced(step)
        self._prepare_pass(step)
        return True

    def _prepare_pass(self, step: Step) -> None:
        if self._mesh is not None and step.lost is None:
            with LosingStep(self._session):
                self._mesh.begin_pass(step)

    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor | None:
        if self._plan.pipelined:
            return self._train_in_pipeline(inputs, targets, loss_fn)
        output = call_module(self._setup.model, inputs)
        with self.loss_parallel():
            loss = loss_of(output, targets, loss_fn)
        loss.backward()
        return loss

    def _train_in_pipeline(
        self, inputs: Any, targets: Any, loss_fn: Loss | None
    ) -> torch.Tensor | None:
        if not self._begin_pass() or self._mesh is None:
            # ahead of the loop, or the step was lost before the model was laid out
            loss = loss_of(call_module(self._stand_in(), inputs), targets, loss_fn)
            loss.backward()
            return loss
        count = self._template.pipeline.micro_batches
        seeds = torch.randint(2**62, (count,)).tolist()  # the ranks of a replica draw alike
        batches = cut_batch(inputs, targets, count=count, seeds=seeds)
        step = self._session.step
        if step is not None and step.weigh is not None:
            weights = step.weigh([one.samples for one in batches])
            batches = [
                dataclasses.replace(one, weight=weight)
                for one, weight in zip(batches, weights, strict=True)
            ]
        # of which the closing tells but the mean
        several = step is not None and step.in_micro_batches
        self._note_pass()
        with LosingStep(self._session), self._passing():
            return self._mesh.train_on(
                batches,
                None if loss_fn is None else self._within_region(loss_fn),
                everywhere=several,
            )
        return torch.zeros((), dtype=torch.float64)

    @contextlib.contextmanager
    @override
    def loss_parallel(self) -> Iterator[None]:
        tensor_mesh = self._mesh.tensor_mesh if self._mesh is not None else None
        with (
            loss_parallel(tensor_mesh)
            if tensor_mesh is not None and self._options.get("loss_parallel")
            else contextlib.nullcontext()
        ):
            yield

    def _within_region(self, loss_fn: Loss) -> Callable[[Any, Any], torch.Tensor]:
        def loss(output: Any, targets: Any) -> torch.Tensor:
            with self.loss_parallel():
                return loss_fn(output, targets)

        return loss

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """See `ShardedModel`. All ranks of a replica call it, with the same inputs, and get the
        same outputs."""
        if self._ahead:
            return call_module(self._stand_in().eval(), inputs)
        self._note_pass()
        with self._passing():
            if self._pipeline_here:
                return self._through_pipeline(inputs)
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, super().predict(inputs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `ShardedModel`. Each rank computes with its part of each layer, unless parameters are
        elsewhere between passes."""
        if self._plan.pipelined or self._plan.sharding is not None:
            return super().generate(*args, **kwargs)
        if self._options.get("loss_parallel"):
            raise ConfigurationError(
                "generate() of a model with loss_parallel=True: its logits are split over the "
                "vocabulary, and tokens are chosen from whole ones; call "
                "model.clone().generate(...) on every rank, or leave loss_parallel out"
            )
        if self._ahead:
            stand_in: Any = self._stand_in()
            return stand_in.generate(*args, **kwargs)
        with (
            self._passing(),
            contextlib.nullcontext() if self._mesh is None else self._mesh.drawing_alike(),
        ):
            module: Any = self.module
            return module.generate(*args, **kwargs)

    def _note_pass(self) -> None:
        """The ranks of the replica are about to meet in a pass, in a step or between steps."""
        step = self._session.step
        if step is not None and self._mesh is not None:
            step.issues(FORWARD)

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        """While open, the module computes: nothing of its parameters is hidden."""
        if self._parts is None or self._in_passes:
            yield
            return
        self._parts.hidden.show()
        try:
            yield
        finally:
            self._parts.hidden.hide()

    @property
    def _ahead(self) -> bool:
        """This process's script is not where its peers' are, and the model is laid out over them:
        they would not answer. Or a failure has left it laid out over nobody, and the step is
        lost."""
        return self.in_parts and (self._session.is_joining or self._mesh is None)

    def _stand_in(self) -> nn.Module:
        """What such a script computes with: nobody uses the answer. The module itself where it is
        whole."""
        if not self.in_parts:
            return self.module
        if self._standing_in is None:
            self._standing_in = self._whole_module(zeros(self._template))
        return self._standing_in.train(self.module.training)

    @property
    def _pipeline_here(self) -> bool:
        return (
            self._mesh is not None
            and self._mesh.pipeline is not None
            and self.module is self._held.module
        )

    def _through_pipeline(self, inputs: Any) -> Any:
        """In a step a failure is that of the step: nothing is raised into the user's loop, and the
        outputs are none that count. In an operation between steps it is raised, and the operation
        done again."""
        with LosingStep(self._session, raises_outside=True):
            return self._laid_out.predict(inputs)
        return call_module(self._stand_in(), inputs)

    def _whole_module(self, values: Mapping[str, Any]) -> nn.Module:
        return whole_module(self._template, values, self._held.unsaved(), self._session.device)
