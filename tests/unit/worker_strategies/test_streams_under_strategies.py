"""Training on streams: under each strategy, the parameters equal those of one rank on complete
batches, even if the items do not divide evenly. Unsupported streams are refused."""

import itertools

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.utils.data import IterableDataset

ITEMS = 11
STRATEGIES = {
    "ddp": {},
    "fsdp": {},
    "hsdp": {"shard_size": 2},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "tensor": {},
    "pipeline": {},
    "hybrid": {"tensor_parallel_size": 2},
}


def row(number):
    x = torch.randn(6, generator=torch.Generator().manual_seed(number))
    return x, x[:2] + number % 3


class Rows(IterableDataset):
    def __init__(self, longer=0):
        self.longer = longer

    def __iter__(self):
        return map(row, range(ITEMS + self.longer * shoal.rank()))


def shards(*cuts):
    return shoal.ShardedStream(
        [*itertools.pairwise(cuts or (0, 2, 9, ITEMS))], lambda cut: map(row, range(*cut))
    )


def train(stream, strategy, options, *, micro=2):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(stream(), global_batch_size=4, micro_batch_size=micro)
    steps = 0
    for _ in loader.epochs(2):
        for step in loader.steps():
            for x, y, *_ in step:
                model.train_step(x, y, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            steps = loader.global_step
    return steps, model.full_state_dict()


@pytest.fixture(scope="module", params=[Rows, shards])
def alone(request):
    return request.param, shoal.launch(train, request.param, "ddp", {}, world_size=1)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_trains_as_on_one_rank(alone, strategy):
    stream, (steps, parameters) = alone
    assert steps == 6
    for world in (2, 3) if strategy in ("ddp", "zero3") else (2,):
        for each_steps, each in shoal.launch(
            train, stream, strategy, STRATEGIES[strategy], world_size=world
        ):
            assert each_steps == 6
            torch.testing.assert_close(each, parameters)


def test_local_sgd_accepts_a_stream_read_by_every_rank_and_refuses_shards():
    results = shoal.launch(train, Rows, "local_sgd", {"sync_every": 2}, world_size=2)
    assert [steps for steps, _ in results] == [6, 6]
    with pytest.raises(ConfigurationError, match="ranks take steps independently"):
        shoal.launch(train, shards, "local_sgd", {"sync_every": 2}, world_size=2)


@pytest.mark.parametrize("longer", [1, 4])
def test_ranks_whose_streams_end_at_different_items_are_reported_without_a_hang(longer):
    with pytest.raises(PreconditionError, match="the stream's items"):
        shoal.launch(train, lambda: Rows(longer), "ddp", {}, world_size=2)


def evaluate(stream):
    model = shoal.as_distributed(nn.Linear(6, 2))
    loader = shoal.ElasticDataLoader(stream(), global_batch_size=2, train=False)
    return shoal.evaluate(
        model,
        loader,
        lambda model, batch: {"samples": len(batch[0]), "batches": 1, "sum": batch[0].sum()},
    )


@pytest.mark.parametrize("stream", [Rows, shards, lambda: shards(0, 2, 2, 5, 9, 10, ITEMS)])
def test_stream_is_evaluated_once_entirely(stream):
    total = float(sum(row(number)[0].sum() for number in range(ITEMS)))
    batches = 6 if stream in (Rows, shards) else 7
    for world in (1, 2, 3, 5):
        for sums in shoal.launch(evaluate, stream, world_size=world):
            assert sums == pytest.approx({"samples": ITEMS, "batches": batches, "sum": total})


def test_an_evaluation_of_streams_that_differ_by_rank_is_refused():
    with pytest.raises(PreconditionError, match="the stream's items"):
        shoal.launch(evaluate, lambda: Rows(4), world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_each_shard_is_evaluated_by_one_rank_though_they_are_uneven(strategy):
    read = []

    def rows(cut):
        for number in range(*cut):
            read.append(number)
            yield row(number)

    def sums():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        model, _ = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )
        stream = shoal.ShardedStream([(0, 1), (1, 2), (2, 3), (3, ITEMS)], rows)
        loader = shoal.ElasticDataLoader(stream, global_batch_size=2, train=False)
        return shoal.evaluate(
            model,
            loader,
            lambda model, batch: {
                "loss": model.predict(batch[0]).square().sum(),
                "samples": len(batch[0]),
            },
        )

    (alone,) = shoal.launch(sums, world_size=1)
    read.clear()
    for each in shoal.launch(sums, world_size=2):
        assert each == pytest.approx(alone)
    looks = [0, 0]  # every rank reads the first item once to inspect it
    assert sorted(read) == sorted([*range(ITEMS), *looks])


def test_sharded_stream_that_divides_itself_by_rank_is_refused():
    def read(cut):
        return itertools.islice(
            map(row_of_whole_numbers, range(*cut)), shoal.rank(), None, shoal.world_size()
        )

    def stream():
        return shoal.ShardedStream([(0, 8), (8, 16)], read)

    for run in (lambda: train(stream, "ddp", {}), lambda: evaluate(stream)):
        with pytest.raises(PreconditionError, match="Do not split it by rank"):
            shoal.launch(run, world_size=2)


def row_of_whole_numbers(number):
    return *row(number), number
