"""Loaders made of torch's and torchdata's DataLoaders: each argument is converted, has no effect on
the batches, or is refused with the reason."""

import inspect
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Placement
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "data-sources.md"
NUMBERS = list(range(10))

# torchdata 0.11 calls it in each StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def as_a_list(batch):
    return torch.tensor(batch) * 10


def two_epochs(make, make_rank):
    """Returns the batches of a single rank in two epochs."""
    rank, epochs = make_rank(make, Placement(generation=1, rank=0, world_size=1)), []
    for _ in range(2):
        epochs.append([])
        while (batch := rank.take()) is not None:
            epochs[-1].append(batch)
            rank.commit()
    return epochs


def seeded(number):
    return torch.Generator().manual_seed(number)


CONVERTED = {
    "nothing but a size": ({}, {"shuffle": False}),
    "shuffle": ({"shuffle": True}, {"shuffle": True}),
    "drop_last": ({"drop_last": True}, {"shuffle": False, "drop_last": True}),
    "collate_fn": ({"collate_fn": as_a_list}, {"shuffle": False, "collate_fn": as_a_list}),
    "sampler": ({"sampler": [3, 1, 2]}, {"sampler": [3, 1, 2]}),
    "a sampler that shuffles": ({"sampler": RandomSampler(NUMBERS)}, {"shuffle": True}),
    "generator": (
        {"shuffle": True, "generator": seeded(7)},
        {"shuffle": True, "seed": 7},
    ),
    "a sampler's generator": (
        {"sampler": RandomSampler(NUMBERS, generator=seeded(7))},
        {"shuffle": True, "seed": 7},
    ),
    "a generator of a sampler that is kept": (
        {"sampler": WeightedRandomSampler([1.0] * 10, 12, generator=seeded(7))},
        {"sampler": WeightedRandomSampler([1.0] * 10, 12, generator=seeded(1))},
    ),
    "torch's batch_sampler": (
        {
            "batch_size": 1,
            "batch_sampler": BatchSampler(RandomSampler(NUMBERS, generator=seeded(7)), 4, True),
        },
        {"shuffle": True, "seed": 7, "drop_last": True},
    ),
    "num_workers and what only concerns their speed": (
        {
            "num_workers": 1,
            "prefetch_factor": 3,
            "persistent_workers": True,
            "in_order": False,
            "timeout": 60,
            "pin_memory": True,
        },
        {"shuffle": False},
    ),
}


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("argument", CONVERTED)
def test_loader_made_from_a_dataloader_gives_the_same_batches(argument, kind, make_rank):
    given, expected = CONVERTED[argument]
    plain = kind(NUMBERS, **{"batch_size": 4, **given})
    found = two_epochs(lambda: ElasticDataLoader.from_dataloader(plain), make_rank)
    assert found == two_epochs(
        lambda: ElasticDataLoader(NUMBERS, global_batch_size=4, **expected), make_rank
    )
    assert found[0]


def test_a_loader_that_torchdata_shuffles_has_the_same_order_on_every_rank(make_rank):
    """Without a generator, torchdata's sampler creates one, with a different seed in each
    process."""
    orders = []
    for seed in range(2):
        torch.manual_seed(seed)
        plain = StatefulDataLoader(NUMBERS, batch_size=4, shuffle=True)
        orders.append(two_epochs(lambda p=plain: ElasticDataLoader.from_dataloader(p), make_rank))
    assert orders[0] == orders[1]


def test_torchdatas_own_batch_sampler_is_converted(make_rank):
    plain = StatefulDataLoader(NUMBERS, batch_sampler=StatefulBatchSampler([5, 6, 7], 2, False))
    found = two_epochs(lambda: ElasticDataLoader.from_dataloader(plain), make_rank)
    assert found == [[[5, 6], [7]]] * 2


def test_explicit_seed_is_preferred_to_the_generators(make_rank):
    plain = DataLoader(NUMBERS, batch_size=4, shuffle=True, generator=seeded(7))
    assert two_epochs(lambda: ElasticDataLoader.from_dataloader(plain, seed=3), make_rank) == (
        two_epochs(lambda: ElasticDataLoader(NUMBERS, global_batch_size=4, seed=3), make_rank)
    )


class Stream(IterableDataset):
    """A stream of numbers that can seek."""

    def __iter__(self):
        return iter(NUMBERS)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataloader_of_a_stream_is_converted(kind, make_rank):
    plain = kind(Stream(), batch_size=4, drop_last=True, num_workers=1)
    found = two_epochs(lambda: ElasticDataLoader.from_dataloader(plain), make_rank)
    assert found == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_loader_made_from_a_dataloader_may_evaluate_with_another_batch_size(session):
    given = DataLoader(NUMBERS, batch_size=4, shuffle=True)
    loader = ElasticDataLoader.from_dataloader(given, global_batch_size=5, train=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


class OfEqualLengths(BatchSampler):
    """A batch sampler that groups samples by its own rule."""


class DealsToRanks:
    """A sampler from a library other than torch that deals samples to ranks."""

    num_replicas = 3

    def __iter__(self):
        return iter(NUMBERS[::3])


class MovesBatches(DataLoader):
    """A DataLoader with its own `__iter__`."""

    def __iter__(self):
        return (batch + 1 for batch in super().__iter__())


def with_a_position():
    loader = StatefulDataLoader(NUMBERS, batch_size=2)
    next(iter(loader))
    resumed = StatefulDataLoader(NUMBERS, batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    return resumed


OTHER_START = next(
    method
    for method in ("spawn", "forkserver")
    if method != multiprocessing.get_start_method(allow_none=True)
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [1, 2], "got list; expected a torch.utils.data.DataLoader"),
        (lambda: DataLoader([1], batch_size=None), r"\(batch_size=None\).* pass batch_size="),
        (lambda: DataLoader(Stream(), batch_size=None), r"\(batch_size=None\)"),
        (lambda: DataLoader([1], batch_sampler=[[0]]), "the batch_sampler list"),
        (
            lambda: DataLoader([1], batch_sampler=OfEqualLengths([0], 1, False)),
            "the batch_sampler OfEqualLengths.* pass batch_size=",
        ),
        (
            lambda: DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)),
            "DistributedSampler deals samples to a fixed number of ranks",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=DealsToRanks()),
            "DealsToRanks deals samples to a fixed number of ranks",
        ),
        (
            lambda: DataLoader([1], num_workers=1, worker_init_fn=print),
            "worker_init_fn, but Shoal's data workers do not call it",
        ),
        (
            lambda: DataLoader([1], num_workers=1, multiprocessing_context=OTHER_START),
            f"multiprocessing_context='{OTHER_START}', but .* call "
            rf"multiprocessing.set_start_method\('{OTHER_START}'\)",
        ),
        (lambda: MovesBatches([1]), "MovesBatches has an __iter__ of its own"),
        (with_a_position, "a position was loaded into the StatefulDataLoader.* shoal.resume"),
        (lambda: DataLoader([1], sampler=[]), "the sampler draws no sample"),
        (lambda: DataLoader(Stream(), num_workers=2), "num_workers=2, but .* one process"),
    ],
)
def test_a_dataloader_whose_samples_cannot_be_dealt_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        ElasticDataLoader.from_dataloader(given())


def test_a_worker_init_fn_without_data_workers_is_ignored_as_by_torch(session):
    plain = DataLoader([1, 2], worker_init_fn=print)
    assert len(ElasticDataLoader.from_dataloader(plain)) == 2


def test_page_lists_the_fate_of_each_dataloader_argument():
    section = PAGE.read_text().partition("## Plain DataLoaders\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    arguments = {*inspect.signature(DataLoader).parameters}
    arguments |= {*inspect.signature(StatefulDataLoader).parameters}
    assert described == arguments


# ----------------------------------------------------------------------------- ambiguous datasets


class DividesItself(IterableDataset):
    """A dataset like those of MosaicML and litData: its length is the length of one rank's part,
    but indices refer to the full dataset."""

    def __len__(self):
        return len(NUMBERS) // 2

    def __getitem__(self, index):
        return NUMBERS[index]

    def __iter__(self):
        return iter(NUMBERS[::2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ElasticDataLoader(DividesItself(), global_batch_size=2),
        lambda: ElasticDataLoader.from_dataloader(DataLoader(DividesItself())),
        lambda: ElasticDataLoader(DividesItself(), global_batch_size=2, train=False),
    ],
)
def test_indexable_dataset_that_is_also_a_stream_is_refused(make):
    with pytest.raises(ConfigurationError, match=r"Subset\(dataset, range\(n\)\)"):
        make()


def test_the_subset_of_all_samples_of_such_a_dataset_is_accepted(make_rank):
    every = Subset(DividesItself(), range(len(NUMBERS)))
    (epoch, _) = two_epochs(lambda: ElasticDataLoader(every, global_batch_size=4), make_rank)
    assert sorted(number for batch in epoch for number in batch) == NUMBERS


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataloader_in_the_place_of_a_dataset_is_refused(kind):
    with pytest.raises(ConfigurationError, match="from_dataloader"):
        ElasticDataLoader(kind(NUMBERS), global_batch_size=2)
