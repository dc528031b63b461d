"""The gradients of a step as far as this rank holds them: added up over micro-batches by weight,
then over the replicas.

Beside them lie how the buffers changed and which parameters were used, which the replicas sum as
well. It knows nothing of how a step ends. The training thread owns it.
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

from shoal_worker.elastic.group import Group
from shoal_worker.engine.buffers import CommittedBuffers
from shoal_worker.engine.hidden_parameters import drop_gradient
from shoal_worker.engine.optimizer_state import strided_like
from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients, squared_norms
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.unit import Reducing, Stage, Unit

# --------------------------------------------------------------------- whole on each rank of a part

_SMALLEST: Final = 1e-12
"""A norm in float32 below it may miss squares that float32 has rounded to zero."""


class MeshGradients(abc.ABC):
    """The gradients of this rank's part of the model, for one division of the ranks."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        *,
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> None:
        """`buffers`: the part's. `averages`: losses are means, so gradients weigh what their
        samples do."""
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
        """The changes of buffers, where they need a wider dtype."""
        if self._apart is not None:
            self._changes = self._apart

    @abc.abstractmethod
    def added(self, name: str) -> torch.Tensor:
        """What was added of one parameter's gradient and is not summed over the replicas yet, in
        its shape; not divided by anything."""

    @abc.abstractmethod
    def squared_norm(self) -> float:
        """What this rank counts of the sums' squared norm."""

    @abc.abstractmethod
    def hand_out(self, divisor: float) -> None:
        """Gives the optimizer its gradients, the sums over `divisor`: none for parameters that no
        replica used."""

    @abc.abstractmethod
    def scale(self, factor: float) -> None:
        """Multiplies the gradients that were handed out."""

    @abc.abstractmethod
    def norm_here(self) -> float:
        """Returns the norm of the gradients that were handed out on this rank."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Forgets what was handed out."""

    def begin(self) -> None:
        """Begins a step."""
        self._flat.zero_()
        self._changes.zero_()

    def add(
        self, weight: float, found: Mapping[str, torch.Tensor | None], changes: torch.Tensor
    ) -> None:
        """What some passes have left: gradients by name, and changes of buffers. Passes that weigh
        nothing may have left anything, and are left out."""
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
        """Adds gradients by the names of their parameters, times `factor`. Nobody changes them any
        more."""
        together: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, gradient in gradients.items():
            added = self.added(name)
            if gradient.layout is torch.strided and gradient.dtype == added.dtype:
                together.append((added, gradient))
            else:  # one by one: what is made of it on the way is as large as it
                added.add_(gradient.to(added.dtype), alpha=factor)
        if together:
            torch._foreach_add_(
                [added for added, _ in together],
                [gradient for _, gradient in together],
                alpha=factor,
            )

    def factor(self, weight: float) -> float:
        """Returns what the gradients of a pass that weighs so much are multiplied with."""
        return weight if self._averages else float(weight > 0)

    @property
    def any_left(self) -> bool:
        """Passes have left gradients here already, before `add`."""
        return False

    sums_passes = False
    """The replicas sum each pass, which `sum_pass` does, instead of the step."""

    @abc.abstractmethod
    def sum_pass(self) -> None:
        """What was added since the last time is whole: also of what this rank shares with others of
        its replica. A failure marks the step lost."""

    def take_part(self) -> None:
        """In a pass of other replicas, for which this one has no samples."""
        if self.sums_passes:
            self.sum_pass()

    def sum_over(self, replicas: Group) -> None:
        """Sums the step's gradients over the replicas. Raises MembershipChanged."""
        replicas.all_reduce(self._flat)
        if self._apart is not None:
            replicas.all_reduce(self._apart)

    @property
    def names(self) -> Sequence[str]:
        """The parameters that have gradients here."""
        return list(self._pieces)

    @property
    def like(self) -> torch.Tensor:
        """Returns a tensor of the dtype and on the device that changes of buffers are wanted in."""
        return self._changes

    @property
    def present(self) -> Mapping[str, bool]:
        """Which parameters were used."""
        return {
            name: count > 0
            for name, count in zip(self._pieces, self._presence.tolist(), strict=True)
        }

    def use(self, names: Sequence[str]) -> None:
        """Parameters that another rank, which holds them too, has used."""
        for index, name in enumerate(self._pieces):
            if name in names:
                self._presence[index] += 1

    @property
    def divisor(self) -> float:
        """What the sums are divided by."""
        return self.total_weight if self._averages else 1.0

    @property
    def total_weight(self) -> float:
        """Weight of the whole batch."""
        return float(self._weight) or 1.0

    @property
    def changes(self) -> torch.Tensor:
        """Changes of the buffers, summed over the batch."""
        return self._changes


class ReplicatedGradients(MeshGradients):
    """Each replica has them whole. Where there are several they lie in one flat vector with the
    rest, so that their sum is one all-reduce.

    What a step's first pass leaves is kept as it is, with its factor: most steps have one pass, and
    then what adding it to zeros would cost is saved. It is never written to, since autograd may
    have given its memory to two parameters.
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
        """`counts(name)`: this rank counts the parameter in the norm."""
        super().__init__(pieces, buffers=buffers, averages=averages, device=device)
        self._counted = [name for name in self._pieces if counts(name)]
        self._first: dict[str, tuple[torch.Tensor, float]] = {}
        """The gradient, and its factor, of parameters to which one gradient was added."""
        self._sums: dict[str, torch.Tensor] = {}
        """The sums of parameters to which several gradients were added."""

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
        # Sparse ones are made dense by adding them.
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
        """See `MeshGradients`: not wanted."""

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
        """What was added is the tensor times the number."""
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
            else:  # one by one: its mean in the wider dtype is needed for a moment
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
    def norm_here(self) -> float:
        return math.sqrt(
            _squared_norm((p.grad, 1.0) for p in self._pieces.values() if p.grad is not None)
        )

    @override
    def forget(self) -> None:
        for piece in self._pieces.values():
            drop_gradient(piece)


def _squared_norm(terms: Iterable[tuple[torch.Tensor, float]]) -> float:
    """Returns the squared norm of tensors times numbers. By rows in float32, and over the rows in
    float64: longer sums of float32 lose digits, and all of it in float64 takes several times as
    long. Where squares are beyond float32, in float64 after all."""
    terms = list(terms)
    if any(not tensor.is_cpu for tensor, _ in terms):  # a device widens as it reads
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


# ---------------------------------------------------------------------------------------- in shards
#
# Gradients of a step that the replicas sum and cut: each keeps the sums of its shard, and of the
# shard that it mirrors.
#
# Of a pipeline they are scattered after the passes, never from hooks in them: its schedule adds up
# its own micro-batches, and may split backward passes in two, which hooks do not see. So what the
# stages share is summed first.

_IN_FLIGHT: Final = 2
"""Reductions on their way at once."""


class ScatteredGradients(MeshGradients):
    """Gradients that are scattered over the replicas: those of the trained units of one rank's
    part."""

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
        """`units`: trained ones, of `pieces`. `counted`: those of which this rank counts its shard
        in the norm."""
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
        """See `MeshGradients`. And gives those that mirror it what this rank has."""
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
    def norm_here(self) -> float:
        return self._cut.norm_here()

    @override
    def forget(self) -> None:
        for piece in (
            piece for unit in self._units for holding in unit.holdings for piece in holding.pieces
        ):
            drop_gradient(piece)


class GradientsOfPasses(ScatteredGradients):
    """Gradients of units that are gathered block by block: they are reduced in the backward passes
    themselves, and freed there."""

    def __init__(self, *args: Any, execution: ShardedExecution, **kwargs: Any) -> None:
        """`execution` runs the units; the other arguments are those of `ScatteredGradients`."""
        super().__init__(*args, **kwargs)
        self._execution = execution

    def sum_pass(self) -> None:
        """See `MeshGradients`: it was begun in the pass."""

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
