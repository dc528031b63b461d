"""Leases in a world of one."""

from __future__ import annotations

import functools

from shoal_worker.elastic.contract.loader_interface import Leases
from shoal_worker.parameter_servers.coordination.leases import LocalLeases


def ask(
    source: LocalLeases,
    *,
    epoch: int = 0,
    finished: tuple[int, ...] = (),
    want: int = 1,
    loader: str = "train",
) -> Leases:
    return source.lease(
        loader=loader, epoch=epoch, batches_in_epoch=3, finished=finished, want=want
    )


def test_an_epoch_is_done_when_its_last_batch_is_finished() -> None:
    leases = LocalLeases()
    assert ask(leases, want=2).batches == (0, 1)
    last = ask(leases, want=2, finished=(0, 1))
    assert (last.batches, last.epoch_done) == ((2,), False)
    after = ask(leases, finished=(2,))
    assert (after.batches, after.epoch_done) == ((), True)


def test_epochs_and_loaders_are_dealt_separately() -> None:
    leases = LocalLeases()
    ask(leases, want=3)
    assert ask(leases, epoch=1).batches == (0,)
    assert ask(leases, loader="other").batches == (0,)


def test_returned_batches_are_dealt_again() -> None:
    leases = LocalLeases()
    lease = functools.partial(leases.lease, loader="a", epoch=0, batches_in_epoch=4)
    assert lease(finished=(), want=3).batches == (0, 1, 2)
    assert not lease(finished=(0,), want=0).epoch_done
    assert lease(finished=(), want=3).batches == (1, 2, 3)
    assert lease(finished=(1, 2, 3), want=1).epoch_done


def test_acknowledging_twice_changes_nothing() -> None:
    leases = LocalLeases()
    ask(leases, want=3)
    ask(leases, finished=(0, 1))
    assert ask(leases, finished=(1, 2)).epoch_done
    assert ask(leases, want=0, finished=(2,)).epoch_done
