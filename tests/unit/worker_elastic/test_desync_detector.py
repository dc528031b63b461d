"""The desync detector stops ranks that are waiting in different operations at the same place of the
run, and no others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shoal_worker.elastic.contract.step import (
    COMMIT,
    FORWARD,
    GRADIENTS,
    CollectiveTrace,
)
from shoal_worker.elastic.group.operations import Operations
from shoal_worker.elastic.group.waiting import Waiting
from shoal_worker.elastic.session.desync_detector import DesyncDetector
from shoal_worker.sharding.collectives import IssuedCollectives
from shoal_worker.store.errors import StoreUnavailableError
from shoal_worker.store.redis_store import RedisStore


class Notes:
    """The methods of a RedisStore that a group's notes use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.prefix = "store"
        self._lock = threading.Lock()

    def with_prefix(self, prefix: str) -> Notes:
        return self

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if not expected and key not in self.values:
                self.values[key] = desired.encode()
            return self.values.get(key, expected.encode())


class Rank:
    """One rank's session, as a detector sees it."""

    def __init__(self, number: int, notes: Notes) -> None:
        self.steps, self.operations, self.step = 4, Operations(), None
        self.waiting = Waiting(cast(RedisStore, notes))
        self.ended: str | None = None
        self.engine, self.log, self.passes_with = self, [4], ""
        self.trace = CollectiveTrace()
        self.group = SimpleNamespace(
            rank=number, broken=None, waiting=self.waiting, abort=self._abort
        )
        self.detector = DesyncDetector(cast(Any, self))

    def _abort(self, reason: str) -> None:
        self.ended = reason

    def issued(self) -> bytes:
        return json.dumps(self.log).encode()

    def compare_issued(self, other: Any) -> None:
        IssuedCollectives.compare(other, "zero3")

    def on_waiting(self, where: Any) -> None:
        self.waiting.where = where

    def steps_of(self, loader: str) -> None:
        self.step = cast(
            Any, SimpleNamespace(source=SimpleNamespace(name=loader), trace=self.trace)
        )


@contextmanager
def evaluating(rank: Rank) -> Iterator[None]:
    with rank.operations.in_progress("evaluate"), rank.waiting:
        yield


@pytest.fixture
def ranks() -> list[Rank]:
    notes = Notes()
    return [Rank(number, notes) for number in range(2)]


def look(*ranks: Rank, waited_s: float = 2.0) -> None:
    for rank in ranks:
        rank.detector.look(time.monotonic() + waited_s)


def test_errors_of_a_rank_in_an_operation_and_one_in_a_step_name_both_positions(
    ranks: list[Rank],
) -> None:
    one, other = ranks
    other.steps_of("train")
    with evaluating(one), other.waiting:
        look(one, other, waited_s=0.5)
        assert one.ended is other.ended is None
        look(one, other)
    assert (one.ended, other.ended) == (None, other.waiting.verdict)
    assert one.waiting.verdict == other.waiting.verdict
    assert other.ended is not None
    assert "rank 0 is in evaluate, rank 1 is in a step of loader 'train'" in other.ended
    assert "every_steps=" in other.ended


def test_ranks_that_issued_different_collectives_in_one_step_are_reported(
    ranks: list[Rank],
) -> None:
    """Ranks that have issued different collectives in one step are stopped. Here, one rank has
    caught an error in its forward pass and has started the pass again."""
    one, other = ranks
    for rank in ranks:
        rank.steps_of("train")
    one.log, other.log = [4, 0, 2, 1], [4, 0, 2, 0, 2]
    with one.waiting, other.waiting:
        look(one, other)
    assert other.ended is not None
    assert "in different orders" in other.ended
    assert one.waiting.verdict == other.ended


@pytest.mark.parametrize("log", [[4, 0, 2, 1, 3], [4, 0], [5, 2]])
def test_ranks_at_different_progress_keep_waiting(ranks: list[Rank], log: list[int]) -> None:
    """Ranks continue to wait if one of them has only issued more collectives, or is in a different
    step of the model."""
    one, other = ranks
    for rank in ranks:
        rank.steps_of("train")
    one.log, other.log = [4, 0, 2], log
    with one.waiting, other.waiting:
        look(one, other)
    assert one.ended is other.ended is other.waiting.verdict is None


def test_step_that_one_rank_ends_and_another_continues_is_reported(ranks: list[Rank]) -> None:
    """The ranks are stopped if rank 0 ends the step while rank 1 omits `optimizer.step()` and sums
    further gradients."""
    one, other = ranks
    for rank, last in zip(ranks, (COMMIT, GRADIENTS), strict=True):
        rank.steps_of("train")
        rank.trace.begin(1, 4, 0)
        rank.trace.add(GRADIENTS)
        rank.trace.add(last)
    with one.waiting, other.waiting:
        look(one, other)
    assert other.ended is not None
    assert "in step 5" in other.ended
    assert "rank 0 commits the step (optimizer.step()" in other.ended
    assert "rank 1 reduces gradients of a backward pass" in other.ended
    assert one.waiting.verdict == other.ended


def test_collectives_of_the_next_step_are_not_recorded_for_the_previous_one(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that continues while its detector is looking is not compared by the collectives of its
    next step."""
    one, other = ranks
    for rank in ranks:
        rank.steps_of("train")
        rank.trace.begin(1, 4)
        rank.trace.add(GRADIENTS)

    def continues() -> bytes:
        one.waiting.__exit__()
        one.trace.begin(1, 5)
        one.trace.add(FORWARD)
        return b"[4]"

    monkeypatch.setattr(one, "issued", continues)
    with other.waiting:
        one.waiting.__enter__()
        look(one, other)
    assert one.ended is other.ended is other.waiting.verdict is None


def test_ranks_at_different_points_of_one_collective_trace_keep_waiting(ranks: list[Rank]) -> None:
    one, other = ranks
    for rank in ranks:
        rank.steps_of("train")
        rank.trace.add(GRADIENTS, "model 0")
    other.trace.add(COMMIT, "model 0")
    with one.waiting, other.waiting:
        look(one, other)
    assert one.ended is other.ended is None


def test_forward_passes_are_compared_only_within_a_replica(ranks: list[Rank]) -> None:
    """Forward passes are compared only within a replica, because replicas may run different numbers
    of micro-batches."""
    third = Rank(2, cast(Any, ranks[0].waiting._notes))
    for rank, replica, traces in zip(
        [*ranks, third],
        "001",
        [[FORWARD, COMMIT], [FORWARD, FORWARD], [FORWARD, FORWARD, COMMIT]],
        strict=True,
    ):
        rank.steps_of("train")
        rank.passes_with = f"replica {replica}"
        for what in traces:
            rank.trace.add(what)
    one, other = ranks
    with third.waiting, one.waiting:
        look(third, one)
        assert third.ended is one.ended is None
        with other.waiting:
            look(other)
    assert other.ended is not None
    assert "rank 1 runs a forward pass of the model" in other.ended


def test_collective_trace_of_an_abandoned_step_continues_in_the_next_one() -> None:
    trace = CollectiveTrace()
    for place, expected in (((1, 4), 1), ((1, 4), 2), ((1, 5), 1), ((2, 5), 1)):
        trace.begin(*place)
        trace.add(GRADIENTS)
        assert trace.encode(passes=True)["issued"] == [0] * expected


def test_ranks_that_wait_in_the_same_call_or_at_different_places_keep_waiting(
    ranks: list[Rank],
) -> None:
    one, other = ranks
    with evaluating(one), evaluating(other):
        look(one, other)
    one.operations.keep(None)
    one.steps_of("train")
    with one.waiting, evaluating(other):  # `other` is behind
        look(one, other)
    assert one.ended is other.ended is one.waiting.verdict is other.waiting.verdict is None


def test_operation_after_collectives_of_its_step_is_not_compared(ranks: list[Rank]) -> None:
    one, other = ranks
    one.steps_of("train")
    other.steps_of("train")
    with one.waiting:
        look(one)
    with other.waiting:  # a short wait
        pass
    with evaluating(other):
        look(other)
    assert other.ended is other.waiting.verdict is None


def test_nothing_is_compared_at_a_step_boundary(ranks: list[Rank]) -> None:
    one, other = ranks
    with one.waiting, evaluating(other):
        look(one, other)
    assert one.ended is other.ended is None


def test_absent_store_changes_nothing(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: str) -> bytes:
        raise StoreUnavailableError("Redis did not answer")

    one, other = ranks
    monkeypatch.setattr(Notes, "compare_set", away)
    with evaluating(one):
        look(one, other)
    assert one.ended is one.waiting.verdict is None
