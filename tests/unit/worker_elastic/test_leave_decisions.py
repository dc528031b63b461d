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


def test_rank_that_was_not_asked_does_not_leave() -> None:
    assert who_leaves([vote("ab"), vote("ba")]) == leaves()


def test_ranks_with_copies_elsewhere_leave_together() -> None:
    assert who_leaves(
        [vote("ab", asked=True), vote("bc"), vote("cd", asked=True), vote("da")]
    ) == leaves(0, 2)


def test_one_of_two_holders_of_a_shards_only_copies_leaves_now() -> None:
    assert who_leaves([vote("ab", asked=True), vote("bc", asked=True), vote("ca")]) == leaves(0)


def test_rank_excluded_from_the_next_generation_leaves_first() -> None:
    assert who_leaves(
        [vote("ab", asked=True), vote("bc", asked=True, excluded=True), vote("ca")]
    ) == leaves(1)


def test_all_stop_if_the_only_copy_would_leave() -> None:
    assert who_leaves([vote("a", asked=True), vote("b")]) == leaves(stop=True)


def test_all_stop_if_the_excluded_ranks_have_the_only_copies() -> None:
    assert who_leaves(
        [vote("ab", asked=True, excluded=True), vote("ba", asked=True, excluded=True), vote("c")]
    ) == leaves(stop=True)


def test_the_only_copy_waits_for_a_joiner() -> None:
    assert who_leaves([vote("a", asked=True), vote("b", joiners=True)]) == leaves()


def test_no_rank_leaves_alone_when_the_job_stops() -> None:
    assert who_leaves([vote("ab", asked=True), vote("ba", stopping=True)]) == leaves()
