"""One rank's part of a model that is trained as a pipeline: what a strategy drives.

    pipeline = Pipeline(module, PipelineSettings(schedule="1f1b", micro_batches=8), group=group, data_group=data_group)
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-3)
    loss = pipeline.train_step(inputs, targets, loss_fn)     # any number of times before the next line
    pipeline.reduce_gradients()
    pipeline.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

It knows nothing of sessions, generations or optimizers. When ranks come or go, a new one is made on a new group, from the same module with
the state loaded. Threads: one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn

from shoal_worker.pipelining import full_state, gradients
from shoal_worker.pipelining.engine import Engine, Loss
from shoal_worker.pipelining.links import Links, Traffic, all_reduce, end_group
from shoal_worker.pipelining.micro_batches import MicroBatch, cut_batch, merge_outputs
from shoal_worker.pipelining.outputs import broadcast_output, plain
from shoal_worker.pipelining.partial import Inside, PartialModel, empty_on, partial_model
from shoal_worker.pipelining.schedule import (
    Schedule,
    checked_stages_per_rank,
    forward_schedule,
    schedule_kind,
    stage_ranks,
    training_schedule,
)
from shoal_worker.pipelining.split import Split, named_tensors, split_model


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How a model is pipelined."""

    schedule: str = "1f1b"
    """One of `schedule_names()`."""
    micro_batches: int = 4
    """How many a batch is cut into; fewer if it has fewer samples."""
    stages_per_rank: int | None = None
    """None: 1 for gpipe and 1f1b, 2 for the others."""
    cut_points: Sequence[str] | None = None
    """Names of the submodules that begin a new stage; None: stages of balanced parameter bytes."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """How micro-batches' losses make up the batch's: their mean by weight, or their sum."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are summed in over the data axis; None: their own."""

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ConfigurationError(f"micro_batches={self.micro_batches!r}: expected a whole number, at least 1")


@dataclass
class _Step:
    """What has been accumulated since the last reduction."""

    reference: float
    """Weights are taken relative to this in the backward passes, so that gradients keep their magnitude."""
    weight: float
    before: dict[int, torch.Tensor | None]
    """Gradients from before, by id of the parameter: already reduced."""


class Pipeline:
    """One rank's stages of a model, and what runs them."""

    def __init__(
        self,
        module: nn.Module,
        settings: PipelineSettings,
        *,
        group: dist.ProcessGroup,
        data_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        end: Callable[[str], None] | None = None,
        observe: Callable[[str, int, int], None] | None = None,
        split: Split | None = None,
        plain: Callable[[nn.Module], None] | None = None,
        inside: Inside | None = None,
    ) -> None:
        """Splits `module` over the ranks of `group`; sends nothing.

        Args:
            module: The whole model, the same on every rank; what this rank does not hold may be on `meta`. It is kept, and shares the
                tensors of this rank's stages.
            settings: The same on every rank.
            group: The ranks of one replica, in the order of the stages.
            data_group: The ranks that hold the same stages in other replicas; None: there is one replica.
            device: Of this rank's tensors; None: the CPU.
            end: Ends both groups for all ranks, with a reason; None: the groups' own `abort`.
            observe: See `Engine.run`.
            split: As it is to be split; None: by the settings.
            plain, inside: See `partial_model`.

        Raises:
            ConfigurationError: the model or the settings cannot be pipelined over so many ranks.
        """
        kind = schedule_kind(settings.schedule)
        if settings.loss_reduction not in {"mean", "sum"}:
            raise ConfigurationError(f"loss_reduction={settings.loss_reduction!r}: expected 'mean' or 'sum'")
        self.settings = settings
        self.module = module
        self._data_group = data_group
        self._observe = observe
        self._per_rank = checked_stages_per_rank(kind, settings.stages_per_rank)
        self.rank_of = stage_ranks(kind, group.size(), self._per_rank)
        self.split: Split = split or split_model(module, len(self.rank_of), cut_points=settings.cut_points)
        self.links = Links(group, device or torch.device("cpu"), end=end or self._ends(group, data_group))
        self.stages = tuple(stage for stage, rank in enumerate(self.rank_of) if rank == self.links.rank)
        self._state_names = full_state.state_names(module)
        self.lacks_values = self._allocate()
        """Whether tensors of this rank's stages were on `meta`: they are arbitrary until `load_full_state_dict`."""
        self._parts: dict[int, PartialModel] = {stage: partial_model(module, self.split, stage, plain, inside) for stage in self.stages}
        self._engine = Engine(self._parts, len(self.rank_of), self.links)
        self._step: _Step | None = None
        self.in_flight = 0
        """Of the last train_step: the most (stage, micro-batch) pairs that waited here for their backward pass at once."""
        self.data_bytes = 0
        """Bytes of the gradients last summed over the data axis; a ring sends 2(D-1)/D of it."""

    @staticmethod
    def _ends(group: dist.ProcessGroup, data_group: dist.ProcessGroup | None) -> Callable[[str], None]:
        def end(reason: str) -> None:
            for one in (group, data_group):
                if one is not None:
                    end_group(one, reason)

        return end

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent along the pipeline."""
        return self.links.traffic

    @property
    def is_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return len(self.rank_of) - 1 in self.stages

    # ------------------------------------------------------------------------------------------------------------- parameters

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by name in the original model; tied ones once, under the first name."""
        return dict(self._own)

    @functools.cached_property
    def _own(self) -> dict[str, nn.Parameter]:
        own: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, tensor in named_tensors(self.module).items():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in seen and self._is_here(name):
                seen.add(id(tensor))
                own[name] = tensor
        return own

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, for an optimizer. May be empty."""
        return list(self.named_parameters().values())

    def counted_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters without those that another rank counts (of copies, the first stage's counts)."""
        return [p for name, p in self.named_parameters().items() if self.rank_of[self.split.placement[name][0]] == self.links.rank]

    def release(self) -> None:
        """Moves what this rank does not hold to `meta` in the original module, so that its memory is freed."""
        elsewhere = {id(t): t for name, t in named_tensors(self.module).items() if not t.is_meta and not self._is_here(name)}
        self._replace({key: empty_on(tensor, torch.device("meta")) for key, tensor in elsewhere.items()})

    def _allocate(self) -> bool:
        """Gives memory to what this rank holds and is on `meta`; whether there was any such."""
        named = {name: t for name, t in named_tensors(self.module).items() if t.is_meta and self._is_here(name)}
        lost = sorted(set(named) - set(self._state_names))
        if lost:
            raise ConfigurationError(
                f"the buffers {lost[:5]} are on meta and in no state dict, so they can get no values: build the model where they have some"
            )
        self._replace({id(t): empty_on(t, self.links.device) for t in named.values()})
        return bool(named)

    def _replace(self, by_id: Mapping[int, torch.Tensor]) -> None:
        """Puts other tensors in the places of the model's; tied ones stay tied."""
        for part in self.module.modules():
            held: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for tensors in held:
                for name, tensor in tensors.items():
                    if id(tensor) in by_id:
                        tensors[name] = by_id[id(tensor)]

    def _is_here(self, name: str) -> bool:
        return not set(self.split.placement[name]).isdisjoint(self.stages)

    # --------------------------------------------------------------------------------------------------------------- training

    def train_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss: Loss | None = None,
        *,
        weight_fn: Callable[[Any, Any], float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Cuts a batch (see `cut_batch`) and takes it through; see `train_on`. Without `loss` the output's `.loss` is used."""
        count = self.settings.micro_batches
        return self.train_on(cut_batch(inputs, targets, count=count, weight_fn=weight_fn, seeds=seeds), loss)

    def train_on(self, micro_batches: Sequence[MicroBatch], loss: Loss | None = None) -> torch.Tensor:
        """Forward and backward passes of micro-batches; adds to the gradients. Returns the loss of this replica's batch, on every rank.

        Called and raises as `take_through`.
        """
        told = self.take_through(micro_batches, loss)
        total = self._nought() if told is None else told
        with self.links.ending_on_failure("a pipeline step"):
            self.links.broadcast(total, self.rank_of[-1], "telling all ranks the loss")
        return total

    def take_through(self, micro_batches: Sequence[MicroBatch], loss: Loss | None = None) -> torch.Tensor | None:
        """Forward and backward passes of micro-batches; adds to the gradients. The loss of this replica's batch where the last stage is;
        elsewhere None.

        All ranks of the replica call it with the same micro-batches. A replica that has none calls `reduce_gradients` alone.

        Raises:
            MembershipChanged: a rank failed or is gone. The gradients are worthless then: `discard_step`.
        """
        if self.lacks_values:
            raise PreconditionError("the model was built on meta: load_full_state_dict() first")
        weights = [one.weight for one in micro_batches]
        mean = self.settings.loss_reduction == "mean"
        if self._step is None:
            self._step = self._begin_step(sum(weights) if mean else 1.0)
        step = self._step
        scales = [weight / step.reference if mean else 1.0 for weight in weights]
        schedule = self._schedule(len(micro_batches))
        self._follow_modes()
        ran = self._engine.run(schedule, micro_batches, loss=loss or own_loss, scales=scales, observe=self._observe)
        step.weight += sum(weights)
        self.in_flight = ran.in_flight
        if not self.is_last:
            return None
        factors = weights if mean else [1.0] * len(weights)
        total = sum((one.double().reshape(()) * factor for one, factor in zip(ran.losses, factors, strict=True)), self._nought())
        return total / sum(weights) if mean and sum(weights) > 0 else total

    def reduce_gradients(self) -> float:
        """The gradients become those of the whole batch, over all `train_on` since the last time and over all replicas. All ranks call
        it, once a step. Returns the weight of the whole batch.

        Gradients from before these calls stay, and are added to.

        Raises:
            MembershipChanged: a rank failed or is gone.
        """
        step = self._step or self._begin_step(1.0)
        own = self.named_parameters()
        with self.links.ending_on_failure("reducing gradients"), torch.no_grad():
            weight = self._total_weight(step.weight)
            if self.settings.loss_reduction == "mean":
                factor = step.reference / weight if weight > 0 else 0.0
                for parameter in own.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            shared = self.split.shared
            exist = gradients.shared_exist(shared, own, self.links)
            gradients.sum_shared(shared, self.rank_of, own, self.links, exist)
            if self._data_group is not None:
                self.data_bytes = gradients.sum_over(self._data_group, own.values(), self.settings.reduce_dtype)
            for parameter in own.values():
                before = step.before.get(id(parameter))
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before + parameter.grad
        self._step = None
        return weight

    def end_accumulation(self) -> None:
        """In the place of `reduce_gradients`, for who reduces them himself: the gradients are the mean (or sum) over what this replica has
        been given since the last time. Parameters on several stages have each stage's part of theirs."""
        self._step = None

    def discard_step(self) -> None:
        """Forgets what has been accumulated since the last reduction; gradients from before are put back."""
        for parameter in self.parameters():
            parameter.grad = None if self._step is None else self._step.before.get(id(parameter))
        self._step = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients so that their norm over all stages is at most `max_norm`; returns the norm before, the same on all ranks.

        Raises:
            PreconditionError: the gradients are not reduced yet.
        """
        if self._step is not None:
            raise PreconditionError("clip_grad_norm_: call reduce_gradients() first, the gradients are only this replica's so far")
        with self.links.ending_on_failure("clipping gradients"), torch.no_grad():
            return gradients.clip(self.parameters(), self.counted_parameters(), self.links, max_norm, norm_type)

    def schedule_of(self, micro_batches: int) -> Schedule:
        """The order in which so many micro-batches are taken through, for looking at."""
        return self._schedule(micro_batches)

    def _schedule(self, micro_batches: int) -> Schedule:
        return training_schedule(self.settings.schedule, ranks=self.links.size, stages_per_rank=self._per_rank, micro_batches=micro_batches)

    def _begin_step(self, reference: float) -> _Step:
        own = self.parameters()
        before = {id(p): p.grad for p in own}
        for parameter in own:
            parameter.grad = None
        return _Step(reference=reference if reference > 0 else 1.0, weight=0.0, before=before)

    def _total_weight(self, weight: float) -> float:
        if self._data_group is None:
            return weight
        total = self._nought() + weight
        all_reduce(self._data_group, total, "adding up the replicas' weights")
        return float(total)

    def _nought(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.links.device)

    def _follow_modes(self) -> None:
        for part in self._parts.values():
            part.follow_modes()

    # ------------------------------------------------------------------------------------------------------------- evaluation

    def predict(self, inputs: Any, *, everywhere: bool = True) -> Any:
        """The model's output in evaluation mode, without gradients. All ranks of the replica call it with the same batch.

        On the last stage's rank, and with `everywhere` on all, where mappings come as plain dicts; else None.
        """
        batches = cut_batch(inputs, count=self.settings.micro_batches)
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            self._follow_modes()
            ran = self._engine.run(forward_schedule(self.rank_of, len(batches)), batches)
        finally:
            for part, training in modes:
                part.training = training
        output = plain(merge_outputs([plain(one) for one in ran.outputs], [one.samples for one in batches])) if self.is_last else None
        if not everywhere:
            return output
        with self.links.ending_on_failure("sending outputs"):
            return broadcast_output(output, self.rank_of[-1], self.links)

    # ------------------------------------------------------------------------------------------------------------------ state

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Copies of parameters and buffers under the original names, on all ranks of the pipeline, or on its first alone. All ranks call
        it."""
        return self._gather(self._state_names, rank0_only=rank0_only)

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters under the original names, tied ones under the first of theirs, on all ranks. All ranks call it."""
        return self._gather([name for name, _ in self.module.named_parameters()], rank0_only=False)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes this rank's part of a whole state, which any number of stages, or one process, may have given. Sends nothing.

        Raises:
            ConfigurationError: it does not fit the model; nothing is changed.
        """
        full_state.load(state, self._state_names, self.module, self.split, self.stages)
        self.lacks_values = False

    def _gather(self, names: Sequence[str], *, rank0_only: bool) -> dict[str, torch.Tensor]:
        with self.links.ending_on_failure("gathering state"), torch.no_grad():
            return full_state.gather(names, self.module, self.split, self.rank_of, self.links, rank0_only=rank0_only)


def own_loss(output: Any, targets: Any) -> torch.Tensor:
    """The loss that the model computed itself.

    Raises:
        ConfigurationError: it has none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise ConfigurationError(f"a train step without a loss function needs an output with a .loss tensor; got {type(output).__name__}")
    return found
