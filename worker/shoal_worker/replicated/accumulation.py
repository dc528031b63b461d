"""Sums the gradients of a step that is cut into micro-batches, weighted by their samples.

Gradients, and by how much each micro-batch changed the buffers, are added up per micro-batch with its weight into one flat vector, which is
reduced when the inner loop ends. The result does not depend on which rank computed what; in float64 (deterministic) not even bitwise:
float32 gradients times whole-number weights sum exactly unless one element's gradients differ by more than 2^20 between micro-batches, and
the sum is rounded to float32 once. The mean over the global batch is left in `.grad`. All of it runs on the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.elastic.step import StepPhase
from shoal_worker.engine.compressed import GradientCompression, check_floating
from shoal_worker.engine.parameter_groups import in_buckets
from shoal_worker.replicated.buckets import Flight

if TYPE_CHECKING:
    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.strategy_interface import StrategySession
    from shoal_worker.engine.buffers import CommittedBuffers

_CHUNK_ELEMENTS = 8 << 20


class AccumulatedReduction:
    """Micro-batches: gradients and buffers added up per micro-batch, reduced once per step."""

    def __init__(
        self,
        module: nn.Module,
        buffers: CommittedBuffers,
        session: StrategySession,
        config: ShardingConfiguration,
        compression: GradientCompression | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """`alone`: the sum is over this rank's micro-batches, and says nothing of the other ranks."""
        self._buffers = buffers
        self._session = session
        self._config = config
        self._sums = config.loss_reduction == "sum"
        self._everything = list(module.parameters())
        self._sparse_ids = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
        self._parameters: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] = []
        self._compression = compression
        self._alone = alone
        self._flight = Flight(session, compression)
        self._loss_sum = self._loss_weight = 0.0
        self._open = False

    @property
    def open(self) -> bool:
        """Something was added up, or reduced, in this step."""
        return self._open

    def discard(self) -> None:
        """Nothing is added up, and nothing in flight."""
        self._flight.land()
        self._open = False

    def micro_batch_begins(self) -> None:
        """Each micro-batch starts from the committed buffers and from no gradient."""
        if not self._open:
            self._start()
        else:
            self._buffers.put_back()
        for parameter in self._parameters:
            parameter.grad = None

    def add_loss(self, loss: float, weight: float) -> float:
        """The mean of this rank's losses in the step, with that of a micro-batch."""
        if weight != 0:
            self._loss_sum, self._loss_weight = self._loss_sum + loss * weight, self._loss_weight + weight
        return self._loss_sum / self._loss_weight if self._loss_weight else 0.0

    def micro_batch_ends(self, weight: float) -> None:
        """Adds the micro-batch's gradient and buffers. One that weighs nothing may hold anything, NaN among it: it is left out."""
        for i, (parameter, total) in enumerate(zip(self._parameters, self._grad_sums, strict=True)):
            grad, parameter.grad = parameter.grad, None
            if grad is not None and weight != 0:
                # In float64, so that float32 times a whole number is exact.
                total.add_(grad.to(total.dtype), alpha=1.0 if self._sums else weight)
                self._presence[i] += 1
        if weight != 0:
            self._buffer_changes.add_(self._buffers.changes(self._flat), alpha=weight)
            self._weight_sum += weight

    def finish(self) -> None:
        """Reduces over all ranks and leaves the mean gradient in `.grad`; or marks the step lost."""
        session = self._session
        step = session.step
        if step is None or step.lost is not None or step.phase is not StepPhase.OPEN:
            return
        if not self._open:
            self._start()  # a rank without micro-batches takes part with weight zero
        if session.elastic and not self._alone:
            self._send(step.share.total_weight if step.share is not None else None)
            if not self._flight.land():
                return
        divisor = 1.0 if self._sums else float(self._weight_sum) or 1.0
        for parameter, summed, count in zip(self._parameters, self._grad_sums, self._presence.tolist(), strict=True):
            here = count > 0 or (self._compression is not None and bool(summed.any()))  # earlier steps have left something out
            # Where the dtype is the same it is no copy, but another object: users may give `.grad` other memory.
            mean = summed.div_(divisor).to(parameter.dtype).detach() if here else None
            parameter.grad = mean.to_sparse(1) if mean is not None and id(parameter) in self._sparse_ids else mean
        if not self._alone:
            session.seal_step()

    def _send(self, total_weight: float | None) -> None:
        if self._compression is None:
            for chunk in self._flat.split(_CHUNK_ELEMENTS):
                self._flight.send(chunk)
            return
        self._compression.weigh(1.0 if self._sums else total_weight or 1.0)
        end = 0
        for number, group in enumerate(self._groups):
            begin, end = end, end + sum(p.numel() for p in group)
            self._flight.send_compressed(self._flat[begin:end], "micro-batches", number, [p.shape for p in group])
        self._flight.send(self._flat[end:])

    def write_buffers(self) -> None:
        """Replaces the buffers by their weighted mean over all micro-batches; keeps them if all weighed nothing."""
        self._buffers.apply(self._buffer_changes / (float(self._weight_sum) or 1.0))
        self._open = False

    def _start(self) -> None:
        trained = [p for p in self._everything if p.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._parameters]:
            self._lay_out(trained)
        self._flat.zero_()
        self._loss_sum = self._loss_weight = 0.0
        self._open = True

    def _lay_out(self, trained: list[nn.Parameter]) -> None:
        if any(p.is_complex() for p in trained):
            raise ConfigurationError("complex parameters cannot be trained in micro-batches: use the loader without micro_batch_size=")
        self._parameters = trained
        wide = self._config.deterministic or self._buffers.dtype == torch.float64 or any(p.dtype == torch.float64 for p in trained)
        sizes = [*(p.numel() for p in trained), self._buffers.size, len(trained), 1]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64 if wide else torch.float32, device=trained[0].device)
        *sums, self._buffer_changes, self._presence, self._weight_sum = self._flat.split(sizes)
        self._grad_sums = [total.view_as(p) for total, p in zip(sums, trained, strict=True)]
        if self._compression is not None:
            check_floating(self._compression.compressor.name, trained)
            # What is compressed at once: whole parameters, in float32.
            self._groups = in_buckets(trained, lambda parameter: 4 * parameter.numel(), self._config.bucket_cap_mb << 20)
            places = {id(p): place for place, p in enumerate(self._everything)}
            layout = [[places[id(p)] for p in group] for group in self._groups]
            self._compression.laid_out("micro-batches", layout, [sum(p.numel() for p in group) for group in self._groups])
