"""One rank's part of a model that is trained as a pipeline, as used by `mesh/rank_mesh.py`.

    pipeline = Pipeline(module, PipelineSettings(schedule="1f1b", micro_batches=8), group=group)
    loss = pipeline.train_on(cut_batch(inputs, targets, count=8), loss_fn)

Gradients are accumulated in `.grad`, as autograd does. This module is independent of sessions,
generations and optimizers: when ranks join or leave, a new pipeline is created on the new group.
All calls must come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.modes import evaluating
from shoal_worker.pipelining.executor import Loss, ScheduleExecutor
from shoal_worker.pipelining.links import Links, broadcast_output, plain
from shoal_worker.pipelining.micro_batches import MicroBatch, cut_batch, merge_outputs
from shoal_worker.pipelining.partial import Inside, PartialModel, partial_model
from shoal_worker.pipelining.schedule import (
    checked_stages_per_rank,
    forward_schedule,
    schedule_kind,
    stage_ranks,
    training_schedule,
)
from shoal_worker.pipelining.split import SharedParameter, Split, split_model

# ------------------------------------------------------------------- gradients of shared parameters
#
# After the schedule has run, the gradients of all copies of a parameter that is on several stages
# are summed. Hooks in the backward pass cannot do this: torch's DDP, for example, does not see the
# second half of a split backward pass and silently leaves its gradients unreduced. If no copy has a
# gradient, it remains None, as in a single process.


def sum_shared(
    shared: Sequence[SharedParameter],
    rank_of: Sequence[int],
    parameters: Mapping[str, nn.Parameter],
    links: Links,
    here: Sequence[bool],
) -> None:
    """Sets the gradient of each copy of a shared parameter to the sum of all copies' gradients,
    added in the order of the stages.

    Args:
        shared: all shared parameters of the model; must be the same on every rank.
        rank_of: the rank of each stage.
        parameters: parameters of this rank, by name. A tied parameter may be under any of its
            names.
        links: connections to the pipeline's ranks.
        here: for each shared parameter, whether any rank has a gradient for it.
    """
    for one, exists in zip(shared, here, strict=True):
        ranks = list(dict.fromkeys(rank_of[stage] for stage in one.stages))
        if not exists or links.rank not in ranks or len(ranks) == 1:
            continue
        parameter = parameters[one.names[0]]
        gradient = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        )
        owner, what = ranks[0], f"summing the gradients of {one.names[0]}"
        if links.rank == owner:
            for peer in ranks[1:]:
                other = torch.empty_like(gradient)
                links.receive(other, peer, what).wait()
                gradient = gradient + other
            for peer in ranks[1:]:
                links.send(gradient, peer, what)
                links.traffic.shared += gradient.numel() * gradient.element_size()
        else:
            links.send(gradient, owner, what)
            links.traffic.shared += gradient.numel() * gradient.element_size()
            links.finish_sends()
            gradient = torch.empty_like(gradient)
            links.receive(gradient, owner, what).wait()
        links.finish_sends()
        parameter.grad = gradient


def shared_exist(
    shared: Sequence[SharedParameter], parameters: Mapping[str, nn.Parameter], links: Links
) -> list[bool]:
    """Returns, for each shared parameter, whether any copy has a gradient."""
    if not shared:
        return []
    own = [parameters.get(one.names[0]) for one in shared]
    found = torch.tensor(
        [float(p is not None and p.grad is not None) for p in own], device=links.device
    )
    links.all_reduce(found, "comparing which shared parameters have gradients", dist.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


# ---------------------------------------------------------------------------------- one rank's part


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Settings of a pipeline."""

    schedule: str = "1f1b"
    """Name of the schedule; one of `schedule_names()`."""
    micro_batches: int = 4
    """Number of micro-batches per batch. If a batch has fewer samples than this, each sample is a
    micro-batch."""
    stages_per_rank: int | None = None
    """Number of stages on each rank. None: 1 for gpipe and 1f1b, 2 for other schedules."""
    cut_points: Sequence[str] | None = None
    """Names of the submodules that begin a new stage. None: stages are balanced by the size of
    their parameters in bytes."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the micro-batches' losses to the batch's loss: "mean" (weighted) or "sum"."""

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ConfigurationError(
                f"micro_batches={self.micro_batches!r}: expected a whole number, at least 1"
            )


class Pipeline:
    """One rank's stages of a model, and their executor."""

    def __init__(
        self,
        module: nn.Module,
        settings: PipelineSettings,
        *,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        end: Callable[[str], None] | None = None,
        come_after: Callable[[dist.Work], None] | None = None,
        observe: Callable[[str, int, int], None] | None = None,
        split: Split | None = None,
        plain: Callable[[nn.Module], None] | None = None,
        inside: Inside | None = None,
    ) -> None:
        """Splits `module` across the ranks of `group`, without communication.

        Args:
            module: the model, the same on every rank; other ranks' parts may be on the meta device.
                The pipeline keeps a reference to the model and uses its tensors.
            settings: settings, the same on every rank.
            group: the ranks of one replica, in the order of the stages.
            device: device of this rank's tensors; None: the CPU.
            end: aborts the group on all ranks, given a reason; None: the group's own `abort` is
                used.
            come_after: see `Links`.
            observe: see `ScheduleExecutor.run`.
            split: predetermined split; None: the settings determine it.
            plain, inside: see `partial_model`.

        Raises:
            ConfigurationError: this model cannot be trained as a pipeline with these settings and
                this number of ranks.
        """
        kind = schedule_kind(settings.schedule)
        self.settings = settings
        self.module = module
        self._observe = observe
        self._per_rank = checked_stages_per_rank(kind, settings.stages_per_rank)
        self.rank_of = stage_ranks(kind, group.size(), self._per_rank)
        """The rank of each stage."""
        self.split: Split = split or split_model(
            module, len(self.rank_of), cut_points=settings.cut_points
        )
        self.links = Links(group, device or torch.device("cpu"), end=end, come_after=come_after)
        stages = [stage for stage, rank in enumerate(self.rank_of) if rank == self.links.rank]
        self._is_last = len(self.rank_of) - 1 in stages
        self._parts: dict[int, PartialModel] = {
            stage: partial_model(module, self.split, stage, plain, inside) for stage in stages
        }
        self._engine = ScheduleExecutor(self._parts, len(self.rank_of), self.links)

    # ------------------------------------------------------------------------------------- training

    def train_on(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | None = None
    ) -> torch.Tensor:
        """Does the same as `take_through`, but returns the loss of this replica's batch on every
        rank."""
        mean_loss = self.take_through(micro_batches, loss)
        total = self._zero() if mean_loss is None else mean_loss
        with self.links.ending_on_failure("a pipeline step"):
            self.links.broadcast(total, self.rank_of[-1], "sending the loss to all ranks")
        return total

    def take_through(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | None = None
    ) -> torch.Tensor | None:
        """Runs the forward and backward passes of micro-batches. Adds the gradients of the batch's
        loss to the parameters' gradients. Returns the loss of this replica's batch on the rank with
        the last stage, and None on other ranks. Without `loss`, the loss is the output's `.loss`.

        Must be called on all ranks of the replica, with the same micro-batches. If a parameter is
        on several stages, each copy gets only its own stage's part of the gradient.

        Raises:
            MembershipChanged: a rank failed or left. The gradients are then invalid.
        """
        weights = [
            one.weight if self.settings.loss_reduction == "mean" else 1.0 for one in micro_batches
        ]
        total_weight = (sum(weights) or 1.0) if self.settings.loss_reduction == "mean" else 1.0
        scales = [weight / total_weight for weight in weights]
        schedule = training_schedule(
            self.settings.schedule,
            ranks=self.links.size,
            stages_per_rank=self._per_rank,
            micro_batches=len(micro_batches),
        )
        self._follow_modes()
        ran = self._engine.run(
            schedule, micro_batches, loss=loss or own_loss, scales=scales, observe=self._observe
        )
        if not self._is_last:
            return None
        total = sum(
            (
                one.double().reshape(()) * weight
                for one, weight in zip(ran.losses, weights, strict=True)
            ),
            self._zero(),
        )
        return total / total_weight

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.links.device)

    def _follow_modes(self) -> None:
        for part in self._parts.values():
            part.follow_modes()

    # ----------------------------------------------------------------------------------- evaluation

    def predict(self, inputs: Any) -> Any:
        """Returns the model's output in evaluation mode, without gradients, on all ranks. Mappings
        are returned as plain dicts. Must be called on all ranks of the replica, with the same
        batch."""
        batches = cut_batch(inputs, count=self.settings.micro_batches)
        with evaluating(self.module):
            self._follow_modes()
            ran = self._engine.run(forward_schedule(self.rank_of, len(batches)), batches)
        output = (
            plain(
                merge_outputs([plain(one) for one in ran.outputs], [one.samples for one in batches])
            )
            if self._is_last
            else None
        )
        with self.links.ending_on_failure("sending outputs"):
            return broadcast_output(output, self.rank_of[-1], self.links)


def own_loss(output: Any, targets: Any) -> torch.Tensor:
    """Returns the loss that the model itself has computed.

    Raises:
        ConfigurationError: the output has no loss.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise ConfigurationError(
            "train_step without a loss function requires an output with a .loss tensor, but the "
            f"model returned {type(output).__name__}"
        )
    return found
