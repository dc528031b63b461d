"""What torch's own calls on a model do whose ranks hold parts of it: they are right, or raise and say what to call instead.

Most of that is in the parameters themselves, which are what torch looks at (`engine/elsewhere.py`). Here are the calls on the whole
model. docs/torch-calls.md has the table.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from shoal_common.errors import PreconditionError
from torch import nn

from shoal_worker.engine.elsewhere import Whereabouts, is_hidden
from shoal_worker.strategies.base import ShardedModel


class TorchCalls(ShardedModel):
    """A model some of whose parameters need not be on this rank."""

    _whereabouts: Whereabouts

    @abc.abstractmethod
    def has_values(self) -> bool:
        """See `Replica`."""

    @abc.abstractmethod
    def _drop_gradients(self) -> None:
        """There are no gradients here, of the step in progress or of the one before."""

    @abc.abstractmethod
    def skip(self) -> None:
        """The step is closed, but nothing is to be updated."""

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `optimizer.zero_grad()` does: those of the backward passes before it are void. What micro-batches have
        added up stays, as under ddp: a step's gradients are its own in any case. Every rank calls it."""
        step = self._session.step
        if not self.has_values() or (step is not None and step.in_micro_batches and step.control is None):
            return
        if self._whereabouts.pending and step is not None and step.control is not None:
            self.skip()
        self._drop_gradients()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own, where this rank has all values. Raises PreconditionError where it has not."""
        self._check_values_here("state_dict()", "model.full_state_dict() gives the whole, under the original module's names")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own, where this rank has all values; every rank loads the same. Raises PreconditionError where it has not."""
        self._check_values_here(
            "load_state_dict()", "model.load_full(state) takes what model.full_state_dict() gave, and model.load_model(path) reads a file"
        )
        return super().load_state_dict(*args, **kwargs)

    def _check_values_here(self, call: str, instead: str) -> None:
        if any(is_hidden(p) for p in self.module.parameters()):
            raise PreconditionError(
                f"model.{call} with strategy={self.strategy!r}: ranks hold parts of the parameters between passes. Called on every rank, "
                f"{instead}"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """What `to`, `half`, `float`, `cuda` and the like come down to. A device and dtype that all tensors have already is no change.

        Raises:
            PreconditionError: it would put the parameters elsewhere than where the ranks' shards are.
        """
        for kind in {(t.dtype, t.device) for t in (*self.module.parameters(), *self.module.buffers()) if not t.is_meta}:
            became = fn(torch.empty(0, dtype=kind[0], device=kind[1]))
            if (became.dtype, became.device) != kind:
                raise PreconditionError(
                    f"model.to({became.dtype}, {became.device}) of a model in {kind[0]} on {kind[1]}: with strategy={self.strategy!r} the "
                    "layout over the ranks is fixed; convert the module before as_distributed, or give param_dtype="
                )
        return self
