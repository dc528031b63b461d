"""Layout of gradients for reduction in flat buckets. Each bucket is sent in one all-reduce.

The layout depends only on the parameters (their order, size, dtype, device), so it is the same on
every rank, regardless of when the rank joined. Buckets are filled from the last parameter to the
first, which is approximately the order of gradients in a backward pass. A bucket also counts the
ranks that have a gradient of each parameter. If no rank has a gradient, `.grad` stays None, as on a
single process. `.grad` is a view of the bucket, so each gradient is in memory only once.

Buckets are reduced concurrently (`Flight`): all-reduces are started one after another and awaited
together. Compressed all-reduces take two rounds, and the second round begins when all of them have
finished the first. Even if one all-reduce fails, all others are awaited too: an aborted step is
repeated in the same memory, to which collectives of the old group must no longer write. A failure
marks the step as failed instead of raising an error; `optimizer.step()` then returns LOST.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, SupportsFloat

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_common.failpoints import failpoint

from shoal_worker.engine.step.failed_collectives import LosingStep, await_reductions

if TYPE_CHECKING:
    from shoal_worker.compression.compressed_reduction import Reduction
    from shoal_worker.elastic.group.group import Group
    from shoal_worker.elastic.state.strategy_interface import StrategySession
    from shoal_worker.engine.step.compressed import GradientCompression

from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.elastic.contract.reported_loss import MeanLoss
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.engine.state.parameter_groups import in_buckets
from shoal_worker.engine.step.compressed import GradientCompression, check_floating, memory_order

if TYPE_CHECKING:
    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.state.strategy_interface import StrategySession
    from shoal_worker.engine.step.buffers import CommittedBuffers

_FIRST_BYTES = 1 << 20
"""Maximum size of the first bucket, in bytes. It is small so that sending starts early."""
_ONE_BYTES = 2 << 20
"""Maximum total size, in bytes, of gradients that are sent in one all-reduce. For so few gradients,
a second all-reduce costs more than an early start gains
(docs/explanation/step-commit.md#gradient-reduction-in-ddp)."""
_LARGE_ELEMENTS = 1 << 14
"""Minimum number of elements of a gradient that is copied and weighted individually, as soon as it
is complete. Smaller gradients are processed together, which is faster."""


class Slot:
    """Location of one parameter's gradient in a bucket, and its progress in the current step."""

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        self.parameter = parameter
        self.view = view
        self.large = parameter.numel() >= _LARGE_ELEMENTS
        self.ready = False
        """True if the parameter's gradient in this backward pass is complete."""
        self.taken = False
        """True if the weighted gradient is in the bucket."""
        self.present = False
        """True if this rank has a gradient of the parameter."""
        self.summed = False
        """True if `.grad` already contains the sum across ranks."""

    def take(self, scale: float) -> None:
        """Stores `scale` times the gradient in the bucket."""
        grad = _dense(self.parameter)
        if grad is self.view:
            self.view.mul_(scale)
        else:
            torch.mul(grad, scale, out=self.view)
            self.parameter.grad = self.view
        self.taken = self.present = True


class Bucket:
    """Gradients that are sent together in one flat vector: [large gradients | small gradients | for
    each parameter, the number of ranks that have its gradient | additional data]."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        riding: int,
    ) -> None:
        parameters = sorted(parameters, key=lambda p: p.numel() < _LARGE_ELEMENTS)
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes) + riding, dtype=dtype, device=device)
        *views, self.presence, self.riding = self.flat.split([*sizes, len(sizes), riding])
        self.gradients, self.tail = self.flat[: sum(sizes)], self.flat[sum(sizes) :]
        self.slots = [
            Slot(p, _laid_out_as(p, view)) for p, view in zip(parameters, views, strict=True)
        ]
        self._larges = sum(slot.large for slot in self.slots)
        self._smalls = self.gradients[sum(sizes[: self._larges]) :]
        self.awaited = len(self.slots)
        """Number of slots whose gradients are not complete."""

    def fill(self, factor: float, *, sums: bool) -> None:
        """Prepares this rank's contribution to the sum.

        Args:
            factor: this rank's fraction of the total weight. If it is 0, the rank contributes
                zeros, even if its gradients are NaN.
            sums: True if the loss is summed over the batch; gradients are then not multiplied by
                `factor`.
        """
        moved: list[Slot] = []
        scaled: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        for slot in self.slots:
            if slot.taken:
                continue
            grad, slot.taken = slot.parameter.grad, True
            slot.present = grad is not None
            if grad is None:
                absent.append(slot.view)
                continue
            if grad is not slot.view:
                moved.append(slot)
            if slot.summed or not sums:
                scaled.append(slot.view)
        if moved:
            torch._foreach_copy_(
                [slot.view for slot in moved], [_dense(slot.parameter) for slot in moved]
            )
            for slot in moved:
                slot.parameter.grad = slot.view
        if scaled and factor != 1.0:
            if (
                len(scaled) == len(self.slots) - self._larges
                and scaled[0] is self.slots[self._larges].view
            ):
                self._smalls.mul_(factor)  # the usual case: exactly the small gradients
            else:
                torch._foreach_mul_(scaled, factor)
        if absent:
            torch._foreach_zero_(absent)
        if factor == 0.0:
            self.gradients.zero_()
            self.presence.zero_()
        elif absent:
            self.presence.copy_(torch.tensor([float(slot.present) for slot in self.slots]))
        else:
            self.presence.fill_(1.0)

    def settle(self, factor: float, *, owed: bool = False) -> None:
        """Makes the sums available in `.grad`. If no rank has a gradient of a parameter, sets its
        `.grad` to None. `factor`: as in `fill`. `owed`: True if the sums may contain compression
        residuals of earlier steps, which are kept even if no rank has a gradient."""
        certain = factor != 0.0
        for slot in self.slots:
            certain = certain and slot.present
            slot.summed = True
        if not certain:
            for slot, count in zip(self.slots, self.presence.real.tolist(), strict=True):
                here = count > 0 or (owed and bool(slot.view.any()))
                slot.parameter.grad = slot.view if here else None

    def open(self) -> None:
        """Resets the bucket for the next backward pass."""
        self.awaited = len(self.slots)
        for slot in self.slots:
            slot.ready = slot.taken = False


def lay_out(
    parameters: Sequence[torch.Tensor],
    *,
    device: torch.device,
    cap_bytes: int,
    minimum_elements: int,
    riding: int,
    riding_dtype: torch.dtype,
) -> list[Bucket]:
    """Divides parameters into buckets. A bucket has at most about `cap_bytes`, unless a single
    parameter is larger, and at least `minimum_elements`, if there are enough parameters of the same
    dtype and device.

    `riding`: number of elements of additional data. They are part of the last bucket if that
    bucket's dtype can represent them exactly. Otherwise, they get a separate bucket on `device`.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for parameter in reversed(parameters):
        groups = kinds.setdefault((parameter.dtype, parameter.device), [[]])
        size, more = _bytes(groups[-1]), parameter.nbytes
        full = size and (size + more > cap_bytes or (len(groups) == 1 and size >= _FIRST_BYTES))
        if full and _elements(groups[-1]) >= minimum_elements:
            groups.append([])
        groups[-1].append(parameter)
    for groups in kinds.values():
        small = len(groups) == 2 and sum(map(_bytes, groups)) <= min(_ONE_BYTES, cap_bytes)
        if small or (len(groups) > 1 and _elements(groups[-1]) < minimum_elements):
            groups[-2].extend(groups.pop())
    planned = [
        (group, dtype, where) for (dtype, where), groups in kinds.items() for group in groups
    ]
    if not planned or planned[-1][1] not in (riding_dtype, torch.float64):
        planned.append(([], riding_dtype, device))
    last = len(planned) - 1
    return [
        Bucket(group, dtype, where, riding if i == last else 0)
        for i, (group, dtype, where) in enumerate(planned)
    ]


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's gradient, which must not be None, as a dense tensor."""
    grad = parameter.grad
    assert grad is not None
    if grad.requires_grad:
        grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.nbytes for p in parameters)


def _laid_out_as(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Returns `flat` with the shape of `parameter` and, if the parameter is dense, with its strides
    (channels_last). Otherwise autograd would copy the gradient, and torch's fused optimizers would
    pair the wrong elements (see `strided_like`)."""
    extent = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    if extent == parameter.numel():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)


class Flight:
    """Reductions in progress. May be used only on the training thread, or on the thread of a
    backward pass while the training thread waits."""

    def __init__(
        self, session: StrategySession, compression: GradientCompression | None = None
    ) -> None:
        self._session = session
        self._compression = compression
        self._works: list[tuple[Group, dist.Work]] = []
        self._reductions: list[tuple[Group, Reduction]] = []

    def send(self, step: Step, tensor: torch.Tensor) -> None:
        """Starts an in-place all-reduce of `tensor`. Does nothing if the step has failed."""
        if step.lost is not None:
            return
        with LosingStep(self._session):
            group = self._require_group()
            work = group.all_reduce_async(
                torch.view_as_real(tensor) if tensor.is_complex() else tensor
            )
            if work is not None:
                self._works.append((group, work))
            failpoint("reduction.under_way")

    def send_compressed(
        self,
        step: Step,
        bucket: torch.Tensor,
        kind: str,
        number: int,
        shapes: Sequence[Sequence[int]],
    ) -> None:
        """Starts a compressed in-place all-reduce of `bucket`; see `GradientCompression.start`.
        Does nothing if the step has failed."""
        compression = self._compression
        assert compression is not None
        if step.lost is not None:
            return
        with LosingStep(self._session):
            group = self._require_group()
            self._reductions.append((group, compression.start(group, bucket, kind, number, shapes)))

    def _require_group(self) -> Group:
        group = self._session.group
        if group is None:
            raise MembershipChanged("there is no group")
        return group

    def land(self, step: Step | None) -> bool:
        """Waits for all reductions that `step` has started. Returns True if the step has not
        failed, so that all sums are available."""
        if self._reductions:
            self._finish_compressed()
        works, self._works = self._works, []
        return await_reductions(self._session, works, step)

    def _finish_compressed(self) -> None:
        """Finishes the compressed reductions in the order in which they were started, which is the
        same on all ranks."""
        reductions, self._reductions = self._reductions, []
        with LosingStep(self._session) as finishing:
            for group, reduction in reductions:
                if not reduction.done:
                    with group.own_collectives("compressed all_reduce"):
                        reduction.advance()
            failpoint("compression.halfway")
            for group, reduction in reductions:
                if not reduction.done:
                    with group.own_collectives("compressed all_reduce"):
                        reduction.wait()
        if finishing.failed:
            for _, reduction in reductions:
                reduction.abandon()


# ------------------------------------------------------------------------------------- accumulation


_CHUNK_ELEMENTS = 8 << 20
_CONVERTED_BYTES = 4 << 20
"""Maximum size, in bytes, of gradients that are converted to a different dtype together during
accumulation."""


def add_times(added: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float) -> None:
    """Multiplies the second tensor of each pair by `factor` and adds the result to the first, in
    the first tensor's dtype. Uses few kernels on a device. The result is the same as with
    sequential additions."""
    at_once: list[tuple[torch.Tensor, torch.Tensor]] = []
    converted_bytes = 0
    for total, given in added:
        if given.layout is not torch.strided:
            total.add_(given.to(total.dtype), alpha=factor)
            continue
        at_once.append((total, given.to(total.dtype)))
        converted_bytes += total.nbytes if given.dtype != total.dtype else 0
        if converted_bytes >= _CONVERTED_BYTES:
            _add_at_once(at_once, factor)
            at_once, converted_bytes = [], 0
    _add_at_once(at_once, factor)


def _add_at_once(added: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float) -> None:
    if added:
        torch._foreach_add_(
            [total for total, _ in added], [given for _, given in added], alpha=factor
        )


class AccumulatedReduction:
    """Reduction for micro-batches: accumulates the gradients and buffer changes of all
    micro-batches, and reduces them once per step.

    Each micro-batch is weighted by its number of samples. The sum, one flat vector, is reduced
    after the inner loop, and `.grad` receives the mean over the global batch. The result does not
    depend on which rank computed which micro-batch, up to rounding. If the sums are float64
    (`deterministic`), the result is even bitwise the same: products of float32 gradients and
    integer weights are summed exactly, and the sum is rounded to float32 once. The exception is an
    element whose gradients differ by more than a factor of 2^20 between micro-batches. Everything
    runs on the training thread.
    """

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
        """`alone`: True to sum only this rank's own micro-batches, without a reduction across
        ranks."""
        self._buffers = buffers
        self._session = session
        self._config = config
        self._sums = config.loss_reduction == "sum"
        self._everything = list(module.parameters())
        self._sparse_ids = {
            id(m.weight)
            for m in module.modules()
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
        }
        self._parameters: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] = []
        self._compression = compression
        self._alone = alone
        self._flight = Flight(session, compression)
        self._apart: torch.Tensor | None = None
        """Buffer changes, if they need a wider dtype than the sum of gradients; otherwise None."""
        self._mean_loss = MeanLoss()
        self._open = False

    @property
    def open(self) -> bool:
        """True if values have been accumulated or reduced in this step."""
        return self._open

    def discard(self) -> None:
        """Discards the accumulated values, after waiting for reductions in progress."""
        self._flight.land(self._session.step)
        self._open = False

    def micro_batch_begins(self) -> None:
        """Begins a micro-batch: restores the committed buffers and clears the gradients."""
        if not self._open:
            self._start()
        else:
            self._buffers.put_back()
        for parameter in self._parameters:
            parameter.grad = None

    def add_loss(self, loss: SupportsFloat, weight: float) -> MeanLoss:
        """Adds the loss of a micro-batch. Returns the weighted mean of this rank's losses in the
        step so far."""
        self._mean_loss.add(loss, weight)
        return self._mean_loss

    def micro_batch_ends(self, weight: float) -> None:
        """Adds the micro-batch's gradients and buffer changes. A micro-batch of weight 0 is
        excluded, even if its gradients are NaN."""
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, (parameter, total) in enumerate(zip(self._parameters, self._grad_sums, strict=True)):
            grad, parameter.grad = parameter.grad, None
            if grad is not None and weight != 0:
                added.append((total, grad))
                self._counts[i] += 1
        # in float64, where float32 times an integer is exact
        add_times(added, 1.0 if self._sums else weight)
        if weight != 0:
            step = self._session.step
            self._buffer_changes.add_(
                self._buffers.changes(
                    self._buffer_changes,
                    weight,
                    weight=weight,
                    samples=step.samples if step is not None else 0,
                )
            )
            self._weight_sum += weight
        else:
            self._buffers.leave_out(self._buffer_changes)

    def finish(self) -> None:
        """Reduces the sums across all ranks and stores the mean gradients in `.grad`. On failure,
        marks the step as failed."""
        session = self._session
        step = session.step
        if step is None or step.lost is not None or step.phase is not StepPhase.OPEN:
            return
        if not self._open:
            self._start()  # a rank without micro-batches takes part with a weight of zero
        self._check_complete()
        self._presence.copy_(torch.tensor(self._counts))
        if session.elastic and not self._alone:
            self._send(step)
            if not self._flight.land(step):
                return
        # read together, because each read from a device waits for the device
        *presence, weight = torch.cat([self._presence, self._weight_sum]).tolist()
        divisor = 1.0 if self._sums else weight or 1.0
        for parameter, summed, count in zip(
            self._parameters, self._grad_sums, presence, strict=True
        ):
            # with compression, earlier steps may have left residuals
            here = count > 0 or (self._compression is not None and bool(summed.any()))
            # If the dtype is the same, this is a new tensor object that shares memory: users may
            # assign other memory to `.grad`.
            mean = summed.div_(divisor).to(parameter.dtype).detach() if here else None
            parameter.grad = (
                mean.to_sparse(1)
                if mean is not None and id(parameter) in self._sparse_ids
                else mean
            )
        if not self._alone:
            session.lifecycle.prepare_step()

    def _check_complete(self) -> None:
        """Raises ConfigurationError if a parameter that requires gradients was not included in the
        reduction."""
        known = {id(p) for p in self._parameters}
        unfrozen = next(
            (
                p
                for p in self._everything
                if p.requires_grad and p.grad is not None and id(p) not in known
            ),
            None,
        )
        if unfrozen is not None:
            raise ConfigurationError(
                f"a parameter of shape {tuple(unfrozen.shape)} got requires_grad=True between the "
                "micro-batches of a step, so its gradient is missing from the step's sum; set "
                "requires_grad before the step's first micro-batch"
            )

    def _send(self, step: Step) -> None:
        if self._compression is None:
            for chunk in self._flat.split(_CHUNK_ELEMENTS):
                self._flight.send(step, chunk)
            if self._apart is not None:
                self._flight.send(step, self._apart)
            return
        total_weight = step.share.total_weight if step.share is not None else None
        self._compression.weigh(1.0 if self._sums else total_weight or 1.0)
        first = end = 0
        for number, group in enumerate(self._groups):
            begin, end = end, end + sum(p.numel() for p in group)
            shapes = [memory_order(total) for total in self._grad_sums[first : first + len(group)]]
            first += len(group)
            self._flight.send_compressed(
                step, self._flat[begin:end], "micro-batches", number, shapes
            )
        self._flight.send(step, self._flat[end:])
        if self._apart is not None:
            self._flight.send(step, self._apart)

    def write_buffers(self) -> None:
        """Sets the buffers to the weighted mean over all micro-batches of all ranks. Keeps the
        committed values if all weights are 0."""
        self._buffers.apply(self._buffer_changes)
        self._open = False

    def _start(self) -> None:
        trained = [p for p in self._everything if p.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._parameters]:
            self._lay_out(trained)
        self._flat.zero_()
        self._buffer_changes.zero_()
        self._counts = [0] * len(self._parameters)
        self._mean_loss = MeanLoss()
        self._open = True

    def _lay_out(self, trained: list[nn.Parameter]) -> None:
        if any(p.is_complex() for p in trained):
            raise ConfigurationError(
                "complex parameters cannot be trained in micro-batches; leave out "
                "micro_batch_size= (in a Trainer, the accumulation of gradients)"
            )
        self._parameters = trained
        wide = self._config.deterministic or any(p.dtype == torch.float64 for p in trained)
        device, dtype = trained[0].device, torch.float64 if wide else torch.float32
        alike = self._buffers.dtype in (dtype, torch.float32)
        sizes = [*(p.numel() for p in trained), self._buffers.size if alike else 0, len(trained), 1]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        *sums, self._buffer_changes, self._presence, self._weight_sum = self._flat.split(sizes)
        self._apart = (
            None
            if alike
            else torch.zeros(self._buffers.size, dtype=self._buffers.dtype, device=device)
        )
        if self._apart is not None:
            self._buffer_changes = self._apart
        self._grad_sums = [_laid_out_as(p, total) for total, p in zip(sums, trained, strict=True)]
        if self._compression is not None:
            check_floating(self._compression.compressor.name, trained)
            # units of compression: complete parameters, in float32
            self._groups = in_buckets(
                trained, lambda parameter: 4 * parameter.numel(), self._config.bucket_cap_mb << 20
            )
            places = {id(p): place for place, p in enumerate(self._everything)}
            layout = [[places[id(p)] for p in group] for group in self._groups]
            self._compression.laid_out(
                "micro-batches", layout, [sum(p.numel() for p in group) for group in self._groups]
            )
