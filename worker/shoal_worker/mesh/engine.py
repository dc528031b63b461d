"""The engine of the strategies `tensor`, `pipeline` and `hybrid`. Several ranks form one replica:
the model's layers are split across them, or its stages are on different ranks.

The engine arranges the ranks along three axes (`layouts.py`): `tensor` and `pipeline` use one axis
in addition to the data axis, and `hybrid` uses all three. During passes, ranks communicate along
the tensor axis and between stages. A step ends as described in `engine/partitioned.py`. Each rank
accumulates the gradients of its part over the micro-batches. A rank has prepared the step once its
gradients are summed across replicas and, if they are sharded along the data axis (`data_axis.py`),
sent to the ranks that mirror its shards. After a failure, the remaining ranks split the state again
(`reshard`), using the parts that they still have. If no remaining rank has some part, it is lost
(docs/strategies/hybrid.md).

`rank_mesh.py` contains the current mesh, and `parts.py` this rank's part of the model. Everything
runs on the training thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.loader_interface import Share, StepStatus
from shoal_worker.elastic.contract.step import COMMIT, EXTREMES, FORWARD, SUM, Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.engine.base import Engine, Setup
from shoal_worker.engine.partitioned import CommitPayload, PartitionedEngine
from shoal_worker.engine.state.hidden_parameters import (
    gradient_of,
    guard_parts,
    refuse_hooks,
    refuse_loading,
)
from shoal_worker.engine.state.module_state import ModuleState
from shoal_worker.engine.state.parameter_groups import check_forward_passes, own_forward
from shoal_worker.engine.state.parameters import take_unsaved
from shoal_worker.engine.step.buffers import joined
from shoal_worker.engine.step.failed_collectives import LosingStep
from shoal_worker.engine.step.pass_writes import ModuleAttributes, WrittenParameters
from shoal_worker.engine.step.passes import Loss, call_module, loss_of, when_gradients_come
from shoal_worker.engine.step.tentative_update import TentativeUpdate
from shoal_worker.mesh.data_axis import Replicated
from shoal_worker.mesh.gradients import MeshGradients
from shoal_worker.mesh.layouts import Layouts, MeshPlan, template_of, unsharded_module, zeros
from shoal_worker.mesh.parts import ModelParts
from shoal_worker.mesh.rank_mesh import RankMesh, alone
from shoal_worker.mesh.resharding import checked
from shoal_worker.modes import modes_of, set_modes
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.sharding.collectives import IssuedCollectives
from shoal_worker.tensor_parallel.context import DropoutRandomness
from shoal_worker.tensor_parallel.region import loss_parallel
from shoal_worker.torch_internals import after_backward, pytree


class MeshEngine(PartitionedEngine[ModelParts, CommitPayload]):
    """Engine of a model that is split across the ranks of a replica."""

    _payload_type = CommitPayload

    def __init__(self, setup: Setup, plan: MeshPlan) -> None:
        super().__init__(setup)
        refuse_hooks(self.module.named_parameters(), self.strategy)
        if self.config.deterministic:
            raise ConfigurationError(
                f"deterministic=True cannot be used with strategy={self.strategy!r}: splitting "
                "the model changes the order of sums, so results cannot be bitwise equal for "
                "other numbers of ranks; leave deterministic out, or use ddp, zero1, zero2, "
                "zero3 or fsdp"
            )
        own = self._options
        dropout = own.get("dropout", DropoutRandomness.PER_SHARD)
        if dropout not in list(DropoutRandomness):
            raise ConfigurationError(
                f"dropout={dropout!r}: expected one of {', '.join(DropoutRandomness)}"
            )
        self._dropout = DropoutRandomness(dropout)
        self._plan = plan
        check_forward_passes(self.module, self.strategy)
        self._checkpointed = tuple(
            name for name, part in self.module.named_modules() if own_forward(part) is not None
        )
        """Names of modules with activation checkpointing."""
        self._template = template_of(self.module, self.config, own, pipelined=plan.pipelined)
        if plan.sharding is not None and plan.sharding.blocks is not None:
            # raises if the model does not have the named blocks
            plan.sharding.blocks(self._template.module)
        self.layouts = Layouts(plan, self._template)
        self._knows_others = False
        """True if there are several models and `layouts` already includes the other models'
        constraints."""
        self._mesh: RankMesh | None = None
        """This rank's mesh; None before the first step, on a spare, and after a failed attempt to
        create a mesh."""
        self._in_passes = False
        """True if a forward pass is waiting for its backward pass."""
        self._begun = -1
        """Number of applied steps when the current or last step began."""
        self._came = False
        """True if a backward pass of the current step has begun."""
        self._standing_in: nn.Module | None = None
        self._build()

    @property
    def _any_optimizer(self) -> bool:
        return not self._plan.cuts_parameters or super()._any_optimizer

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Extends `PartitionedEngine.attach`. Raises ConfigurationError if the model cannot be
        split across the job's initial ranks."""
        super().attach(optimizer)
        session = self._session
        if self._setup.several and not self._knows_others:
            return  # all models are checked together with the last one
        if session.begins and not session.is_joining:
            # ranks that remain after a failure wait for a replacement
            self.layouts.check_start(session.world_size, ranks_may_come=session.ranks_may_come)

    def _make_state(self) -> ModelParts:
        refuse_loading(self.module)
        self._writes: list[WrittenParameters] = []
        self._piece_writes = WrittenParameters((), self.strategy)
        """Detects writes to the pieces of the mesh in `_writes_of`."""
        self._writes_of: RankMesh | None = None
        self._attributes = ModuleAttributes(self.module, numbers=False)
        self._looked = False
        """True if a step of this process has already been checked for writes through `.data`."""
        return ModelParts(
            self.module,
            self._template,
            self._session.device,
            dropout=self._dropout,
            checkpointed=self._checkpointed,
            whereabouts=self._whereabouts,
        )

    @property
    def _gradients(self) -> MeshGradients:
        return self._laid_out.gradients

    def _own_pieces(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._held.data_axis.own.items()

    def _check_can_travel(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            super()._check_can_travel(key, value)
        else:
            checked(key, value)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        for name, parameter in self._held.parameters.items():
            yield name, parameter, self._held.is_trained(name)

    def _named_state(self) -> ModuleState:
        return ModuleState(self._template.module)

    def _parameter_names(self) -> dict[str, str]:
        template = self._template
        return {
            name: first
            for name, first in template.first_names.items()
            if first in template.parameter_names
        }

    def _commit_buffers(self) -> None:
        if self._mesh is not None:
            self._mesh.buffers.commit()

    # ------------------------------------------------------------------------- the passes of a step

    @property
    def _laid_out(self) -> RankMesh:
        if self._mesh is None:
            raise PreconditionError(
                "the model has not been split across the ranks yet; it is split when the first "
                "step begins"
            )
        return self._mesh

    @property
    @override
    def is_sharded(self) -> bool:
        return self._parts is not None and not self._parts.is_unsharded

    @property
    def idle(self) -> bool:
        """True if this rank is a spare, because there are too few ranks for one more replica."""
        return self._parts is not None and self._parts.is_empty

    replaces_parameters = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass. Must be called on all ranks of a replica.

        Raises:
            ConfigurationError: the model is a pipeline in training mode; only train_step can run a
                batch through it.
        """
        training = self._trains
        if training and self.module.training and self._plan.pipelined:
            raise ConfigurationError(
                f"model(x) cannot be called in training with strategy={self.strategy!r}: a "
                "pipeline runs both passes of a batch together; call loss = model.train_step(x, "
                "y, loss_fn) instead of the forward pass, the loss and backward()"
            )
        # In a loop without a Shoal loader, a spare waits here for the start of its next step.
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
            f"register_forward_method({name!r}) cannot be used with strategy={self.strategy!r}: "
            "layers and stages are split along the module's forward pass, so no other method can "
            "run through them. Let forward() call the method, selected by an argument, or use "
            "zero3 or fsdp"
        )

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `Engine.forward_frozen`. As in every pass, the ranks of a replica communicate,
        so all of them must call it."""
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
        """Keeps the module's parameters usable until a backward pass has run through `output` or
        the step has ended."""
        if self._parts is not None:
            self._parts.hidden.show()
            self._in_passes = True
            when_gradients_come(output, lambda _: self._before_backward(), mode="any")

    def _before_backward(self) -> None:
        step = self._session.step
        if torch.is_grad_enabled() and self._held.hidden.are_split:
            raise PreconditionError(
                "a backward pass with create_graph=True cannot be used with "
                f"strategy={self.strategy!r}, because gradients of gradients would be wrong "
                "through layers that are split over ranks; use zero2 or fsdp, or leave out "
                "gradient penalties"
            )
        if step is not None and not self._came:
            self._carried = self._held.hidden.carries and not step.in_micro_batches
            self._came = True
        after_backward(self._after_passes)

    def _after_passes(self) -> None:
        self._in_passes = False
        self._held.hidden.hide()

    def _begin_pass(self) -> bool:
        """Prepares a pass in training. Returns False if the pass is not part of a step, because
        this rank is a joiner that has not reached its training loop."""
        step = self._session.lifecycle.ensure_step()
        if step is not self._session.step:
            return False  # a joiner's pass before its training loop
        self._refuse_reduced(step)
        self._prepare_pass(step)
        return True

    def _prepare_pass(self, step: Step) -> None:
        if self._mesh is not None:
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
            # before the loop, or if the step was lost before the model was split
            loss = loss_of(call_module(self._stand_in(), inputs), targets, loss_fn)
            loss.backward()
            return loss
        count = self._template.pipeline.micro_batches
        seeds = torch.randint(2**62, (count,)).tolist()  # a replica's ranks draw the same numbers
        batches = cut_batch(inputs, targets, count=count, seeds=seeds)
        step = self._session.step
        if step is not None and step.weigh is not None:
            weights = step.weigh([one.samples for one in batches])
            batches = [
                dataclasses.replace(one, weight=weight)
                for one, weight in zip(batches, weights, strict=True)
            ]
        # the commit all-reduce reports only the mean of these losses
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
        """Implements `ShardedModel.predict`. Must be called on all ranks of a replica, with the
        same inputs; all get the same outputs."""
        if self._ahead:
            return call_module(self._stand_in().eval(), inputs)
        self._note_pass()
        with self._passing():
            if self._pipeline_here:
                return self._through_pipeline(inputs)
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, super().predict(inputs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `ShardedModel.generate`. Each rank computes with its part of each layer. With
        a pipeline or with sharding along the data axis, uses `Engine.generate`, which raises
        PreconditionError if this rank lacks values."""
        if self._plan.pipelined or self._plan.sharding is not None:
            return super().generate(*args, **kwargs)
        if self._options.get("loss_parallel"):
            raise ConfigurationError(
                "generate() cannot be used with loss_parallel=True, because the logits are split "
                "over the vocabulary, and choosing tokens needs all of them; call "
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
        """Records in the current step, if any, that the ranks of the replica are about to
        communicate in a pass."""
        step = self._session.step
        if step is not None and self._mesh is not None:
            step.issues(FORWARD)

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        """Context in which the parameters are usable, so that the module can compute."""
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
        """True if this rank cannot run a pass with its peers. Either this process is joining, so
        that its script is at a different position, or there is no mesh, because a failure has
        interrupted the creation of the mesh, and the step will be aborted."""
        return self.is_sharded and (self._session.is_joining or self._mesh is None)

    def _stand_in(self) -> nn.Module:
        """Returns a module that computes meaningless outputs, because this rank cannot reach its
        peers. Returns the module itself if it is not split."""
        if not self.is_sharded:
            return self.module
        if self._standing_in is None:
            self._standing_in = self._unsharded_module(zeros(self._template))
        return self._standing_in.train(self.module.training)

    @property
    def _pipeline_here(self) -> bool:
        return (
            self._mesh is not None
            and self._mesh.pipeline is not None
            and self.module is self._held.module
        )

    def _through_pipeline(self, inputs: Any) -> Any:
        """Runs inputs through the pipeline. A failure within a step marks the step as failed; the
        outputs are then meaningless, and no error is raised in the user's loop. A failure between
        steps raises an error, and the session retries the operation."""
        with LosingStep(self._session, raises_outside=True):
            return self._laid_out.predict(inputs)
        return call_module(self._stand_in(), inputs)

    def _unsharded_module(self, values: Mapping[str, Any]) -> nn.Module:
        return unsharded_module(self._template, values, self._held.unsaved(), self._session.device)

    # ------------------------------------------------------------------------- for ShardedOptimizer

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Implements `Engine.finish_step`. Raises ConfigurationError for a GradScaler with a
        pipeline."""
        if (scaled or inspected) and self._plan.pipelined:
            raise ConfigurationError(
                "a GradScaler with a pipeline: train_step itself runs the backward pass of each "
                "loss, so the script cannot scale the loss first; use bfloat16, which needs no "
                "scaler, with torch.autocast(..., dtype=torch.bfloat16) around train_step"
            )
        return super().finish_step(update, scaled=scaled, inspected=inspected)

    # -------------------------------------------------------------- TrainingEngine: for the session

    def capture(self) -> dict[str, Any]:
        """Implements `TrainingEngine.capture`: before the first step, returns the complete state;
        afterwards, only the data that every rank has."""
        if not self.is_sharded:
            own = {
                "model": ModuleState(self.module).captured(),
                "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            }
            unsaved = self._held.unsaved() if self._parts is not None else {}
            return (
                own
                | {"applied": self._applied, "extremes": dict(self.extremes)}
                | ({"buffers": unsaved} if unsaved else {})
            )
        return {
            "unsaved": self._held.unsaved(),
            "settings": self._held.settings,
            "applied": self._applied,
        } | {"extremes": dict(self.extremes)}

    @torch.no_grad()
    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.extremes |= state.get("extremes", {})
        self._give_values(state)
        held = self._held
        if "model" in state:
            held.check(state)
            if self.is_sharded and (self._mesh is None or self._mesh.group.broken is not None):
                self._mesh = None
                # Parts of the state are lost, and this state replaces them. It will be split again
                # when the next step begins.
                held.make_unsharded()
            held.load_values(state["model"])
            if state["optimizer"] is not None:
                held.load_optimizer(state["optimizer"])
            self._applied = state.get("applied", 0)  # a checkpoint does not contain the count
            self._commit_payload = None
        else:
            if self._mesh is None or state["applied"] != self._applied:
                self._release()
                # this rank's state is missing or too old; the peers' state arrives when the ranks
                # form a mesh
                held.drop()
                self._commit_payload = None
            held.settings = state["settings"]
            self._applied = state["applied"]
        take_unsaved(self.module, state.get("buffers" if "model" in state else "unsaved", {}))
        self._attributes.forget()
        self._piece_writes.replaced()
        if self._mesh is not None:
            self._mesh.buffers.replaced()

    def _hand_out(self, commit_payload: CommitPayload) -> None:
        self._held.hidden.show_gradients()
        self._gradients.hand_out(commit_payload.divisor)
        self._held.hidden.handed_out(self._held.optimized)
        guard_parts(self._held.optimized, guarded=True)

    def _updated(self) -> None:
        self._held.data_axis.updated()

    def exchange_update(self, update: TentativeUpdate) -> None:
        """Implements `Engine.exchange_update`. With sharding along the data axis, ranks fetch the
        resulting values from their owners by the start of the next step."""
        super().exchange_update(update)
        self._held.data_axis.changed()

    @torch.no_grad()
    @override
    def fetch_put_back(self) -> None:
        if self._mesh is not None:
            self._held.data_axis.fetch()

    @override
    def divide_alike(self, several: Sequence[Engine]) -> None:
        self._knows_others = True
        self.layouts.divide_alike(
            [each.layouts for each in several if isinstance(each, MeshEngine)]
        )

    @torch.no_grad()
    @override
    def reshard(self, group: Group) -> None:
        execution = self._mesh.execution if self._mesh is not None else None
        issued = execution.issued.encode().decode() if execution is not None else ""
        received = [
            json.loads(each)
            for each in group.exchange(json.dumps([self.is_sharded, issued]).encode())
        ]
        IssuedCollectives.compare([each.encode() for _, each in received], self.strategy)
        if not any(is_sharded for is_sharded, _ in received):
            return
        if self.layouts.too_few(group.world_size):
            state = self._held.gather_unsharded(group)
            self._release()
            self._held.take_unsharded(state)
        else:
            self._lay_out(group, gathered=True)

    @torch.no_grad()
    def consolidate(self, channel: Channel) -> None:
        """Implements `TrainingEngine.consolidate`. Needed if some ranks have begun the first step
        and have split the model across ranks that have since left."""
        if self._parts is not None and self._parts.make_unsharded_again(channel):
            self._mesh = None

    def _lay_out(self, group: Group, *, gathered: bool) -> None:
        """Splits the model for the ranks of `group`. `gathered`: True to assemble the state from
        the ranks' parts; False if each rank has the complete state.

        If it fails at any point, every rank still has its previous parts, so that the call can be
        repeated with other ranks.
        """
        held, axes = self._held, self.layouts.axes(group.world_size)
        at = axes.at(group.rank)
        channel = group if gathered else LocalChannel()
        taken, beside = held.take(channel, axes, at), held.gather_beside(channel)
        mesh = RankMesh(group, axes, self._session, self._plan.sharding) if at is not None else None
        if mesh is not None:
            self._release()
            mesh.lay_out(
                held, taken, averages=self.config.loss_reduction == "mean", extremes=self.extremes
            )
            self._mesh = mesh
        if gathered:
            group.exchange(b"")  # all ranks have their parts; a spare's state is needed until then
        if mesh is None:
            self._release()
            held.drop()
        held.load_beside(beside)

    def _release(self) -> None:
        old, self._mesh = self._mesh, None
        if old is not None:
            old.release()

    @torch.no_grad()
    @override
    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        if self._parts is not None:
            self._parts.copy_singles(channel, leaving)

    @property
    def holds(self) -> list[str]:
        """Implements `TrainingEngine.holds`: lists this rank's shards, each as
        "STAGE.PART.SHARD"."""
        if self._mesh is None or not self.is_sharded:
            return []
        cut = self._mesh.cut
        return [f"{cut.at.pipeline}.{cut.at.tensor}.{position}" for position in cut.positions]

    @override
    def working(self, group: Group) -> Group:
        return self._mesh.all if self._mesh is not None and self._mesh.group is group else group

    @torch.no_grad()
    @override
    def step_begins(self) -> None:
        self._begin_step()
        self._standing_in = None
        if self._mesh is None:
            with LosingStep(self._session) as dividing:
                if self.lacks_ranks:  # a step that begins with too few ranks is always aborted
                    raise MembershipChanged("there are too few ranks for one replica of the model")
                self._lay_out(self._session.group or alone(), gathered=False)
            if dividing.failed:
                return
        if self.idle:
            return
        mesh = self._laid_out
        self._check_training()
        step = self._session.step
        assert step is not None
        self._came = False
        if self._applied == self._begun or step.in_micro_batches or self._plan.pipelined:
            # Gradients of an aborted step are invalid. After micro-batches or a pipeline, there are
            # no gradients to add to.
            self._held.hidden.drop_gradients()
        self._begun = self._applied
        self._held.data_axis.fetch()  # the pieces may be outdated after an update has been undone
        mesh.begin_step(self._applied + 1)
        if step.source is None:
            mesh.seed_step()
        self._writes = [
            WrittenParameters(
                self._held.parameters.items(), self.strategy, stay=False, compared=False
            ),
            self._writes_to_pieces(mesh),
        ]
        for writes in self._writes:
            writes.begin()
        if self._session.elastic:
            self._attributes.begin()

    @override
    def micro_batch_begins(self) -> None:
        if self._mesh is not None:
            self._mesh.buffers.put_back()

    @override
    def micro_batch_ends(self, weight: float) -> None:
        step = self._session.step
        if self._mesh is not None and step is not None and step.lost is None:
            self._held.hidden.show_gradients()
            with LosingStep(self._session):
                self._mesh.add(weight, step.samples)
            step = self._session.step
            if weight > 0 and step is not None and step.lost is None:
                self._mesh.buffers.micro_batch_ends()

    @torch.no_grad()
    def _reduce(self, step: Step, share: Share) -> None:
        session = self._session
        mesh = self._laid_out
        self._refuse_carried()
        if step.lost is None:  # failed collectives may have left arbitrary values
            for writes in self._writes:
                writes.refuse(unless=self._proves_lost)
        self._held.hidden.show_gradients()
        with LosingStep(session):
            if not step.in_micro_batches:
                mesh.add(share.weight, step.samples)
            self._prepare_pass(step)
            for _ in range(share.most_micro_batches - (share.micro_batches or 0)):
                mesh.take_part()
            step.issues(SUM)
            mesh.sum_gradients()
            if step.lost is not None:
                return
            failpoint("reduction.completed")
            self._agree_on_extremes(mesh, step, share)
            step.writes = self._digest_of_buffers(mesh)
            if mesh.cut.axes.pipeline == 1:  # ranks of other stages have different parameters
                step.written_between = joined(self._piece_writes.between, mesh.buffers.between)
            session.lifecycle.prepare_step()

    @torch.no_grad()
    @override
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        mesh = self._laid_out
        failpoint("sharded.prepared")
        norm = mesh.gradients.squared_norm()
        issued = mesh.execution.issued.word() if mesh.execution is not None else []
        step.issues(COMMIT)
        summed = mesh.all.sum_numbers([*vote, norm, *issued])
        word, (norm, *issued) = summed[: len(vote)], summed[len(vote) :]
        if issued:
            IssuedCollectives.check(issued, self.strategy)
        payload = CommitPayload(
            number=self._applied + 1, squared_norm=norm, divisor=mesh.gradients.divisor
        )
        return word, vars(payload)

    def unsharded_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Implements `TrainingEngine.unsharded_everywhere`: returns the parameters that are not
        split and the buffers, which are the same on all ranks. Returns nothing for a pipeline,
        because its stages have no tensors in common."""
        mesh, held = self._mesh, self._held
        if mesh is None or mesh.cut.axes.pipeline > 1:
            return {}
        unsplit = {}
        if isinstance(held.data_axis, Replicated):
            unsplit = {
                repr(name): piece.detach()
                for name, piece in held.pieces.items()
                if held.parameters[name] is piece
            }
        return {"the parameters": unsplit, "the buffers": mesh.buffers.begun_from()}

    def _writes_to_pieces(self, mesh: RankMesh) -> WrittenParameters:
        """Returns the object that detects writes to the pieces of the current mesh."""
        if self._writes_of is not mesh:
            replicated = isinstance(self._held.data_axis, Replicated)
            compared, whole = (
                replicated and not self._looked,
                replicated and mesh.cut.axes.pipeline == 1,
            )
            pieces = self._held.pieces.items()
            self._piece_writes = WrittenParameters(
                pieces, self.strategy, stay=False, compared=compared, whole=whole
            )
            self._writes_of = mesh
        return self._piece_writes

    def _agree_on_extremes(self, mesh: RankMesh, step: Step, share: Share) -> None:
        """Exchanges minima and maxima with the ranks that have the same part of the model, and
        combines them. Raises MembershipChanged."""
        extremes = mesh.buffers.extremes
        if extremes:
            extremes.refuse_other_shapes(self.strategy)
            step.issues(EXTREMES)
            extremes.agree(
                mesh.replicas.exchange(
                    extremes.made(counted=not step.in_micro_batches and share.weight > 0)
                )
            )

    def _digest_of_buffers(self, mesh: RankMesh) -> int:
        digest = mesh.buffers.exact_digest()
        if digest and mesh.cut.axes.pipeline > 1 and mesh.cut.axes.data > 1:
            # ranks of other stages have different buffers
            raise mesh.buffers.apart()
        return digest if mesh.cut.axes.pipeline == 1 else 0

    @override
    def writes_apart(self) -> ShoalError:
        buffers = self._laid_out.buffers
        if buffers.exact_names() and not self._overwritten:
            return buffers.apart()
        return self._piece_writes.apart(list(self._parameter_names()) if self._overwritten else [])

    @property
    def _has_gradients(self) -> bool:
        step = self._session.step
        left = self._mesh is not None and self._mesh.gradients.any_left
        return (
            left
            or (step is not None and step.control is not None)
            or any(gradient_of(p) is not None for p in self.module.parameters())
        )

    def _drop_gradients(self) -> None:
        self._held.hidden.drop_gradients()
        if self._mesh is None:
            return
        step = self._session.step
        if step is not None and step.control is not None:
            # they are included in the ranks' sum, together with changes to buffers
            self._mesh.forget()
        else:
            self._mesh.drop_gradients()

    @torch.no_grad()
    @override
    def discard_step(self) -> None:
        self._whereabouts.pending = False
        if self._mesh is None:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        self._in_passes = False
        self._mesh.forget()
        self._mesh.buffers.put_back()
        self._attributes.put_back()
        self._held.hidden.hide()

    @torch.no_grad()
    @override
    def commit_step(self) -> None:
        mesh = self._laid_out
        mesh.buffers.apply(mesh.gradients.changes)
        mesh.buffers.step_committed()
        self._piece_writes.commit()
        self._looked, self._in_passes = True, False
        with self._held.hidden.carrying():
            mesh.forget()
        self._held.hidden.hide()
        self._held.forget_before()

    @property
    @override
    def changing_buffers(self) -> bool:
        return self._mesh is not None and self._mesh.buffers.size > 0

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        if "model" in state and self._parts is not None:
            self._parts.check(state)

    @property
    @override
    def lacks_ranks(self) -> bool:
        return (
            self._parts is not None
            and self._parts.is_unsharded
            and self.layouts.too_few(self._session.world_size)
        )

    # ---------------------------------------------------------------------------------------- ranks

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica; 0 on a spare."""
        at = self.layouts.axes(self._session.world_size).at(self._session.rank)
        return at.data if at is not None else 0

    @property
    @override
    def passes_with(self) -> str:
        return f"replica {self.data_parallel_rank}"

    @property
    @override
    def leads_replica(self) -> bool:
        at = self.layouts.axes(self._session.world_size).at(self._session.rank)
        return at is not None and at.pipeline == at.tensor == 0

    @property
    @override
    def replica_size(self) -> int:
        return self.layouts.axes(self._session.world_size).replica_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return max(1, self.layouts.axes(self._session.world_size).data)

    # ---------------------------------------------------------------------------------------- state

    @torch.no_grad()
    @override
    def assemble(self, channel: Channel) -> dict[str, Any]:
        if channel.rank != 0:
            self._held.help_assemble(channel)
            return {}
        unsaved = self._held.unsaved()
        whole = self._held.assemble(channel)
        return whole | {"buffers": unsaved} if unsaved else whole

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Implements `TrainingEngine.in_common`: returns this rank's part, for comparison with
        ranks of other replicas that have the same part."""
        return self._held.in_common() if self._mesh is not None else {}

    @contextlib.contextmanager
    def unsharded_for(self, channel: Channel) -> Iterator[None]:
        """Implements `TrainingEngine.unsharded_for`. Each rank needs enough memory for the complete
        model in addition to its part."""
        if self._parts is None or not self.is_sharded:
            yield
            return
        whole, own = self._unsharded_module(self._held.values(channel)), self.module
        set_modes(
            [(part, mode) for part, (_, mode) in zip(whole.modules(), modes_of(own), strict=True)]
        )
        self._show(whole)
        try:
            yield
        finally:
            self._show(own)

    def _show(self, module: nn.Module) -> None:
        """Makes `module` the module that passes use and that `ShardedModel.module` returns."""
        self.module = module
        self._setup.show(module)

    def clone(self, remake: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Implements `Engine.clone`: returns an unsplit copy whose modules have the user's own
        classes."""
        return self._unsharded_module(self._unsharded_state())

    @override
    def unsharded_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        tensors = self._template.tensors()
        return [
            (tensors[name], tensors[name].shape)
            for name in self._template.names
            if name in self._template.parameter_names
        ]
