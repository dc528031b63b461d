"""Memory of a unit on this rank. A unit consists of parameters that are gathered together, and
whose gradients are reduced together.

Memory of a unit between its passes, on each of N ranks, where P is the size of its parameters in
bytes (plus P/N on a rank that mirrors another rank's shard):

    stage           parameters     gradients
    OPTIMIZER       P              P
    GRADIENTS       P              P/N  (P while its backward pass runs)
    PARAMETERS      P/N (P while   P/N  (P while its backward pass runs)
                    it computes)

The module's own parameters always remain the same objects. They are views of `full`, whose memory
is returned to the allocator while no module computes with the parameters. As in torch's FSDP, this
is done by resizing the storage to zero. Tensors saved by autograd refer to the same storage, which
contains the values again when the unit is gathered for its backward pass. Optimizers update pieces
of shards (`Holding`), not the module's parameters.

If passes use a different dtype than updates, or if shards are stored elsewhere (`ShardPlacement`),
shards have separate memory at every stage, and `full` contains copies of them. This takes P bytes
in the dtype of the passes, and P/N in the dtype of the shards.

This module does not decide when to gather or reduce (`execution.py`).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal_worker.engine.state.hidden_parameters import (
    HiddenParameter,
    Leaves,
    Whereabouts,
    find_moved,
    take_gradient,
)
from shoal_worker.engine.step.pass_writes import same, some_of, written_in_vain
from shoal_worker.sharding.collectives import Collectives, Pending
from shoal_worker.sharding.layout import Piece, UnitLayout, layout_of
from shoal_worker.sharding.placements import ShardPlacement

_log = logging.getLogger(__name__)


class Stage(enum.IntEnum):
    """Stages of sharding. They determine what is sharded: each stage shards the named state in
    addition to that of the previous stages (Rajbhandari et al., "ZeRO", SC 2020, section 5)."""

    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Holding:
    """A shard on this rank: its own shard, or its mirror of another rank's shard."""

    def __init__(self, unit: Unit) -> None:
        self.position: int | None = None
        """Position of the shard; None if this rank has none."""
        self._placement = unit.placement
        self.shard = torch.empty(0, dtype=unit.dtype, device=unit.placement.device)
        self.pieces = tuple(
            nn.Parameter(self.shard, requires_grad=unit.trained) for _ in unit.parameters
        )
        """This rank's part of each parameter, which the optimizer updates: a flat piece or an
        entire tensor. Always the same objects, but with new memory after each `hold`."""
        self.cuts: tuple[Piece, ...] = ()
        self._whole_tensors = False
        self.gradient: torch.Tensor | None = None
        """Sum of all ranks' gradients; None if they have not been reduced yet in this step."""

    def hold(self, position: int | None, shard: torch.Tensor, layout: UnitLayout) -> None:
        """Makes this object store `shard`, the shard at `position`. If `position` is None, it
        stores no shard."""
        self.position, self.shard, self.gradient = position, shard, None
        self._whole_tensors = layout.whole_tensors
        self.cuts = (
            layout.pieces(position)
            if position is not None
            else tuple(Piece(parameter=i) for i in range(len(layout.shapes)))
        )
        for piece, cut in zip(self.pieces, self.cuts, strict=True):
            piece.grad = None
            piece.data = layout.piece(shard, cut)

    def move(self, shard: torch.Tensor, layout: UnitLayout) -> None:
        """Replaces the shard with `shard`, a copy of it in other memory, and drops its
        gradients."""
        self.shard = shard
        for piece, cut in zip(self.pieces, self.cuts, strict=True):
            piece.grad = None
            piece.data = layout.piece(shard, cut)

    def hand_out(self, divisor: float, present: Sequence[bool]) -> None:
        """Sets the optimizer's gradients to the sum divided by `divisor`. `present`: for each
        parameter, True if any rank has used it. Other parameters get no gradient (None). If tensors
        are not split, parameters of other ranks get None too, because optimizers that need entire
        tensors may not accept empty ones. The gradients are available once the placement's
        `arrived` has returned."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            gradient = self._placement.bring(gradient.div_(divisor), self.shard.dtype)
        for piece, cut, here in zip(self.pieces, self.cuts, present, strict=True):
            if gradient is None or not here or (self._whole_tensors and not cut.length):
                piece.grad = None
            else:
                piece.grad = gradient[cut.offset : cut.offset + cut.length].view(piece.shape)

    def forget_gradients(self) -> None:
        """Drops the summed gradients and the optimizer's gradients."""
        self.gradient = None
        for piece in self.pieces:
            piece.grad = None


class Unit:
    """Parameters that are gathered together and whose gradients are reduced together. They have the
    same dtype, and are either all trained or all frozen."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        stage: Stage,
        wide: bool,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        placement: ShardPlacement | None = None,
        leaves: Sequence[torch.Tensor] | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        """Takes over the memory of the parameters, which must be unsharded. `cut` or `adopt` must
        be called next.

        Args:
            name: name of the unit in error messages.
            parameters, names: the module's parameters and their names in the module.
            stage: state that is sharded.
            wide: True if gradients are summed in float64.
            param_dtype: dtype of gathered parameters; None: the parameters' own dtype. Shards
                always keep their own dtype.
            reduce_dtype: dtype of gradients in transfers; None: dtype of the sum.
            placement: memory for the shards; None: on the parameters' device.
            leaves: tensors whose gradients autograd accumulates: DTensors around the parameters, or
                the parameters themselves; None: the parameters.
            whereabouts: state shared by the model's hidden parameters; None if they do not belong
                to a model.
        """
        self.name = name
        self.parameters = tuple(parameters)
        self.parameter_names = tuple(names)
        self.leaves = tuple(leaves) if leaves is not None else self.parameters
        self.trained = self.parameters[0].requires_grad
        self.dtype = self.parameters[0].dtype
        """Dtype of the shards."""
        self.device = self.parameters[0].device
        """Device of the unsharded parameters."""
        self.placement = placement or ShardPlacement(self.device)
        self.stage = stage
        self.sum_dtype = torch.float64 if wide or self.dtype == torch.float64 else torch.float32
        """Dtype of gradient sums."""
        self._wire_dtype = reduce_dtype or self.sum_dtype
        self._unsharded_dtype = (
            param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype
        )
        self.apart = (
            stage is Stage.PARAMETERS or self.placement.apart or self._unsharded_dtype != self.dtype
        )
        """True if the shards have their own memory, separate from `full`."""
        self.layout = layout_of(self.parameters, 1)
        self.own, self.mirror = Holding(self), Holding(self)
        self.touched = [False] * len(self.parameters)
        """One flag per parameter: True if it has a gradient in this step."""
        whereabouts = self._whereabouts = whereabouts or Whereabouts()
        shapes = (
            None if isinstance(leaf, DTensor) else shape
            for leaf, shape in zip(self.leaves, self.layout.shapes, strict=True)
        )
        self.hidden = Leaves(
            self.leaves,
            [
                HiddenParameter(name, whereabouts, shape)
                for name, shape in zip(names, shapes, strict=True)
            ],
        )
        """Makes torch calls on the leaves raise an error while their values or gradients are stored
        elsewhere."""
        self.compressed: Callable[[torch.Tensor, torch.Tensor], Pending] | None = None
        """Function to call instead of the collectives' reduce-scatter if gradients are compressed;
        None: no compression."""
        self.resident = False
        """True if the unit keeps its memory and values until the parameters change, even though it
        counts as freed; see `ShardedExecution.keep_unsharded`."""
        self.in_step = self.watched = False
        """`in_step`: True if passes of a step may write to the unsharded parameters. `watched`:
        True if in-place writes through `.data` are detected."""
        self.is_lost: Callable[[], bool] = bool
        """Returns whether the step is lost. A failed collective may then have left arbitrary values
        in the gathered parameters."""
        self.proves_lost: Callable[[], bool] = bool
        """Waits for all collectives issued so far and returns whether the step is lost. On a GPU,
        failures are reported only after this wait."""
        self._gathered = True
        self._gathering: Pending | None = None
        self._sampled: torch.Tensor | None = None
        """Some elements of each parameter, read after gathering; None if nothing has been gathered
        or the elements cannot be read."""
        self._sent: torch.Tensor | None = None
        """The shard as it is sent to the other ranks; None if it is not being sent."""
        self._gradient: torch.Tensor | None = None
        """This rank's own weighted gradient of all elements in the unit; None if none has been
        added yet."""
        values = [p.detach() for p in self.parameters]
        self._replace(self.layout, self.dtype)
        for view, value in zip(self._views, values, strict=True):
            view.copy_(value)
        self.own.hold(0, self._full, self.layout)

    @property
    def holdings(self) -> tuple[Holding, Holding]:
        """This rank's own shard and its mirrored shard."""
        return self.own, self.mirror

    # --------------------------------------------------------------------------------------- layout

    def keep_tensors_whole(self, turn: int) -> None:
        """Assigns every parameter to one rank instead of splitting it, from the first sharding on.
        `turn`: see `UnitLayout.turn`."""
        assert self.layout.world_size == 1
        self.layout = replace(self.layout, whole_tensors=True, turn=turn)
        self.own.hold(0, self._full, self.layout)

    def cut(self, world_size: int, position: int, mirrored: int | None) -> None:
        """Divides the parameters, which must be unsharded on this rank, into `world_size` shards.
        Keeps only the shards at `position` and `mirrored`."""
        assert self._gathered
        self.finish_gathering()
        whole = self.layout.in_order(self._full)
        self._replace(self.layout.over(world_size), self._unsharded_dtype)
        self._put(whole)
        self._hold(position, mirrored, lambda where: self.layout.shard_of(whole, where))

    def adopt(
        self,
        world_size: int,
        shards: Mapping[int, torch.Tensor],
        position: int,
        mirrored: int | None,
    ) -> None:
        """Replaces the unit's memory with some of `world_size` shards: those at `position` and
        `mirrored`. The other elements are gathered when needed. `shards`: values of these shards,
        by position."""
        self.finish_gathering()
        self._replace(self.layout.over(world_size), self._unsharded_dtype)
        self._hold(position, mirrored, shards.__getitem__)
        self._gathered = world_size == 1 and not self.apart
        self.free()

    def make_unsharded(self, flat: torch.Tensor | None = None) -> None:
        """Makes all parameters unsharded on this rank, as if there were only one rank. `flat`:
        values of the parameters; None: the values are arbitrary until they are loaded."""
        self.finish_gathering()
        self._replace(self.layout.over(1), self.dtype)
        if flat is not None:
            self._full.copy_(flat)
        self._gathered = True
        self.own.hold(0, self._full, self.layout)
        self.mirror.hold(None, self._full[:0], self.layout)

    def fill(self, flat: torch.Tensor) -> None:
        """Sets the gathered values to `flat`, as if they had been gathered. Does not communicate or
        change the shards."""
        self.finish_gathering()
        self._allocate()
        self._put(flat)
        self._gathered = True

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Loads new values for all parameters into this rank's shards, and into the gathered
        parameters if there are any. The sharding does not change."""
        self.finish_gathering()
        whole = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        for view, value in zip(self.layout.views(whole), values, strict=True):
            view.copy_(value)
        size = self.layout.shard_numel
        for holding in self.holdings:
            if holding.position is not None:
                holding.shard.copy_(whole[holding.position * size : (holding.position + 1) * size])
        if self._full.untyped_storage().nbytes():
            self._full.copy_(whole)

    def _put(self, elements: torch.Tensor) -> None:
        """Writes values into the unsharded parameters. `elements`: the values, in the order of the
        parameters."""
        for view, value in zip(self._views, self.layout.over(1).views(elements), strict=True):
            view.copy_(value)

    def _replace(self, layout: UnitLayout, dtype: torch.dtype) -> None:
        self.layout, self.resident = layout, False
        self._full = torch.zeros(layout.padded_numel, dtype=dtype, device=self.device)
        self._views = layout.views(self._full)
        self._samples = [some_of(view) for view in self._views]
        self._show()

    def _show(self) -> None:
        self.hidden.show()
        self._point(self._views)

    def _point(self, memory: Sequence[torch.Tensor]) -> None:
        for own, parameter, leaf in zip(memory, self.parameters, self.leaves, strict=True):
            parameter.data = own
            if isinstance(leaf, DTensor):
                leaf._local_tensor = parameter.detach()

    def _slot(self, position: int) -> torch.Tensor:
        return self._full[
            position * self.layout.shard_numel : (position + 1) * self.layout.shard_numel
        ]

    def _hold(
        self, position: int, mirrored: int | None, values: Callable[[int], torch.Tensor]
    ) -> None:
        """Sets the values of this rank's shards. `values`: returns the values of the shard at a
        position."""
        for holding, where in ((self.own, position), (self.mirror, mirrored)):
            if where is None:
                shard = self.placement.empty(0, self.dtype)
            elif self.apart:
                shard = self.placement.empty(self.layout.shard_numel, self.dtype)
                shard.zero_()
            else:
                shard = self._slot(where)  # a view of the parameters, which takes no memory
            if where is not None:
                shard.copy_(values(where))
            holding.hold(where, shard, self.layout)

    # ----------------------------------------------------------------------------------- parameters

    def start_gathering(self, collectives: Collectives) -> bool:
        """Starts gathering the parameters. Returns False if they are already gathered or being
        gathered."""
        if self._gathered or self._gathering is not None:
            return False
        if self.resident:
            self._gathered = True
            return True
        self._allocate()
        self._sent = self.own.shard.to(self.device, self._full.dtype, non_blocking=True)
        self._gathering = collectives.all_gather(self._full, self._sent)
        return True

    def _allocate(self) -> None:
        storage, size = self._full.untyped_storage(), self._full.numel() * self._full.element_size()
        if storage.nbytes() != size:
            storage.resize_(size)
            self._show()

    def finish_gathering(self) -> None:
        """Waits until the parameters are gathered or the step has failed."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._gathered = gathering.wait()
            self._sent = None
            self._sampled = self._sample() if self._gathered and self.in_step else None

    def _sample(self) -> torch.Tensor | None:
        return (
            torch.cat(self._samples)
            if self.device.type == "cpu" and self._full.untyped_storage().nbytes()
            else None
        )

    def free(self) -> None:
        """Frees the memory of the gathered parameters, if parameters are sharded. If they are not
        sharded, but are a copy of shards that have their own memory, hides the parameters, so that
        the script does not mistake the copy for the shards."""
        uncut = self.own.shard is self._full  # there are no other copies of the values
        if uncut or not self.apart:
            return
        if self.stage is not Stage.PARAMETERS:
            self.hidden.hide()
        elif self._gathering is None:
            came, self._gathered = self._gathered, False
            if self._full.untyped_storage().nbytes() and not self.resident:
                if came:
                    self.refuse_written()
                elif self.in_step and not self.is_lost():
                    _log.warning(
                        "another rank failed during a forward pass that ran between the backward "
                        "pass and optimizer.step(); the step is still valid, but the outputs of "
                        "that pass are not and must not be used"
                    )
                self._point([self._full[:0]] * len(self.parameters))
                self.hidden.hide()
                self._full.untyped_storage().resize_(0)

    def refuse_written(self) -> None:
        """Raises ConfigurationError if a pass has written to the gathered parameters or replaced
        the memory of a parameter, because the change would be lost."""
        if not self.in_step or self.is_lost():
            return
        name, shard = self.moved, self.own.shard
        if name is None and self.watched and self.own.position is not None:
            written = not same(
                self._slot(self.own.position), shard.to(self.device, self._full.dtype)
            )
            name = self.parameter_names[0] if written else None
        if name is None and self._sampled is not None:
            name = self._written_in_place(self._sampled)
        if name is not None and not self.proves_lost():
            raise written_in_vain(name, self._whereabouts.strategy)

    def _written_in_place(self, before: torch.Tensor) -> str | None:
        """Returns the name of a parameter whose sampled elements differ from `before`; None if all
        are the same."""
        now = self._sample()
        if now is None or same(now, before):
            return None
        sizes = [sample.numel() for sample in self._samples]
        parts = zip(self.parameter_names, now.split(sizes), before.split(sizes), strict=True)
        return next(name for name, value, old in parts if not same(value, old))

    @property
    def moved(self) -> str | None:
        """Name of a parameter that the script has moved to memory other than the unit's; None if
        there is none."""
        index = find_moved(self.parameters, self._views)
        return self.parameter_names[index] if index is not None else None

    def changed(self) -> None:
        """Records that the shards have new values, so that the gathered values are outdated. Has no
        effect on unsharded frozen parameters. Must be called after an optimizer step."""
        self.finish_gathering()
        self.resident = self.in_step = False
        if self.stage is Stage.PARAMETERS:
            self.free()
        elif not self.trained:
            return
        elif self.layout.world_size > 1 or self.apart:
            self._gathered = False

    # ------------------------------------------------------------------------------------ gradients

    def add_gradient(self, index: int, factor: float) -> None:
        """Removes the gradient that autograd has stored in a parameter, and adds it, weighted by
        `factor`, to the accumulated gradient. If the factor is zero, the gradient is ignored, and
        may even contain NaN."""
        gradient = self.hidden.take_gradient(index)
        if gradient is None:
            return
        gradient = _local_part(self.leaves[index], gradient)
        if factor == 0.0:
            return
        self.touched[index] = True
        self.added(index).add_(gradient.to(self.sum_dtype), alpha=factor)

    def added(self, index: int) -> torch.Tensor:
        """Returns this rank's accumulated gradient of one parameter, in the parameter's shape,
        before it is reduced."""
        if self._gradient is None:
            self._gradient = torch.zeros(
                self.layout.padded_numel, dtype=self.sum_dtype, device=self.device
            )
        begins = self.layout.starts[index]
        return self._gradient[begins : begins + self.layout.numels[index]].view(
            self.layout.shapes[index]
        )

    def start_reducing(self, collectives: Collectives) -> Reducing:
        """Starts summing the gradients across ranks. Must be called on every rank, even without a
        gradient."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            gradient = torch.zeros(
                self.layout.padded_numel, dtype=self.sum_dtype, device=self.device
            )
        if gradient.dtype != self._wire_dtype:
            gradient = gradient.to(self._wire_dtype)
        shard = torch.empty(self.layout.shard_numel, dtype=gradient.dtype, device=self.device)
        return Reducing(
            self, shard, gradient, (self.compressed or collectives.reduce_scatter)(shard, gradient)
        )

    def has_gradient(self) -> bool:
        """Returns whether there is an accumulated gradient that has not been reduced yet."""
        return self._gradient is not None

    def forget_gradients(self) -> None:
        """Drops accumulated gradients and the optimizer's gradients."""
        self._gradient = None
        self.touched = [False] * len(self.parameters)
        self.hidden.forget_gradients()
        for holding in self.holdings:
            holding.forget_gradients()


class Reducing:
    """A reduction of one unit's gradients in progress."""

    def __init__(
        self, unit: Unit, shard: torch.Tensor, gradient: torch.Tensor, pending: Pending
    ) -> None:
        self._unit = unit
        self._shard = shard
        self._gradient = gradient
        """The gradient being sent, which must stay alive until the sum has arrived."""
        self._pending = pending

    def wait(self) -> None:
        """Waits for the sum and adds it to the shard's gradient. Adds nothing if the step has
        failed."""
        if self._pending.wait():
            own, shard = self._unit.own, self._shard.to(self._unit.sum_dtype)
            own.gradient = shard if own.gradient is None else own.gradient.add_(shard)


def taken_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """Removes the gradient that autograd has stored in a parameter, and returns this rank's part of
    it."""
    gradient = take_gradient(leaf)
    return None if gradient is None else _local_part(leaf, gradient)


def _local_part(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a gradient. For a DTensor, may sum the gradient across the ranks
    of its mesh, and must then be called on all of them."""
    if isinstance(leaf, DTensor) and isinstance(gradient, DTensor):
        if gradient.placements != leaf.placements:
            gradient = gradient.redistribute(placements=leaf.placements)
        return gradient.to_local()
    return gradient
