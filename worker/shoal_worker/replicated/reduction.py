"""Sums the gradients of one batch per rank during the backward pass, weighted by the numbers of
samples.

Each parameter's gradient is recorded when autograd has completed it. A bucket is sent as soon as it
has all its gradients. At the end of the backward pass, the remaining buckets are sent, with zeros
for unused parameters, and all reductions are awaited. Every rank therefore sends the same buckets
in the same order, regardless of which parameters its batch uses. This also holds for forward passes
that do not go through the wrapper's `forward`. If there was no backward pass, `optimizer.step()`
sends the buckets. If a step has several backward passes, each of them reduces its gradients; by
linearity the sum is correct. A failed collective is recorded and does not raise an error in
`backward()`.

torch's own reducer is not used, for two reasons. It cannot complete a pass with unused parameters
unless it searches the model's output for them. If ranks differ in their unused parameters, their
collectives do not match, and Gloo terminates the processes. Moreover, its buckets follow the order
of the first pass, which a joiner has not seen.

Buffer changes are part of the last bucket. With compression, only gradients are compressed: all
additional data in the buckets is sent separately, in one all-reduce.

Hooks run on the backward pass's thread, while the training thread waits. Everything else runs on
the training thread.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal_worker.elastic.contract.step import GRADIENTS
from shoal_worker.engine.state.hidden_parameters import run_last
from shoal_worker.engine.step.compressed import GradientCompression, check_floating, memory_order
from shoal_worker.engine.step.passes import half_a_pass, tensors_in
from shoal_worker.replicated.buckets import Bucket, Flight, Slot, lay_out
from shoal_worker.torch_internals import after_backward, in_backward

if TYPE_CHECKING:
    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.contract.loader_interface import Share
    from shoal_worker.elastic.contract.step import Step
    from shoal_worker.elastic.group.group import Group
    from shoal_worker.elastic.state.strategy_interface import StrategySession
    from shoal_worker.engine.step.buffers import CommittedBuffers


class OverlappedReduction:
    """Sums gradients bucket by bucket during the backward pass, in steps in which each rank has one
    batch."""

    def __init__(
        self,
        module: nn.Module,
        buffers: CommittedBuffers,
        session: StrategySession,
        config: ShardingConfiguration,
        compression: GradientCompression | None = None,
    ) -> None:
        self._module = module
        self._buffers = buffers
        self._session = session
        self._config = config
        self._sums = config.loss_reduction == "sum"
        self._automatic = config.auto_sync_gradients
        self._parameters = list(module.parameters())
        self._sparse_ids = {
            id(m.weight)
            for m in module.modules()
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
        }
        self._compression = compression
        self._flight = Flight(session, compression)
        self._hooks: list[RemovableHandle] = []
        self._completing: list[tuple[torch.Tensor, RemovableHandle]] = []
        """Parameters, each with the hook that adds its gradient to a bucket."""
        self._slots: list[tuple[Bucket | None, Slot] | None] = []
        """Slot of each parameter, with its bucket; the bucket is None if the gradient is sparse.
        The entry is None if the parameter is frozen."""
        self._trained: list[bool] = []
        self._places: list[torch.Tensor] = []
        """Parameters, followed by the views of buckets that store their gradients."""
        self._addresses: list[int] = []
        self._buffer_changes: torch.Tensor | None = None
        self._begun_in: Step | None = None
        """Step of a backward pass that has begun and not ended; None outside of passes."""
        self.pending = False
        """True if this step has gradients that have not been reduced yet."""
        self._lay_out()

    # --------------------------------------------------------------------------- the wrapper's part

    def prepare(self, step: Step) -> None:
        """Prepares a forward pass of `step`. Rebuilds the layout if parameters have been frozen,
        unfrozen or moved since the last pass. (torch drops the hooks of a parameter when its dtype
        changes, and may also have moved `.grad`, which is a view of the bucket.)"""
        if not in_backward():
            # otherwise a checkpointed block is being recomputed, in the middle of a backward pass
            self._refuse_half_a_pass()
        self._end_awaited = False
        if (
            self._wanted() != self._trained
            or [t.data_ptr() for t in self._places] != self._addresses
        ):
            if self.pending:
                self.synchronize(step)
            self._lay_out()
        run_last(self._completing)

    def follow(self, output: Any) -> None:
        """Detects the backward pass that belongs to the forward pass with this `output`. The
        reduction ends when that backward pass ends.

        The backward pass is considered to begin when the first gradient reaches the output, because
        backward passes may be nested (reentrant checkpointing). If the output contains no tensor,
        each nested pass ends with a separate reduction, which is also correct, but slower.
        """
        me = weakref.ref(self)

        def reached(_: torch.Tensor) -> None:
            reduction = me()
            if reduction is not None:
                reduction._await_end()

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which backward passes only accumulate gradients on this rank."""
        before, self._automatic = self._automatic, False
        try:
            yield
        finally:
            self._automatic = before

    def synchronize(self, step: Step) -> None:
        """Sends the remaining gradients and waits for all reductions. Afterwards, either the sums
        are in `.grad`, or the step is marked as failed."""
        self._refuse_half_a_pass()
        self._include_unfrozen(step)
        self._reduce(step)

    def check_complete(self) -> None:
        """Raises ConfigurationError if, in a step that is already reduced, a parameter was unfrozen
        during a backward pass: its gradient is not summed across ranks."""
        unfrozen = self._unfrozen()
        if unfrozen is not None and unfrozen.grad is not None:
            raise ConfigurationError(
                f"a parameter of shape {tuple(unfrozen.shape)} got requires_grad=True while "
                "gradients of this step were being summed, so its gradient contains only this "
                "rank's samples; set requires_grad before the step's passes"
            )

    @torch.no_grad()
    def _reduce(self, step: Step) -> None:
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next], step)
        for slot in self._sparse:
            self._send_sparse(slot, step)
        if self._flight.land(step):
            self._settle(step)
        else:
            for bucket in self._buckets:
                bucket.flat.zero_()
        self._forget_pass()

    def sum_buffers_again(self, group: Group, step: Step) -> None:
        """Sums the changes of all buffers again, in a separate all-reduce, because the script has
        changed buffers since the first sum. Raises MembershipChanged."""
        share = _share(step)
        factor = _factor(share)
        if factor == 0.0:
            changes = torch.zeros_like(self._changes)
            self._buffers.leave_out(changes)
        else:
            changes = self._buffers.changes(
                self._changes, factor, weight=share.weight, samples=step.samples
            )
        group.all_reduce(changes)
        self._buffer_changes = changes

    def write_buffers(self) -> None:
        """Sets the buffers to the committed values plus the changes of all ranks (see
        `CommittedBuffers.apply`). The result is the same on all ranks."""
        if self._buffer_changes is not None:
            self._buffers.apply(self._buffer_changes)
        self._buffer_changes = None

    def discard(self) -> None:
        """Discards an aborted step, after waiting for reductions in progress."""
        self._flight.land(self._session.step)
        self._forget_pass()
        self._buffer_changes = None
        for slot in [*self._sparse, *(slot for bucket in self._buckets for slot in bucket.slots)]:
            slot.summed = False

    # ------------------------------------------------------------------------------ a backward pass

    def _arrived(self, number: int) -> None:
        """Records that the gradient of parameter `number` is complete, in this or a nested backward
        pass."""
        step = self._begun_in or self._session.step
        if step is None or step.share is None or step.in_micro_batches:
            return
        sends = self._automatic and step.lost is None
        if sends and self._begun_in is None:
            self._include_unfrozen(step)
        self.pending = True
        found = self._slots[number]
        if sends and found is not None:
            self._completed(*found, step)

    def _completed(self, bucket: Bucket | None, slot: Slot, step: Step) -> None:
        """Adds a complete gradient to its bucket, and sends the next buckets for as long as they
        have all their gradients. `bucket`: None if the gradient is sparse."""
        self._begun_in = step
        if not self._end_awaited:
            self._await_end()
        if bucket is None:
            return
        if slot.ready:
            raise ConfigurationError(
                f"a parameter of shape {tuple(slot.parameter.shape)} got its gradient in parts, "
                "because it is used in several checkpoints with use_reentrant=True. Use "
                "checkpoint(..., use_reentrant=False), or create the model with "
                "auto_sync_gradients=False and call model.synchronize_gradients() after the "
                "backward pass"
            )
        slot.ready = True
        bucket.awaited -= 1
        if slot.large:
            slot.take(1.0 if self._sums else _factor(_share(step)))
        while self._next < len(self._buckets) and self._buckets[self._next].awaited == 0:
            self._send(self._buckets[self._next], step)

    def _before(self, slot: Slot) -> None:
        """Multiplies a gradient that is already summed across ranks by this rank's fraction of the
        weight, before autograd adds to it. The next reduction sums it across ranks again, and would
        otherwise multiply it by the number of ranks. Used with `loss_reduction="sum"`."""
        step = self._session.step
        if slot.summed and step is not None and step.share is not None:
            slot.summed = False
            if slot.parameter.grad is not None:
                slot.parameter.grad.mul_(_factor(step.share))

    def _await_end(self) -> None:
        if not self._end_awaited:
            self._end_awaited = True
            after_backward(self._pass_ended)

    def _pass_ended(self) -> None:
        self._end_awaited = False
        if self._begun_in is not None:
            self._reduce(self._begun_in)

    def _refuse_half_a_pass(self) -> None:
        if self._begun_in is not None:
            raise half_a_pass()

    def _forget_pass(self) -> None:
        self._next = 0
        self._begun_in = None
        self.pending = self._end_awaited = False
        for bucket in self._buckets:
            bucket.open()

    # -------------------------------------------------------------------------------------- sending

    def _send(self, bucket: Bucket, step: Step) -> None:
        share = _share(step)
        factor = _factor(share)
        if self._next == 0:
            step.issues(GRADIENTS)
        bucket.fill(factor, sums=self._sums)
        self._next += 1
        if self._next == len(self._buckets):
            if factor == 0.0:
                self._changes.zero_()
                self._buffers.leave_out(self._changes)
            elif self._changes.numel():
                self._changes.copy_(
                    self._buffers.changes(
                        self._changes, factor, weight=share.weight, samples=step.samples
                    )
                )
        if self._compression is None:
            self._flight.send(step, bucket.flat)
            return
        if self._next == 1:
            self._compression.weigh(1.0)
        if bucket.slots:
            self._flight.send_compressed(
                step,
                bucket.gradients,
                "buckets",
                self._next - 1,
                [memory_order(slot.view) for slot in bucket.slots],
            )
        if self._next == len(self._buckets):
            self._riding = torch.cat([each.tail.to(self._changes) for each in self._buckets])
            self._flight.send(step, self._riding)

    def _send_sparse(self, slot: Slot, step: Step) -> None:
        """Sums a sparse gradient in a separate all-reduce of all rows that at least one rank
        has."""
        parameter, factor = slot.parameter, _factor(_share(step))
        weighted = factor if not self._sums or slot.summed else float(factor > 0)
        grad = parameter.grad
        if grad is None or weighted == 0.0:
            rows = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
            grad = torch.sparse_coo_tensor(
                rows,
                parameter.new_zeros(0, *parameter.shape[1:]),
                parameter.shape,
                check_invariants=False,
            )
            weighted = 1.0
        parameter.grad = (grad.coalesce() * weighted).coalesce()
        self._flight.send(step, parameter.grad)

    def _settle(self, step: Step) -> None:
        factor = _factor(_share(step))
        if self._compression is not None:
            tails = [each.tail for each in self._buckets]
            torch._foreach_copy_(tails, list(self._riding.split([tail.numel() for tail in tails])))
        for bucket in self._buckets:
            bucket.settle(factor, owed=self._compression is not None)
        for slot in self._sparse:
            slot.summed = True
            if slot.parameter.grad is not None and slot.parameter.grad._nnz() == 0:
                slot.parameter.grad = None
        self._buffer_changes = self._changes
        self._session.lifecycle.prepare_step()

    # --------------------------------------------------------------------------------------- layout

    def _wanted(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]

    def _include_unfrozen(self, step: Step) -> None:
        """Rebuilds the layout if it lacks a parameter that has been unfrozen. `prepare` does this
        too, but it is called by the model's `forward`, which passes need not go through.

        Called before the first bucket is sent, either in a backward pass or in a step without one.
        All ranks therefore rebuild the layout at the same point, whichever gradient is complete
        first.
        """
        if self._unfrozen() is None:
            return
        if self.pending and any(
            known and not now for known, now in zip(self._trained, self._wanted(), strict=True)
        ):
            self._reduce(step)  # gradients of parameters that are now frozen
        self._lay_out()

    def _unfrozen(self) -> torch.Tensor | None:
        """Returns a parameter that requires a gradient but is not in a bucket; None if there is
        none."""
        wanted = self._wanted()
        if wanted == self._trained:
            return None
        return next(
            (
                p
                for p, now, known in zip(self._parameters, wanted, self._trained, strict=True)
                if now and not known
            ),
            None,
        )

    def _lay_out(self) -> None:
        for hook in self._hooks:
            hook.remove()
        summed = {id(slot.parameter) for _, slot in filter(None, self._slots) if slot.summed}
        self._trained = self._wanted()
        self._session.note_trained(self._trained)
        trained = [p for p in self._parameters if p.requires_grad]
        if not trained:
            raise ConfigurationError(
                "the model no longer has a parameter with requires_grad=True, so there is "
                "nothing to train"
            )
        dense = [p for p in trained if id(p) not in self._sparse_ids]
        self._sparse = [Slot(p, p) for p in trained if id(p) in self._sparse_ids]
        self._buckets = lay_out(
            dense,
            device=trained[0].device,
            cap_bytes=self._config.bucket_cap_mb << 20,
            minimum_elements=self._config.minimum_parameter_group_size,
            riding=self._buffers.size,
            riding_dtype=self._buffers.dtype,
        )
        if self._compression is not None:
            check_floating(self._compression.compressor.name, dense)
            places = {id(p): place for place, p in enumerate(self._parameters)}
            layout = [
                [places[id(slot.parameter)] for slot in bucket.slots] for bucket in self._buckets
            ]
            self._compression.laid_out(
                "buckets", layout, [bucket.gradients.numel() for bucket in self._buckets]
            )
        self._changes = self._buckets[-1].riding
        self._forget_pass()
        slots = [(bucket, slot) for bucket in self._buckets for slot in bucket.slots]
        self._places = [*self._parameters, *(slot.view for _, slot in slots)]
        self._addresses = [tensor.data_ptr() for tensor in self._places]
        known = {
            id(slot.parameter): (bucket, slot)
            for bucket, slot in (*slots, *((None, slot) for slot in self._sparse))
        }
        for _, slot in known.values():
            slot.summed = id(slot.parameter) in summed
        self._slots = [known.get(id(p)) for p in self._parameters]
        self._completing = []
        self._hooks = [hook for number in range(len(self._slots)) for hook in self._hook(number)]

    def _hook(self, number: int) -> Iterator[RemovableHandle]:
        """Registers the hooks of a parameter and yields their handles. The hooks belong to the
        user's parameters and may outlive this object. They do not reference their parameter:
        Python's garbage collector does not detect such a cycle, and the model would never be freed.

        A frozen parameter has a hook as well, in case it is unfrozen.
        """
        me, parameter, frozen = (
            weakref.ref(self),
            self._parameters[number],
            self._slots[number] is None,
        )

        def completed(_: torch.Tensor) -> None:
            reduction = me()
            if reduction is not None:
                reduction._arrived(number)

        def before(_: torch.Tensor) -> None:
            reduction = me()
            if reduction is not None and (found := reduction._slots[number]) is not None:
                reduction._before(found[1])

        if frozen and not (parameter.is_floating_point() or parameter.is_complex()):
            return  # integer parameters have no gradients, and torch accepts no hook
        parameter.requires_grad_(True)  # otherwise torch accepts no hook
        handle = parameter.register_post_accumulate_grad_hook(completed)
        self._completing.append((parameter, handle))
        yield handle
        if self._sums and not frozen:
            yield parameter.register_hook(before)
        parameter.requires_grad_(not frozen)


def _share(step: Step) -> Share:
    """Returns this rank's share of the step's global batch. Must be called only once the loader has
    handed out the step's batch."""
    assert step.share is not None
    return step.share


def _factor(share: Share) -> float:
    """Returns this rank's fraction of the step's total weight, from 0 to 1."""
    return share.weight / share.total_weight if share.total_weight else 0.0
