"""Engine of zero1, zero2, zero3, fsdp and hsdp, which shard optimizer state, gradients and
parameters across ranks.

The strategies differ in what is sharded (`Stage`), in which parameters share a collective
(`groups`), and in the number of replicas (`divide`). (Rajbhandari et al., "ZeRO", SC 2020, sections
5 and 7; Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.) The optimizer updates flat pieces of
parameters, which is correct for elementwise optimizers such as Adam. For optimizers that need
entire tensors (Muon, Adafactor), each tensor is assigned to one rank (`UnitLayout.whole_tensors`).

A step ends as described in `engine/partitioned.py`. A rank has prepared the step once the gradients
of its shard are summed and the sum has been sent to the mirror holder. The mirror holder keeps the
shard's parameters and optimizer state as additional pieces of its own optimizer. The commit
all-reduce also determines which parameters were used and how the buffers changed. Owners and mirror
holders apply the same update. After a failure, the shards are redistributed for the new group
(`reshard`). `sharded_state.py` contains the operations on the state between steps, and
`execution.py` gathers units during the passes. Everything runs on the training thread, in the same
order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint
from torch import nn
from typing_extensions import override

from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.generation import Topology
from shoal_worker.elastic.contract.loader_interface import Share
from shoal_worker.elastic.contract.step import COMMIT, EXTREMES, Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.engine.base import Setup
from shoal_worker.engine.partitioned import CommitSum, PartitionedEngine, ShardedCommitPayload
from shoal_worker.engine.state.hidden_parameters import inside, refuse_loading
from shoal_worker.engine.state.parameter_groups import ParameterGroup, alike, by_bytes, by_modules
from shoal_worker.engine.state.parameters import take_unsaved
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.engine.step.compressed import check_floating, compression_of
from shoal_worker.engine.step.failed_collectives import LosingStep, completes
from shoal_worker.engine.step.pass_writes import ModuleAttributes, WrittenParameters
from shoal_worker.engine.step.passes import Loss, call_module, check_reproducible, loss_of
from shoal_worker.engine.step.tentative_update import TentativeUpdate
from shoal_worker.features.synchronized_norms import synchronize_norms
from shoal_worker.sharding.collectives import (
    CompressedScatter,
    IssuedCollectives,
    ReplicatedCollectives,
    SessionCollectives,
)
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients
from shoal_worker.sharding.layout import Division, among_all
from shoal_worker.sharding.mirrors import TravellingMirrors
from shoal_worker.sharding.placements import placement_of
from shoal_worker.sharding.sharded_state import ShardedState
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.state.fits import takes_whole_tensors
from shoal_worker.state.tree import StatePart
from shoal_worker.torch_internals import pytree

_WIDE: Final = torch.empty(0, dtype=torch.float64)
"""Empty tensor with the dtype and device of the commit sum."""

Groups = Callable[[nn.Module, ShardingConfiguration], list[ParameterGroup]]
"""Function that divides a model's parameters into units, each gathered or reduced in one
collective. The outermost module's unit comes first."""
Divide = Callable[[Topology], Division]
"""Function that returns how the ranks are divided into replicas, given their distribution across
hosts."""

OPTIONS: Final = frozenset({"elementwise_optimizer", "whole_tensors"})
"""Keyword arguments of `as_distributed` that this engine reads."""
SETTINGS: Final = frozenset({"param_dtype", "reduce_dtype", "offload", "mirrors"})
"""Fields of `ShardingConfiguration` that this engine reads and some other engines do not."""


def in_buckets(module: nn.Module, config: ShardingConfiguration) -> list[ParameterGroup]:
    """Divides a model's parameters into buckets. A bucket is reduced as soon as the backward pass
    has computed all of its gradients."""
    return by_bytes(module, config.bucket_cap_mb << 20)


def in_blocks(module: nn.Module, config: ShardingConfiguration) -> list[ParameterGroup]:
    """Divides a model's parameters into blocks. A block's parameters are gathered only during the
    block's passes."""
    return by_modules(module, config.shard_modules, at_least=config.minimum_parameter_group_size)


def _in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Converts the floating-point tensors in `inputs` to `dtype`."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        inputs,
    )


class ShardedEngine(PartitionedEngine[ShardedState, ShardedCommitPayload]):
    """Engine of a model whose optimizer state, and possibly gradients and parameters, are sharded
    across ranks."""

    _payload_type = ShardedCommitPayload
    _execution: ShardedExecution
    """Gathers and reduces units in the passes. Created once the module is no longer on the meta
    device."""

    def __init__(
        self, setup: Setup, *, stage: Stage, groups: Groups, divide: Divide | None = None
    ) -> None:
        """Takes ownership of the parameters' memory. The parameters are sharded when the first step
        begins; until then they are unsharded on all ranks.

        Args:
            setup: the model and its configuration.
            stage: state that is sharded.
            groups: divides the parameters into units.
            divide: divides the ranks into replicas, each of which has all shards; None: all ranks
                form one replica.
        """
        super().__init__(setup)
        self.stage = stage
        self._compression = compression_of(self.config.compressor, self._session)
        self._weighed = False
        """True if the weight of the gradients is already known for this micro-batch, or for this
        step."""
        self._frozen_pass = False
        """True if all parameters were frozen in the last forward pass."""
        compressor = self.config.compressor
        if compressor is not None and compressor.of_matrices:
            raise ConfigurationError(
                f"gradient_compression={compressor.name!r} with strategy={self.strategy!r}: the "
                "compressor needs whole matrices on every rank, but this strategy shards "
                "gradients; use another compressor, such as topk or int8, or use ddp"
            )
        synchronize_norms(self.module, self._session, sums=self.config.loss_reduction == "sum")
        self._groups = groups
        self._divide = divide or among_all
        self._replicas = ReplicatedCollectives(self._session) if divide is not None else None
        self._collectives = self._replicas or SessionCollectives(self._session)
        self._whole_tensors = False
        """True if the optimizer needs entire tensors."""
        self._weights = 0.0
        """Weight of this rank's micro-batches in this step."""
        self._changes: torch.Tensor | None = None
        """Weighted changes that this rank's micro-batches made to the buffers."""
        self._build()

    def _unit(self, part: ParameterGroup) -> Unit:
        config = self.config
        return Unit(
            part.name,
            part.parameters,
            part.names,
            stage=self.stage,
            wide=config.deterministic,
            param_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            placement=placement_of(config.offload, part.parameters[0].device),
            whereabouts=self._whereabouts,
        )

    def _make_state(self) -> ShardedState:
        units = [
            (group.module, [self._unit(part) for part in alike(group)])
            for group in self._groups(self.module, self.config)
        ]
        self._execution = ShardedExecution(
            units,
            self._collectives,
            self.stage,
            self._whereabouts,
            prefetch=self.config.blocks_ahead,
        )
        self._execution.before_backward = self._before_backward
        state = ShardedState(self.module, self._execution, self.stage, self._divide)
        state.mirrors = TravellingMirrors(state.units, self.config.mirrors)
        if self._whole_tensors:
            state.keep_tensors_whole()
        if any(unit.apart for unit in state.units):
            refuse_loading(self.module)
        if self._compression is not None:
            for number, unit in enumerate(state.trained):
                check_floating(self._compression.compressor.name, unit.parameters)
                unit.compressed = CompressedScatter(self._compression, self._session, number)
        self._summed = CutGradients(state.trained, exact=self.config.deterministic)
        self._step_buffers = CommittedBuffers(self.module, self.extremes)
        self._carries_writes = self.stage is not Stage.PARAMETERS and not any(
            unit.apart for unit in state.units
        )
        self._writes = WrittenParameters(
            self.module.named_parameters(),
            self.strategy,
            stay=False,
            compared=self._carries_writes and self._session.elastic,
            whole=self._carries_writes,
        )
        self._attributes = ModuleAttributes(self.module)
        self._looked = False
        return state

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        said = self._options.get("whole_tensors")
        if said not in (None, True, False):
            raise ConfigurationError(f"whole_tensors={said!r}: expected True, False or None")
        self._whole_tensors = takes_whole_tensors(
            optimizer, elementwise=self._any_optimizer, whole_tensors=said
        )
        if not self._whole_tensors:
            return
        if self._compression is not None:
            raise ConfigurationError(
                f"gradient_compression={self._compression.compressor.name!r} with "
                f"{type(optimizer).__name__} and strategy={self.strategy!r}: this optimizer needs "
                "entire tensors, each of which is assigned to one rank, but compression works on "
                "gradients that are split over ranks; leave gradient_compression out, or use ddp"
            )
        if self._parts is not None:
            self._parts.keep_tensors_whole()

    # ------------------------------------------------------------------------- the passes of a step

    def _passes_begin(self) -> None:
        """Resets the per-step state of the passes when a step begins."""
        self._weighed = self._frozen_pass = False

    def _micro_batch_begins(self) -> None:
        """Prepares a micro-batch's passes."""
        step = self._session.step
        self._weighed = False
        if step is not None:
            self._refuse_half_a_pass(step)
            self._prepare_pass(step)
        self._execution.begin_passes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass. In training, its backward pass reduces the gradients
        across ranks."""
        self._frozen_pass = False
        if self._trains:
            self._execution.take_gradients_last()
            step = self._session.lifecycle.ensure_step()
            if (
                step.source is not None
            ):  # otherwise the script may only be trying out the model, outside of a step
                check_reproducible(self.config, step)
            if step is self._session.step:
                self._weigh(step)
            else:  # a joiner's pass before its training loop
                self._execution.factor = 0.0
        if self.config.param_dtype is not None:
            args, kwargs = _in_dtype((args, kwargs), self.config.param_dtype)
        return self._compute(*args, **kwargs)

    def _as_forward(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.module, name)
        return (
            self._execution.as_forward(self.module, method) if self._parts is not None else method
        )

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass whose backward pass does not reduce gradients."""
        self._execution.reduces_in_backward = False
        self._frozen_pass = True
        if self.config.param_dtype is not None:
            args, kwargs = _in_dtype((args, kwargs), self.config.param_dtype)
        return super().forward_frozen(*args, **kwargs)

    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        loss.backward()
        return loss

    def _weigh(self, step: Step) -> None:
        """Determines the weight of the next pass's gradients in the step's sum."""
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
        """Prepares a backward pass before its first gradient is used. Determines the gradients'
        weight if no forward pass of the whole module has done so."""
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
        """Prepares a step's passes before its first collective. Determines when gradients are
        reduced and how compressed gradients are weighted. If parameters are sharded and there are
        micro-batches, also exchanges with the other ranks which collectives a pass issues."""
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
        if (
            step.in_micro_batches
            and step.lost is None
            and self.stage is Stage.PARAMETERS
            and (group := self._session.group) is not None
        ):
            with LosingStep(self._session):
                self._execution.learn_passes(group)

    # ------------------------------------------------------------------------------------- training

    def exchange_update(self, update: TentativeUpdate) -> None:
        """Undoes the given update or, if it has been undone, reapplies it. If parameters are
        unsharded, the other ranks' parts of them are fetched by the start of the next step."""
        # otherwise data could be read before its copy to host memory is complete
        self._held.bring_mirrors()
        super().exchange_update(update)
        for unit in self._held.units:
            unit.changed()

    @torch.no_grad()
    @override
    def fetch_put_back(self) -> None:
        if self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()

    # -------------------------------------------------------------- TrainingEngine: for the session

    def capture(self) -> dict[str, Any]:
        """Implements `TrainingEngine.capture`: before the first step, returns the complete state;
        afterwards, only the state that is not sharded."""
        if self._held.whole:
            return self._held.capture_unsharded() | {
                "applied": self._applied,
                "extremes": dict(self.extremes),
            }
        beside = {
            "applied": self._applied,
            "written": self._writes.known,
            "extremes": dict(self.extremes),
        }
        return self._held.capture_common() | beside

    @torch.no_grad()
    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.extremes |= state.get("extremes", {})
        self._give_values(state)
        if "model" in state:
            self._held.restore_unsharded(state)
            self._applied = state.get("applied", 0)  # a checkpoint does not contain the count
            if self._compression is not None:
                self._compression.restore(state.get("compression"))
            self._commit_payload = None
        else:
            if (
                not self._held.whole
                and self._held.cut is not None
                and state["applied"] != self._applied
            ):
                raise PreconditionError(
                    f"this rank has applied {self._applied} steps, but its peers have applied "
                    f"{state['applied']}, so its shards are outdated; end this process and start "
                    "a replacement"
                )
            self._applied = state["applied"]
            self._held.restore_common(state)
        take_unsaved(self.module, state.get("buffers" if "model" in state else "unsaved", {}))
        self._step_buffers.replaced()
        self._writes.watch(state.get("written", ()))
        self._writes.replaced()
        self._attributes.forget()

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
        names = self._writes.names() or (list(self._parameter_names()) if self._overwritten else [])
        return (
            self._step_buffers.apart()
            if self._step_buffers.exact_names() and not names
            else self._writes.apart(names)
        )

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        if "model" in state and self._parts is not None:
            self._parts.check(state)

    def _hand_out(self, commit_payload: ShardedCommitPayload) -> None:
        held, present = self._held, iter(commit_payload.present)
        held.bring_mirrors()
        self._gradients.hand_out(commit_payload.divisor, commit_payload.present)
        for unit in held.trained:
            unit.hidden.gradients_handed_out([next(present) for _ in unit.parameters])
        # A rank without micro-batches has a part of the sum too, which `zero_grad` must discard.
        self._whereabouts.pending |= any(commit_payload.present)

    @override
    def issued(self) -> bytes:
        return self._execution.issued.encode() if self._parts is not None else b""

    @override
    def compare_issued(self, issued: Sequence[bytes]) -> None:
        IssuedCollectives.compare(issued, self.strategy)

    @torch.no_grad()
    @override
    def reshard(self, group: Group) -> None:
        if self._replicas is not None:
            self._replicas.connect(group, self._divide(group.generation.topology))
        self.compare_issued(group.exchange(self.issued()))
        if self._parts is not None:
            self._writes.moving()
            self._execution.resharded()
            self._parts.reshard(group)
        elif any(row[0] for row in group.all_gather_integers([0])):
            raise PreconditionError(
                "this rank's model is on the meta device, but its peers have already sharded "
                "their state; end this process and start it again, so that it joins the run"
            )

    @torch.no_grad()
    @override
    def step_begins(self) -> None:
        step, group = self._session.step, self._session.group
        assert step is not None
        self._check_training()
        self._begin_step()
        self._execution.begin_step(self._applied + 1, step.issues)
        self._weights, self._changes = 0.0, None
        self._passes_begin()
        if self._held.whole:
            topology = (
                group.generation.topology
                if group is not None
                else Topology(world_size=1, most_local=1)
            )
            self._held.cut_whole(
                number=step.placement.generation, rank=step.placement.rank, topology=topology
            )
        elif self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()  # in case a failure prevented this after the update
        # operations between steps may have moved the mirrors to the device
        self._held.mirrors.put_away(self.optimizer)
        if self._compression is not None:
            trained = self._held.trained
            self._compression.laid_out(
                "units",
                [unit.parameter_names for unit in trained],
                [u.layout.padded_numel for u in trained],
            )
            self._compression.step_begins()
        self._watch_units(self._held.units, not self._carries_writes)
        self._step_buffers.step_begins()
        self._writes.begin()
        if self._session.elastic:
            self._attributes.begin()

    def _watch_units(self, units: Sequence[Unit], in_step: bool) -> None:
        for unit in units:
            unit.in_step, unit.watched = in_step, in_step and not self._looked
            unit.is_lost, unit.proves_lost = self._is_lost, self._proves_lost

    @override
    def micro_batch_begins(self) -> None:
        self._step_buffers.put_back()
        self._writes.micro_batch_begins()
        self._micro_batch_begins()

    @override
    def micro_batch_ends(self, weight: float) -> None:
        self._execution.end_passes()
        if not self._is_lost():
            self._writes.micro_batch_ends()
        if weight > 0:
            if not self._is_lost():
                self._step_buffers.micro_batch_ends()
            self._weights += weight
            step = self._session.step
            changes = self._step_buffers.changes(
                _WIDE, weight, weight=weight, samples=step.samples if step is not None else 0
            )
            self._changes = changes if self._changes is None else self._changes + changes
        else:
            self._step_buffers.leave_out(_WIDE)

    @torch.no_grad()
    def _reduce(self, step: Step, share: Share) -> None:
        held = self._held
        check_reproducible(self.config, step)
        self._refuse_half_a_pass(step)
        self._refuse_carried()
        self._prepare_pass(step)
        if step.in_micro_batches and self.stage > Stage.OPTIMIZER:
            for _ in range(share.most_micro_batches - (share.micro_batches or 0)):
                self._execution.take_part()
        self._execution.reduce_rest()
        if step.lost is None:  # failed collectives may have left arbitrary values
            if not self._carries_writes:
                self._writes.refuse(unless=self._proves_lost)
                for unit in held.units:
                    if unit.resident:
                        unit.refuse_written()
            self._step_buffers.report_writes(step, self._writes)
        self._agree_on_extremes(step, share)
        step.issues(COMMIT)
        # the mirror holder receives the sums before the step is prepared
        if (
            step.lost is None
            and self._gradients.pass_on(self._collectives, held.division)
            and completes(self._session, step)
        ):
            self._session.lifecycle.prepare_step()

    @torch.no_grad()
    @override
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        failpoint("sharded.prepared")
        gradients, held, group = self._gradients, self._held, self._session.group
        counts = held.division.replica(group.rank if group is not None else 0) == 0
        summing = CommitSum(
            vote,
            self._execution.issued.word(),
            [self._weights],
            gradients.squared_norm_part(held.trained if counts else []),
            gradients.touched,
            self._buffer_changes(step),
        )
        summed = summing.to_send()
        if group is not None and group.world_size > 1:
            group.all_reduce_short(summed)
        word, issued, weights, norm, present, changes = summing.split(summed)
        IssuedCollectives.check(issued.tolist(), self.strategy)
        total = (float(weights) or 1.0) if step.in_micro_batches else 1.0
        payload = ShardedCommitPayload(
            number=self._applied + 1,
            divisor=total if self.config.loss_reduction == "mean" else 1.0,
            squared_norm=gradients.squared_norm(norm),
            present=[count > 0 for count in present.tolist()],
            changes=changes,
        )
        return word.tolist(), vars(payload)

    def _agree_on_extremes(self, step: Step, share: Share) -> None:
        extremes = self._step_buffers.extremes
        if not extremes or step.lost is not None:
            return
        group = self._session.group
        step.issues(EXTREMES)
        made = extremes.made(counted=not step.in_micro_batches and share.weight > 0)
        with LosingStep(self._session):
            extremes.agree(group.exchange(made) if group is not None else [made])

    def _buffer_changes(self, step: Step) -> torch.Tensor:
        """Returns this rank's contribution to the sum of changes to buffers."""
        if step.in_micro_batches:
            return (
                torch.zeros(self._step_buffers.size, dtype=torch.float64)
                if self._changes is None
                else self._changes
            )
        share = step.share
        assert share is not None
        if not share.weight > 0:
            self._step_buffers.leave_out(_WIDE)
            return torch.zeros(self._step_buffers.size, dtype=torch.float64)
        return self._step_buffers.changes(
            _WIDE, share.weight, weight=share.weight, samples=step.samples
        )

    @property
    def _has_gradients(self) -> bool:
        return self._execution.came

    @property
    @override
    def changing_buffers(self) -> bool:
        return self._parts is not None and self._step_buffers.size > 0

    def _drop_gradients(self) -> None:
        step = self._session.step
        if step is not None:
            self._refuse_half_a_pass(step)
        self._execution.drop_gradients()

    def _updated(self) -> None:
        """Moves mirrors back to the memory that stores them. If parameters are unsharded, fetches
        the pieces that other ranks have updated."""
        self._held.updated()
        self._execution.applied()

    @torch.no_grad()
    @override
    def discard_step(self) -> None:
        self._watch_units(self._held.units, False)
        self._execution.forget()
        self._step_buffers.put_back()
        step = self._session.step
        if step is not None and step.lost is None:
            # The script did not intend a step, and may write to the parameters afterwards.
            self._writes.forget()
            self._attributes.forget()
            return
        if self._carries_writes:
            self._writes.put_back()
        self._attributes.put_back()

    @torch.no_grad()
    @override
    def commit_step(self) -> None:
        assert self._commit_payload is not None
        self._step_buffers.apply(self._commit_payload.changes)
        self._execution.forget()
        self._step_buffers.step_committed()
        self._writes.commit()
        held = self._held
        self._watch_units(held.units, False)
        self._looked = True
        held.committed()
        if self._compression is not None:
            self._compression.commit(unusable=self._skipped)

    # ---------------------------------------------------------------------------------------- state

    @property
    def _gradients(self) -> CutGradients:
        return self._summed

    @override
    def check_optimizer_state(self) -> None:
        super().check_optimizer_state()
        self._held.check_dtypes()

    def _own_pieces(self) -> list[tuple[str, torch.Tensor]]:
        return [
            each
            for unit in self._held.units
            for each in zip(unit.parameter_names, unit.own.pieces, strict=True)
        ]

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        for unit in self._held.units:
            for name, parameter in zip(unit.parameter_names, unit.parameters, strict=True):
                yield name, parameter, unit.trained

    def _check_training(self) -> None:
        super()._check_training()
        moved = next(filter(None, (unit.moved for unit in self._held.units)), None)
        if moved is not None:
            raise ConfigurationError(
                f"parameter {moved!r} was moved to other memory or another dtype after "
                "as_distributed (for example by module.half() or p.data = ...): with "
                f"strategy={self.strategy!r}, Shoal would no longer train it; convert the module "
                "before as_distributed, and set values with model.with_parameters(values)"
            )

    def _parameter_names(self) -> dict[str, str]:
        first = {id(p): name for name, p in self.module.named_parameters()}
        return {
            name: first[id(p)] for name, p in self.module.named_parameters(remove_duplicate=False)
        }

    def _commit_buffers(self) -> None:
        self._step_buffers.commit()

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Implements `TrainingEngine.assemble`. The state includes every rank's compression
        residuals."""
        whole = self._held.assemble(channel)
        return (
            whole
            if self._compression is None
            else whole | {"compression": self._compression.assemble(channel)}
        )

    @torch.no_grad()
    @override
    def part(self, channel: Channel) -> StatePart | None:
        part = self._held.part(channel)
        return (
            part
            if part is None or self._compression is None
            else self._compression.part(part, channel)
        )

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns this rank's shards, its mirrored shards, and its unsharded state."""
        return self._held.in_common() if self._parts is not None and not self._parts.whole else {}

    def unsharded_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the buffers and, if every rank has them unsharded between passes, the
        parameters."""
        parameters = {}
        if self._carries_writes:
            with inside():
                parameters = {
                    repr(name): parameter.detach()
                    for name, parameter in self.module.named_parameters()
                }
        return {"the parameters": parameters, "the buffers": self._step_buffers.begun_from()}

    @torch.no_grad()
    def consolidate(self, channel: Channel) -> None:
        """Fetches unsharded parameters that only their owners have updated. Also restores a
        consistent state if only some ranks have begun the first step."""
        if self._parts is not None:
            self._parts.make_unsharded_again(channel)
            self._parts.fill(channel)

    @torch.no_grad()
    @override
    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        if self._parts is not None:
            self._parts.copy_singles(channel, leaving)

    @override
    def unsharded_for(self, channel: Channel) -> AbstractContextManager[None]:
        return self._held.unsharded_for(channel) if self._parts is not None else nullcontext()

    @property
    @override
    def is_sharded(self) -> bool:
        return (
            self._parts is not None
            and self._parts.cut is not None
            and self._parts.cut.world_size > 1
        )

    @property
    def holds(self) -> list[str]:
        """Lists this rank's shards, including the mirrored one."""
        cut = self._parts.cut if self._parts is not None and self.is_sharded else None
        return (
            [str(position) for position in (cut.position, cut.mirrored) if position is not None]
            if cut is not None
            else []
        )

    def layout(self) -> dict[str, Any]:
        """Describes the sharding: what is sharded, the number of shards, how many ranks own each
        shard, and whether shards are mirrored."""
        division = (
            self._parts.division if self._parts is not None else Division(world_size=1, shards=1)
        )
        return {
            "sharded": [stage.name.lower() for stage in Stage if stage <= self.stage],
            "shards": division.shards,
            "replicas": division.replicas,
            "mirrored": division.mirrors,
        }

    @override
    def unsharded_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        return [
            each
            for unit in self._held.units
            for each in zip(unit.own.pieces, unit.layout.shapes, strict=True)
        ]
