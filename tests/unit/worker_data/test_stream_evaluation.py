"""A stream's batches are dealt for an evaluation so that each counts once, no matter which rank
dies, and each shard is read by as few ranks as possible."""

import functools
import itertools
import json
import random

import pytest
import shoal
from shoal_worker.elastic.session.evaluation import StreamedBatches

from tests.unit.worker_data.sources import Numbers
from tests.unit.worker_data.test_stream_world import shards_of


def batches_of(stream, size):
    return shoal.ElasticDataLoader(
        stream, global_batch_size=size, train=False, collate_fn=list
    ).evaluation_batches()


@pytest.mark.parametrize("seed", range(60))
def test_each_item_counts_once_though_ranks_die_at_any_batch(seed):
    draw = random.Random(seed)
    size, world = draw.randint(1, 5), draw.randint(1, 5)
    if seed % 3 == 0:
        lengths = [draw.randint(0, 40)]
        make = functools.partial(Numbers, lengths[0], 1)
    else:
        lengths = [draw.choice([0, 1, 3, 10, 25]) for _ in range(draw.randint(1, 8))]
        make = functools.partial(shards_of, lengths)
    ranks = [(batches_of(make(), size), {}) for _ in range(world)]
    while True:
        dies = draw.randrange(len(ranks)) if len(ranks) > 1 and draw.random() < 0.7 else None
        held = {number for _, results in ranks for number in results}
        ended = [batches.ended for batches, _ in ranks]
        for rank, (batches, results) in enumerate(ranks):
            parts = batches.deal(held, ended, rank, len(ranks))
            most = draw.randint(0, 4) if rank == dies else None
            for number, batch in itertools.islice(batches.read(parts), most):
                assert number not in held
                results[number] = batch
        if dies is None:
            break
        del ranks[dies]
    counted = {}
    for _, results in ranks:
        assert not counted.keys() & results.keys(), "no batch is computed by two ranks"
        counted.update(results)
    items = [item for _, batch in sorted(counted.items()) for item in batch]
    assert items == list(make())
    assert all(len(batch) <= size for batch in counted.values())


def test_each_shard_is_read_by_one_rank_that_reads_no_more_than_it_yields():
    opened = []

    def read(shard):
        opened.append(shard)
        return range(4)

    for world, times in ((1, 1), (2, 1), (3, 1), (6, 2)):
        opened.clear()
        for rank in range(world):
            batches = batches_of(shoal.ShardedStream(range(3), read), 2)
            list(batches.read(batches.deal((), (), rank, world)))
        # reads of the first item of the first shard, by which the ranks compare their streams
        compared = world if world > 1 else 0
        assert [opened.count(shard) for shard in range(3)] == [times + compared, times, times]


def test_completely_read_shards_are_not_read_again():
    batches = batches_of(shards_of((4, 4)), 2)
    held = {number for number, _ in batches.read(batches.deal((), (), 0, 1))}
    assert len(held) == 4
    other = batches_of(shards_of((4, 4)), 2)
    assert other.deal(held, [batches.ended], 0, 1) == []
    assert [part.source for part in other.deal(held - {max(held)}, [batches.ended], 0, 1)] == [1]
    assert isinstance(other, StreamedBatches)


def test_each_evaluation_of_a_loader_reads_again():
    loader = shoal.ElasticDataLoader(shards_of((4, 4)), global_batch_size=2, train=False)
    first = loader.evaluation_batches()
    list(first)
    assert len(json.loads(first.ended)) == 2
    assert json.loads(loader.evaluation_batches().ended) == {}
