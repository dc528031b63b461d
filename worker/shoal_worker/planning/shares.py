"""A rank's memory and traffic under each strategy, derived from the layouts that the engines use to
split a model.

The layouts are the same as in a run: buckets (`replicated/buckets.py`), units and shards with their
padding (`sharding/layout.py`), parts of layers and pipeline stages (`mesh/layouts.py`). This module
adds what each engine keeps in memory and what it sends. Tests and docs/planner.md compare the
results with real runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal_worker.engine.state.parameter_groups import alike
from shoal_worker.mesh.data_axis import alike_pieces
from shoal_worker.mesh.layouts import Axes, Blueprint, Coordinate, Template
from shoal_worker.pipelining.schedule import Schedule, training_schedule
from shoal_worker.planning.costs import Memory, Traffic, When, all_reduce, gather
from shoal_worker.planning.pipeline_time import StageCosts, most_in_flight
from shoal_worker.planning.subject import Subject
from shoal_worker.planning.traced_passes import Passes, scaled
from shoal_worker.replicated.buckets import lay_out
from shoal_worker.sharding.layout import Division, UnitLayout, layout_of
from shoal_worker.sharding.unit import Stage
from shoal_worker.tensor_parallel.split_plan import Style, TensorParallelPlan

_META = torch.device("meta")
_IN_FLIGHT = 2
"""Number of concurrent reductions of units."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one strategy on one mesh."""

    memory: Memory
    traffic: tuple[Traffic, ...]
    schedule: Schedule | None = None
    """Schedule of the pipeline; None without a pipeline."""
    stages: StageCosts | None = None
    """Costs of the pipeline's stages; None without a pipeline or an example."""


def _activations(subject: Subject, samples: float) -> float | None:
    passes = subject.passes
    return None if passes is None else scaled(passes.kept_at_most(), samples, passes)


def _whole(subject: Subject) -> tuple[float, float]:
    """Returns the bytes of all parameters, and of their optimizer state."""
    return (
        sum(p.nbytes for p in subject.parameters.values()),
        sum(subject.state_of(name).of(p.numel()) for name, p in subject.trained.items()),
    )


# --------------------------------------------------------------------------------------- replicated


def ddp(subject: Subject, world_size: int, samples: float) -> Costs:
    """Returns the costs of `ddp`. Each rank stores the complete model, and its gradients in the
    buckets that are all-reduced."""
    parameters, state = _whole(subject)
    trained = list(subject.trained.values())
    buckets = lay_out(
        trained,
        device=_META,
        cap_bytes=subject.config.bucket_cap_mb << 20,
        minimum_elements=subject.config.minimum_parameter_group_size,
        riding=subject.shared_buffer_elements,
        riding_dtype=torch.float32,
    )
    gradients = sum(bucket.flat.nbytes for bucket in buckets)
    memory = Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        staging=2 * subject.buffer_bytes + max(p.nbytes for p in trained),
        activations=_activations(subject, samples),
    )
    summed = Traffic(
        what="gradients",
        sent=all_reduce(gradients, world_size),
        when=When.BACKWARD,
        group=world_size,
        messages=len(buckets),
    )
    return Costs(memory=memory, traffic=(summed,))


def local_sgd(subject: Subject, world_size: int, samples: float, sync_every: int) -> Costs:
    """Returns the costs of `local_sgd`. Each rank stores the complete model, and a copy of it from
    the start of the round. At the end of a round, parameters are averaged."""
    parameters, state = _whole(subject)
    memory = Memory(
        parameters=parameters,
        gradients=sum(p.nbytes for p in subject.trained.values()),
        optimizer=state,
        staging=2 * parameters + state + 2 * subject.buffer_bytes,
        activations=_activations(subject, samples),
    )
    averaged = all_reduce(sum(p.nbytes for p in subject.trained.values()), world_size) / sync_every
    return Costs(
        memory=memory,
        traffic=(Traffic(what="averages", sent=averaged, when=When.ALONE, group=world_size),),
    )


# ------------------------------------------------------------------------------------------ sharded


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A unit: parameters that are gathered or reduced in one collective."""

    names: tuple[str, ...]
    layout: UnitLayout
    dtype: torch.dtype
    """Dtype of the unit's shards."""
    unsharded_dtype: torch.dtype
    wire_dtype: torch.dtype
    """Dtype of the gradients in transfers."""
    trained: bool
    stays: bool = False
    """True for the outermost unit, which remains gathered until the pass has ended."""

    @property
    def whole(self) -> int:
        """Size of the gathered parameters, in bytes."""
        return self.layout.padded_numel * self.unsharded_dtype.itemsize

    @property
    def shard(self) -> int:
        """Size of one shard, in bytes."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def gradient(self) -> int:
        """Size of the unit's unsharded gradient while it is being reduced, in bytes."""
        return self.layout.padded_numel * self.wire_dtype.itemsize if self.trained else 0


def _unit(
    subject: Subject,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    shards: int,
    *,
    stays: bool = False,
    mixed: bool = True,
    turn: int | None = None,
) -> _Unit:
    """Creates a unit. `mixed`: True if the configuration's dtypes for mixed precision apply.
    `turn`: if entire tensors are assigned to ranks, the rank that gets the first one; None: tensors
    are split."""
    config, dtype = subject.config, parameters[0].dtype
    summed = (
        torch.float64
        if dtype == torch.float64 or (config.deterministic and mixed)
        else torch.float32
    )
    return _Unit(
        names=tuple(names),
        layout=dataclasses.replace(
            layout_of(parameters, shards), whole_tensors=turn is not None, turn=turn or 0
        ),
        dtype=dtype,
        unsharded_dtype=config.param_dtype
        if mixed and config.param_dtype is not None and dtype.is_floating_point
        else dtype,
        wire_dtype=config.reduce_dtype if mixed and config.reduce_dtype is not None else summed,
        trained=parameters[0].requires_grad,
        stays=stays,
    )


def _cut_memory(
    subject: Subject,
    units: Sequence[_Unit],
    stage: Stage,
    division: Division,
    *,
    gathered: bool = False,
) -> Memory:
    """Returns the memory of the rank that uses the most, with units sharded at `stage`. A mirrored
    shard is assumed to be as large as the rank's own. `gathered`: True if all units are unsharded
    throughout the passes, instead of block by block."""
    apart = [stage is Stage.PARAMETERS or unit.unsharded_dtype != unit.dtype for unit in units]
    gradients, state = max(
        (_updated(subject, units, position) for position in _fullest(units, division)), key=sum
    )
    own = sum(unit.shard for unit, separate in zip(units, apart, strict=True) if separate)
    whole = sum(unit.whole for unit in units) if stage is not Stage.PARAMETERS else 0
    return Memory(
        parameters=own + whole,
        gradients=gradients,
        optimizer=state,
        mirrors=own + gradients + state if division.mirrors else 0.0,
        staging=2 * subject.buffer_bytes
        + _staged(units, stage, gathered=gathered, ahead=subject.config.blocks_ahead),
    )


def _fullest(units: Sequence[_Unit], division: Division) -> Iterable[int]:
    """Returns the indices of the shards that may be the largest: only the first one if parameters
    are split, or all of them if entire tensors are assigned to ranks."""
    return range(division.shards) if any(unit.layout.whole_tensors for unit in units) else (0,)


def _updated(subject: Subject, units: Sequence[_Unit], position: int) -> tuple[float, float]:
    """Returns the bytes of one shard's gradients and of its optimizer state."""
    gradients = state = 0.0
    for unit in (unit for unit in units if unit.trained):
        for name, piece in zip(unit.names, unit.layout.pieces(position), strict=True):
            gradients += piece.length * unit.dtype.itemsize
            state += subject.state_of(name).of(piece.length)
    return gradients, state


def _staged(units: Sequence[_Unit], stage: Stage, *, gathered: bool, ahead: int) -> float:
    """Returns the temporary memory: gathered parameters, and gradients that are being accumulated
    or reduced, with their receive buffers. `ahead`: number of blocks that are gathered before they
    are needed."""
    gradients = sorted((unit.gradient for unit in units), reverse=True)
    staged = 2.0 * sum(gradients[:_IN_FLIGHT])
    if gathered:
        staged += sum(unit.whole for unit in units)
    elif stage is Stage.PARAMETERS:
        blocks = sorted((unit.whole for unit in units if not unit.stays), reverse=True)
        staged += sum(unit.whole for unit in units if unit.stays) + sum(blocks[: 1 + ahead])
    return staged


def _cut_traffic(
    units: Sequence[_Unit],
    stage: Stage,
    division: Division,
    world_size: int,
    *,
    gathers: int | None = None,
) -> list[Traffic]:
    """Returns the traffic of sharded units. `gathers`: None if sharded parameters are gathered
    block by block in each pass; otherwise, number of times that they are gathered in a step, before
    the passes."""
    shards, replicas = division.shards, division.replicas
    trained = sum(unit.trained for unit in units)

    def one(
        what: str, size: float, when: When, group: int = shards, messages: int = trained
    ) -> Traffic:
        return Traffic(what=what, sent=size, when=when, group=group, messages=messages)

    reduced = sum(unit.gradient for unit in units)
    traffic = [one("gradients", gather(reduced, shards), When.BACKWARD)]
    if replicas > 1:
        traffic.append(
            one("gradients", all_reduce(reduced / shards, replicas), When.BACKWARD, world_size)
        )
    if stage is not Stage.PARAMETERS:
        traffic.append(
            one(
                "parameters",
                gather(sum(unit.whole for unit in units if unit.trained), shards),
                When.ALONE,
            )
        )
    else:
        again = [unit.whole for unit in units if not unit.stays]
        when = When.FORWARD if gathers is None else When.ALONE
        traffic.append(
            one(
                "parameters",
                gather(sum(unit.whole for unit in units), shards),
                when,
                messages=len(units),
            )
        )
        if gathers is None:
            traffic.append(
                one("parameters", gather(sum(again), shards), When.BACKWARD, messages=len(again))
            )
    if division.mirrors:
        traffic.append(one("mirrors", reduced / shards, When.ALONE, world_size))
    return traffic


def sharded(
    subject: Subject, world_size: int, samples: float, stage: Stage, shards: int | None = None
) -> Costs:
    """Returns the costs of zero1, zero2, zero3 and fsdp or, with `shards`, of hsdp with this number
    of ranks per replica."""
    division = Division(world_size=world_size, shards=shards or world_size)
    groups = subject.blocks if stage is Stage.PARAMETERS else subject.buckets
    parts = [
        (part, number == 0 and stage is Stage.PARAMETERS)
        for number, group in enumerate(groups)
        for part in alike(group)
    ]
    units = [
        _unit(
            subject,
            part.names,
            part.parameters,
            division.shards,
            stays=stays,
            turn=turn if subject.whole_tensors else None,
        )
        for turn, (part, stays) in enumerate(parts)
    ]
    memory = _cut_memory(subject, units, stage, division)
    return Costs(
        memory=_with(memory, activations=_activations(subject, samples)),
        traffic=tuple(_cut_traffic(units, stage, division, world_size)),
    )


def _with(memory: Memory, *, activations: float | None) -> Memory:
    return dataclasses.replace(memory, activations=activations)


# ---------------------------------------------------------------------------------------- on a mesh

Blueprints = Callable[[Axes], Blueprint]
"""Function that returns the layout of the model on a mesh with these axes. Raises
ConfigurationError if the model cannot be split in this way."""


def blueprints(template: Template) -> Blueprints:
    """Returns a cached function that lays out a model on a mesh. The layout is the same in all
    replicas."""

    @functools.cache
    def cut(tensor: int, pipeline: int) -> Blueprint:
        return Blueprint(template, Axes(pipeline=pipeline, tensor=tensor, data=1))

    return lambda axes: cut(axes.tensor, axes.pipeline)


def on_mesh(
    subject: Subject,
    axes: Axes,
    blueprint: Blueprint,
    samples: float,
    *,
    stage: Stage | None = None,
    micro_batches: int = 1,
) -> Costs:
    """Returns the costs of `tensor`, `pipeline` and `hybrid`.

    Args:
        subject: the model and optimizer.
        axes: sizes of the mesh's axes.
        blueprint: layout of the model on the mesh.
        samples: number of samples per replica.
        stage: which state is sharded along the data axis; None: none.
        micro_batches: number of micro-batches in a pipeline.
    """
    pipelined = axes.pipeline > 1
    schedule = stages = None
    if pipelined:
        assert blueprint.split is not None
        name = blueprint.template.pipeline.schedule
        schedule = training_schedule(
            name, ranks=axes.pipeline, stages_per_rank=1, micro_batches=micro_batches
        )
        if subject.passes is not None:
            stages = _stage_costs(subject.passes, blueprint, samples / micro_batches)
    places = [
        _place(subject, axes, blueprint, stage, pipeline) for pipeline in range(axes.pipeline)
    ]
    activations: list[float | None]
    if stages is not None and schedule is not None:
        activations = list(most_in_flight(schedule, stages))
    elif subject.passes is not None:
        activations = [scaled(subject.passes.kept_at_most(blueprint.plan), samples, subject.passes)]
    else:
        activations = [None] * axes.pipeline
    memories = [
        _with(memory, activations=kept)
        for (memory, _), kept in zip(places, activations, strict=True)
    ]
    traffic = [_mean(each) for each in zip(*(sent for _, sent in places), strict=True)]
    if subject.passes is not None:
        traffic += _tensor_traffic(subject.passes, blueprint.plan, samples, axes)
        if stages is not None:
            borders = 2 * micro_batches * sum(stages.border_bytes) / axes.pipeline
            traffic.append(
                Traffic(
                    what="activations", sent=borders, when=When.IN_PIPELINE, group=axes.replica_size
                )
            )
    if blueprint.split is not None and pipelined:
        tied = _tied(subject, blueprint) / axes.pipeline
        traffic.append(
            Traffic(what="gradients", sent=tied, when=When.ALONE, group=axes.replica_size)
        )
    largest = max(memories, key=lambda memory: memory.total)
    return Costs(
        memory=largest,
        traffic=tuple(each for each in traffic if each.sent),
        schedule=schedule,
        stages=stages,
    )


def _mean(traffic: Sequence[Traffic]) -> Traffic:
    first = traffic[0]
    return dataclasses.replace(first, sent=sum(each.sent for each in traffic) / len(traffic))


def _place(
    subject: Subject, axes: Axes, blueprint: Blueprint, stage: Stage | None, pipeline: int
) -> tuple[Memory, list[Traffic]]:
    """Returns the memory and the traffic of the first tensor-parallel rank of a pipeline stage. The
    traffic is that with other replicas. `pipeline`: index of the stage's rank along the pipeline
    axis."""
    at = Coordinate(pipeline, 0, 0)
    parameters = subject.parameters
    pieces = {
        name: nn.Parameter(
            torch.empty(blueprint.shape(name, 0), dtype=parameters[name].dtype, device=_META),
            requires_grad=parameters[name].requires_grad,
        )
        for name in parameters
        if blueprint.is_here(name, at)
    }
    trained = {name: piece for name, piece in pieces.items() if piece.requires_grad}
    sums = sum(4 * piece.numel() for piece in trained.values())
    if stage is None:
        memory = Memory(
            parameters=sum(piece.nbytes for piece in pieces.values()),
            gradients=sum(piece.nbytes for piece in trained.values()),
            optimizer=sum(
                subject.state_of(name).of(piece.numel()) for name, piece in trained.items()
            ),
            staging=sums + 2 * subject.buffer_bytes,
        )
        summed = all_reduce(sums + 4 * (len(trained) + 1), axes.data)
        return memory, [Traffic(what="gradients", sent=summed, when=When.ALONE, group=axes.working)]
    division = Division(world_size=axes.data, shards=axes.data)
    units = list(_mesh_units(subject, pieces, blueprint, stage, axes))
    memory = _cut_memory(
        subject, units, stage, division, gathered=stage is Stage.PARAMETERS and axes.pipeline > 1
    )
    traffic = _cut_traffic(
        units, stage, division, axes.working, gathers=1 if axes.pipeline > 1 else None
    )
    spanning = [dataclasses.replace(each, group=axes.working) for each in traffic]
    return memory, spanning


def _mesh_units(
    subject: Subject,
    pieces: Mapping[str, nn.Parameter],
    blueprint: Blueprint,
    stage: Stage,
    axes: Axes,
) -> Iterable[_Unit]:
    if stage is not Stage.PARAMETERS or axes.pipeline > 1:
        for names in alike_pieces(pieces, blueprint.kind, subject.config.bucket_cap_mb << 20):
            yield _unit(subject, names, [pieces[name] for name in names], axes.data, mixed=False)
        return
    for number, group in enumerate(subject.blocks):
        own = {name: pieces[name] for name in group.names}
        for names in alike_pieces(own, blueprint.kind, math.inf):
            yield _unit(
                subject,
                names,
                [pieces[name] for name in names],
                axes.data,
                stays=number == 0,
                mixed=False,
            )


def _stage_costs(passes: Passes, blueprint: Blueprint, samples: float) -> StageCosts:
    """Returns the costs of one micro-batch of `samples` samples in each stage. Operations outside
    of the stages' modules, mainly those of the loss, are included in the last stage."""
    assert blueprint.split is not None
    tensor = blueprint.axes.tensor
    names = [stage.modules for stage in blueprint.split.stages]
    kept = [0.0] * len(names)
    for module, size in passes.kept(blueprint.plan).items():
        kept[_stage_of(module, names)] += size
    forward = [float(passes.flops_of(own)) for own in names]
    forward[-1] += max(0.0, passes.forward_flops - sum(forward))
    backward = (passes.flops - passes.forward_flops) / max(1, passes.forward_flops)
    return StageCosts(
        forward_flops=tuple(_part(f, samples, passes) / tensor for f in forward),
        backward_share=backward,
        kept=tuple(_part(k, samples, passes) for k in kept),
        recomputed=_part(
            sum(passes.kept(blueprint.plan, passes.recomputed).values()), samples, passes
        ),
        border_bytes=tuple(
            _part(passes.io_of(own[-1]).output_bytes, samples, passes) for own in names[:-1]
        ),
    )


def _part(amount: float, samples: float, passes: Passes) -> float:
    return amount * samples / passes.samples


def _stage_of(module: str, stages: Sequence[Sequence[str]]) -> int:
    for index, names in enumerate(stages):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    return len(stages) - 1


def _tensor_traffic(
    passes: Passes, plan: TensorParallelPlan | None, samples: float, axes: Axes
) -> list[Traffic]:
    """Returns the traffic that tensor parallelism needs for activations. Split layers sum or gather
    their outputs in the forward pass, and blocks sum the gradients of their inputs in the backward
    pass."""
    if plan is None:
        return []
    ranks = plan.size
    forward = backward = 0.0
    messages = 0
    entered: set[str] = set()
    for entry in plan.entries:
        through = passes.io_of(entry.module, entry.block)
        if entry.style in (Style.ROW, Style.VOCABULARY):
            forward, messages = forward + all_reduce(through.output_bytes, ranks), messages + 1
        elif entry.style in (Style.COLUMN_GATHERED, Style.EMBEDDING_DIMENSION):
            forward, messages = forward + gather(through.output_bytes, ranks), messages + 1
        enters = entry.style in (
            Style.COLUMN,
            Style.PACKED_COLUMN,
            Style.COLUMN_GATHERED,
            Style.ATTENTION,
        )
        if enters and entry.block not in entered and through.input_needs_gradient:
            entered.add(entry.block)
            backward, messages = backward + all_reduce(through.input_bytes, ranks), messages + 1
    sent = (forward + backward) * samples / passes.samples / axes.pipeline
    return [
        Traffic(
            what="activations",
            sent=sent,
            when=When.ALONE,
            group=ranks,
            messages=messages / axes.pipeline,
        )
    ]


def _tied(subject: Subject, blueprint: Blueprint) -> float:
    """Returns the bytes that the ranks of a pipeline send, in total, to sum the gradients of
    parameters that are on several stages."""
    assert blueprint.split is not None
    sizes = {name: parameter.nbytes for name, parameter in subject.parameters.items()}
    sent = 0.0
    for one in blueprint.split.shared:
        name = next((each for each in one.names if each in sizes), None)
        if name is not None and subject.parameters[name].requires_grad:
            sent += 2 * (len(one.stages) - 1) * sizes[name] / blueprint.parts(name)
    return sent
