"""A worker's record of its pushes and pulls after a server has reported its own state."""

from __future__ import annotations

from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker.parameter_servers.ledger import Ledger


def pushed(ledger: Ledger, *partitions: int) -> None:
    ledger.acknowledged(pb.PartitionResult(partition_id=each) for each in partitions)


def pulled(ledger: Ledger, version: int, *partitions: int) -> None:
    ledger.pulled(pb.PullHeader(partition_id=each, version=version) for each in partitions)


def reported(*, sequence: int, version: int, partition: int = 1) -> list[pb.PartitionVersion]:
    return [pb.PartitionVersion(partition_id=partition, sequence=sequence, version=version)]


def three_pushes() -> Ledger:
    """Returns a ledger with three acknowledged pushes of partitions 1 and 2. Version 4 of both was
    pulled."""
    ledger = Ledger([1, 2])
    for _ in range(3):
        pushed(ledger, 1, 2)
    pulled(ledger, 4, 1, 2)
    return ledger


def test_each_push_has_the_next_number_and_names_the_pulled_version() -> None:
    ledger = Ledger([1])
    assert ledger.next_push(1) == (1, 0)
    pushed(ledger, 1)
    pulled(ledger, 7, 1)
    assert ledger.next_push(1) == (2, 7)
    assert ledger.held(1) == 7


def test_server_that_lost_pushes_is_sent_their_numbers_again_and_its_values_are_pulled() -> None:
    ledger = three_pushes()
    assert ledger.rewind(reported(sequence=1, version=2)) == 2
    assert ledger.next_push(1) == (2, 2)
    assert (ledger.held(1), ledger.held(2)) == (0, 4)
    assert ledger.next_push(2) == (4, 4)


def test_pending_push_that_was_applied_is_repeated_under_its_number() -> None:
    ledger = three_pushes()
    assert ledger.rewind(reported(sequence=4, version=5)) == 0
    assert ledger.next_push(1) == (4, 4)
    assert (ledger.held(1), ledger.held(2)) == (4, 4)
    assert ledger.ahead(reported(sequence=4, version=5)) == {1}
    assert ledger.ahead(reported(sequence=3, version=4)) == frozenset()


def test_values_that_went_back_without_a_lost_push_of_this_worker_are_new() -> None:
    ledger = three_pushes()
    assert ledger.rewind(reported(sequence=3, version=3)) == 0
    assert ledger.held(1) == 0
    assert ledger.next_push(1) == (4, 3)


def test_server_without_values_is_initialized_before_the_next_gradient() -> None:
    ledger = Ledger([1])
    assert not ledger.has_values(1)
    pulled(ledger, 4, 1)
    ledger.rewind(reported(sequence=0, version=0))
    assert ledger.has_values(1)
    assert ledger.next_push(1) == (1, 4)


def test_push_is_in_doubt_until_it_is_acknowledged_or_looked_up() -> None:
    ledger = three_pushes()
    ledger.begun([1, 2], batch=7)
    pushed(ledger, 2)
    assert (ledger.doubt(1), ledger.doubt(2)) == (7, None)
    ledger.rewind(reported(sequence=4, version=5))
    assert ledger.doubt(1) == 7
    ledger.follow(reported(sequence=4, version=5))
    assert ledger.doubt(1) is None


def test_pushes_after_an_abandoned_batch_follow_what_the_server_applied() -> None:
    ledger = three_pushes()
    ledger.follow(reported(sequence=4, version=5))
    assert ledger.next_push(1) == (5, 4)
