"""Determines the mesh for a number of ranks, and which rank has which part of each tensor of a
model's state. Also splits tensors into parts and assembles them.

Everything is derived from shapes alone. Every rank therefore gets the same results, even for a mesh
that it was never part of, such as a mesh from before it joined. The module uses neither process
groups nor the tensors' values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.config import ShardingConfiguration
from shoal_worker.engine.state.module_state import ModuleState, load_captured
from shoal_worker.engine.state.parameter_groups import ParameterGroup
from shoal_worker.pipelining.partial import empty_on
from shoal_worker.pipelining.rank_pipeline import PipelineSettings
from shoal_worker.pipelining.schedule import checked_stages_per_rank, schedule_kind, stage_ranks
from shoal_worker.pipelining.split import Split, named_tensors, split_model
from shoal_worker.sharding.unit import Stage
from shoal_worker.tensor_parallel.derive import make_plan
from shoal_worker.tensor_parallel.split_plan import (
    ParameterLayout,
    Share,
    TensorParallelPlan,
    cut,
    cut_shape,
)

# --------------------------------------------------------------------------------------------- axes
#
# A generation's mesh: the ranks are divided into replicas of the model, and each replica into
# pipeline stages and tensor-parallel parts. Adjacent ranks form a tensor-parallel group (they are
# probably on one host), adjacent groups form a pipeline, and pipelines are replicas. Ranks that are
# left when no further replica can be formed are spares. Pure functions.


class Coordinate(NamedTuple):
    """A rank's position on the mesh's three axes."""

    pipeline: int
    tensor: int
    data: int


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of a mesh's three axes."""

    pipeline: int
    tensor: int
    data: int

    @property
    def replica_size(self) -> int:
        """Number of ranks in one replica of the model."""
        return self.pipeline * self.tensor

    @property
    def working(self) -> int:
        """Number of ranks that are not spares. Ranks below this number are part of the mesh; the
        others are spares."""
        return self.replica_size * self.data

    def at(self, rank: int) -> Coordinate | None:
        """Returns a rank's position on the axes; None for a spare."""
        if rank >= self.working:
            return None
        replica, within = divmod(rank, self.replica_size)
        stage, part = divmod(within, self.tensor)
        return Coordinate(stage, part, replica)

    def rank(self, pipeline: int, tensor: int, data: int) -> int:
        """Returns the rank at a position. The inverse of `at`."""
        return data * self.replica_size + pipeline * self.tensor + tensor

    def lines(self) -> Iterator[tuple[str, str, list[int]]]:
        """Yields, as (axis, name, ranks), the group of all ranks that are not spares (axis "all"),
        and then each group of ranks along an axis. The order is the same on every rank."""
        yield "all", "working", list(range(self.working))
        for data in range(self.data):
            for stage in range(self.pipeline):
                yield (
                    "tensor",
                    f"tensor {data} {stage}",
                    [self.rank(stage, part, data) for part in range(self.tensor)],
                )
            for part in range(self.tensor):
                yield (
                    "pipeline",
                    f"pipeline {data} {part}",
                    [self.rank(stage, part, data) for stage in range(self.pipeline)],
                )
        for stage in range(self.pipeline):
            for part in range(self.tensor):
                yield (
                    "data",
                    f"data {stage} {part}",
                    [self.rank(stage, part, data) for data in range(self.data)],
                )


# ----------------------------------------------------------------------------- placement of tensors

TENSOR_OPTIONS: Final = frozenset(
    {
        "plan",
        "sequence_dimension",
        "loss_parallel",
        "example_inputs",
        "dropout",
        "elementwise_optimizer",
    }
)
PIPELINE_OPTIONS: Final = frozenset({"schedule", "micro_batches", "stages_per_rank", "cut_points"})
"""Keyword arguments of `as_distributed` that apply to pipelines."""


def meta_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of the module on the meta device. Tied tensors remain tied. Activation
    checkpointing is dropped, because it replaces the `forward` of the module object, not of the
    module's class."""
    tensors = {id(t): empty_on(t, torch.device("meta")) for t in named_tensors(module).values()}
    checkpointed = [part for part in module.modules() if "forward" in part.__dict__]
    forwards = [part.__dict__.pop("forward") for part in checkpointed]
    try:
        copied: nn.Module = copy.deepcopy(module, dict(tensors))
    except (TypeError, RuntimeError) as error:
        computed = [
            f"{name}.{attribute}" if name else attribute
            for name, part in module.named_modules()
            for attribute, value in vars(part).items()
            if isinstance(value, torch.Tensor) and value.grad_fn is not None
        ]
        reason = (
            f"attribute {computed[0]!r} is computed from parameters (as by torch.nn.utils."
            "weight_norm, spectral_norm or prune): use torch.nn.utils.parametrizations or "
            "parametrize, or call prune.remove"
            if computed
            else f"{error}; define its __deepcopy__"
        )
        raise ConfigurationError(
            f"{type(module).__name__} cannot be split, because it cannot be copied: {reason}"
        ) from error
    finally:
        for part, forward in zip(checkpointed, forwards, strict=True):
            part.__dict__["forward"] = forward
    return copied


@dataclass(frozen=True, kw_only=True)
class Template:
    """The user's model, on the meta device, and the options for splitting it."""

    module: nn.Module
    """The module, on the meta device."""
    plan_options: Mapping[str, Any]
    """Options for `make_plan`."""
    pipeline: PipelineSettings
    pipelined: bool
    """True if the model runs as a pipeline, even if that pipeline has only one rank."""
    names: tuple[str, ...] = field(init=False)
    """Names of the tensors in the state, parameters first. A tied tensor appears once, under its
    first name."""
    first_names: Mapping[str, str] = field(init=False)
    """Every name of a tensor in the module -> the tensor's first name."""
    keys: Mapping[str, str] = field(init=False)
    """Key in the state dict -> name of the tensor."""
    parameter_names: frozenset[str] = field(init=False)
    tied_parameters: frozenset[str] = field(init=False)
    """All names of tied parameters except their first names."""
    _tensors: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        state, named = ModuleState(self.module), named_tensors(self.module)
        first: dict[int, str] = {}
        for name, parameter in self.module.named_parameters():
            first[id(parameter)] = name
        parameters = frozenset(first.values())
        for name in state.keys:
            first.setdefault(id(named[name]), name)
        object.__setattr__(self, "names", tuple(first.values()))
        object.__setattr__(
            self, "first_names", {name: first[id(named[name])] for name in state.keys}
        )
        object.__setattr__(
            self, "keys", {key: first[id(tensor)] for key, tensor in state.tensors.items()}
        )
        object.__setattr__(self, "parameter_names", parameters)
        ties = {
            name
            for name, one in self.first_names.items()
            if one in parameters and name not in parameters
        }
        object.__setattr__(self, "tied_parameters", frozenset(ties))
        object.__setattr__(self, "_tensors", {name: named[name] for name in self.names})

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors in `names`, by name, on the meta device and with their full
        shapes."""
        return self._tensors

    def stages(self, ranks: int) -> tuple[int, ...]:
        """Returns, for a pipeline of `ranks` ranks, the rank that runs each stage."""
        kind = schedule_kind(self.pipeline.schedule)
        return stage_ranks(
            kind, ranks, checked_stages_per_rank(kind, self.pipeline.stages_per_rank)
        )


def template_of(
    module: nn.Module, config: ShardingConfiguration, options: Mapping[str, Any], *, pipelined: bool
) -> Template:
    """Returns the `Template` of a module. `options`: the strategy's options for splitting it."""
    return Template(
        module=meta_copy(module),
        plan_options={
            "minimum_parameter_group_size": config.minimum_parameter_group_size,
            **{
                name: options[name]
                for name in ("plan", "sequence_dimension", "loss_parallel", "example_inputs")
                if name in options
            },
        },
        pipeline=PipelineSettings(
            loss_reduction="mean" if config.loss_reduction == "mean" else "sum",
            **{name: options[name] for name in PIPELINE_OPTIONS if name in options},
        ),
        pipelined=pipelined,
    )


class Blueprint:
    """Layout of a model's state on one mesh: which rank has which part of each tensor."""

    def __init__(self, template: Template, axes: Axes) -> None:
        """Computes the layout. Raises ConfigurationError if the model cannot be split in this
        way."""
        self.template = template
        self.axes = axes
        self.plan: TensorParallelPlan | None = None
        self.split: Split | None = None
        self.rank_of: tuple[int, ...] = (0,)
        self._layouts: dict[str, ParameterLayout] = {}
        if axes.tensor > 1:
            self.plan = make_plan(template.module, axes.tensor, **template.plan_options)
            self._layouts = {
                layout.name: layout
                for layout in self.plan.parameters
                if layout.dimension is not None
            }
        if template.pipelined:
            self.rank_of = template.stages(axes.pipeline)
            # a single rank, which may have the complete model, is not split
            cut_points = template.pipeline.cut_points if axes.pipeline > 1 else None
            self.split = split_model(template.module, len(self.rank_of), cut_points=cut_points)

    def holders(self, name: str) -> Sequence[int]:
        """Returns the positions on the pipeline axis whose ranks have a tensor. In sums over all
        elements, such as a norm, the rank at the first of these positions counts the tensor."""
        if self.split is None:
            return (0,)
        return list(dict.fromkeys(self.rank_of[stage] for stage in self.split.placement[name]))

    def is_here(self, name: str, at: Coordinate) -> bool:
        """Returns whether the rank at position `at` has a tensor or a part of it."""
        return at.pipeline in self.holders(name)

    def share(self, at: Coordinate) -> Share:
        """Returns the part of the model in the pipeline stages that the rank at position `at`
        runs."""
        stages = self.split.stages if self.split is not None else ()
        elsewhere = [
            name
            for stage in stages
            if self.rank_of[stage.index] != at.pipeline
            for name in stage.modules
        ]
        here = frozenset(
            key for key, first in self.template.first_names.items() if self.is_here(first, at)
        )
        return Share(parameters=here, elsewhere=tuple(elsewhere))

    def counts(self, name: str, at: Coordinate) -> bool:
        """Returns whether the rank at position `at` includes a parameter's elements in sums over
        all elements, such as a norm. If several ranks of a replica have the same elements, only one
        of them includes them."""
        whole_elsewhere = name not in self._layouts and at.tensor > 0
        return at.pipeline == self.holders(name)[0] and not whole_elsewhere

    def kind(self, name: str) -> Hashable:
        """Returns the kind of a parameter. Parameters of the same kind are on the same ranks, and
        the same ranks include them in the norm."""
        return tuple(self.holders(name)), name in self._layouts

    def parts(self, name: str) -> int:
        """Returns the number of parts into which a tensor is split along the tensor axis."""
        return self.axes.tensor if name in self._layouts else 1

    def cut(self, name: str, whole: torch.Tensor, part: int) -> torch.Tensor:
        """Returns a copy of a part of a tensor, in the shape in which a rank stores it. `whole`:
        the full tensor. `part`: index of the part."""
        layout = self._layouts.get(name)
        return whole.clone() if layout is None else cut(whole, layout, self.axes.tensor, part)

    def shape(self, name: str, part: int) -> torch.Size:
        """Returns the shape of the part that `cut` returns."""
        layout, whole = self._layouts.get(name), self.template.tensors()[name]
        return whole.shape if layout is None else cut_shape(layout, self.axes.tensor, part)

    def join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Assembles a tensor from its parts. The inverse of `cut`."""
        layout = self._layouts.get(name)
        if layout is None:
            return parts[0]
        assert layout.dimension is not None
        return torch.cat(list(parts), layout.dimension).reshape(layout.shape)


# ------------------------------------------------------------------------------- the unsplit module
#
# The unsplit module, in addition to this rank's part: for evaluation, for copies, and as a
# stand-in.


def unsharded_module(
    template: Template,
    values: Mapping[str, Any],
    unsaved: Mapping[str, torch.Tensor],
    device: torch.device,
) -> nn.Module:
    """Returns a new unsplit module. `values`: state dict to load. `unsaved`: buffers that are not
    in the module's state dict."""
    whole = copy.deepcopy(template.module).to_empty(device=device)
    for first, second in template.first_names.items():  # to_empty separates tied parameters
        owner, _, name = first.rpartition(".")
        source, _, own = second.rpartition(".")
        if first != second and first in template.tied_parameters:
            setattr(whole.get_submodule(owner), name, whole.get_submodule(source)._parameters[own])
    load_captured(whole, values)
    buffers = dict(whole.named_buffers())
    for name, value in unsaved.items():
        buffers[name].copy_(value)
    return whole


def zeros(template: Template) -> dict[str, torch.Tensor]:
    """Returns a state dict of zeros. Used for a module whose outputs are ignored."""
    tensors = template.tensors()
    return {key: torch.zeros(tensors[first].shape) for key, first in template.keys.items()}


# ------------------------------------------------------------------------------------------- meshes
#
# The mesh for any number of ranks: combines a strategy's plan with the model's constraints.

Fits = Callable[[Axes], bool]
"""Function that returns whether the model can be split on a mesh with these axes."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options for sharding each rank's part of the model along the data axis."""

    stage: Stage
    bucket_bytes: int
    """Number of bytes reduced or gathered in one collective."""
    blocks: Callable[[nn.Module], Sequence[ParameterGroup]] | None = None
    """Function that returns parts of a module; each of them is gathered for its own passes."""
    prefetch: int = 1
    """Number of parameter groups gathered ahead."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Rules by which a strategy forms a mesh from any number of ranks."""

    axes_for: Callable[[int, Fits], Axes]
    """Function that returns the mesh's axes for a number of ranks. Ranks that are not part of a
    replica are spares."""
    axes_at_start: Callable[[int], Axes] | None = None
    """Function that returns the axes required for the job's initial number of ranks. After a rank
    is lost, the remaining ranks use the best possible axes instead. None: the user has set the
    sizes."""
    pipelined: bool
    """True if the model runs as a pipeline."""
    cuts_parameters: bool
    """True if ranks have parts of parameters, which some optimizers cannot update."""
    sharding: Sharding | None = None


def first_that_fits(candidates: Iterable[Axes], fits: Fits) -> Axes:
    """Returns the first of `candidates` for which `fits` returns True, because the model can be
    split on a mesh with these axes. If the candidates are sorted by descending size, additional
    ranks never increase a rank's part of the model. Ranks that are left over are spares.

    Raises:
        ConfigurationError: no candidate fits."""
    for axes in candidates:
        if fits(axes):
            return axes
    raise ConfigurationError("no rank is left to hold the model")


def checked_size(option: str, value: object) -> int:
    """Returns `value`. Raises ConfigurationError unless it is a valid number of ranks."""
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{option}={value!r}: expected a number of ranks, at least 1")
    return value


def plan_along(
    option: str,
    options: Mapping[str, Any],
    axes: Callable[[int, int], Axes],
    *,
    pipelined: bool,
    cuts_parameters: bool,
) -> MeshPlan:
    """Returns the plan for a strategy with one axis besides the replicas. `axes(size, replicas)`:
    returns the axes, given the size of this axis and the number of replicas.

    `options[option]` is the size of the axis. If it is not given, the axis is as large as the model
    allows, but at the start of a job, the model must allow an axis as large as the number of ranks.
    """
    given = options.get(option)
    if given is not None:
        size = checked_size(option, given)
        return MeshPlan(
            axes_for=lambda world_size, fits: axes(size, world_size // size),
            pipelined=pipelined,
            cuts_parameters=cuts_parameters,
        )
    return MeshPlan(
        axes_for=lambda world_size, fits: first_that_fits(
            (axes(n, world_size // n) for n in range(world_size, 0, -1)), fits
        ),
        axes_at_start=lambda world_size: axes(world_size, 1),
        pipelined=pipelined,
        cuts_parameters=cuts_parameters,
    )


class Layouts:
    """Chooses the mesh for one model, or for several models that use the same mesh. Makes the same
    choice on every rank."""

    def __init__(self, plan: MeshPlan, template: Template) -> None:
        self._plan = plan
        self._template = template
        self._templates = [template]
        """Templates of all models that must be split on the same mesh, including `template`."""
        self._known: dict[int, Axes] = {}

    def divide_alike(self, several: Sequence[Layouts]) -> None:
        """Restricts the choice to meshes on which every model can be split. `several`: the
        `Layouts` of all models that these ranks train, including this one."""
        self._templates = [each._template for each in several]
        self._known.clear()

    def axes(self, world_size: int) -> Axes:
        """Returns the axes for `world_size` ranks.

        Raises:
            ConfigurationError: the model cannot be split across this number of ranks.
        """
        if world_size not in self._known:
            self._known[world_size] = self._plan.axes_for(world_size, self._fits)
        return self._known[world_size]

    def too_few(self, world_size: int) -> bool:
        """Returns whether `world_size` ranks are too few for one replica of the model."""
        return self.axes(world_size).data == 0

    def check_start(self, world_size: int, *, ranks_may_come: bool) -> None:
        """Raises ConfigurationError if the model cannot be split across the job's initial ranks.
        `ranks_may_come`: True if more ranks may join later. Surplus ranks are then allowed, because
        they may become part of another replica."""
        if self._plan.axes_at_start is not None:
            for template in self._templates:
                Blueprint(template, self._plan.axes_at_start(world_size))
        axes = self.axes(world_size)
        for template in self._templates:
            Blueprint(template, axes)
        if axes.working < world_size and not ranks_may_come:
            raise ConfigurationError(
                f"{world_size} ranks form {axes.data} replica(s) of pipeline {axes.pipeline} x "
                f"tensor {axes.tensor} = {axes.replica_size} ranks, which leaves "
                f"{world_size - axes.working} unused for the whole run; start a multiple of "
                f"{axes.replica_size} ranks"
            )
        if axes.data == 0:
            raise ConfigurationError(
                f"{world_size} rank(s) are fewer than the {axes.replica_size} that one replica "
                f"needs (pipeline {axes.pipeline} x tensor {axes.tensor}); start the job with at "
                f"least {axes.replica_size} (--nproc-per-node, MIN of --nnodes MIN:MAX)"
            )

    def _fits(self, axes: Axes) -> bool:
        with contextlib.suppress(ConfigurationError):
            for template in self._templates:
                Blueprint(template, axes)
            return True
        return False
