"""Gradients of a step that the replicas sum and cut: each keeps the sums of its shard, and of the shard that it mirrors.

Of a pipeline they are scattered after the passes, never from hooks in them: its schedule adds up its own micro-batches, and may split
backward passes in two, which hooks do not see. So what the stages share is summed first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from shoal_worker.elastic.group import Group
from shoal_worker.mesh.gradients import MeshGradients
from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.unit import Reducing, Stage, Unit

_IN_FLIGHT: Final = 2
"""Reductions on their way at once."""


class ScatteredGradients(MeshGradients):
    """Gradients that are scattered over the replicas: those of the trained units of one rank's part."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        units: Sequence[Unit],
        *,
        stage: Stage,
        division: Division,
        collectives: Collectives,
        counted: Sequence[Unit],
        buffers: int,
        averages: bool,
        device: torch.device,
    ) -> None:
        """`units`: trained ones, of `pieces`. `counted`: those of which this rank counts its shard in the norm."""
        super().__init__(pieces, buffers=buffers, averages=averages, device=device)
        self.sums_passes = stage > Stage.OPTIMIZER
        self._units, self._counted = units, counted
        self._cut = CutGradients(units, exact=False)
        self._division, self._collectives = division, collectives
        self._places = {name: (unit, index) for unit in units for index, name in enumerate(unit.parameter_names)}

    def begin(self) -> None:
        """See `MeshGradients`."""
        super().begin()
        for unit in self._units:
            unit.forget_gradients()

    def added(self, name: str) -> torch.Tensor:
        """See `MeshGradients`."""
        unit, index = self._places[name]
        return unit.added(index)

    def sum_pass(self) -> None:
        """See `MeshGradients`."""
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

    def squared_norm(self) -> float:
        """See `MeshGradients`."""
        return float(self._cut.squared_norm_part(self._counted))

    def hand_out(self, divisor: float) -> None:
        """See `MeshGradients`."""
        present = self.present
        self._cut.hand_out(divisor, [present[name] for unit in self._units for name in unit.parameter_names])

    def scale(self, factor: float) -> None:
        """See `MeshGradients`."""
        self._cut.scale(factor)

    def norm_here(self) -> float:
        """See `MeshGradients`."""
        return self._cut.norm_here()

    def forget(self) -> None:
        """See `MeshGradients`."""
        for piece in (piece for unit in self._units for holding in unit.holdings for piece in holding.pieces):
            piece.grad = None


class GradientsOfPasses(ScatteredGradients):
    """Gradients of units that are gathered block by block: they are reduced in the backward passes themselves, and freed there."""

    def __init__(self, *args: Any, execution: ShardedExecution, **kwargs: Any) -> None:
        """`execution` runs the units; the other arguments are those of `ScatteredGradients`."""
        super().__init__(*args, **kwargs)
        self._execution = execution

    def sum_pass(self) -> None:
        """See `MeshGradients`: it was begun in the pass."""

    def take_part(self) -> None:
        """See `MeshGradients`."""
        self._execution.take_part()

    def sum_over(self, replicas: Group) -> None:
        """See `MeshGradients`."""
        self._execution.reduce_rest()
        touched = [unit.touched[index] for unit, index in map(self._places.__getitem__, self.names)]
        self._presence += torch.tensor(touched).to(self._presence)
        super().sum_over(replicas)

    @property
    def any_left(self) -> bool:
        """See `MeshGradients`."""
        return self._execution.came

    def forget(self) -> None:
        """See `MeshGradients`."""
        super().forget()
        self._execution.settle()
