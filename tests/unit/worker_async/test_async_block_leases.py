"""A worker's blocks of leases, checked against the coordinator's ledger, with answers that are
late, lost or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shoal_common.errors import PreconditionError, UnavailableError
from shoal_coordinator.membership.model.batches import Epoch, Ledger
from shoal_worker.elastic.contract.loader_interface import Drained, StopTraining
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.leases import CoordinatorLeases

from tests.zygote.children import eventually

FIRST_KEY = 1 << 40


class FakeJob:
    """A job of one or more members whose coordinator consists of its ledgers."""

    def __init__(self, *, members: int = 1) -> None:
        self.ledgers: dict[tuple[str, int], Ledger] = {}
        self.members = members
        self.patience = timedelta(seconds=20)
        self.leaving = False
        self.stop: StopTraining = StopTraining("stopped")
        self.away = threading.Event()
        self.refusal: Exception | None = None
        self.released = threading.Event()
        """Answers are held back until this event is set."""
        self.released.set()
        self.waiting = threading.Event()
        """Set while an answer is held back."""
        self.requests: list[dict[str, Any]] = []

    def departure(self) -> StopTraining:
        return self.stop

    def retry_until(self, what: str, call: Callable[[], Any]) -> Any:
        return call()

    def lease_batches(self, **request: Any) -> Any:
        if self.away.is_set():
            raise UnavailableError("away")
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        ledger = self.ledgers.setdefault(
            (request["loader"], request["epoch"]),
            Ledger(Epoch(batches=request["batches_in_epoch"], first_key=FIRST_KEY)),
        )
        repeated = ledger.repeated("me", request["sequence"])
        assert repeated is None or request["sequence"] == repeated.sequence, (
            "sequence numbers increase"
        )
        ledger.finish("me", request["finished"])
        ledger.take_back("me", request["returned"])
        batches = (
            ledger.lease("me", request["want"], request["sequence"], members=self.members)
            if repeated is None
            else repeated.batches
        )
        if not self.released.is_set():
            self.waiting.set()
            assert self.released.wait(20)
        return SimpleNamespace(
            batches=batches,
            epoch_done=ledger.is_done,
            retry_after_ms=1,
            first_key=FIRST_KEY,
            newest_epoch=0,
        )

    def leased(self, loader: str = "a", epoch: int = 0) -> tuple[int, ...]:
        """Returns the batches that are leased to this worker according to the coordinator."""
        return tuple(self.ledgers[loader, epoch].close().leased.get("me", ()))


def train(seconds: float) -> None:
    """Simulates the computation of a step. It takes real time because leases depend on the pace of
    finished batches."""
    time.sleep(seconds)


def stay_away(seconds: float) -> None:
    """Waits long enough for the leases' thread to do something that it must not do."""
    time.sleep(seconds)


class Loop:
    """A loader's loop that takes one batch per call."""

    def __init__(
        self, leases: CoordinatorLeases, *, loader: str = "a", epoch: int = 0, batches: int = 1000
    ) -> None:
        self._leases = leases
        self._place = {"loader": loader, "epoch": epoch, "batches_in_epoch": batches}
        self.finished: tuple[int, ...] = ()
        self.batch: int | None = None

    def step(self) -> int | None:
        if self.batch is not None:
            self.finished = (self.batch,)
        answer = self._leases.lease(**self._place, finished=self.finished, want=1)
        self.finished = ()
        self.batch = answer.batches[0] if answer.batches else None
        return self.batch

    def leave(self, *, finish: bool = True) -> None:
        if finish and self.batch is not None:
            self.finished, self.batch = (self.batch,), None
        self._leases.lease(**self._place, finished=self.finished, want=0, at_hand=self.batch)
        self.finished = ()


@pytest.fixture
def job() -> FakeJob:
    return FakeJob()


@pytest.fixture
def make(job: FakeJob) -> Iterator[Callable[..., CoordinatorLeases]]:
    made: list[CoordinatorLeases] = []

    def one(ahead_s: float) -> CoordinatorLeases:
        made.append(CoordinatorLeases(cast(Job, job), ahead=timedelta(seconds=ahead_s)))
        return made[-1]

    yield one
    job.released.set()
    for leases in made:
        leases.close()


def test_steps_make_no_request_while_a_block_is_leased(job: FakeJob, make) -> None:
    loop = Loop(make(60.0))
    for number in range(4):
        assert loop.step() == number
    eventually(lambda: len(job.leased()) > 300, "a block")
    job.away.set()
    for number in range(4, 200):
        assert loop.step() == number
    job.away.clear()
    loop.leave()
    assert job.leased() == ()
    assert job.ledgers["a", 0].close().returned[0] == 200


def test_slower_worker_returns_batches_it_will_not_reach(job: FakeJob, make) -> None:
    loop = Loop(make(0.6))
    for _ in range(30):
        loop.step()
        train(0.001)
    eventually(lambda: len(job.leased()) > 60, "a block")
    for _ in range(12):
        loop.step()
        train(0.1)
    eventually(lambda: len(job.leased()) <= 25, f"few: {len(job.leased())}")


def test_stalled_worker_returns_batches_it_has_not_started(job: FakeJob, make) -> None:
    loop = Loop(make(0.3))
    for _ in range(10):
        loop.step()
        train(0.005)
    eventually(lambda: len(job.leased()) > 10, "a block")
    eventually(lambda: job.leased() == (loop.batch,), "the worker to keep only its current batch")
    stay_away(0.3)
    assert job.leased() == (loop.batch,)
    for _ in range(10):
        loop.step()
    eventually(lambda: len(job.leased()) > 5, "the next block")


def test_long_wait_for_the_next_batch_is_not_a_stall(job: FakeJob, make) -> None:
    """A worker that waited long for its next batch keeps that batch. Otherwise all waiting workers
    would pass the last batches around forever."""
    loop = Loop(make(0.1))
    loop.step()
    job.away.set()
    back = threading.Timer(0.5, job.away.clear)
    back.start()
    assert [loop.step() for _ in range(3)] == [1, 2, 3]
    assert not any(request["returned"] for request in job.requests)
    back.join()


def test_time_between_two_loops_is_not_a_step(job: FakeJob, make) -> None:
    loop = Loop(make(0.3))
    for _ in range(10):
        loop.step()
        train(0.005)
    loop.leave()
    stay_away(0.8)
    for _ in range(3):
        loop.step()
    eventually(lambda: len(job.leased()) > 20, "a block as large as before")


def test_loop_left_with_a_current_batch_keeps_only_that_one(job: FakeJob, make) -> None:
    leases = make(60.0)
    loop = Loop(leases)
    for _ in range(20):
        loop.step()
    loop.leave(finish=False)
    assert job.leased() == (19,)
    assert leases.at_hand("a") == FIRST_KEY + 19
    stay_away(0.3)
    assert job.leased() == (19,), "a loop that was left leases nothing ahead"
    assert loop.step() not in (None, 19)
    loop.leave()
    assert job.leased() == ()


def test_stopped_job_ends_the_wait_and_finished_batches_are_reported(job: FakeJob, make) -> None:
    """A loop's wait for a batch ends when the job is stopped, and the batch in the coordinator's
    late answer is returned."""
    loop = Loop(make(0.0))
    assert [loop.step() for _ in range(3)] == [0, 1, 2]
    job.released.clear()
    threading.Timer(0.2, lambda: setattr(job, "leaving", True)).start()
    with pytest.raises(StopTraining, match="stopped"):
        loop.step()
    loop.batch = None
    threading.Timer(0.2, job.released.set).start()
    loop.leave()
    assert job.leased() == ()
    assert job.ledgers["a", 0].close().returned == (3,)


def test_leaving_worker_that_cannot_report_it_leaves_after_some_seconds(
    job: FakeJob, make, monkeypatch
) -> None:
    monkeypatch.setattr("shoal_worker.parameter_servers.coordination.leases._LAST_WORD_S", 0.3)
    loop = Loop(make(0.0))
    loop.step()
    job.away.set()
    job.leaving, job.stop = True, Drained("SIGTERM")
    with pytest.raises(Drained):
        loop.step()
    loop.batch = None
    with pytest.raises(
        Exception,
        match=r"waited .* for the coordinator to answer a request for batches of loader 'a': away; "
        r"check that it is running",
    ):
        loop.leave()
    job.away.clear()
    eventually(lambda: job.leased() == (), "the coordinator to learn of the batches")


def test_epochs_and_alternating_loaders_have_separate_requests(job: FakeJob, make) -> None:
    leases = make(60.0)
    # in the second pass the loop is back in the first epoch, as after loading a state
    for _ in range(2):
        for epoch in range(2):
            loops = [Loop(leases, loader=loader, epoch=epoch, batches=6) for loader in "ab"]
            for _ in range(20):
                for loop in loops:
                    loop.step()
            for loop in loops:
                loop.leave()
    for ledger in job.ledgers.values():
        assert ledger.is_done


def test_answer_that_arrives_after_the_loop_was_left_leaks_nothing(job: FakeJob, make) -> None:
    leases = make(60.0)
    place: dict[str, Any] = {"loader": "a", "epoch": 0, "batches_in_epoch": 4000}
    held = leases.lease(**place, finished=(), want=4).batches
    job.released.clear()
    for batch in held[:3]:
        leases.lease(**place, finished=(batch,), want=1)
    eventually(job.waiting.is_set, "a request for a block")
    threading.Timer(0.2, job.released.set).start()
    leases.lease(**place, finished=(), want=0)
    assert job.leased() == ()
    Loop(leases, epoch=1).step()
    assert job.leased() == ()
    assert len(job.ledgers["a", 0].close().returned) == job.ledgers["a", 0].close().dealt - 3


def test_refusal_is_raised_even_with_batches_left(job: FakeJob, make) -> None:
    loop = Loop(make(0.2))
    for _ in range(5):
        loop.step()
        train(0.01)
    job.refusal = PreconditionError("another has its place", reason="MEMBER_REPLACED")

    def until_refused() -> None:
        for _ in range(1000):
            loop.step()
            train(0.01)

    with pytest.raises(PreconditionError, match="another has its place"):
        until_refused()


def test_worker_with_leased_batches_does_not_wait(job: FakeJob, make) -> None:
    """A loader that has data workers and still has batches does not wait for more."""
    leases = make(0.0)
    place: dict[str, Any] = {"loader": "a", "epoch": 0, "batches_in_epoch": 100}
    held = leases.lease(**place, finished=(), want=4).batches
    assert len(held) == 4
    job.away.set()
    for batch in held[:3]:
        leases.lease(**place, finished=(batch,), want=1)
        assert not leases.is_idle("a")
