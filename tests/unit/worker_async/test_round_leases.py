"""Leases of rounds: one batch of the coordinator consists of several batches of the loader."""

from __future__ import annotations

import functools

from shoal_worker.asynchronous.round_leases import RoundLeases
from shoal_worker.parameter_servers.coordination.leases import LocalLeases


def leases(*, steps: int = 3, batches: int = 7):
    source = RoundLeases(LocalLeases(), steps=steps)
    return source, functools.partial(source.lease, loader="a", epoch=0, batches_in_epoch=batches)


def test_batches_come_round_by_round_and_the_last_round_of_an_epoch_may_be_shorter() -> None:
    source, lease = leases()
    assert lease(finished=(), want=1).batches == (0,)
    assert source.round_of("a") == range(3)
    assert lease(finished=(0,), want=5).batches == (1, 2)
    assert lease(finished=(1,), want=5).batches == (), (
        "the next round begins only after this one is pushed"
    )
    assert lease(finished=(2,), want=2).batches == (3, 4)
    assert lease(finished=(3, 4), want=2).batches == (5,)
    assert lease(finished=(5,), want=2).batches == (6,)
    assert source.round_of("a") == range(6, 7)
    answer = lease(finished=(6,), want=2)
    assert (answer.batches, answer.epoch_done) == ((), True)


def test_repeated_acknowledgement_finishes_no_other_round() -> None:
    _, lease = leases()
    lease(finished=(), want=3)
    assert lease(finished=(0, 1, 2), want=1).batches == (3,)
    assert lease(finished=(0, 1, 2), want=1).batches == (4,)


def test_abandoned_round_is_returned_and_dealt_again_entirely() -> None:
    source, lease = leases()
    lease(finished=(), want=2)
    assert lease(finished=(0,), want=0, at_hand=1).took_back_at_hand
    assert source.round_of("a") is None
    assert lease(finished=(), want=9).batches == (0, 1, 2)


def test_round_whose_last_batch_is_current_may_still_be_finished() -> None:
    source, lease = leases()
    lease(finished=(), want=3)
    assert not lease(finished=(0, 1), want=0, at_hand=2).took_back_at_hand
    assert source.round_of("a") == range(3)
    assert lease(finished=(2,), want=1).batches == (3,)


def test_epochs_and_loaders_have_separate_rounds() -> None:
    source, lease = leases()
    lease(finished=(), want=1)
    assert source.lease(loader="b", epoch=0, batches_in_epoch=2, finished=(), want=9).batches == (
        0,
        1,
    )
    assert (source.round_of("a"), source.round_of("b")) == (range(3), range(2))
    assert source.lease(loader="a", epoch=1, batches_in_epoch=7, finished=(), want=1).batches == (
        0,
    )
