"""Sums gradients over the ranks of a step, weighted by the samples behind them, with the session's control word riding along.

Two ways, one for each form of the training loop:

- `OverlappedReduction`, one batch per rank and step: torch's own DDP reducer, so that buckets are reduced while the backward pass goes
  on. The reducer is built on a group of this rank alone, and a communication hook sends the buckets to whatever group the session has at
  the time. So a re-forming does not rebuild it, and a failed collective is noted instead of raised out of `backward()`.
- `AccumulatedReduction`, micro-batches: gradients, and the buffers each micro-batch left behind, are added up per micro-batch with its
  weight into one flat vector, which is reduced when the inner loop ends. The result does not depend on which rank computed what; in
  float64 (deterministic) not even bitwise: float32 gradients times whole-number weights sum exactly unless one element's gradients differ
  by more than 2^20 between micro-batches, and the sum is rounded to float32 once.

Both leave the mean gradient over the global batch in `.grad`. All of it runs on the training thread, except the completion of a bucket,
which torch calls on a thread of the process group while the training thread waits for it in `backward()`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from torch import nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from shoal_worker.elastic.group import brief
from shoal_worker.elastic.step import CONTROL_LENGTH
from shoal_worker.failpoints import failpoint

if TYPE_CHECKING:
    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.session import Session

_BUCKET_ELEMENTS = 8 << 20
_WARM_UP = object()


def averaged_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that a step changes and all ranks must agree on: floating-point and part of state_dict (running statistics).

    Others are constants (masks, position tables) or counters that advance alike on every rank.
    """
    persistent = {id(t) for t in module.state_dict(keep_vars=True).values()}
    return [b for b in module.buffers() if b.is_floating_point() and id(b) in persistent]


class _Attach(torch.autograd.Function):
    """Identity on `output` that makes its backward pass reach `control`."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
        ctx.zeros = torch.zeros_like(control)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.zeros


class _WithControl(nn.Module):
    """The user's module beside one small parameter whose "gradient" is the control word.

    So the control word lies in a bucket of its own kind's first and travels in an all-reduce that is sent anyway.
    """

    def __init__(self, inner: nn.Module, length: int, like: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        # Float32 at least: weights and flags must be exact.
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        self.control = nn.Parameter(torch.zeros(length, dtype=dtype, device=like.device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is _WARM_UP:
            return self._all_parameters()
        output = self.inner(*args, **kwargs)
        attach: Callable[..., Any] = _Attach.apply
        return pytree.tree_map_only(torch.Tensor, lambda t: attach(t, self.control) if t.requires_grad else t, output)

    def _all_parameters(self) -> torch.Tensor:
        """A value whose backward pass reaches the control word first, then the parameters from last to first."""
        total = torch.zeros((), device=self.control.device)
        for parameter in [p for p in self.inner.parameters() if p.requires_grad]:
            total = total + parameter.sum()
        return total + self.control.sum()


class OverlappedReduction:
    """One batch per rank: DDP's reducer, its buckets reduced by the session's group."""

    def __init__(self, module: nn.Module, session: Session, config: ShardingConfiguration) -> None:
        self._session = session
        self._sums = config.loss_reduction == "sum"
        self._buffers = averaged_buffers(module)
        self._sizes = [b.numel() for b in self._buffers]
        trained = [p for p in module.parameters() if p.requires_grad]
        self._wrapped = _WithControl(module, CONTROL_LENGTH + sum(self._sizes), trained[0])
        self._control_at: tuple[int, int] | None = None
        self._reduced_buffers: list[torch.Tensor] = []
        self._warming_up = True
        self._ddp = DistributedDataParallel(
            self._wrapped,
            process_group=_group_of_one(),
            init_sync=False,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        # A lambda: DDP compares annotations with classes, and finds strings where annotations are postponed.
        self._ddp.register_comm_hook(None, lambda state, bucket: self._reduce_bucket(bucket))
        self._fix_buckets(trained)

    def _fix_buckets(self, trained: Sequence[nn.Parameter]) -> None:
        """Makes the reducer settle its buckets now.

        It rebuilds them once, after the first backward pass, in the order in which gradients became ready. A joiner's first pass is
        another step than its peers', so their buckets could differ, and their collectives would not match (TRAPS.md). Here all ranks have
        the same first pass.
        """
        before = [p.grad for p in trained]
        self._ddp(_WARM_UP).backward()
        for parameter, grad in zip(trained, before, strict=True):
            parameter.grad = grad
        self._wrapped.control.grad = None
        self._warming_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        return self._ddp(*args, **kwargs)

    def write_buffers(self) -> None:
        """Replaces the buffers by their weighted mean over the ranks."""
        for buffer, reduced in zip(self._buffers, self._reduced_buffers, strict=False):
            buffer.copy_(reduced.view_as(buffer))
        self._reduced_buffers = []

    def _reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook. Never raises: a failure marks the step lost and gives zeros."""
        buffer = bucket.buffer()
        session = self._session
        step = session.step
        if self._warming_up or step is None:
            return _completed(buffer)
        share, group = step.share, session.group
        if step.lost is not None or share is None or group is None:
            return _completed(buffer.zero_())
        factor = share.weight / share.total_weight if share.total_weight else 0.0
        if factor == 0.0:
            buffer.zero_()  # a stand-in batch: its gradient may be anything, NaN among it
        elif not self._sums:
            buffer.mul_(factor)
        control = self._find_control(bucket)
        if control is not None:
            self._write_control(control, factor)
        try:
            work = group.all_reduce_async(buffer)
        except MembershipChanged as error:
            session.mark_lost(error)
            return _completed(buffer.zero_())
        if work is None:
            self._completed_bucket(control)
            return _completed(buffer)

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            try:
                future.value()
                failpoint("reduction.completed")
            except (RuntimeError, MembershipChanged) as error:
                reason = f"all_reduce failed: {brief(error)}"
                group.abort(reason)  # closes the sockets, so that peers stuck in it are freed as well
                session.mark_lost(MembershipChanged(reason))
                return buffer.zero_()
            self._completed_bucket(control)
            return buffer

        return work.get_future().then(arrived)

    def _find_control(self, bucket: GradBucket) -> torch.Tensor | None:
        """The control word's place in this bucket, if it is in this one."""
        where = self._control_at
        if where is None:
            for i, parameter in enumerate(bucket.parameters()):
                if parameter is self._wrapped.control:
                    where = self._control_at = (bucket.index(), i)
        if where is None or where[0] != bucket.index():
            return None
        return bucket.gradients()[where[1]]

    def _write_control(self, control: torch.Tensor, factor: float) -> None:
        word = self._session.control_word()
        control[:CONTROL_LENGTH] = torch.tensor(word, dtype=control.dtype)
        offset = CONTROL_LENGTH
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            if factor == 0.0:
                control[offset : offset + size] = 0
            else:
                torch.mul(buffer.view(-1), factor, out=control[offset : offset + size])
            offset += size

    def _completed_bucket(self, control: torch.Tensor | None) -> None:
        if control is None:
            return
        values = control.detach()
        self._session.take_control_word(values[:CONTROL_LENGTH].tolist())
        step = self._session.step
        weightless = step is None or step.share is None or not step.share.total_weight
        self._reduced_buffers = [] if weightless or not self._sizes else [t.clone() for t in values[CONTROL_LENGTH:].split(self._sizes)]


class AccumulatedReduction:
    """Micro-batches: gradients and buffers added up per micro-batch, reduced once per step."""

    def __init__(self, module: nn.Module, session: Session, config: ShardingConfiguration) -> None:
        self._session = session
        self._sums = config.loss_reduction == "sum"
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._buffers = averaged_buffers(module)
        self._counters = [b for b in module.buffers() if b.dtype == torch.int64]
        device = self._parameters[0].device
        wide = config.deterministic or any(p.dtype == torch.float64 for p in self._parameters)
        dtype = torch.float64 if wide else torch.float32
        grads, buffers = [p.numel() for p in self._parameters], [b.numel() for b in self._buffers]
        counters = [b.numel() for b in self._counters]
        sizes = [*grads, *buffers, *counters, len(grads), 1, CONTROL_LENGTH]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        pieces = iter(self._flat.split(sizes))
        self._grad_sums = [next(pieces).view_as(p) for p in self._parameters]
        self._buffer_sums = [next(pieces).view_as(b) for b in self._buffers]
        self._counter_sums = [next(pieces).view_as(b) for b in self._counters]
        self._presence, self._weight_sum, self._control = pieces
        self._committed: list[torch.Tensor] = []
        self._open = False

    @property
    def open(self) -> bool:
        """Something was added up, or reduced, in this step."""
        return self._open

    def reset(self) -> None:
        """Nothing is added up."""
        self._open = False

    def micro_batch_begins(self) -> None:
        """Each micro-batch starts from the committed buffers and from no gradient."""
        if not self._open:
            self._start()
        else:
            for buffer, committed in zip((*self._buffers, *self._counters), self._committed, strict=True):
                buffer.copy_(committed)
        for parameter in self._parameters:
            parameter.grad = None

    def add_gradients(self, weight: float) -> None:
        """Adds the gradients of a whole plain batch, and the buffers it left behind."""
        self._open = True
        self._flat.zero_()
        self._committed = [b.clone() for b in (*self._buffers, *self._counters)]
        self.micro_batch_ends(weight)

    def _start(self) -> None:
        self._flat.zero_()
        self._committed = [b.clone() for b in (*self._buffers, *self._counters)]
        self._open = True

    def micro_batch_ends(self, weight: float) -> None:
        """Adds the micro-batch's gradient and buffers. One that weighs nothing may hold anything, NaN among it: it is left out."""
        if weight == 0:
            for parameter in self._parameters:
                parameter.grad = None
            return
        for i, (parameter, total) in enumerate(zip(self._parameters, self._grad_sums, strict=True)):
            if parameter.grad is not None:
                # In float64, so that float32 times a whole number is exact.
                grad = parameter.grad.to(total.dtype)
                total.add_(grad, alpha=1.0 if self._sums else weight)
                self._presence[i] += 1
                parameter.grad = None
        for buffer, total in zip(self._buffers, self._buffer_sums, strict=True):
            total.add_(buffer.to(total.dtype), alpha=weight)
        for counter, before, total in zip(self._counters, self._committed[len(self._buffers) :], self._counter_sums, strict=True):
            total.add_((counter - before).to(total.dtype), alpha=weight)
        self._weight_sum += weight

    def finish(self) -> None:
        """Reduces over all ranks and leaves the mean gradient in `.grad`; or marks the step lost."""
        session = self._session
        step = session.step
        if step is None or step.lost is not None or step.control is not None:
            return
        if not self._open:
            self._start()  # a rank without micro-batches takes part with weight nought
        self._control.copy_(torch.tensor(session.control_word()))
        group = session.group
        if group is not None:
            try:
                works = [group.all_reduce_async(chunk) for chunk in self._flat.split(_BUCKET_ELEMENTS)]
                for work in works:
                    if work is not None:
                        group.wait(work)
                failpoint("reduction.completed")
            except MembershipChanged as error:
                session.mark_lost(error)
                return
        divisor = 1.0 if self._sums else float(self._weight_sum) or 1.0
        for parameter, summed, count in zip(self._parameters, self._grad_sums, self._presence.tolist(), strict=True):
            parameter.grad = (summed / divisor).to(parameter.dtype) if count > 0 else None
        session.take_control_word(self._control.tolist())

    def write_buffers(self) -> None:
        """Replaces the buffers by their weighted mean over all micro-batches; keeps them if all weighed nothing."""
        total_weight = float(self._weight_sum)
        if total_weight == 0:
            for buffer, before in zip((*self._buffers, *self._counters), self._committed, strict=True):
                buffer.copy_(before)
            return
        for buffer, summed in zip(self._buffers, self._buffer_sums, strict=True):
            buffer.copy_(summed / total_weight)
        for counter, before, summed in zip(self._counters, self._committed[len(self._buffers) :], self._counter_sums, strict=True):
            counter.copy_(before + (summed / total_weight).round().to(counter.dtype))


def _group_of_one() -> dist.ProcessGroup:
    """A process group of this rank alone, for the reducer to be built on. Nothing is ever sent over it."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=5))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def _completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
