"""Where each tensor of a model's state lies when the ranks are divided in some way, and how it is
cut and put together again.

Derived from shapes alone, so every rank derives the same, also for a division that it has never
been in: of a peer's state, or of one that was cut before a rank died. No process groups, no values.
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
from shoal_worker.engine.module_state import ModuleState, load_captured
from shoal_worker.engine.parameter_groups import ParameterGroup
from shoal_worker.pipelining.partial import empty_on
from shoal_worker.pipelining.pipeline import PipelineSettings
from shoal_worker.pipelining.schedule import checked_stages_per_rank, schedule_kind, stage_ranks
from shoal_worker.pipelining.split import Split, named_tensors, split_model
from shoal_worker.sharding.unit import Stage
from shoal_worker.tensor_parallel.derive import make_plan
from shoal_worker.tensor_parallel.plan import (
    ParameterLayout,
    Share,
    TensorParallelPlan,
    cut,
    cut_shape,
)

# --------------------------------------------------------------------------------------------- axes
#
# How the ranks of a generation are divided: into replicas of the model, and each replica into
# pipeline stages and tensor-parallel parts.
#
# Neighbouring ranks share a tensor-parallel group (they are of one host), then a pipeline; replicas
# lie behind each other. What is left over when no further replica can be made are spares. Pure.


class Coordinate(NamedTuple):
    """A rank's place on the three axes."""

    pipeline: int
    tensor: int
    data: int


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of the three axes."""

    pipeline: int
    tensor: int
    data: int

    @property
    def replica_size(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.pipeline * self.tensor

    @property
    def working(self) -> int:
        """Ranks that are no spares: those below this one."""
        return self.replica_size * self.data

    def at(self, rank: int) -> Coordinate | None:
        """Where a rank is; None: a spare."""
        if rank >= self.working:
            return None
        replica, within = divmod(rank, self.replica_size)
        stage, part = divmod(within, self.tensor)
        return Coordinate(stage, part, replica)

    def rank(self, pipeline: int, tensor: int, data: int) -> int:
        """The inverse of `at`."""
        return data * self.replica_size + pipeline * self.tensor + tensor

    def lines(self) -> Iterator[tuple[str, str, list[int]]]:
        """All groups along one axis, in an order that is the same on every rank: the axis, a name,
        and the ranks."""
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


# --------------------------------------------------------------------------- where each tensor lies

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
"""Keyword arguments of `as_distributed` that say how a model is cut."""


def meta_copy(module: nn.Module) -> nn.Module:
    """The module's structure without values; tied tensors stay tied. Where activations are computed
    again, the forward pass that does it stays behind: it stands in the module, not in its class."""
    tensors = {id(t): empty_on(t, torch.device("meta")) for t in named_tensors(module).values()}
    checkpointed = [part for part in module.modules() if "forward" in part.__dict__]
    forwards = [part.__dict__.pop("forward") for part in checkpointed]
    try:
        copied: nn.Module = copy.deepcopy(module, dict(tensors))
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied, which cutting it needs ({error}): give it "
            "__deepcopy__"
        ) from error
    finally:
        for part, forward in zip(checkpointed, forwards, strict=True):
            part.__dict__["forward"] = forward
    return copied


@dataclass(frozen=True, kw_only=True)
class Template:
    """A model as the user wrote it, without values, and what was said about cutting it."""

    module: nn.Module
    """On the meta device."""
    plan_options: Mapping[str, Any]
    """For `make_plan`."""
    pipeline: PipelineSettings
    pipelined: bool
    """There is a pipeline also where it has one rank."""
    names: tuple[str, ...] = field(init=False)
    """Names of the tensors of the state, parameters first; tied ones once, under the first of their
    names."""
    first_names: Mapping[str, str] = field(init=False)
    """By each name that a tensor has in the module."""
    keys: Mapping[str, str] = field(init=False)
    """By each key of the state dict that is a tensor's: that tensor's name."""
    parameter_names: frozenset[str] = field(init=False)
    tied_parameters: frozenset[str] = field(init=False)
    """Further names of parameters."""
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
        """The tensors of `names`, on the meta device, in the shapes of the whole."""
        return self._tensors

    def stages(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage of a pipeline over so many ranks."""
        kind = schedule_kind(self.pipeline.schedule)
        return stage_ranks(
            kind, ranks, checked_stages_per_rank(kind, self.pipeline.stages_per_rank)
        )


def template_of(
    module: nn.Module, config: ShardingConfiguration, options: Mapping[str, Any], *, pipelined: bool
) -> Template:
    """The template of a module, and what the strategy's options say of how it is cut."""
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
    """One division of a model's state."""

    def __init__(self, template: Template, axes: Axes) -> None:
        """Raises ConfigurationError: the model cannot be cut so."""
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
            # one rank, which may have it whole, is not cut
            cut_points = template.pipeline.cut_points if axes.pipeline > 1 else None
            self.split = split_model(template.module, len(self.rank_of), cut_points=cut_points)

    def holders(self, name: str) -> Sequence[int]:
        """The places on the pipeline axis that hold a tensor; the first counts it."""
        if self.split is None:
            return (0,)
        return list(dict.fromkeys(self.rank_of[stage] for stage in self.split.placement[name]))

    def is_here(self, name: str, at: Coordinate) -> bool:
        """Whether a rank holds a tensor, or a part of it."""
        return at.pipeline in self.holders(name)

    def share(self, at: Coordinate) -> Share:
        """What of the model is on a rank's pipeline stages."""
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
        """Whether a rank is the one, of those of its replica that hold the same elements, that
        counts them."""
        whole_elsewhere = name not in self._layouts and at.tensor > 0
        return at.pipeline == self.holders(name)[0] and not whole_elsewhere

    def kind(self, name: str) -> Hashable:
        """What kind of parameter it is: a rank that holds and counts one of a kind holds and counts
        all."""
        return tuple(self.holders(name)), name in self._layouts

    def parts(self, name: str) -> int:
        """Into how many parts the tensor axis cuts it."""
        return self.axes.tensor if name in self._layouts else 1

    def cut(self, name: str, whole: torch.Tensor, part: int) -> torch.Tensor:
        """A part of a tensor that has a parameter's shape, in the form in which ranks hold it. A
        copy."""
        layout = self._layouts.get(name)
        return whole.clone() if layout is None else cut(whole, layout, self.axes.tensor, part)

    def shape(self, name: str, part: int) -> torch.Size:
        """Shape of what `cut` returns."""
        layout, whole = self._layouts.get(name), self.template.tensors()[name]
        return whole.shape if layout is None else cut_shape(layout, self.axes.tensor, part)

    def join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `cut`."""
        layout = self._layouts.get(name)
        if layout is None:
            return parts[0]
        assert layout.dimension is not None
        return torch.cat(list(parts), layout.dimension).reshape(layout.shape)


# --------------------------------------------------------------------------------- the whole module
#
# The module as the user wrote it, whole, beside this rank's part of it: for evaluation, for copies,
# and to stand in.


def whole_module(
    template: Template,
    values: Mapping[str, Any],
    unsaved: Mapping[str, torch.Tensor],
    device: torch.device,
) -> nn.Module:
    """A new module with these values. `unsaved`: buffers that are no part of its state dict."""
    whole = copy.deepcopy(template.module).to_empty(device=device)
    for first, second in template.first_names.items():  # to_empty makes tied ones several
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
    """Values for a module whose answers nobody uses: all zero."""
    tensors = template.tensors()
    return {key: torch.zeros(tensors[first].shape) for key, first in template.keys.items()}


# ---------------------------------------------------------------------------- how ranks are divided
#
# Along which axes a model's ranks are divided, for any number of them: what a strategy plans, held
# against what the model allows.

Fits = Callable[[Axes], bool]
"""Whether the model can be cut along these axes."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What the data axis cuts of each rank's part."""

    stage: Stage
    bucket_bytes: int
    """What is reduced or gathered at once."""
    blocks: Callable[[nn.Module], Sequence[ParameterGroup]] | None = None
    """What of a model is gathered at once in its passes."""
    prefetch: int = 1
    """How many of them are gathered ahead."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What a strategy says of how ranks are divided."""

    axes_for: Callable[[int, Fits], Axes]
    """The division of so many ranks. Those that no replica can be made of are spares."""
    axes_at_start: Callable[[int], Axes] | None = None
    """What the ranks that the job begins with have to make: after a death the best is made of what
    is left. None: the sizes were given."""
    pipelined: bool
    """The model is run as a pipeline."""
    cuts_parameters: bool
    """Ranks hold pieces of parameters, which not every optimizer can update."""
    sharding: Sharding | None = None


def first_that_fits(candidates: Iterable[Axes], fits: Fits) -> Axes:
    """The first division that is possible. Given from the largest size down, the answer never holds
    more of the model on a rank because ranks have come; those that this leaves over are spares.

    Raises:
        ConfigurationError: none is.
    """
    for axes in candidates:
        if fits(axes):
            return axes
    raise ConfigurationError("no rank is left to hold the model")


def checked_size(option: str, value: object) -> int:
    """Raises ConfigurationError: not a number of ranks."""
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
    """The plan for one axis beside that of the replicas. `axes(size, replicas)`: the axes when it
    has so many ranks.

    `options[option]` is its size. Without that it is as long as the model allows: in a job that
    begins it has to be the number of ranks.
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
    """The divisions of one model's ranks, or of the ranks of several models, which are divided
    alike. The same on every rank."""

    def __init__(self, plan: MeshPlan, template: Template) -> None:
        self._plan = plan
        self._template = template
        self._templates = [template]
        """Those of all models that have to be cut along the same axes, `template` among them."""
        self._known: dict[int, Axes] = {}

    def divide_alike(self, several: Sequence[Layouts]) -> None:
        """`several`: of all models that the same ranks train, this one among them. From here on the
        ranks are divided so that each of them can be cut."""
        self._templates = [each._template for each in several]
        self._known.clear()

    def axes(self, world_size: int) -> Axes:
        """How so many ranks are divided.

        Raises:
            ConfigurationError: the model cannot be cut so.
        """
        if world_size not in self._known:
            self._known[world_size] = self._plan.axes_for(world_size, self._fits)
        return self._known[world_size]

    def too_few(self, world_size: int) -> bool:
        """Whether so many ranks are fewer than one replica of the model takes."""
        return self.axes(world_size).data == 0

    def check_start(self, world_size: int, *, ranks_may_come: bool) -> None:
        """Raises ConfigurationError: the ranks that the job begins with cannot hold the model.
        `ranks_may_come`: later, so that ranks that are left over now need not be so for good."""
        if self._plan.axes_at_start is not None:
            for template in self._templates:
                Blueprint(template, self._plan.axes_at_start(world_size))
        axes = self.axes(world_size)
        for template in self._templates:
            Blueprint(template, axes)
        if axes.working < world_size and not ranks_may_come:
            raise ConfigurationError(
                f"{world_size} ranks make {axes.data} replica(s) of pipeline {axes.pipeline} x "
                f"tensor {axes.tensor} = {axes.replica_size}, and {world_size - axes.working} "
                f"would be left over for good: start a multiple of {axes.replica_size}"
            )
        if axes.data == 0:
            raise ConfigurationError(
                f"{world_size} rank(s) are fewer than the {axes.replica_size} that hold one "
                f"replica (pipeline {axes.pipeline} x tensor {axes.tensor}): let the job begin "
                f"with {axes.replica_size} at least (--nproc-per-node, MIN of --nnodes MIN:MAX)"
            )

    def _fits(self, axes: Axes) -> bool:
        with contextlib.suppress(ConfigurationError):
            for template in self._templates:
                Blueprint(template, axes)
            return True
        return False
