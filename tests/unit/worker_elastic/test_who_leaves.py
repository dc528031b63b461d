"""The ranks that leave at a step boundary: none takes the only copy of anything with it."""

from __future__ import annotations

from shoal_worker.elastic.recovery.step_boundaries import BoundaryMessage, WhoLeaves, who_leaves


def vote(
    holds: str,
    *,
    asked: bool = False,
    excluded: bool = False,
    stopping: bool = False,
    joiners: bool = False,
) -> BoundaryMessage:
    return BoundaryMessage(
        asked=asked, excluded=excluded, holds=tuple(holds), stopping=stopping, joiners=joiners
    )


def leaves(*now: int, stop: bool = False) -> WhoLeaves:
    return WhoLeaves(now=frozenset(now), stop=stop)


def test_nobody_leaves_who_was_not_asked() -> None:
    assert who_leaves([vote("ab"), vote("ba")]) == leaves()


def test_ranks_with_copies_elsewhere_leave_together() -> None:
    assert who_leaves(
        [vote("ab", asked=True), vote("bc"), vote("cd", asked=True), vote("da")]
    ) == leaves(0, 2)


def test_of_two_that_hold_the_only_copies_of_a_shard_one_leaves_now() -> None:
    assert who_leaves([vote("ab", asked=True), vote("bc", asked=True), vote("ca")]) == leaves(0)


def test_who_is_left_out_of_the_next_generation_goes_first() -> None:
    assert who_leaves(
        [vote("ab", asked=True), vote("bc", asked=True, excluded=True), vote("ca")]
    ) == leaves(1)


def test_all_stop_where_the_only_copy_would_leave() -> None:
    assert who_leaves([vote("a", asked=True), vote("b")]) == leaves(stop=True)


def test_all_stop_where_those_that_are_left_out_have_the_only_copies() -> None:
    assert who_leaves(
        [vote("ab", asked=True, excluded=True), vote("ba", asked=True, excluded=True), vote("c")]
    ) == leaves(stop=True)


def test_the_only_copy_waits_for_a_joiner() -> None:
    assert who_leaves([vote("a", asked=True), vote("b", joiners=True)]) == leaves()


def test_nobody_leaves_alone_when_the_job_stops() -> None:
    assert who_leaves([vote("ab", asked=True), vote("ba", stopping=True)]) == leaves()
