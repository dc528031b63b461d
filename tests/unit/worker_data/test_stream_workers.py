"""Data workers read streams ahead and yield the same items as a rank without them, even across
errors, deaths, resumes and epochs. No worker is left behind."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.data.streaming.sources import Sources
from shoal_worker.elastic.contract.loader_interface import Placement
from torch.utils.data import get_worker_info

from tests.unit.worker_data.killed_ranks import assert_workers_die_with
from tests.unit.worker_data.sources import Forgetful, Numbers, Seeking
from tests.unit.worker_data.test_stream_world import shards_of, shards_read_by
from tests.zygote.children import eventually

ALONE = Placement(generation=1, rank=0, world_size=1)


_of_others = set()


@pytest.fixture(autouse=True)
def workers_of_other_tests():
    """Records the data workers that exist before a test, because they do not belong to it."""
    _of_others.clear()
    _of_others.update(each.pid for each in multiprocessing.active_children())


def workers_of_this_test():
    """Returns the living data workers of the calling test. Other children, such as the zygote, are
    ignored."""
    return [
        psutil.Process(each.pid)
        for each in multiprocessing.active_children()
        if each.pid not in _of_others
    ]


def epochs(loader, session, n=2):
    """Returns the batches of all steps of `n` epochs."""
    taken = []
    for _ in loader.epochs(n):
        for step in loader.steps():
            taken.append([item for batch in step for item in batch.tolist()])
            loader.committed(session.placement)
    return taken


class Drawing(Numbers):
    """Draws from the global generators, as augmentations do."""

    def __iter__(self):
        for number in super().__iter__():
            yield torch.tensor(
                [
                    number,
                    int(torch.randint(1000, ())),
                    np.random.randint(1000),
                    random.randrange(1000),
                ]
            )


def drawing_shards():
    return shoal.ShardedStream(range(7), lambda shard: iter(Drawing(5 * shard, 3)))


@pytest.mark.parametrize(
    ("make", "workers", "options"),
    [
        (lambda: Drawing(23), 1, {"micro_batch_size": 3}),
        (lambda: Drawing(23), 1, {"micro_batch_size": 3, "drop_last": True}),
        (drawing_shards, 1, {"micro_batch_size": 3}),
        (drawing_shards, 3, {"micro_batch_size": 3}),
    ],
)
def test_data_workers_change_nothing_and_none_remains(session, make, workers, options):
    alone = epochs(shoal.ElasticDataLoader(make(), global_batch_size=8, **options), session)
    loader = shoal.ElasticDataLoader(
        make(), global_batch_size=8, num_workers=workers, name="workers", **options
    )
    assert epochs(loader, session) == alone
    assert len(alone) >= 4
    assert not workers_of_this_test()
    evaluation = shoal.ElasticDataLoader(
        make(), global_batch_size=8, num_workers=workers, train=False
    )
    expected = shoal.ElasticDataLoader(make(), global_batch_size=8, train=False)
    assert [batch.tolist() for batch in evaluation] == [batch.tolist() for batch in expected]
    assert not workers_of_this_test()


class Where(Numbers):
    """Yields the process that reads, and the values by which a stream would split itself."""

    def __iter__(self):
        return (
            torch.tensor([os.getpid(), int(get_worker_info() is None)]) for _ in super().__iter__()
        )


def shards_of_where():
    return shoal.ShardedStream(range(2), lambda shard: iter(Where(9)))


@pytest.mark.parametrize(
    ("make", "workers", "processes"), [(lambda: Where(9), 1, 1), (shards_of_where, 2, 2)]
)
def test_stream_is_read_in_other_processes_and_does_not_divide_itself_by_worker(
    session, make, workers, processes
):
    loader = shoal.ElasticDataLoader(
        make(), global_batch_size=8, micro_batch_size=4, num_workers=workers
    )
    read = {tuple(item) for step in epochs(loader, session, 1) for item in step}
    assert len({pid for pid, _ in read} - {os.getpid()}) == len(read) == processes
    assert all(whole for _, whole in read)


def test_a_data_worker_reads_ahead_while_the_rank_trains(session, tmp_path):
    class Noting(Numbers):
        def __iter__(self):
            for place, number in enumerate(super().__iter__()):
                (tmp_path / str(place)).touch()
                yield number

    loader = shoal.ElasticDataLoader(Noting(1000), global_batch_size=10, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    eventually((tmp_path / "20").exists, "the worker to read ahead: a step, one item, and a step")
    iterator.close()
    assert not (tmp_path / "40").exists(), "reading ahead is bounded"


def kill_one():
    worker = workers_of_this_test()[0]
    worker.send_signal(signal.SIGKILL)
    eventually(lambda: worker.status() == psutil.STATUS_ZOMBIE, "the worker's end")


@pytest.mark.parametrize("make", [lambda: Numbers(100, 1), lambda: shards_of((50, 50))])
def test_dead_data_worker_is_one_clear_error_and_the_loop_can_be_entered_again(session, make):
    loader = shoal.ElasticDataLoader(
        make(), global_batch_size=10, micro_batch_size=5, num_workers=1, shuffle=None
    )
    seen = []

    def loop(kills):
        for step in loader.steps():
            seen.extend(item for batch in step for item in batch.tolist())
            loader.committed(session.placement)
            if kills:
                kill_one()

    with pytest.raises(PreconditionError, match="SIGKILL") as raised:
        loop(kills=True)
    assert raised.value.reason == "DATA_WORKER_DIED"
    assert len(seen) == 10
    loop(kills=False)
    assert len(seen) == len(set(seen)) == 100
    assert not workers_of_this_test()


def test_error_in_the_source_is_raised_at_its_item_with_the_position(session):
    class Failing(Numbers):
        def __iter__(self):
            for number in super().__iter__():
                if number == 6:
                    raise OSError("the network")
                yield number

    loader, seen = shoal.ElasticDataLoader(Failing(10, 1), global_batch_size=2, num_workers=1), []

    def loop():
        for batch in loader:
            seen.extend(batch.tolist())
            loader.committed(session.placement)

    with pytest.raises(OSError, match="the network") as raised:
        loop()
    assert "Failing" not in str(raised.value)
    assert "in __iter__" in str(raised.value.__cause__)
    assert seen == [0, 1, 2, 3]
    assert not workers_of_this_test()


def test_an_item_that_cannot_be_sent_is_refused(session):
    class Lambdas(Numbers):
        def __iter__(self):
            return ((lambda number=number: number) for number in super().__iter__())

    loader = shoal.ElasticDataLoader(
        Lambdas(10), global_batch_size=2, num_workers=1, collate_fn=list
    )
    with pytest.raises(ConfigurationError, match="leave num_workers out"):
        next(iter(loader))


@pytest.mark.parametrize("kind", [Numbers, Seeking, Forgetful])
@pytest.mark.parametrize("sharded", [False, True])
def test_run_resumes_with_and_without_data_workers(make_rank, kind, sharded):
    def rank(workers, state=None):
        stream = shards_read_by(kind, (9, 0, 14, 20)) if sharded else kind(43)
        return make_rank(
            lambda: shoal.ElasticDataLoader(
                stream, global_batch_size=4, micro_batch_size=2, num_workers=workers
            ),
            ALONE,
            state,
        )

    alone = rank(0).rest_of_first_epoch()
    for first, then in ((0, 1), (1, 0), (2 if sharded else 1, 1)):
        begun = rank(first)
        taken = begun.rest_of_first_epoch(4)
        state = json.loads(json.dumps(begun.loader.state_dict()))
        begun.iterator.close()
        going_on = rank(then, state)
        assert taken + going_on.rest_of_first_epoch() == alone
        going_on.iterator.close()
    assert not workers_of_this_test()


def test_a_change_to_the_stream_between_epochs_reaches_its_data_worker(session):
    stream = Numbers(4, 1)
    loader = shoal.ElasticDataLoader(stream, global_batch_size=4, num_workers=1)
    seen = []
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch.tolist())
            loader.committed(session.placement)
        stream.step = 3
    assert seen == [[0, 1, 2, 3], [1, 0, 3, 2]], (
        "set_epoch is called before the second epoch, which has another order"
    )


def test_long_requests_and_replies_do_not_block_each_other():
    sources = Sources([lambda: iter(range(300_000))] * 3, num_workers=1, ahead=10)
    try:
        readers = [sources.open(number, key=(0, number), name="numbers") for number in range(3)]
        for reader in readers:
            reader.expect(12_000)
        long = sources.open(2, key=(0, 2), name="x" * 1_000_000)
        for reader in (*readers, long):
            reader.fill(12_000)
            assert reader.items([0, 11_999]) == [0, 11_999]
    finally:
        sources.close()


def test_tensors_arrive_unchanged_from_a_data_worker(session):
    tensors = [
        torch.arange(6).view(2, 3).t(),
        torch.randn(2, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0),
        torch.randn(3)[1:],
    ]
    loader = shoal.ElasticDataLoader(
        shoal.ShardedStream([0], lambda _: tensors),
        global_batch_size=5,
        micro_batch_size=5,
        num_workers=1,
        collate_fn=list,
    )
    steps = loader.steps()
    given = next(iter(next(steps)))
    assert [(each.dtype, each.tolist()) for each in given] == [
        (each.dtype, each.tolist()) for each in tensors
    ]
    for each in given:
        each.zero_()  # modifies the rank's own copy
    steps.close()


def test_a_step_whose_loop_was_left_says_so(session):
    for stream in (Numbers(9), shards_of((9,))):
        step = next(
            iter(
                shoal.ElasticDataLoader(
                    stream, global_batch_size=4, micro_batch_size=2, num_workers=1
                ).steps()
            )
        )
        with pytest.raises(PreconditionError, match="inside the loop"):
            next(iter(step))


KILLED = """
import time
from shoal_worker.data.streaming.sources import Sources
sources = Sources([lambda: iter(range(10))] * 2, num_workers=2, ahead=3)
for number in range(2):
    sources.open(number, key=(0,), name="numbers").fill(1)
print("ready", flush=True)
time.sleep(60)  # until it is killed
"""


def test_data_workers_die_with_a_killed_rank():
    assert_workers_die_with(KILLED)  # the workers would wait forever for requests


def test_data_workers_end_with_a_process_that_leaves_its_loop_open():
    script = KILLED.replace("time.sleep(60)", "pass")
    subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, timeout=60, check=True
    )
