"""Compressed gradients in step with the session: what compression leaves behind counts when a step
does, and is saved and restored.

One for each model that has `gradient_compression=`. Engines send their buckets through it
(`Flight`, sharding's collectives) and tell it how each step ended: what it proposed to leave behind
counts if the step does (docs/explanation/compression.md#error-feedback).

Belongs to the training thread, or to the thread that runs the backward pass while the training
thread waits for that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.memory import RESIDUAL
from shoal_worker.compression.reduction import CompressedReduction, Reduction
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import Run, StatePart

if TYPE_CHECKING:
    from shoal_worker.elastic.channel import Channel
    from shoal_worker.elastic.group import Group
    from shoal_worker.elastic.strategy_interface import StrategySession

_KINDS: Final = ("buckets", "micro-batches", "units")
"""Ways to cut a model's gradients into what is compressed at once; a script may use several."""
_PER_KIND: Final = 1 << 20


class GradientCompression:
    """One model's compressor on one rank, with its memory."""

    def __init__(self, compressor: GradientCompressor, session: StrategySession) -> None:
        self.compressor = compressor
        self._session = session
        self._reduction = CompressedReduction(compressor)
        self._layouts: dict[str, str] = {}
        """What each kind's residuals are of."""
        self._numels: dict[int, int] = {}
        """Elements of each bucket."""
        self._units = 1.0
        """What a gradient of 1 counts in the residuals: a GradScaler's scale, times the weight that
        sums are divided by afterwards."""
        self._divisor = 1.0
        """The weight that sums are divided by."""
        self._scaler: str | None = None
        """Name of the GradScaler that steps this model's optimizer; empty: none does, and None:
        that is not known yet."""

    # -------------------------------------------------------------------------------------- sending

    def laid_out(self, kind: str, layout: object, numels: Sequence[int]) -> None:
        """How gradients are cut from now on: `layout` is JSON-able and says of which parameters
        each bucket is, `numels` how many elements it has, padding at its end included. What is owed
        to another layout is owed no longer."""
        said = json.dumps(layout)
        if self._layouts.setdefault(kind, said) != said:
            self._layouts[kind] = said
            self._reduction.forget(self._index(kind, 0), self._index(kind, _PER_KIND))
        for number, numel in enumerate(numels):
            self._reduction.resize(self._index(kind, number), numel)
            self._numels[self._index(kind, number)] = numel

    def weigh(self, divisor: float) -> None:
        """Before a step's first bucket: gradients are given in sums that are divided by `divisor`
        afterwards."""
        self._divisor = divisor
        units = self._session.registered.loss_scale(self._scaler) * divisor
        if units != self._units and math.isfinite(units) and units > 0:
            self._reduction.rescale(units / self._units)
            self._units = units

    def note_scaler(self, name: str) -> None:
        """The GradScaler of that name has stepped this model's optimizer; empty: none has. Until
        then all that are registered are taken to scale its loss."""
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
        """Begins to sum a bucket over the group's ranks, in place. `shapes`: of the tensors in it,
        in memory order.

        Raises:
            MembershipChanged: the group is over.
        """
        index, step = self._index(kind, number), self._session.steps
        if group.world_size == 1:
            return self._reduction.start(bucket, None, index=index, step=step)
        with group.own_collectives("compressed all_reduce") as backend:
            return self._reduction.start(bucket, backend, index=index, step=step, shapes=shapes)

    def pay(self, bucket: torch.Tensor, kind: str, number: int) -> None:
        """Alone nothing is sent, and nothing left out: adds what is owed from before."""
        self._reduction.start(
            bucket, None, index=self._index(kind, number), step=self._session.steps
        ).wait()

    def start_scatter(
        self, group: Group, shard: torch.Tensor, full: torch.Tensor, number: int
    ) -> Reduction:
        """Begins to sum the flat `full` over the group's ranks; this rank's part of the sum goes to
        `shard`.

        Raises:
            MembershipChanged: the group is over.
        """
        index, step = self._index("units", number), self._session.steps
        with group.own_collectives("compressed reduce_scatter") as backend:
            return self._reduction.start_scatter(full, shard, backend, index=index, step=step)

    def _index(self, kind: str, number: int) -> int:
        return _KINDS.index(kind) * _PER_KIND + number

    # ---------------------------------------------------------------------------------------- steps

    def step_begins(self) -> None:
        """The next step begins: what an earlier one proposed and did not commit never was."""
        self._reduction.rollback()

    def commit(self, *, unusable: bool = False) -> None:
        """The step counts. `unusable`: a GradScaler found infinities, and its gradients were
        applied nowhere."""
        if unusable:
            self._reduction.rollback()
        else:
            self._reduction.commit()

    def void(self) -> None:
        """The step counts nowhere."""
        self._reduction.rollback()

    # ---------------------------------------------------------------------------------------- state

    def capture(self) -> dict[str, Any]:
        """What is the same on all ranks, for peers."""
        return {
            "steps": self._session.steps,
            "shared": _nested(self._reduction.shared_state_dict()),
            "scaler": self._scaler,
        }

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """For checkpoints: with every rank's residuals, on the channel's first rank. Bucket by
        bucket, so that no rank has all at once but the one that writes them."""
        own = _nested(self._reduction.state_dict())
        told = [json.loads(each) for each in channel.exchange(json.dumps(sorted(own)).encode())]
        ranks: dict[str, dict[str, dict[str, torch.Tensor]]] = {
            str(rank): {} for rank in range(channel.world_size)
        }
        for bucket in sorted({name for each in told for name in each}):
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
        """Returns the state for a checkpoint that each rank writes a part of: a shard more for each
        rank, with its residuals, if it has any."""
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
        """Takes over what a peer captured or a checkpoint assembled; None: the checkpoint is of a
        run that did not compress.

        A checkpoint's: rank r takes over what was owed by the saved ranks r, r + n, r + 2n, ... of
        n ranks now. So all that is owed is kept, and a rank beyond the saved ones owes nothing.
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
    """None where nothing is compressed."""
    return None if compressor is None else GradientCompression(compressor, session)


def check_floating(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ConfigurationError for parameters that cannot be compressed."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ConfigurationError(
                f"gradient_compression={name!r}: a trained parameter is {tensor.dtype}, and "
                "compressors know real numbers only; leave gradient_compression out"
            )


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a dense tensor as its elements lie in memory: largest stride first."""
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
