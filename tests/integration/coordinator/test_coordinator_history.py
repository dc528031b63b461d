"""The coordinator is killed repeatedly while members join, die and reconnect. Then the history of
all that they received is checked.

No two generations have the same number, no member receives decreasing numbers, and in the end all
live members agree.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable

from shoal_common.clients import CoordinatorClient
from shoal_common.errors import PreconditionError, UnavailableError
from shoal_common.redis import EmbeddedRedis
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator, Job, Member, create_job, eventually

ROUNDS = 3
WORKERS = 4


class Worker(threading.Thread):
    """The life of a process: it joins, reports ready, accepts generations, reconnects, and starts
    again under a new id after an eviction."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._number = number
        self._stop_requested = threading.Event()
        self._die = threading.Event()
        self.history: list[pb.Generation] = []
        """Generations that the current incarnation received."""
        self.incarnations: list[list[pb.Generation]] = []
        """Generations that each incarnation received."""

    def run(self) -> None:
        name = self._reborn()
        while not self._stop_requested.is_set():
            last = self.history[-1].number if self.history else 0
            member = Member(
                self._job, name, host=f"h{self._number % 2}", index=self._number, last=last
            )
            self._live(member)
            member.kill()
            if self._die.is_set() or isinstance(member.error, PreconditionError):
                self._die.clear()
                name = self._reborn()
            else:
                assert member.error is None or isinstance(member.error, UnavailableError), (
                    member.error
                )
                time.sleep(random.uniform(0.01, 0.05))  # a reconnecting member backs off

    def kill(self) -> None:
        self._die.set()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(60)
        assert not self.is_alive()

    def _reborn(self) -> str:
        self.history = []
        self.incarnations.append(self.history)
        return uuid.uuid4().hex

    def _live(self, member: Member) -> None:
        member.ready()
        read = 0
        while not (member.ended or self._die.is_set() or self._stop_requested.is_set()):
            for directive in member.seen[read:]:
                read += 1
                if directive.WhichOneof("directive") == "generation":
                    self.history.append(directive.generation)
            member.beat(self.history[-1].number if self.history else 0)
            time.sleep(0.01)  # the heartbeat interval


def test_no_generation_number_is_used_twice_despite_deaths(
    make_coordinator: Callable[..., Coordinator], own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(
            coordinator, client, smallest=2, largest=WORKERS, join_grace_ms=100, lease_ms=2000
        )
        workers = [Worker(job, number) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(ROUNDS):
                before = eventually(lambda: number_of(client, job), "a generation")
                random.choice(workers).kill()
                eventually(
                    lambda before=before: number_of(client, job) > before,
                    "a generation after a death",
                )
                random.choice(workers).kill()
                coordinator.kill()
                coordinator.start()
            eventually(lambda: agreed(job, workers), "all to agree")
        finally:
            for worker in workers:
                worker.stop()
    generations: defaultdict[int, set[bytes]] = defaultdict(set)
    for worker in workers:
        for history in worker.incarnations:
            numbers = [generation.number for generation in history]
            assert numbers == sorted(numbers), "nobody hears numbers fall"
            for generation in history:
                generations[generation.number].add(generation.SerializeToString(deterministic=True))
    assert len(generations) > ROUNDS
    assert [number for number, versions in generations.items() if len(versions) > 1] == []


def number_of(client: CoordinatorClient, job: Job) -> int:
    return client.get_job(job.job_id).generation.number


def agreed(job: Job, workers: list[Worker]) -> bool:
    newest = job.get().generation
    return len(newest.ranks) == WORKERS and all(
        worker.history and worker.history[-1].number == newest.number for worker in workers
    )
