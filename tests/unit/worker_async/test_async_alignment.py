"""The iteration at which a worker begins on each server when it joins while others train in
step."""

from __future__ import annotations

from shoal_worker.parameter_servers.server_link import Position
from shoal_worker.parameter_servers.servers import aligned


def at(clock: int, **by_others: int) -> Position:
    return Position(clock=clock, by_others=by_others)


def test_worker_moves_to_the_furthest_of_its_places() -> None:
    # The second server counts from another origin. There, the worker was placed before an iteration
    # began, and on the first server after it.
    assert aligned([at(7, a=107), at(3, a=106), at(9, a=107)]) == [None, 4, None]


def test_alignment_without_participants_on_all_servers_does_nothing() -> None:
    assert aligned([]) == []
    assert aligned([at(7), at(8)]) == [None, None]
    assert aligned([at(7, a=1), at(8, b=5)]) == [None, None]


def test_servers_without_trained_tensors_are_ignored() -> None:
    assert aligned([None, at(7, a=2), None, at(8, a=3)]) == [None, 8, None, None]


def test_member_with_the_closest_places_counts_among_several() -> None:
    # a has rested between the two answers and was placed again.
    assert aligned([at(7, a=40, b=12), at(7, a=3, b=11)]) == [None, 8]
