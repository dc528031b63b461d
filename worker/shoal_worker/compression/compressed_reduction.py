"""Sums buckets of gradients across ranks with compression, and keeps the compression state.

Engines weight the gradients and decide whether a step commits; this module does neither. In each
step, an engine calls `start` for each bucket, then `wait` for each reduction, and finally either
`commit` or `rollback`. May be used only on the training thread; collectives run on the backend's
threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError

from shoal_worker.backends.base import CommunicationBackend, Handle
from shoal_worker.compression.base import Chunks, Errand, GradientCompressor, Steps, scatter_sum
from shoal_worker.compression.memory import BucketMemory, Memory, is_finite
from shoal_worker.scratch import ScratchMemory


class Reduction:
    """The reduction of one bucket. All ranks must call `advance` and `wait` for the same reductions
    in the same order."""

    def __init__(self, steps: Steps, result: torch.Tensor) -> None:
        self._steps: Steps | None = steps
        self._handle: Handle | None = None
        self._result = result
        self._resume()

    def advance(self) -> None:
        """Waits for the collective in progress and issues the next one, if any, without waiting for
        it.

        Should be called for all buckets before `wait` is called for the first one, so that the
        buckets' second collectives overlap.

        Raises:
            MembershipChanged: the group failed. The bucket's contents are undefined, and the step
                must be aborted.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            if self._steps is not None:
                raise PreconditionError(
                    "this reduction has already failed; roll back and redo the step"
                )
            return
        handle.wait()
        self._resume()

    def wait(self) -> torch.Tensor:
        """Waits for the result and returns the bucket, which contains the sum across ranks. May be
        called more than once. Raises the same errors as `advance`."""
        while self._steps is not None:
            self.advance()
        return self._result

    def abandon(self) -> None:
        """Waits until no collective is in progress, and discards the result. Used after a
        collective of the step has failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(MembershipChanged):
                handle.wait()

    @property
    def done(self) -> bool:
        """True if the result is available."""
        return self._steps is None

    def _resume(self) -> None:
        assert self._steps is not None
        try:
            self._handle = next(self._steps)
        except StopIteration:
            self._steps = None


class CompressedReduction:
    """Sums buckets across ranks with one compressor. Each rank has one instance for each model.

    **NaN and infinity** are preserved: if any rank's bucket contains one, the result contains one
    on every rank (each compressor documents where). The residual of such a bucket does not change.
    **An aborted step, or a step that a GradScaler skips**, is rolled back. If peers have applied a
    step that failed on this rank, the step is committed, because the sum contains this rank's
    gradients. **Membership**: the residual of a lost rank is lost, which is a bounded error
    (memory.py). A joiner has no residual. A rank that becomes responsible for a different part of
    the bucket keeps its residuals. If there is only one rank, nothing is compressed, and the whole
    residual is added to the next gradient.
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._memory = Memory()
        self._scratch = ScratchMemory()

    def start(
        self,
        bucket: torch.Tensor,
        backend: CommunicationBackend | None,
        *,
        index: int,
        step: int,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> Reduction:
        """Starts replacing `bucket` with its sum across ranks. Must be called on all ranks in the
        same order, with the same arguments except for the bucket's values.

        Args:
            bucket: floating-point (sent as float32), contiguous, and already multiplied by this
                rank's weight. The caller must not use it until the result has arrived.
            backend: None if there is only one rank.
            index: index of the bucket, which identifies its residual.
            step: number of the current step. It determines the random numbers, so a repeated step
                draws the same numbers.
            shapes: shapes of the tensors in the bucket, in order; needed by PowerSGD.

        Raises:
            ConfigurationError: the bucket cannot be compressed.
            MembershipChanged: the group has failed.
        """
        values = _checked(bucket)
        memory = self._memory.bucket(index)
        if backend is None or backend.world_size == 1:
            return Reduction(self._pay(bucket, values, memory), bucket)
        errand = self._errand(backend, index, step, shapes)
        return Reduction(self._reduce(bucket, values, errand), bucket)

    def start_scatter(
        self,
        bucket: torch.Tensor,
        out: torch.Tensor,
        backend: CommunicationBackend,
        *,
        index: int,
        step: int,
    ) -> Reduction:
        """Starts a reduce-scatter, which writes this rank's part of the sum of `bucket` to `out`.
        The reduction's result is `out`.

        `bucket`: as many parts as there are ranks, each of the size of `out`. The sum is not
        compressed again, because it stays on this rank. For the other arguments, see `start`.

        Raises:
            ConfigurationError: the bucket cannot be compressed, sizes do not match, or the
                compressor is PowerSGD, which needs entire matrices.
            MembershipChanged: the group has failed.
        """
        if self.compressor.of_matrices:
            raise ConfigurationError(
                f"{self.compressor.name} does not support reduce-scatter, because it needs whole "
                "matrices on every rank; use another compressor"
            )
        if bucket.numel() != out.numel() * backend.world_size or not out.is_contiguous():
            raise ConfigurationError(
                f"reduce-scatter of {bucket.numel()} elements into {out.numel()} on "
                f"{backend.world_size} ranks: expected a contiguous output, with the elements "
                "divided evenly among the ranks"
            )
        return Reduction(
            self._scatter(_checked(bucket), out, self._errand(backend, index, step, None)), out
        )

    def _errand(
        self,
        backend: CommunicationBackend,
        index: int,
        step: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> Errand:
        memory = self._memory.bucket(index)
        return Errand(
            backend=backend,
            memory=memory,
            scratch=self._scratch,
            bucket=index,
            step=step,
            shapes=shapes,
            round=memory.next_round(),
        )

    def wire_bytes(
        self, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None = None
    ) -> int:
        """Returns the number of bytes that each rank sends for one bucket in `start`; see
        `GradientCompressor.wire_bytes`."""
        return self.compressor.wire_bytes(numel, world_size, shapes)

    def scatter_wire_bytes(self, numel: int, world_size: int) -> int:
        """Returns the number of bytes that each rank sends for one bucket of `numel` elements in
        `start_scatter`."""
        return (world_size - 1) * self.compressor.payload_bytes((numel // world_size,))

    # ---------------------------------------------------------------------------------------- state

    def commit(self) -> None:
        """Commits the step: its compression errors become the residuals, unless they are not
        finite."""
        self._memory.commit()

    def rollback(self) -> None:
        """Discards the step: restores the residuals and warm starts from before the step."""
        self._memory.rollback()

    def rescale(self, factor: float) -> None:
        """Multiplies the residuals by `factor`. Must be called when a GradScaler changes its scale,
        because residuals are scaled like the gradients."""
        self._memory.rescale(factor)

    def forget(self, first: int, end: int) -> None:
        """Drops the residuals of the buckets with indices from `first` to `end` - 1. Called when
        these buckets are about to change."""
        self._memory.forget(first, end)

    def resize(self, index: int, numel: int) -> None:
        """Adapts the residual of a bucket to `numel` elements. Only the padding at the bucket's end
        may have changed."""
        self._memory.resize(index, numel)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the committed residuals, which differ between ranks. The tensors are references,
        valid until the next commit."""
        return self._memory.state_dict(warm=False)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's residuals. `state`: result of `state_dict`; empty for a rank that did
        not exist when the state was saved.

        Raises:
            CorruptDataError (STATE_INVALID): `state` is not a result of `state_dict`; nothing is
                changed.
        """
        self._memory.load_state_dict(state, warm=False)

    def shared_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the committed warm starts, which are the same on all ranks and are sent to
        joiners with the model. The tensors are references, valid until the next commit."""
        return self._memory.state_dict(warm=True)

    def load_shared_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads warm starts. Raises the same errors as `load_state_dict`."""
        self._memory.load_state_dict(state, warm=True)

    # -------------------------------------------------------------------------------------- running

    def _reduce(self, bucket: torch.Tensor, values: torch.Tensor, errand: Errand) -> Steps:
        if values.numel():
            yield from self.compressor.exchange().reduce(self.compressor, values, errand)
        self._conclude(values, errand.memory)
        if values.data_ptr() != bucket.data_ptr():
            bucket.view(-1).copy_(values)

    def _scatter(self, values: torch.Tensor, out: torch.Tensor, errand: Errand) -> Steps:
        chunks = Chunks(values.numel(), out.numel(), errand.backend.world_size)
        total = (
            out.view(-1)
            if out.dtype is torch.float32
            else out.new_empty(out.numel(), dtype=torch.float32)
        )
        errand.scratch.give_back(
            *(yield from scatter_sum(self.compressor, values, total, chunks, errand))
        )
        # The non-finite value may be in another rank's part, so this rank's residual is checked
        # again when the step commits.
        if not is_finite(total):
            errand.memory.conclude(finite=False)
        if out.dtype is not torch.float32:
            out.view(-1).copy_(total)

    def _pay(self, bucket: torch.Tensor, values: torch.Tensor, memory: BucketMemory) -> Steps:
        """Adds the residual to the bucket. Used if there is only one rank, which compresses
        nothing."""
        yield from ()
        if self.compressor.error_feedback:
            given = memory.compensated_gradient(values, slice(0, 0))
            bucket.view(-1).copy_(given)
            given.zero_()
            self._conclude(bucket, memory)

    def _conclude(self, result: torch.Tensor, memory: BucketMemory) -> None:
        if self.compressor.error_feedback:
            memory.conclude(finite=is_finite(result))


def _checked(bucket: torch.Tensor) -> torch.Tensor:
    """Returns the bucket's values as float32, without a copy if possible."""
    if not bucket.is_floating_point() or not bucket.is_contiguous():
        raise ConfigurationError(
            f"cannot compress a bucket of {bucket.dtype} that is "
            f"{'' if bucket.is_contiguous() else 'not '}contiguous; expected floating-point and "
            "contiguous"
        )
    return bucket.detach().view(-1).float()
