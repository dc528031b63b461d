"""Implements `shoal.plan`: plans every possible strategy and mesh for a number of ranks, and sorts
the results."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.config import ShardingConfiguration
from shoal_worker.engine.step.passes import Loss
from shoal_worker.mesh.layouts import template_of
from shoal_worker.planning.candidates import MICRO_BATCHES_PER_STAGE, STAGES, Choice, choices
from shoal_worker.planning.costs import Memory
from shoal_worker.planning.plan import Plan, PlannedStrategy
from shoal_worker.planning.shares import (
    Blueprints,
    Costs,
    blueprints,
    ddp,
    local_sgd,
    on_mesh,
    sharded,
)
from shoal_worker.planning.step_time import Assumptions, estimate
from shoal_worker.planning.subject import Subject, subject_of
from shoal_worker.planning.units import parse_bytes, parse_flops, readable_bytes
from shoal_worker.state.fits import ELEMENTWISE
from shoal_worker.strategies import registry
from shoal_worker.tensor_parallel.split_plan import Style

RESERVE: Final = 0.1
"""Fraction of a device's memory that a plan leaves free for the allocator, the runtime and the
kernels' workspaces."""


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world_size: int,
    device_memory: int | str | None = None,
    example: Any = None,
    targets: Any = None,
    loss_fn: Loss | None = None,
    global_batch_size: int | None = None,
    config: ShardingConfiguration | None = None,
    ranks_per_host: int = 8,
    device_flops: float | str = Assumptions.device_flops,
    efficiency: float = Assumptions.efficiency,
    bandwidth: float | str = Assumptions.bandwidth,
    local_bandwidth: float | str = Assumptions.local_bandwidth,
) -> Plan:
    """Estimates the costs of every strategy for the model on `world_size` ranks: memory by purpose,
    traffic, a pipeline's bubble, and the time of a step.

    Does not train or communicate, and does not change the model or the optimizer. The model may be
    on the meta device.

    Args:
        model: the model, as for `as_distributed`.
        optimizer: optimizer of the model's parameters.
        world_size: number of ranks, at least 1.
        device_memory: memory of each rank: bytes, "80GB" or "80GiB"; None: everything fits.
        example: inputs of the model for one rank, as for `train_step`: a tensor, a tuple of
            positional arguments or a mapping of keyword arguments. The values do not matter.
            Without an example, activations, times and the traffic of tensor and pipeline are
            unknown.
        targets, loss_fn: arguments of `train_step`. Without `loss_fn`, the loss is the output's
            `.loss` or the output's mean.
        global_batch_size: number of samples in a step, divided among the replicas; None: the
            example's number of samples for each rank.
        config: settings common to all strategies; None: the defaults.
        ranks_per_host: number of ranks that share a host's links. Tensor parallelism stays within a
            host.
        device_flops, efficiency: peak operations per second of a device, and the fraction that
            training reaches.
        bandwidth, local_bandwidth: bytes per second that a rank sends to other hosts, and within
            its own host.

    Raises:
        ConfigurationError: a value is invalid, there is nothing to train, or the example cannot be
            passed through the model on fake tensors.
    """
    if type(world_size) is not int or world_size < 1:
        raise ConfigurationError(
            f"world_size={world_size!r}: expected a number of ranks, at least 1"
        )
    if type(ranks_per_host) is not int or ranks_per_host < 1:
        raise ConfigurationError(
            f"ranks_per_host={ranks_per_host!r}: expected a number of ranks, at least 1"
        )
    if not 0.0 < efficiency <= 1.0:
        raise ConfigurationError(
            f"efficiency={efficiency!r}: expected a fraction above 0 and at most 1"
        )
    config = config or ShardingConfiguration()
    for field in ("gradient_compression", "offload", "mirrors"):
        if getattr(config, field) not in (None, "device"):
            raise ConfigurationError(
                f"{field}={getattr(config, field)!r} is not supported in plans; leave it out of "
                "config"
            )
    assumptions = Assumptions(
        device_flops=parse_flops("device_flops", device_flops),
        efficiency=efficiency,
        bandwidth=parse_bytes("bandwidth", bandwidth),
        local_bandwidth=parse_bytes("local_bandwidth", local_bandwidth),
        ranks_per_host=ranks_per_host,
    )
    memory = None if device_memory is None else parse_bytes("device_memory", device_memory)
    subject = subject_of(model, optimizer, config, inputs=example, targets=targets, loss_fn=loss_fn)
    batch = _batch(global_batch_size, subject, world_size)
    planner = _Planner(subject, world_size, batch, memory, assumptions)
    planned = [planner.planned(choice) for choice in choices(world_size, ranks_per_host)]
    return Plan(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in subject.parameters.values()),
        parameter_bytes=sum(p.nbytes for p in subject.parameters.values()),
        optimizer=subject.optimizer,
        world_size=world_size,
        global_batch_size=batch,
        device_memory=memory,
        assumptions=assumptions,
        strategies=tuple(sorted(planned, key=_order)),
    )


def _batch(given: int | None, subject: Subject, world_size: int) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise ConfigurationError(
            f"global_batch_size={given!r}: expected a number of samples, at least 1"
        )
    if subject.passes is None:
        if given is not None:
            raise ConfigurationError(
                f"global_batch_size={given} without an example: the cost of a sample is unknown; "
                "pass example=, or leave global_batch_size out"
            )
        return None
    return given or subject.passes.samples * world_size


def _order(each: PlannedStrategy) -> tuple[int, float, float]:
    """Returns the sort key of a planned strategy. Because sorting is stable, strategies with the
    same costs remain in their original order, the simplest first."""
    if each.memory is None:
        return 3, 0.0, 0.0
    if not each.fits:
        return 2, each.memory.total, 0.0
    seconds = each.estimate.seconds if each.estimate is not None else 0.0
    return (
        (0 if each.exact else 1),
        float(f"{seconds:.2g}"),
        each.memory.total if each.estimate is not None else 0.0,
    )


class _Planner:
    """Plans one strategy at a time, all for the same model and optimizer."""

    def __init__(
        self,
        subject: Subject,
        world_size: int,
        batch: int | None,
        device_memory: int | None,
        assumptions: Assumptions,
    ) -> None:
        self._subject = subject
        self._world_size = world_size
        self._batch = batch
        self._device_memory = device_memory
        self._assumptions = assumptions
        self._cut: dict[bool, Blueprints] = {}

    def planned(self, choice: Choice) -> PlannedStrategy:
        """Returns the costs of a strategy on a mesh, or the reason why it cannot be used."""
        axes = choice.axes
        samples = 1 if self._batch is None else math.ceil(self._batch / axes.data)
        options, costs, reason = dict(choice.options), None, ""
        if axes.pipeline > 1:
            options["micro_batches"] = (
                min(samples, MICRO_BATCHES_PER_STAGE * axes.pipeline) if self._batch else 4
            )
        try:
            self._check(choice)
            costs = self._costs(choice, samples, options.get("micro_batches", 1))
        except ConfigurationError as error:
            reason = str(error)
        estimated = None
        if costs is not None:
            reason = self._too_much(costs.memory)
            if self._subject.passes is not None:
                estimated = estimate(
                    costs,
                    self._subject.passes,
                    self._assumptions,
                    samples=samples,
                    tensor=axes.tensor,
                    replica_size=axes.replica_size,
                )
        return PlannedStrategy(
            strategy=choice.strategy,
            label=choice.label,
            options=options,
            data=axes.data,
            tensor=axes.tensor,
            pipeline=axes.pipeline,
            samples=samples,
            memory=None if costs is None else costs.memory,
            traffic=() if costs is None else costs.traffic,
            estimate=estimated,
            fits=not reason,
            reason=reason,
        )

    def _check(self, choice: Choice) -> None:
        """Raises ConfigurationError if `as_distributed` would reject the strategy and mesh, or if
        there are fewer samples than replicas."""
        registry.check_model(
            registry.find(choice.strategy)[0].declaration,
            self._subject.module,
            self._subject.config,
        )
        cuts = choice.strategy in STAGES or choice.axes.tensor > 1 or choice.along_data != "ddp"
        dealt = self._subject.whole_tensors and choice.strategy in STAGES
        if cuts and not dealt and self._subject.optimizer not in ELEMENTWISE:
            raise ConfigurationError(
                f"{self._subject.optimizer} is not known to update each element independently, "
                "but this strategy splits parameters into pieces; see elementwise_optimizer= "
                "and, for zero1, zero2, zero3, fsdp and hsdp, whole_tensors="
            )
        if self._batch is not None and self._batch < choice.axes.data:
            raise ConfigurationError(
                f"a step has {self._batch} samples, fewer than the {choice.axes.data} replicas "
                "that share them"
            )

    def _costs(self, choice: Choice, samples: int, micro_batches: int) -> Costs:
        subject, axes = self._subject, choice.axes
        if choice.strategy == "ddp":
            return ddp(subject, self._world_size, samples)
        if choice.strategy == "local_sgd":
            return local_sgd(subject, self._world_size, samples, choice.options["sync_every"])
        if choice.strategy in STAGES:
            return sharded(
                subject,
                self._world_size,
                samples,
                STAGES[choice.strategy],
                choice.options.get("shard_size"),
            )
        pipelined = axes.pipeline > 1
        if pipelined not in self._cut:
            self._cut[pipelined] = blueprints(
                template_of(subject.module, subject.config, {}, pipelined=pipelined)
            )
        blueprint = self._cut[pipelined](axes)
        if blueprint.plan is not None and all(
            entry.style is Style.REPLICATE for entry in blueprint.plan.entries
        ):
            raise ConfigurationError(
                "no layer would be split, because none has at least "
                f"{subject.config.minimum_parameter_group_size} elements "
                "(minimum_parameter_group_size)"
            )
        stage = STAGES.get(choice.along_data)
        return on_mesh(subject, axes, blueprint, samples, stage=stage, micro_batches=micro_batches)

    def _too_much(self, memory: Memory) -> str:
        if self._device_memory is None:
            return ""
        usable = self._device_memory * (1 - RESERVE)
        if memory.total <= usable:
            return ""
        roles = memory.roles()
        largest = max(roles, key=lambda name: roles[name])
        return (
            f"needs {readable_bytes(memory.total)} of {readable_bytes(usable)}, "
            f"{readable_bytes(roles[largest])} of it {largest}"
        )
