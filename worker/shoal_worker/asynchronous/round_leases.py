"""Leases of rounds. The batches between two pushes are adjacent in the epoch and are leased
together (outer_steps.py).

To the coordinator and the servers, a round is one batch with its own key. A worker that takes over
a failed worker's round trains on the same batches and pushes under the same key. Each partition
therefore applies each batch only once (docs/explanation/parameter-servers.md#outer-steps).

This module does not access the model's values. Everything runs on the training thread, except for
`CoordinatorLeases`, which has threads of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_worker.elastic.contract.loader_interface import Leases
from shoal_worker.parameter_servers.coordination.leases import LeaseSource


@dataclass(kw_only=True, eq=False)
class _Dealt:
    """Batches of this worker's current round, in one epoch of one loader."""

    epoch: int
    round: range | None = None
    """The current round's batches, which are leased and not yet pushed."""
    coming: deque[int] = field(default_factory=deque)
    """Batches of the current round that the loader has not received yet."""


class RoundLeases:
    """Gives the loader the batches of a round one at a time, from leases of entire rounds: the
    underlying source treats each round as one batch."""

    def __init__(self, rounds: LeaseSource, *, steps: int) -> None:
        """`rounds`: source that leases rounds. `steps`: number of batches in a round; the last
        round of an epoch may have fewer."""
        self._rounds = rounds
        self._steps = steps
        self._dealt: dict[str, _Dealt] = {}

    def lease(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Leases batches as `LeaseSource.lease` does, possibly fewer than wanted: all of them
        belong to the same round until that round is pushed. If the script leaves the loop in the
        middle of a round, the entire round is given up, including the batch in progress, unless
        that batch is the round's last one."""
        dealt = self._dealt.get(loader)
        if dealt is None or dealt.epoch != epoch:
            dealt = self._dealt[loader] = _Dealt(epoch=epoch)
        # the round was pushed with the step of its last batch
        over = dealt.round is not None and dealt.round[-1] in finished
        pushed = (self._number(dealt.round),) if over and dealt.round is not None else ()
        rounds = -(-batches_in_epoch // self._steps)
        if want == 0:
            # The step in progress may still finish the round, if it is the round's last step.
            kept = (
                dealt.round
                if dealt.round is not None and not over and at_hand == dealt.round[-1]
                else None
            )
            dealt.round, dealt.coming = kept, deque()
            number = None if kept is None else self._number(kept)
            self._rounds.lease(
                loader=loader,
                epoch=epoch,
                batches_in_epoch=rounds,
                finished=pushed,
                want=0,
                at_hand=number,
            )
            return Leases(
                batches=(), epoch_done=False, retry_after_s=0.0, took_back_at_hand=kept is None
            )
        if dealt.round is None or over:
            answer = self._rounds.lease(
                loader=loader, epoch=epoch, batches_in_epoch=rounds, finished=pushed, want=1
            )
            dealt.round = None
            if not answer.batches:
                return answer
            begin = answer.batches[0] * self._steps
            dealt.round = range(begin, min(begin + self._steps, batches_in_epoch))
            dealt.coming = deque(dealt.round)
        batches = tuple(dealt.coming.popleft() for _ in range(min(want, len(dealt.coming))))
        return Leases(batches=batches, epoch_done=False, retry_after_s=0.0)

    def round_of(self, loader: str) -> range | None:
        """Returns the batches of the loader's current round. Throughout a round, this is the same
        object. Returns None if the loader has no current round, for example because its batches
        were returned."""
        dealt = self._dealt.get(loader)
        return None if dealt is None else dealt.round

    def at_hand(self, loader: str) -> int:
        """Returns the key for pushes of the loader's current round (`LeaseSource.at_hand`)."""
        return self._rounds.at_hand(loader)

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """Returns the latest epoch of the loader that any worker has begun
        (`LeaseSource.newest_epoch`)."""
        return self._rounds.newest_epoch(loader, epoch)

    def is_idle(self, loader: str) -> bool:
        """Returns whether this worker has no leased round of the loader (`LeaseSource.is_idle`)."""
        return self._rounds.is_idle(loader)

    def close(self) -> None:
        """Stops leasing (`LeaseSource.close`)."""
        self._rounds.close()

    def _number(self, batches: range) -> int:
        return batches.start // self._steps
