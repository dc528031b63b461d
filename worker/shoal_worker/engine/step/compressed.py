"""Compresses gradients. The residuals (compression errors that are added to the next step's
gradients) are kept only if their step is committed, and are saved and restored with the run's
state.

Each model with `gradient_compression=` has one `GradientCompression`. Engines reduce their buckets
with it (`Flight`, `CompressedScatter`). They also report the outcome of each step to it, because
the step's residuals are kept only if the step is committed
(docs/explanation/compression.md#error-feedback).

May be used only on the training thread, or on the thread of a backward pass while the training
thread waits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.compressed_reduction import CompressedReduction, Reduction
from shoal_worker.compression.memory import RESIDUAL
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import Run, StatePart

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.group.group import Group
    from shoal_worker.elastic.state.strategy_interface import StrategySession

_KINDS: Final = ("buckets", "micro-batches", "units")
"""Kinds of gradient layout. Residuals are kept for each kind."""
_PER_KIND: Final = 1 << 20


class GradientCompression:
    """Compressor of one model on one rank, with its residuals."""

    def __init__(self, compressor: GradientCompressor, session: StrategySession) -> None:
        self.compressor = compressor
        self._session = session
        self._reduction = CompressedReduction(compressor)
        self._layouts: dict[str, str] = {}
        """Current layout of each kind, as JSON."""
        self._numels: dict[int, int] = {}
        """Number of elements of each bucket."""
        self._units = 1.0
        """Scale of the residuals relative to gradients: a GradScaler's scale times `_divisor`."""
        self._divisor = 1.0
        """Divisor of the sums: the total weight of the step."""
        self._scaler: str | None = None
        """Name of the GradScaler that steps this model's optimizer; empty if none does; None if not
        yet known."""

    # -------------------------------------------------------------------------------------- sending

    def laid_out(self, kind: str, layout: object, numels: Sequence[int]) -> None:
        """Sets the current layout of the buckets of one `kind`, and drops residuals that belong to
        a different layout. `layout`: each bucket's parameters, as a JSON-able value. `numels`:
        number of elements of each bucket, including padding."""
        said = json.dumps(layout)
        if self._layouts.setdefault(kind, said) != said:
            self._layouts[kind] = said
            self._reduction.forget(self._index(kind, 0), self._index(kind, _PER_KIND))
        for number, numel in enumerate(numels):
            self._reduction.resize(self._index(kind, number), numel)
            self._numels[self._index(kind, number)] = numel

    def weigh(self, divisor: float) -> None:
        """Sets the number by which the step's gradient sums will be divided. Must be called before
        the step's first bucket is sent."""
        self._divisor = divisor
        units = self._session.registered.loss_scale(self._scaler) * divisor
        if units != self._units and math.isfinite(units) and units > 0:
            self._reduction.rescale(units / self._units)
            self._units = units

    def note_scaler(self, name: str) -> None:
        """Records the name of the GradScaler that has stepped this model's optimizer; empty: no
        scaler. Before the first call, all registered scalers are assumed to scale this model's
        loss."""
        if name != self._scaler:
            self._scaler = name
            self._units = self._session.registered.loss_scale(name) * self._divisor

    def start(
        self,
        group: Group,
        bucket: torch.Tensor,
        kind: str,
        number: int,
        shapes: Sequence[Sequence[int]],
    ) -> Reduction:
        """Starts a compressed in-place all-reduce of a bucket across the group's ranks. `kind`,
        `number`: kind of the bucket, and its index among the buckets of that kind. `shapes`: shapes
        of the bucket's tensors, each with its dimensions in memory order.

        Raises:
            MembershipChanged: the group has ended."""
        index, step = self._index(kind, number), self._session.steps
        if group.world_size == 1:
            return self._reduction.start(bucket, None, index=index, step=step)
        with group.own_collectives("compressed all_reduce") as backend:
            return self._reduction.start(bucket, backend, index=index, step=step, shapes=shapes)

    def pay(self, bucket: torch.Tensor, kind: str, number: int) -> None:
        """Adds the residuals of earlier steps to the gradients of a bucket. Used if there is only
        one rank, whose gradients are neither compressed nor sent."""
        self._reduction.start(
            bucket, None, index=self._index(kind, number), step=self._session.steps
        ).wait()

    def start_scatter(
        self, group: Group, shard: torch.Tensor, full: torch.Tensor, number: int
    ) -> Reduction:
        """Starts a compressed reduce-scatter: sums the flat tensor `full` across the group's ranks,
        and stores this rank's part of the sum in `shard`.

        Raises:
            MembershipChanged: the group has ended."""
        index, step = self._index("units", number), self._session.steps
        with group.own_collectives("compressed reduce_scatter") as backend:
            return self._reduction.start_scatter(full, shard, backend, index=index, step=step)

    def _index(self, kind: str, number: int) -> int:
        return _KINDS.index(kind) * _PER_KIND + number

    # ---------------------------------------------------------------------------------------- steps

    def step_begins(self) -> None:
        """Begins a step: discards residuals proposed by an earlier step that was not committed."""
        self._reduction.rollback()

    def commit(self, *, unusable: bool = False) -> None:
        """Commits the step's residuals. `unusable`: True if a GradScaler found infinities, so that
        the step's gradients were not applied; the residuals are then discarded."""
        if unusable:
            self._reduction.rollback()
        else:
            self._reduction.commit()

    def abort(self) -> None:
        """Discards the aborted step's residuals."""
        self._reduction.rollback()

    # ---------------------------------------------------------------------------------------- state

    def capture(self) -> dict[str, Any]:
        """Returns the part of the compression's state that is the same on all ranks, to be sent to
        peers."""
        return {
            "steps": self._session.steps,
            "shared": _nested(self._reduction.shared_state_dict()),
            "scaler": self._scaler,
        }

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the state for a checkpoint. On the first rank of `channel`, it includes every
        rank's residuals. Gathers one bucket at a time, so that only this rank needs memory for all
        residuals."""
        own = _nested(self._reduction.state_dict())
        received = [json.loads(each) for each in channel.exchange(json.dumps(sorted(own)).encode())]
        ranks: dict[str, dict[str, dict[str, torch.Tensor]]] = {
            str(rank): {} for rank in range(channel.world_size)
        }
        for bucket in sorted({name for each in received for name in each}):
            for rank, data in enumerate(channel.exchange(dump_tensors(own.get(bucket, {}), {}))):
                if channel.rank == 0:
                    ranks[str(rank)][bucket] = load_tensors(data)[0]
        return {
            **self.capture(),
            "ranks": ranks,
            "units": self._units,
            "layouts": dict(self._layouts),
        }

    def part(self, whole: StatePart, channel: Channel) -> StatePart:
        """Returns the state for a sharded checkpoint: `whole`, with an additional shard for each
        rank that has residuals."""
        units = json.loads(channel.exchange(json.dumps(self._units).encode())[0])
        self._reduction.rescale(units / self._units)
        self._units = units
        own = self._reduction.state_dict()
        runs: list[Run] = []
        ranks: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        for rank in range(channel.world_size):
            for bucket, numel in self._numels.items() if self.compressor.error_feedback else ():
                vector = torch.empty(numel, device="meta")
                ranks.setdefault(str(rank), {})[str(bucket)] = {RESIDUAL: vector}
                if rank == channel.rank:
                    owed = own.get(f"{bucket}/{RESIDUAL}")
                    runs.append(
                        Run(
                            vector=vector,
                            begin=0,
                            values=torch.zeros(numel) if owed is None else owed,
                        )
                    )
        saved = {**self.capture(), "ranks": ranks, "units": units, "layouts": dict(self._layouts)}
        state = {**whole.state, "compression": saved}
        if not ranks:
            return StatePart(state=state, count=whole.count, shards=whole.shards)
        return StatePart(
            state=state,
            count=whole.count + channel.world_size,
            shards={**whole.shards, whole.count + channel.rank: runs},
        )

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores the state of a peer or a checkpoint. None: the run that saved the checkpoint did
        not use compression.

        If the state comes from a checkpoint, rank r of n takes the sum of the residuals that ranks
        r, r + n, r + 2n, ... had saved, so that all residuals are used. If there were fewer ranks
        when it was saved, additional ranks start without residuals.
        """
        self._reduction.rollback()
        if state is not None:
            self._scaler = state.get("scaler")
            self._reduction.load_shared_state_dict(_flat(state["shared"]))
        if state is None or "ranks" in state:
            self._take_saved(state or {"ranks": {}, "units": 1.0, "layouts": {}})

    def _take_saved(self, state: Mapping[str, Any]) -> None:
        owed: dict[str, torch.Tensor] = {}
        if self.compressor.error_feedback:
            rank, world_size = self._session.rank, self._session.world_size
            for saved in range(rank, len(state["ranks"]), world_size):
                for name, tensor in _flat(state["ranks"][str(saved)]).items():
                    known = owed.get(name)
                    owed[name] = (
                        tensor if known is None or known.shape != tensor.shape else known + tensor
                    )
        self._reduction.load_state_dict(
            {name: tensor.to(self._session.device) for name, tensor in owed.items()}
        )
        self._units, self._layouts = state["units"], dict(state["layouts"])


def compression_of(
    compressor: GradientCompressor | None, session: StrategySession
) -> GradientCompression | None:
    """Returns the compression of a model; None if it has no compressor."""
    return None if compressor is None else GradientCompression(compressor, session)


def check_floating(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Checks that the parameters can be compressed; otherwise raises ConfigurationError. `name`:
    name of the compressor."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ConfigurationError(
                f"gradient_compression={name!r} cannot be used, because a trained parameter has "
                f"dtype {tensor.dtype} and compressors support only real numbers; leave "
                "gradient_compression out"
            )


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a dense tensor with its dimensions in memory order (descending
    strides)."""
    strides = parameter.stride()
    return tuple(
        parameter.shape[d] for d in sorted(range(parameter.dim()), key=lambda d: -strides[d])
    )


def _nested(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        bucket, _, slot = name.partition("/")
        nested.setdefault(bucket, {})[slot] = tensor
    return nested


def _flat(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{bucket}/{slot}": tensor
        for bucket, slots in state.items()
        for slot, tensor in slots.items()
    }
