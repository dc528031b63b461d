"""Outer steps: a worker takes several inner steps by itself, and pushes what they have moved as if
it were one gradient.

(Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
algorithm 1; Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, for workers
that do not wait for one another.)

A *round* is the inner steps between two pushes. Here is what becomes of it, and of the values: it
begins with a step, goes on, is pushed, or is undone where its batches go back. The batches
themselves are leased in `round_leases.py`, and how a gradient is pushed is the engine's business.
All of it runs on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from shoal_common.errors import PreconditionError

from shoal_worker.asynchronous.round_leases import RoundLeases
from shoal_worker.asynchronous.tensors import HostTensor, check_outer_gradients, publish
from shoal_worker.elastic.loader_interface import StepSource
from shoal_worker.elastic.strategy_interface import StrategySession

_log = logging.getLogger(__name__)


class OuterSteps:
    """The rounds of a worker, one after another: which step ends one, and when one goes back."""

    def __init__(
        self,
        session: StrategySession,
        leases: RoundLeases,
        tensors: Sequence[HostTensor],
        *,
        steps: int,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        push: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        """`leases`: of `steps` batches a round. `outer`: what the servers run. `push`: ends an
        iteration with these gradients, by the tensors' names; with none it pushes nothing."""
        self._session = session
        self._leases = leases
        self._tensors = tuple(tensors)
        self._inner, self._outer = inner, outer
        self._push = push
        self._round = Round([tensor for tensor in tensors if tensor.trained], steps=steps)

    @property
    def steps(self) -> int:
        """Inner steps since the last push."""
        return self._round.steps

    def step_begins(self, source: StepSource | None) -> None:
        """Raises as `Round.check_source`."""
        self._round.check_source(source)

    def take(self, *, usable: bool) -> None:
        """Takes an inner step, and pushes the round with its last one. Again after a push that
        failed: then the round is pushed, and no step is taken. `usable` False: a GradScaler found
        the gradients unusable, and the step changes nothing."""
        step = self._session.step
        source = step.source if step is not None else None
        left_out = False
        if not self._round.is_over:
            batches = self._leases.round_of(source.name) if source is not None else None
            if not self._round.take(self._inner, source, batches, usable=usable):
                if step is not None:
                    step.pushed = ()
                return
            self._round.end()
        else:
            left_out = all(tensor.parameter.grad is None for tensor in self._tensors)
        self._push_round(left_out=left_out)

    def push_now(self) -> None:
        """Ends the round where it is, with a push.

        Raises:
            PreconditionError: its batches are leased, and count as a whole.
        """
        if self._round.is_leased:
            raise PreconditionError(
                f"synchronize_parameters {self.steps} inner steps after the last push: the batches "
                "of a round count together, with its last step; call it where "
                "model.steps_in_round is 0"
            )
        if not self._round.is_over:
            self._round.end()
        self._push_round()

    def _push_round(self, *, left_out: bool = False) -> None:
        self._push({} if left_out else self._round.outer_gradients())
        self._round.settle()
        # The servers have stepped it: its schedulers need not warn that nobody has.
        self._outer._opt_called = True  # type: ignore[attr-defined]
        step = self._session.step
        if step is not None and step.source is not None:
            step.pushed = self._leases.round_of(step.source.name)

    def check_step(self) -> None:
        """Before a step is finished: where the round that it was in has gone back, the step counts
        for nothing.

        Raises:
            PreconditionError: the script was handed the batch again.
        """
        step = self._session.step
        if (
            step is None
            or step.source is None
            or self._leases.round_of(step.source.name) is not None
        ):
            return
        if not step.left:
            raise PreconditionError(
                "the round of inner steps that this batch is in went back to the coordinator when "
                "its loop was left; leave the loop again, and go on with the next epoch"
            )
        self._session.void_step(
            "its loop was left within a round of inner steps, whose batches are dealt again"
        )

    def has_leased(self, loader: str) -> bool:
        """A loop was left, or goes on with other batches: undoes what inner steps of a round have
        moved that went back with its loop. Returns whether there were some."""
        if not self._round.has_gone_back(loader, self._leases.round_of(loader)):
            return False
        if not self._round.is_over:
            _log.warning(
                "loader %r: its loop was left %d inner steps after the last push; they are "
                "undone, and their batches dealt again. Leave a loop where model.steps_in_round "
                "is 0",
                loader,
                self.steps,
            )
        self._round.undo()
        return True

    def close(self) -> None:
        """Nothing is pushed any more: says so where that loses steps."""
        if self.steps and not self._round.is_leased:
            _log.warning(
                "%d inner steps since the last push are not on the servers; behind a loop of your "
                "own call optimizer.synchronize_parameters()",
                self.steps,
            )


class Round:
    """The inner steps since the last push: the values that they began with, and how far they have
    moved."""

    def __init__(self, tensors: Sequence[HostTensor], *, steps: int) -> None:
        """`tensors`: those that are trained; `steps`: of a round. Takes host memory for a copy of
        them when the first round begins."""
        self._most = steps
        self.steps = 0
        """Inner steps taken; 0: the values are those that were pulled last."""
        self._tensors = tuple(tensors)
        self._kept: dict[str, torch.Tensor] = {}
        """By name, flat: the values at the round's begin. Once it is over, of those that were
        trained, the outer gradient."""
        self._trained: set[str] = set()
        """Names of the tensors that had a gradient in a step of this round."""
        self._source: StepSource | None = None
        self._batches: range | None = None
        """What `RoundLeases.round_of` gives; None: they are not leased."""
        self._outer: dict[str, torch.Tensor] | None = None

    @property
    def is_over(self) -> bool:
        """Its last step is taken: what is left is to push it."""
        return self._outer is not None

    @property
    def is_leased(self) -> bool:
        """Its batches are leased, and count together."""
        return self._source is not None

    def has_gone_back(self, loader: str, batches: range | None) -> bool:
        """Whether its batches were this loader's, which is in a round of others now, or in none."""
        return (
            self.steps > 0
            and self._source is not None
            and self._source.name == loader
            and self._batches is not batches
        )

    def check_source(self, source: StepSource | None) -> None:
        """A step of `source`'s begins.

        Raises:
            PreconditionError: the round has steps of another loader.
        """
        if self.steps and source is not self._source:
            raise PreconditionError(
                f"this step is of loader {source.name if source else ''!r}, but the round of inner "
                "steps that it falls into began with "
                f"{self._source.name if self._source else ''!r}, and its batches count together: "
                "use one loader, or take turns between loaders where model.steps_in_round is 0"
            )

    def take(
        self,
        optimizer: torch.optim.Optimizer,
        source: StepSource | None,
        batches: range | None,
        *,
        usable: bool,
    ) -> bool:
        """One inner step of a round of these batches; returns whether it was the last. `usable`
        False: a GradScaler found the gradients unusable, and it changes nothing."""
        if self.steps == 0:
            self._source, self._batches = source, batches
            for tensor in self._tensors:
                values = tensor.values()
                self._kept.setdefault(tensor.name, torch.empty_like(values)).copy_(values)
        if usable:
            self._trained.update(
                tensor.name for tensor in self._tensors if tensor.parameter.grad is not None
            )
            optimizer.step()
        self.steps += 1
        return self.steps >= (self._most if batches is None else len(batches))

    @torch.no_grad()
    def end(self) -> None:
        """The last inner step is taken: finds what to push, and puts the values back to the round's
        begin, from where the servers step.

        A tensor that no step had a gradient of is left out, as torch leaves it alone.
        """
        self._outer = {}
        for tensor in self._tensors:
            kept = self._kept[tensor.name]
            moved = kept - tensor.values()
            tensor.target().copy_(kept)
            if tensor.name in self._trained:
                self._outer[tensor.name] = kept.copy_(moved)
        publish(self._tensors)

    def outer_gradients(self) -> Mapping[str, torch.Tensor]:
        """What a round that is over is to push: the values at its begin less those at its end, flat
        and in host memory, by the tensors' names; the same each time.

        Raises:
            InvalidRequestError (GRADIENT_NOT_FINITE): NaN or infinite values, naming the parameter.
        """
        assert self._outer is not None, "it is over"
        check_outer_gradients(self._outer, steps=self.steps)
        return self._outer

    def settle(self) -> None:
        """It was pushed, or is left out: the next one begins with the next step."""
        self.steps, self._outer, self._source, self._batches = 0, None, None, None
        self._trained.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """Its batches are dealt again: puts the values back to its begin."""
        if not self.is_over:
            for tensor in self._tensors:
                tensor.target().copy_(self._kept[tensor.name])
            publish(self._tensors)
        self.settle()
