"""One unit: parameters that are gathered, reduced and owned together, and the memory that this rank holds for them.

What is held, in bytes of this unit's parameters P, at rest and over N ranks:

    stage           parameters     gradients
    OPTIMIZER       P              P
    GRADIENTS       P              P/N  (P while its backward pass runs)
    PARAMETERS      P/N (P while   P/N  (P while its backward pass runs)
                    it computes)

The module's own parameters stay the same objects throughout; their memory is a view of `full`, which is given back to the allocator while
nobody computes with it (the storage is resized to nothing, as torch's FSDP does: what autograd saved sees the same storage, and finds the
values again because the unit is gathered before its backward pass). Optimizers update `pieces`, this rank's part.

It does not know when to gather or reduce (`execution.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import nn

from shoal_worker.sharding.collectives import Collectives, Pending
from shoal_worker.sharding.layout import layout_of


class Stage(enum.IntEnum):
    """What is sharded; each stage includes those before (Rajbhandari et al., "ZeRO", SC 2020, section 5)."""

    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Unit:
    """Parameters of one dtype that are all trained, or all frozen."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], names: Sequence[str], *, stage: Stage, wide: bool) -> None:
        """Takes the parameters' memory over, with a layout for this rank alone; `lay_out` comes next. `wide`: gradients are summed in
        float64."""
        self.name = name
        self.parameters = tuple(parameters)
        self.parameter_names = tuple(names)
        self.trained = self.parameters[0].requires_grad
        self.dtype = self.parameters[0].dtype
        self.device = self.parameters[0].device
        self.stage = stage
        self.sum_dtype = torch.float64 if wide or self.dtype == torch.float64 else torch.float32
        """Of gradients, on the wire and in the sum."""
        self.pieces: tuple[nn.Parameter, ...] = ()
        """This rank's part of each parameter, one-dimensional: what the optimizer updates. The same objects for ever; their memory is
        replaced by `lay_out`."""
        self.layout = layout_of(self.parameters, 1)
        self._full = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        for view, parameter in zip(self.layout.views(self._full), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._shard = self._full
        self._gathered = True
        self._gathering: Pending | None = None
        self._gradient: torch.Tensor | None = None
        """This rank's own gradient of all elements, weighted; None: nothing added yet."""
        self._gradient_shard: torch.Tensor | None = None
        """Summed over the ranks, this rank's part."""
        self.touched = [False] * len(self.parameters)
        """Which parameters got a gradient in this step."""
        self.pieces = tuple(nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=self.trained) for _ in self.parameters)
        self._cut(0)

    # ---------------------------------------------------------------------------------------------------------------- layout

    def lay_out(self, rank: int, world_size: int) -> None:
        """Cuts the parameters for so many ranks. They must be whole here: gathered, or just built."""
        assert self._gathered
        assert self._gathering is None
        whole = self._full[: self.layout.numel]
        self.layout = layout_of(self.parameters, world_size)
        full = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        full[: self.layout.numel] = whole
        self._full = full
        for view, parameter in zip(self.layout.views(full), self.parameters, strict=True):
            parameter.data = view
        shard = full[rank * self.layout.shard_numel : (rank + 1) * self.layout.shard_numel]
        # With the parameters resident the shard is a part of them, and costs nothing.
        self._shard = shard.clone() if self.stage is Stage.PARAMETERS else shard
        self._cut(rank)

    def _cut(self, rank: int) -> None:
        self._rank = rank
        self._cuts = self.layout.pieces(rank)
        for piece, cut in zip(self.pieces, self._cuts, strict=True):
            piece.data = self._shard[cut.offset : cut.offset + cut.length]

    # ------------------------------------------------------------------------------------------------------------- parameters

    def start_gathering(self, collectives: Collectives) -> bool:
        """Begins to fetch the whole parameters. False: they are here, or on their way."""
        if self._gathered or self._gathering is not None:
            return False
        self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
        self._gathering = collectives.all_gather(self._full, self._shard)
        return True

    def finish_gathering(self) -> None:
        """Returns when what was begun is here, or the step is lost."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._gathered = gathering.wait()

    def free(self) -> None:
        """Gives back the whole parameters' memory, where parameters are sharded."""
        if self.stage is not Stage.PARAMETERS or self._gathering is not None:
            return
        self._gathered = False
        self._full.untyped_storage().resize_(0)

    def changed(self) -> None:
        """The optimizer has updated the pieces: what was gathered before is stale."""
        self.finish_gathering()
        if self.stage is Stage.PARAMETERS:
            self.free()
        elif self.layout.world_size > 1:
            self._gathered = False

    # -------------------------------------------------------------------------------------------------------------- gradients

    def add_gradient(self, index: int, factor: float) -> None:
        """Takes over the gradient of one parameter, weighted by `factor`; nought: it may hold anything, NaN among it."""
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or factor == 0.0:
            return
        self.touched[index] = True
        if self._gradient is None:
            self._gradient = torch.zeros(self.layout.padded_numel, dtype=self.sum_dtype, device=self.device)
        begins = sum(self.layout.numels[:index])
        own = self._gradient[begins : begins + parameter.numel()].view(parameter.shape)
        own.add_(gradient.to(self.sum_dtype), alpha=factor)

    def start_reducing(self, collectives: Collectives) -> Reducing:
        """Begins to sum the gradients over the ranks. Every rank takes part, also one that has none."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            gradient = torch.zeros(self.layout.padded_numel, dtype=self.sum_dtype, device=self.device)
        shard = torch.empty(self.layout.shard_numel, dtype=self.sum_dtype, device=self.device)
        return Reducing(self, shard, gradient, collectives.reduce_scatter(shard, gradient))

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds a sum that has arrived to this step's."""
        self._gradient_shard = shard if self._gradient_shard is None else self._gradient_shard.add_(shard)

    @property
    def gradient_shard(self) -> torch.Tensor | None:
        """This rank's part of the sum over the ranks; None: not reduced in this step."""
        return self._gradient_shard

    def hand_out(self, divisor: float, present: Sequence[bool]) -> None:
        """Gives the optimizer its gradients: the sum over `divisor`; None for parameters that no rank used (`present`)."""
        shard, self._gradient_shard = self._gradient_shard, None
        for piece, cut, here in zip(self.pieces, self._cuts, present, strict=True):
            if shard is None or not here:
                piece.grad = None
            else:
                piece.grad = (shard[cut.offset : cut.offset + cut.length] / divisor).to(self.dtype)

    def forget_gradients(self) -> None:
        """Nothing is added up and nothing handed out."""
        self._gradient = self._gradient_shard = None
        self.touched = [False] * len(self.parameters)
        for parameter in (*self.parameters, *self.pieces):
            parameter.grad = None

    def has_gradient(self) -> bool:
        """Something was added that is not reduced yet."""
        return self._gradient is not None


class Reducing:
    """The sum of one unit's gradients, on its way."""

    def __init__(self, unit: Unit, shard: torch.Tensor, gradient: torch.Tensor, pending: Pending) -> None:
        self._unit = unit
        self._shard = shard
        self._gradient = gradient
        """Held until the sum has arrived: it is being sent."""
        self._pending = pending

    def wait(self) -> None:
        """Returns when the sum is here and counted."""
        self._pending.wait()
        self._unit.add_reduced(self._shard)
