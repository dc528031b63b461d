"""This rank's gradients in a step: accumulated over micro-batches by weight, then summed across
replicas.

The changes to buffers and the set of used parameters are summed with the gradients. This module
does not decide how a step ends. May be used only on the training thread.
"""

from __future__ import annotations

import abc
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from shoal_worker.elastic.group.group import Group
from shoal_worker.engine.state.hidden_parameters import drop_gradient
from shoal_worker.engine.state.optimizer_state import strided_like
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients, squared_norms
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.unit import Reducing, Stage, Unit

# --------------------------------------------------------------------------------------- replicated

_SMALLEST: Final = 1e-12
"""Float32 norm below which squares may have been rounded to zero."""


class MeshGradients(abc.ABC):
    """Gradients of this rank's part of the model, on one mesh."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        *,
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> None:
        """Creates empty gradients. `buffers`: buffers of this rank's part. `averages`: True if
        losses are means; gradients are then weighted by the number of samples."""
        self._pieces = {name: piece for name, piece in pieces.items() if piece.requires_grad}
        self._averages = averages
        wide = any(piece.dtype == torch.float64 for piece in self._pieces.values())
        dtype = torch.float64 if wide else torch.float32
        alike = buffers.dtype in (dtype, torch.float32)
        sizes = [buffers.size if alike else 0, len(self._pieces), 1]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts: Sequence[torch.Tensor] = self._flat.split(sizes)
        self._changes, self._presence, self._weight = parts
        self._apart = (
            None if alike else torch.zeros(buffers.size, dtype=buffers.dtype, device=device)
        )
        """Changes to the buffers, if they need a wider dtype than the gradients; otherwise None."""
        if self._apart is not None:
            self._changes = self._apart

    @abc.abstractmethod
    def added(self, name: str) -> torch.Tensor:
        """Returns the accumulated gradient of one parameter, in the parameter's shape, before it is
        summed across replicas and divided."""

    @abc.abstractmethod
    def squared_norm(self) -> float:
        """Returns this rank's contribution to the squared norm of the summed gradients."""

    @abc.abstractmethod
    def hand_out(self, divisor: float) -> None:
        """Sets the optimizer's gradients to the sums across replicas, divided by `divisor`. A
        parameter that no replica has used gets no gradient."""

    @abc.abstractmethod
    def scale(self, factor: float) -> None:
        """Multiplies the optimizer's gradients by `factor`."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Discards the optimizer's gradients."""

    def begin(self) -> None:
        """Resets the gradients and the changes to buffers for a new step."""
        self._flat.zero_()
        self._changes.zero_()

    def add(
        self, weight: float, found: Mapping[str, torch.Tensor | None], changes: torch.Tensor
    ) -> None:
        """Adds the results of passes to the step's sums. `found`: gradients by parameter name.
        `changes`: changes to buffers. If the weight is 0, the results may be arbitrary and are
        ignored."""
        if not weight > 0:
            return
        self.add_all(
            {name: gradient for name in self._pieces if (gradient := found.get(name)) is not None},
            self.factor(weight),
        )
        self._presence += torch.tensor([found.get(name) is not None for name in self._pieces]).to(
            self._presence
        )
        self._changes.add_(changes.to(self._changes))
        self._weight += weight

    def add_all(self, gradients: Mapping[str, torch.Tensor], factor: float) -> None:
        """Adds gradients, multiplied by `factor`, to the accumulated gradients. `gradients`: by
        parameter name. The caller must not modify these gradients afterwards."""
        together: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, gradient in gradients.items():
            added = self.added(name)
            if gradient.layout is torch.strided and gradient.dtype == added.dtype:
                together.append((added, gradient))
            else:  # one by one: temporary results are as large as the gradients
                added.add_(gradient.to(added.dtype), alpha=factor)
        if together:
            torch._foreach_add_(
                [added for added, _ in together],
                [gradient for _, gradient in together],
                alpha=factor,
            )

    def factor(self, weight: float) -> float:
        """Returns the factor by which the gradients of a pass with this weight are multiplied."""
        return weight if self._averages else float(weight > 0)

    @property
    def any_left(self) -> bool:
        """True if hooks have moved gradients of this step's passes out of the module's
        parameters."""
        return False

    sums_passes = False
    """True if the replicas sum gradients after each pass, with `sum_pass`, instead of once per
    step."""

    @abc.abstractmethod
    def sum_pass(self) -> None:
        """Sums, across replicas, the gradients added since the last call. If a parameter is on
        several stages, its gradients must first be summed across those stages. A failure marks the
        step as failed."""

    def take_part(self) -> None:
        """Participates in the collectives of a pass that only other replicas have samples for."""
        if self.sums_passes:
            self.sum_pass()

    def sum_over(self, replicas: Group) -> None:
        """Sums the step's gradients across replicas. Raises MembershipChanged."""
        replicas.all_reduce(self._flat)
        if self._apart is not None:
            replicas.all_reduce(self._apart)

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters that have gradients on this rank."""
        return list(self._pieces)

    @property
    def like(self) -> torch.Tensor:
        """Tensor with the dtype and on the device that changes to buffers must have."""
        return self._changes

    @property
    def present(self) -> Mapping[str, bool]:
        """Flags that show, by parameter name, whether any rank has used the parameter in this
        step."""
        return {
            name: count > 0
            for name, count in zip(self._pieces, self._presence.tolist(), strict=True)
        }

    def use(self, names: Sequence[str]) -> None:
        """Marks these parameters as used, because another rank that has them has used them."""
        for index, name in enumerate(self._pieces):
            if name in names:
                self._presence[index] += 1

    @property
    def divisor(self) -> float:
        """Divisor of the summed gradients."""
        return self.total_weight if self._averages else 1.0

    @property
    def total_weight(self) -> float:
        """Total weight of the samples in the step, over all replicas."""
        return float(self._weight) or 1.0

    @property
    def changes(self) -> torch.Tensor:
        """Changes to the buffers, summed over the passes of the step."""
        return self._changes


class ReplicatedGradients(MeshGradients):
    """Gradients that each replica stores in full. With several replicas, they are put into one flat
    vector together with all other sums, so that one all-reduce suffices.

    The gradients of a step's first pass are kept unchanged, together with their factor. Most steps
    have one pass, so this usually avoids adding the gradients to zeros. These gradients are never
    modified, because autograd may have used the same memory for two parameters.
    """

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        *,
        counts: Callable[[str], bool],
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> None:
        """Creates empty gradients. `counts(name)`: returns whether this rank includes its gradient
        of the parameter in the norm."""
        super().__init__(pieces, buffers=buffers, averages=averages, device=device)
        self._counted = [name for name in self._pieces if counts(name)]
        self._first: dict[str, tuple[torch.Tensor, float]] = {}
        """Parameter name -> gradient and its factor, if one gradient has been added for the
        parameter."""
        self._sums: dict[str, torch.Tensor] = {}
        """Parameter name -> sum, if several gradients have been added for the parameter."""

    @override
    def begin(self) -> None:
        super().begin()
        self._first.clear()
        self._sums.clear()

    @override
    def added(self, name: str) -> torch.Tensor:
        if name in self._first:
            gradient, factor = self._first.pop(name)
            self._sums[name] = gradient * factor
        elif name not in self._sums:
            self._sums[name] = self._flat.new_zeros(self._pieces[name].shape)
        return self._sums[name]

    @override
    def add_all(self, gradients: Mapping[str, torch.Tensor], factor: float) -> None:
        # Adding sparse gradients makes them dense.
        first = {
            name
            for name, gradient in gradients.items()
            if name not in self._first
            and name not in self._sums
            and gradient.layout is torch.strided
        }
        super().add_all(
            {name: gradient for name, gradient in gradients.items() if name not in first}, factor
        )
        for name in first:
            self._first[name] = gradients[name].to(self._flat.dtype), factor

    def sum_pass(self) -> None:
        """Does nothing: `sum_over` sums replicated gradients once per step."""

    @override
    def sum_over(self, replicas: Group) -> None:
        if replicas.world_size == 1:
            return
        *parts, rest = self._together.split(
            [*(piece.numel() for piece in self._pieces.values()), self._flat.numel()]
        )
        together = {
            name: part.view(piece.shape)
            for (name, piece), part in zip(self._pieces.items(), parts, strict=True)
        }
        for name, part in together.items():
            if name in self._first:
                gradient, factor = self._first.pop(name)
                torch.mul(gradient, factor, out=part)
            else:
                part.copy_(self.added(name))
        rest.copy_(self._flat)
        replicas.all_reduce(self._together)
        if self._apart is not None:
            replicas.all_reduce(self._apart)
        self._flat.copy_(rest)
        self._sums = together

    @functools.cached_property
    def _together(self) -> torch.Tensor:
        return self._flat.new_empty(
            sum(piece.numel() for piece in self._pieces.values()) + self._flat.numel()
        )

    def _added_times(self, name: str) -> tuple[torch.Tensor, float]:
        """Returns a tensor and a factor; their product is the parameter's accumulated gradient."""
        return self._first[name] if name in self._first else (self.added(name), 1.0)

    @override
    def squared_norm(self) -> float:
        return _squared_norm(map(self._added_times, self._counted))

    @override
    def hand_out(self, divisor: float) -> None:
        present = self.present
        for piece in self._pieces.values():
            drop_gradient(piece)
        together: list[tuple[nn.Parameter, torch.Tensor, float]] = []
        for name, piece in self._pieces.items():
            if not present[name]:
                continue
            gradient, factor = self._added_times(name)
            if gradient.dtype == piece.dtype:
                together.append((piece, gradient, divisor / factor))
            else:  # one by one: the mean must be computed in the wider dtype
                piece.grad = strided_like(gradient.div(divisor / factor).to(piece.dtype), piece)
        if together:
            means = torch._foreach_div(
                [gradient for _, gradient, _ in together], [by for *_, by in together]
            )
            for (piece, *_), mean in zip(together, means, strict=True):
                piece.grad = strided_like(mean, piece)

    @override
    def scale(self, factor: float) -> None:
        if gradients := [piece.grad for piece in self._pieces.values() if piece.grad is not None]:
            torch._foreach_mul_(gradients, factor)

    @override
    def forget(self) -> None:
        for piece in self._pieces.values():
            drop_gradient(piece)


def _squared_norm(terms: Iterable[tuple[torch.Tensor, float]]) -> float:
    """Returns the squared norm of several tensors, each multiplied by a factor. On the CPU, rows
    are summed in float32 and the row sums in float64: longer float32 sums would lose precision, and
    float64 throughout would take several times as long. If squares exceed the range of float32,
    everything is computed in float64."""
    terms = list(terms)
    if any(not tensor.is_cpu for tensor, _ in terms):  # a device converts while it reads
        norms_there = squared_norms([tensor for tensor, _ in terms])
        return float(
            (
                norms_there * torch.tensor([factor * factor for _, factor in terms]).to(norms_there)
            ).sum()
        )
    rows = [
        _norms(tensor.flatten(1) if tensor.dim() > 1 else tensor).mul_(factor).reshape(-1)
        for tensor, factor in terms
    ]
    if not rows:
        return 0.0
    norm = float(torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64))
    if not _SMALLEST < norm < math.inf:
        norms = (
            float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) * factor
            for tensor, factor in terms
        )
        return sum(one * one for one in norms)
    return norm * norm


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(
        rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    return norms


# ------------------------------------------------------------------------------------------ sharded
#
# Gradients of a step that the replicas reduce-scatter: each replica keeps the sums of its own shard
# and of the shard that it mirrors. The gradients of a pipeline are scattered after the passes,
# never from hooks, because its schedule accumulates its own micro-batches and may split backward
# passes in two without hooks noticing. The gradients of parameters shared by stages can therefore
# be summed first.

_IN_FLIGHT: Final = 2
"""Maximum number of reductions in progress at the same time."""


class ScatteredGradients(MeshGradients):
    """Gradients of the trained units in one rank's part of the model. They are reduce-scattered
    across replicas, so that each replica keeps the sums for its own shards."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        units: Sequence[Unit],
        *,
        stage: Stage,
        division: Division,
        collectives: Collectives,
        counted: Sequence[Unit],
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> None:
        """Creates empty gradients. `units`: trained units of `pieces`. `counted`: units whose shard
        this rank includes in the norm."""
        super().__init__(pieces, buffers=buffers, averages=averages, device=device)
        self.sums_passes = stage > Stage.OPTIMIZER
        self._units, self._counted = units, counted
        self._cut = CutGradients(units, exact=False)
        self._division, self._collectives = division, collectives
        self._places = {
            name: (unit, index) for unit in units for index, name in enumerate(unit.parameter_names)
        }

    @override
    def begin(self) -> None:
        super().begin()
        for unit in self._units:
            unit.forget_gradients()

    @override
    def added(self, name: str) -> torch.Tensor:
        unit, index = self._places[name]
        return unit.added(index)

    @override
    def sum_pass(self) -> None:
        on_their_way: deque[Reducing] = deque()
        for unit in self._units:
            if len(on_their_way) >= _IN_FLIGHT:
                on_their_way.popleft().wait()
            on_their_way.append(unit.start_reducing(self._collectives))
        for reducing in on_their_way:
            reducing.wait()

    def sum_over(self, replicas: Group) -> None:
        """Extends `MeshGradients.sum_over`: also sends the sums for this rank's shards to the ranks
        that mirror the shards."""
        if not self.sums_passes:
            self.sum_pass()
        super().sum_over(replicas)
        self._cut.pass_on(self._collectives, self._division)

    @override
    def squared_norm(self) -> float:
        return float(self._cut.squared_norm_part(self._counted))

    @override
    def hand_out(self, divisor: float) -> None:
        present = self.present
        self._cut.hand_out(
            divisor, [present[name] for unit in self._units for name in unit.parameter_names]
        )

    @override
    def scale(self, factor: float) -> None:
        self._cut.scale(factor)

    @override
    def forget(self) -> None:
        for piece in (
            piece for unit in self._units for holding in unit.holdings for piece in holding.pieces
        ):
            drop_gradient(piece)


class GradientsOfPasses(ScatteredGradients):
    """Gradients of units that are gathered block by block. The gradients are reduced, and their
    memory is freed, during the backward passes."""

    def __init__(self, *args: Any, execution: ShardedExecution, **kwargs: Any) -> None:
        """Creates empty gradients. `execution`: gathers and frees the units. For the other
        arguments, see `ScatteredGradients`."""
        super().__init__(*args, **kwargs)
        self._execution = execution

    def sum_pass(self) -> None:
        """Does nothing: the backward pass has already started the reduction."""

    @override
    def take_part(self) -> None:
        self._execution.take_part()

    @override
    def sum_over(self, replicas: Group) -> None:
        self._execution.reduce_rest()
        touched = [unit.touched[index] for unit, index in map(self._places.__getitem__, self.names)]
        self._presence += torch.tensor(touched).to(self._presence)
        super().sum_over(replicas)

    @property
    @override
    def any_left(self) -> bool:
        return self._execution.came

    @override
    def forget(self) -> None:
        super().forget()
        self._execution.settle()
