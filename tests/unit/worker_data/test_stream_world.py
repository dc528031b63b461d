"""Whole runs of simulated ranks over streams, with deaths, joins and lost steps at random. Every
item counts exactly once, and the steps are those of one rank."""

import concurrent.futures
import functools
import json
import random
import threading

import pytest
import shoal
import torch
from shoal_worker.data import iteration
from shoal_worker.data.record import audit
from shoal_worker.elastic.contract.loader_interface import Placement

from tests.unit.worker_data.sources import Forgetful, Numbers, Seeking
from tests.unit.worker_data.test_data_world import EPOCHS, World

EVENTS = ["commit", "commit", "commit", "kill behind", "kill ahead", "fall behind", "lost", "join"]


class StreamWorld(World):
    """Ranks that read streams. If they read shards, each takes its steps on its own thread, and
    they meet where the session sums their numbers."""

    def __init__(self, directory, make_rank, make_stream, options):
        self._make_stream = make_stream
        self.steps = []
        super().__init__(directory, make_rank, 0, options)

    def _make_dataset(self):
        return self._make_stream()

    def _take_all(self):
        if len(self.ranks) == 1 or not isinstance(
            self.ranks[0].loader.dataset, shoal.ShardedStream
        ):
            for rank in self.ranks:
                rank.session.sums = None
            taken = super()._take_all()
        else:
            meeting = Meeting(len(self.ranks))
            for rank in self.ranks:
                rank.session.sums = meeting.sum
            with concurrent.futures.ThreadPoolExecutor(len(self.ranks)) as threads:
                taken = list(threads.map(self._take_in_thread, self.ranks))
        if taken[0] is not None:
            loader = self.ranks[0].loader
            weights = [rank.session.calls_of("assign")[-1][1].weight for rank in self.ranks]
            # weight 0 marks a placeholder
            items = [
                item for part, weight in zip(taken, weights, strict=True) if weight for item in part
            ]
            self.steps.append(((loader.epoch, loader.step), items))
        return taken

    def _take_in_thread(self, rank):
        _thread.session = rank.session
        return self._take(rank)


_thread = threading.local()


@pytest.fixture(autouse=True)
def session_of_thread(monkeypatch):
    """Makes a thread that takes a rank's step find the rank's session."""
    of_process = iteration.current_loader_session
    monkeypatch.setattr(
        iteration,
        "current_loader_session",
        lambda: getattr(_thread, "session", None) or of_process(),
    )


class Meeting:
    """An all-reduce of the ranks' contributions."""

    def __init__(self, world):
        self._barrier, self._lock, self._given = (
            threading.Barrier(world, timeout=20),
            threading.Lock(),
            [],
        )

    def sum(self, values):
        with self._lock:
            self._given.append(values)
        self._barrier.wait()
        total = [sum(each) for each in zip(*self._given, strict=True)]
        if self._barrier.wait() == 0:
            self._given = []
        self._barrier.wait()
        return total


def shards_of(lengths):
    def read(shard):
        yield from range(1000 * shard, 1000 * shard + lengths[shard])

    return shoal.ShardedStream(range(len(lengths)), read)


def shards_read_by(kind, lengths, read=None):
    """Returns shards whose readers are of this kind. `read` collects all items that they yield."""

    class Reader(kind):
        def __init__(self, shard):
            super().__init__(lengths[shard])
            self.shard = shard

        def __iter__(self):
            for item in super().__iter__():
                if read is not None:
                    read.append(item)
                yield item

        def order(self):
            return range(1000 * self.shard, 1000 * self.shard + self.n)

    return shoal.ShardedStream(range(len(lengths)), Reader)


def run(directory, make_rank, make_stream, options, events):
    world = StreamWorld(directory, make_rank, make_stream, options)
    world.run(iter(events))
    return dict(world.steps)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [Numbers, Seeking, Forgetful])
def test_stream_is_dealt_as_on_one_rank_despite_any_events(make_rank, tmp_path, kind, seed):
    draw = random.Random(seed)
    n, batch = draw.randint(1, 40), draw.randint(1, 12)
    options = {
        "global_batch_size": min(batch, n),
        "micro_batch_size": draw.choice([None, min(3, batch, n)]),
        "drop_last": draw.random() < 0.3,
    }
    alone = run(tmp_path / "alone", make_rank, lambda: kind(n, 7 if n % 7 else 1), options, [])
    events = [draw.choice(EVENTS) for _ in range(25)]
    steps = run(tmp_path / "faulty", make_rank, lambda: kind(n, 7 if n % 7 else 1), options, events)
    assert steps == alone
    whole = (
        n // options["global_batch_size"] * options["global_batch_size"]
        if options["drop_last"]
        else n
    )
    verdict = audit(tmp_path / "faulty")
    assert [
        (epoch.epoch, epoch.expected, epoch.once, epoch.repeated) for epoch in verdict.epochs
    ] == [(e, whole, whole, 0) for e in range(EPOCHS)]


KINDS_OF_SHARDS = [
    shards_of,
    functools.partial(shards_read_by, Seeking),
    functools.partial(shards_read_by, Forgetful),
]


@pytest.mark.parametrize("seed", range(60))
def test_shards_are_dealt_as_on_one_rank_despite_any_events(make_rank, tmp_path, seed):
    draw, shards_of = random.Random(seed), KINDS_OF_SHARDS[seed % 3]
    lengths = [draw.choice([0, 1, 3, 10, 25]) for _ in range(draw.randint(1, 8))] + [
        draw.randint(1, 9)
    ]
    micro = draw.randint(1, 4)
    options = {
        "global_batch_size": draw.randint(micro, 12),
        "micro_batch_size": micro,
        "shuffle": draw.random() < 0.5,
    }
    alone = run(tmp_path / "alone", make_rank, lambda: shards_of(lengths), options, [])
    steps = run(
        tmp_path / "faulty",
        make_rank,
        lambda: shards_of(lengths),
        options,
        [draw.choice(EVENTS) for _ in range(25)],
    )
    assert steps == alone
    for epoch in range(EPOCHS):
        items = [item for (of, _), step in sorted(steps.items()) if of == epoch for item in step]
        assert sorted(items) == [
            1000 * shard + i for shard, length in enumerate(lengths) for i in range(length)
        ]
    verdict = audit(tmp_path / "faulty")
    assert [(epoch.expected, epoch.once, epoch.repeated) for epoch in verdict.epochs] == [
        (sum(lengths), sum(lengths), 0)
    ] * EPOCHS


def test_each_shard_is_read_by_one_rank(make_rank, tmp_path):
    opened = []

    def read(shard):
        opened.append(shard)
        yield from range(10 * shard, 10 * shard + 10)

    options = {"global_batch_size": 4, "micro_batch_size": 1, "shuffle": False}
    world = StreamWorld(tmp_path, make_rank, lambda: shoal.ShardedStream(range(12), read), options)
    world._join(world.ranks[0].loader.state_dict())
    world._join(world.ranks[0].loader.state_dict())
    world.run(iter([]))
    compared = [0, 0, 0]  # reads of each rank of the first item of the first shard
    assert sorted(opened) == sorted([*range(12), *compared] * EPOCHS)


def test_random_draws_of_a_stream_are_the_same_after_skipping(make_rank, tmp_path):
    class Augmented(Numbers):
        def __iter__(self):
            return (
                number + 100 * int(torch.randint(1000, ())) + 10**6 * random.randrange(1000)
                for number in super().__iter__()
            )

    options = {"global_batch_size": 4}
    alone = run(tmp_path / "alone", make_rank, lambda: Augmented(20), options, [])
    faulty = run(
        tmp_path / "faulty",
        make_rank,
        lambda: Augmented(20),
        options,
        ["commit", "join", "commit", "kill behind", "join"],
    )
    assert faulty == alone


def test_stateful_source_is_sought_and_a_stateless_one_is_skipped_through(make_rank):
    read = {}
    for kind in (Numbers, Seeking, Forgetful):
        stream = kind(40)
        first = make_rank(
            lambda stream=stream: shoal.ElasticDataLoader(stream, global_batch_size=10),
            Placement(generation=1, rank=0, world_size=1),
        )
        for _ in range(3):
            first.take()
            first.commit()
        again = kind(40)
        resumed = make_rank(
            lambda again=again: shoal.ElasticDataLoader(again, global_batch_size=10),
            Placement(generation=2, rank=0, world_size=1),
            first.loader.state_dict(),
        )
        assert resumed.take() == stream.order()[30:]
        read[kind] = again.read
    # the copy of a stream that seeks counts its own reads
    assert read == {Numbers: 40, Seeking: 0, Forgetful: 40}


@pytest.mark.parametrize(("kind", "passed_over"), [(Seeking, 0), (Numbers, 12), (Forgetful, 12)])
@pytest.mark.parametrize("how", ["resume", "death", "join"])
def test_stateful_shard_reader_is_sought_and_a_stateless_one_is_skipped_through(
    make_rank, tmp_path, kind, passed_over, how, caplog
):
    read = []
    options = {"global_batch_size": 8, "micro_batch_size": 4, "shuffle": False}
    world = StreamWorld(tmp_path, make_rank, lambda: shards_read_by(kind, (40, 40), read), options)
    if how == "death":
        world._join(world.ranks[0].loader.state_dict())
    for _ in range(3):
        world._take_all()
        world._commit(world.ranks)
    read.clear()
    state = json.loads(json.dumps(world.ranks[0].loader.state_dict()))
    if how == "death":
        world._kill(world.ranks[0])
    elif how == "join":
        world._join(state)
    else:
        world._kill(world.ranks[0])
        world._join(state)
    taken = [sorted(items) for items in world._take_all()]
    assert sorted(item for part in taken for item in part) == [*range(12, 16), *range(1012, 1016)]
    # the item at the wrong position to which its state leads
    wasted = 1 if kind is Forgetful else 0
    # the first item of the epoch's first shard; in "death" both ranks have read it before
    compared = {"resume": 0, "death": 0, "join": 2}[how]
    # the items of the step and one ahead; a rank that stays has already read one of them
    one = 5 + passed_over + wasted
    assert len(read) == compared + (2 * one if how == "resume" else one + 4)
    assert ("led to a different item" in caplog.text) == (kind is Forgetful)


def test_state_too_long_to_send_each_step_is_reported_once_and_the_shard_is_skipped_through(
    make_rank, tmp_path, caplog
):
    class Long(Seeking):
        def state_dict(self):
            return {**super().state_dict(), "buffer": "x" * 100_000}

    options = {"global_batch_size": 4, "micro_batch_size": 4}
    events = ["commit", "fall behind", "join", "kill behind"]
    steps = run(
        tmp_path / "faulty", make_rank, lambda: shards_read_by(Long, (20, 20)), options, events
    )
    assert steps == run(
        tmp_path / "alone", make_rank, lambda: shards_read_by(Numbers, (20, 20)), options, []
    )
    assert caplog.text.count("so it is not sent") == 1
