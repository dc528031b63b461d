"""Along which axes a model's ranks are divided, for any number of them: what a strategy plans, held against what the model allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.engine.parameter_groups import ParameterGroup
from shoal_worker.mesh.axes import Axes
from shoal_worker.mesh.blueprint import Blueprint, Template
from shoal_worker.sharding.unit import Stage

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


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What a strategy says of how ranks are divided."""

    axes_for: Callable[[int, Fits], Axes]
    """The division of so many ranks. Those that no replica can be made of are spares."""
    axes_at_start: Callable[[int], Axes] | None = None
    """What the ranks that the job begins with have to make: after a death the best is made of what is left. None: the sizes were given."""
    pipelined: bool
    """The model is run as a pipeline."""
    cuts_parameters: bool
    """Ranks hold pieces of parameters, which not every optimizer can update."""
    sharding: Sharding | None = None


def first_that_fits(candidates: Iterable[Axes], fits: Fits) -> Axes:
    """The first division that is possible. Given from the largest size down, the answer never holds more of the model on a rank because
    ranks have come; those that this leaves over are spares.

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
    option: str, options: Mapping[str, Any], axes: Callable[[int, int], Axes], *, pipelined: bool, cuts_parameters: bool
) -> MeshPlan:
    """The plan for one axis beside that of the replicas. `axes(size, replicas)`: the axes when it has so many ranks.

    `options[option]` is its size. Without that it is as long as the model allows: in a job that begins it has to be the number of ranks.
    """
    given = options.get(option)
    if given is not None:
        size = checked_size(option, given)
        return MeshPlan(
            axes_for=lambda world_size, fits: axes(size, world_size // size), pipelined=pipelined, cuts_parameters=cuts_parameters
        )
    return MeshPlan(
        axes_for=lambda world_size, fits: first_that_fits((axes(n, world_size // n) for n in range(world_size, 0, -1)), fits),
        axes_at_start=lambda world_size: axes(world_size, 1),
        pipelined=pipelined,
        cuts_parameters=cuts_parameters,
    )


class Layouts:
    """The divisions of one model's ranks. The same on every rank."""

    def __init__(self, plan: MeshPlan, template: Template) -> None:
        self._plan = plan
        self._template = template
        self._known: dict[int, Axes] = {}

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
        """Raises ConfigurationError: the ranks that the job begins with cannot hold the model. `ranks_may_come`: later, so that ranks that
        are left over now need not be so for good."""
        if self._plan.axes_at_start is not None:
            Blueprint(self._template, self._plan.axes_at_start(world_size))
        axes = self.axes(world_size)
        Blueprint(self._template, axes)
        if axes.working < world_size and not ranks_may_come:
            raise ConfigurationError(
                f"{world_size} ranks make {axes.data} replica(s) of pipeline {axes.pipeline} x tensor {axes.tensor} = {axes.replica_size}, "
                f"and {world_size - axes.working} would be left over for good: start a multiple of {axes.replica_size}"
            )
        if axes.data == 0:
            raise ConfigurationError(
                f"{world_size} rank(s) are fewer than the {axes.replica_size} that hold one replica (pipeline {axes.pipeline} x tensor "
                f"{axes.tensor}): let the job begin with {axes.replica_size} at least (--nproc-per-node, MIN of --nnodes MIN:MAX)"
            )

    def _fits(self, axes: Axes) -> bool:
        with contextlib.suppress(ConfigurationError):
            Blueprint(self._template, axes)
            return True
        return False
