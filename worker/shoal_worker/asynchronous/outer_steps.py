"""Outer steps: a worker takes several inner steps alone and pushes their total change as if it were
one gradient.

(Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
algorithm 1; Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, for workers
that do not wait for one another.)

A *round* consists of the inner steps between two pushes. This module manages a round and the
parameters' values in it. A round begins with its first step. It is pushed after its last step or,
if its batches are returned to the coordinator, undone. `round_leases.py` leases the batches, and
the engine pushes the gradient. Everything runs on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from shoal_common.errors import PreconditionError

from shoal_worker.asynchronous.round_leases import RoundLeases
from shoal_worker.elastic.contract.loader_interface import StepSource
from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.parameter_servers.tensors import HostTensor, check_outer_gradients, publish

_log = logging.getLogger(__name__)


class OuterSteps:
    """Runs a worker's rounds, one after another. Decides which step ends a round, and when a round
    must be undone."""

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
        """Creates the object; the first step begins the first round.

        Args:
            leases: leases of rounds with `steps` batches each.
            outer: optimizer that the servers run.
            push: pushes the given gradients (tensor name -> gradient), if there are any, and
                finishes the iteration.
        """
        self._session = session
        self._leases = leases
        self._tensors = tuple(tensors)
        self._inner, self._outer = inner, outer
        self._push = push
        self._round = Round([tensor for tensor in tensors if tensor.trained], steps=steps)

    @property
    def steps(self) -> int:
        """Number of inner steps since the last push."""
        return self._round.steps

    def step_begins(self, source: StepSource | None) -> None:
        """Checks that a step of `source` may begin. Raises the same errors as
        `Round.check_source`."""
        self._round.check_source(source)

    def take(self, *, usable: bool) -> None:
        """Takes an inner step. After the round's last step, also pushes the round. If the push
        fails, the next call retries it without taking another step. `usable`: False if a GradScaler
        found the gradients unusable; the step then leaves the parameters unchanged."""
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
        """Pushes the round now, although it is not complete.

        Raises:
            PreconditionError: the batches of the round are leased, so they must commit together.
        """
        if self._round.is_leased:
            raise PreconditionError(
                f"synchronize_parameters was called {self.steps} inner steps after the last "
                "push, but all batches of a round must be committed together, by its last step; "
                "call it when model.steps_in_round is 0"
            )
        if not self._round.is_over:
            self._round.end()
        self._push_round()

    def _push_round(self, *, left_out: bool = False) -> None:
        self._push({} if left_out else self._round.outer_gradients())
        self._round.settle()
        # The servers have stepped the optimizer, so schedulers must not warn about a wrong order of
        # calls.
        self._outer._opt_called = True  # type: ignore[attr-defined]
        step = self._session.step
        if step is not None and step.source is not None:
            step.pushed = self._leases.round_of(step.source.name)

    def check_step(self) -> None:
        """Checks, before a step is finished, that its round is still valid. If the script has left
        the loop, the round's batches were returned to the coordinator; the step is then aborted.

        Raises:
            PreconditionError: the script has left the loop and has then entered it again, where it
                has received the batch again.
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
                "this round of inner steps cannot be finished, because its batches were given "
                "back to the coordinator when their loop was left; leave this loop, and continue "
                "with the next epoch"
            )
        self._session.lifecycle.abort_step(
            "its loop was left within a round of inner steps, whose batches are dealt again"
        )

    def has_leased(self, loader: str) -> bool:
        """Undoes the round if its batches have been returned to the coordinator: the script has
        left the loop, or the loop continues with batches of another round. Returns whether a round
        was undone. Must be called each time that batches have been leased."""
        if not self._round.has_gone_back(loader, self._leases.round_of(loader)):
            return False
        if not self._round.is_over:
            _log.warning(
                "the loop over loader %r was left %d inner steps after the last push; these "
                "steps are undone, and their batches are dealt again. Leave a loop only when "
                "model.steps_in_round is 0",
                loader,
                self.steps,
            )
        self._round.undo()
        return True

    def close(self) -> None:
        """Stops pushing when the run ends. Warns if inner steps that were not pushed are
        discarded."""
        if self.steps and not self._round.is_leased:
            _log.warning(
                "%d inner steps since the last push have not reached the servers; if the loop "
                "does not use a Shoal loader, call optimizer.synchronize_parameters() after it",
                self.steps,
            )


class Round:
    """The inner steps since the last push. Keeps the parameters' values from before the first of
    these steps."""

    def __init__(self, tensors: Sequence[HostTensor], *, steps: int) -> None:
        """`tensors`: trained tensors. `steps`: number of steps per round. The first step allocates
        host memory for a copy of the tensors."""
        self._most = steps
        self.steps = 0
        """Number of inner steps taken. 0: the current values are the values pulled last."""
        self._tensors = tuple(tensors)
        self._kept: dict[str, torch.Tensor] = {}
        """Name -> flat values of the tensor at the beginning of the round. Once the round has
        ended, the outer gradients replace the values of trained tensors."""
        self._trained: set[str] = set()
        """Names of the tensors that had a gradient in any step of this round."""
        self._source: StepSource | None = None
        self._batches: range | None = None
        """Batches of the round, from `RoundLeases.round_of`; None if the batches are not leased."""
        self._outer: dict[str, torch.Tensor] | None = None

    @property
    def is_over(self) -> bool:
        """True if the round's last step has been taken. Only the push then remains."""
        return self._outer is not None

    @property
    def is_leased(self) -> bool:
        """True if the round's batches are leased and therefore commit together."""
        return self._source is not None

    def has_gone_back(self, loader: str, batches: range | None) -> bool:
        """Returns whether the round's batches have been returned to the coordinator. `batches`: the
        current round of `loader`. If this round's batches come from `loader` but are not `batches`,
        they have been returned."""
        return (
            self.steps > 0
            and self._source is not None
            and self._source.name == loader
            and self._batches is not batches
        )

    def check_source(self, source: StepSource | None) -> None:
        """Checks that a step that takes its batch from `source` can be part of this round.

        Raises:
            PreconditionError: the round's earlier steps used a different loader.
        """
        if self.steps and source is not self._source:
            raise PreconditionError(
                f"this step uses loader {source.name if source else ''!r}, but its round of "
                f"inner steps began with loader {self._source.name if self._source else ''!r}, "
                "and all batches of a round must be committed together; use one loader, or "
                "switch loaders when model.steps_in_round is 0"
            )

    def take(
        self,
        optimizer: torch.optim.Optimizer,
        source: StepSource | None,
        batches: range | None,
        *,
        usable: bool,
    ) -> bool:
        """Takes one inner step of the round. `batches`: the round's batches. `usable`: False if a
        GradScaler found the gradients unusable; the step then leaves the parameters unchanged.
        Returns whether the step was the round's last one."""
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
        """Ends the round: computes the outer gradients and restores the values from the beginning
        of the round, because the servers apply their update to those values.

        A tensor that had no gradient in any step of the round is omitted, because torch's
        optimizers skip such tensors.
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
        """Returns the gradients to push for a finished round: initial minus final values, flat and
        in host memory, by tensor name. Repeated calls return the same tensors.

        Raises:
            InvalidRequestError (GRADIENT_NOT_FINITE): there are NaN or infinite values; the message
                names the parameter.
        """
        assert self._outer is not None, "it is over"
        check_outer_gradients(self._outer, steps=self.steps)
        return self._outer

    def settle(self) -> None:
        """Discards the round after it has been pushed or skipped. The next round begins with the
        next step."""
        self.steps, self._outer, self._source, self._batches = 0, None, None, None
        self._trained.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """Discards the round and restores the values from its beginning. Its batches will be leased
        again."""
        if not self.is_over:
            for tensor in self._tensors:
                tensor.target().copy_(self._kept[tensor.name])
            publish(self._tensors)
        self.settle()
