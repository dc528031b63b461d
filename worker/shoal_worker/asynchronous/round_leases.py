"""Leases of rounds: the batches between two pushes follow one another in the epoch, and are leased
together (outer_steps.py).

To the coordinator and to the servers a round is one batch. So it has a key of its own, and whoever
gets a dead worker's round trains on the same batches and pushes under the same key: each batch
counts once on each partition (docs/explanation/parameter-servers.md#outer-steps).

What a round does to the values is not here. All of it runs on the training thread, but for what
`CoordinatorLeases` does on its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_worker.asynchronous.leases import LeaseSource
from shoal_worker.elastic.loader_interface import Leases


@dataclass(kw_only=True, eq=False)
class _Dealt:
    """What this worker has of one epoch of one loader."""

    epoch: int
    round: range | None = None
    """The batches of the round that is leased and not pushed."""
    coming: deque[int] = field(default_factory=deque)
    """Those of them that the loader has not got yet."""


class RoundLeases:
    """A `LeaseSource` of batches over one of rounds: what that one takes for a batch is a round of
    them."""

    def __init__(self, rounds: LeaseSource, *, steps: int) -> None:
        """`steps`: batches in a round; an epoch's last round may have fewer."""
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
        """See `LeaseSource`. Batches are those of one round until it is pushed, and fewer than
        wanted where it has no more. Where the loop is left within a round, all of it goes back,
        with the batch at hand."""
        dealt = self._dealt.get(loader)
        if dealt is None or dealt.epoch != epoch:
            dealt = self._dealt[loader] = _Dealt(epoch=epoch)
        # the step of its last batch has pushed it
        over = dealt.round is not None and dealt.round[-1] in finished
        pushed = (self._number(dealt.round),) if over and dealt.round is not None else ()
        rounds = -(-batches_in_epoch // self._steps)
        if want == 0:
            # The step of the batch at hand may still end the round, if that is its last.
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
        """The batches of the round that `loader` is in, one object for each round; None: it is in
        none, or was taken out of it."""
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
