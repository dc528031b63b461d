"""Outer steps: a worker takes several inner steps by itself, and pushes what they have moved as if it were one gradient.

(Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1; Liu et al., "Asynchronous
Local-SGD Training for Language Modeling", 2024, for workers that do not wait for one another.)

A *round* is the inner steps between two pushes. Its batches follow one another in the epoch, and are leased together: to the coordinator
and to the servers a round is one batch. So it has a key of its own, and whoever gets a dead worker's round trains on the same batches and
pushes under the same key: each batch counts once on each partition (docs/decisions/0202).

Here: the leases, and the values. When a round begins and ends is the engine's to say. All of it runs on the training thread, but for what
`CoordinatorLeases` does on its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from shoal_common.errors import PreconditionError

from shoal_worker.asynchronous.leases import LeaseSource
from shoal_worker.asynchronous.tensors import HostTensor, check_outer_gradients, publish
from shoal_worker.elastic.loader_interface import Leases, StepSource


@dataclass(kw_only=True, eq=False)
class _Dealt:
    """What this worker has of one epoch of one loader."""

    epoch: int
    round: range | None = None
    """The batches of the round that is leased and not pushed."""
    coming: deque[int] = field(default_factory=deque)
    """Those of them that the loader has not got yet."""


class RoundLeases:
    """A `LeaseSource` of batches over one of rounds: what that one takes for a batch is a round of them."""

    def __init__(self, rounds: LeaseSource, *, steps: int) -> None:
        """`steps`: batches in a round; an epoch's last round may have fewer."""
        self._rounds = rounds
        self._steps = steps
        self._dealt: dict[str, _Dealt] = {}

    def lease(
        self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int, at_hand: int | None = None
    ) -> Leases:
        """See `LeaseSource`. Batches are those of one round until it is pushed, and fewer than wanted where it has no more. Where the loop
        is left within a round, all of it goes back, with the batch at hand."""
        dealt = self._dealt.get(loader)
        if dealt is None or dealt.epoch != epoch:
            dealt = self._dealt[loader] = _Dealt(epoch=epoch)
        over = dealt.round is not None and dealt.round[-1] in finished  # the step of its last batch has pushed it
        pushed = (self._number(dealt.round),) if over and dealt.round is not None else ()
        rounds = -(-batches_in_epoch // self._steps)
        if want == 0:
            # The step of the batch at hand may still end the round, if that is its last.
            kept = dealt.round if dealt.round is not None and not over and at_hand == dealt.round[-1] else None
            dealt.round, dealt.coming = kept, deque()
            number = None if kept is None else self._number(kept)
            self._rounds.lease(loader=loader, epoch=epoch, batches_in_epoch=rounds, finished=pushed, want=0, at_hand=number)
            return Leases(batches=(), epoch_done=False, retry_after_s=0.0, took_back_at_hand=kept is None)
        if dealt.round is None or over:
            answer = self._rounds.lease(loader=loader, epoch=epoch, batches_in_epoch=rounds, finished=pushed, want=1)
            dealt.round = None
            if not answer.batches:
                return answer
            begin = answer.batches[0] * self._steps
            dealt.round = range(begin, min(begin + self._steps, batches_in_epoch))
            dealt.coming = deque(dealt.round)
        batches = tuple(dealt.coming.popleft() for _ in range(min(want, len(dealt.coming))))
        return Leases(batches=batches, epoch_done=False, retry_after_s=0.0)

    def round_of(self, loader: str) -> range | None:
        """The batches of the round that `loader` is in, one object for each round; None: it is in none, or was taken out of it."""
        dealt = self._dealt.get(loader)
        return None if dealt is None else dealt.round

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`: the key of the round."""
        return self._rounds.at_hand(loader)

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """See `LeaseSource`."""
        return self._rounds.newest_epoch(loader, epoch)

    def is_idle(self, loader: str) -> bool:
        """See `LeaseSource`."""
        return self._rounds.is_idle(loader)

    def close(self) -> None:
        """See `LeaseSource`."""
        self._rounds.close()

    def _number(self, batches: range) -> int:
        return batches.start // self._steps


class Round:
    """The inner steps since the last push: the values that they began with, and how far they have moved."""

    def __init__(self, tensors: Sequence[HostTensor], *, steps: int) -> None:
        """`tensors`: those that are trained; `steps`: of a round. Takes host memory for a copy of them when the first round begins."""
        self._most = steps
        self.steps = 0
        """Inner steps taken; 0: the values are those that were pulled last."""
        self._tensors = tuple(tensors)
        self._kept: dict[str, torch.Tensor] = {}
        """By name, flat: the values at the round's begin. Once it is over, of those that were trained, the outer gradient."""
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
        return self.steps > 0 and self._source is not None and self._source.name == loader and self._batches is not batches

    def check_source(self, source: StepSource | None) -> None:
        """A step of `source`'s begins.

        Raises:
            PreconditionError: the round has steps of another loader.
        """
        if self.steps and source is not self._source:
            raise PreconditionError(
                f"this step is of loader {source.name if source else ''!r}, but the round of inner steps that it falls into began with "
                f"{self._source.name if self._source else ''!r}, and its batches count together: use one loader, or take turns between "
                "loaders where model.steps_in_round is 0"
            )

    def take(self, optimizer: torch.optim.Optimizer, source: StepSource | None, batches: range | None, *, usable: bool) -> bool:
        """One inner step of a round of these batches; returns whether it was the last. `usable` False: a GradScaler found the gradients
        unusable, and it changes nothing."""
        if self.steps == 0:
            self._source, self._batches = source, batches
            for tensor in self._tensors:
                values = tensor.values()
                self._kept.setdefault(tensor.name, torch.empty_like(values)).copy_(values)
        if usable:
            self._trained.update(tensor.name for tensor in self._tensors if tensor.parameter.grad is not None)
            optimizer.step()
        self.steps += 1
        return self.steps >= (self._most if batches is None else len(batches))

    @torch.no_grad()
    def end(self) -> None:
        """The last inner step is taken: finds what to push, and puts the values back to the round's begin, from where the servers step.

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
        """What a round that is over is to push: the values at its begin less those at its end, flat and in host memory, by the tensors'
        names; the same each time.

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
