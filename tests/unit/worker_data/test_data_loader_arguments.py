"""The samplers, datasets and arguments that a loader accepts or refuses, and loaders for
evaluation, which take no part in steps."""

import random

import numpy as np
import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Placement
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.unit.worker_data.loaders import loader_of, run_epoch

# ----------------------------------------------------------------------------------------- samplers


def test_a_sampler_is_drawn_once_per_epoch_and_each_position_counts_once(session):
    draws = []

    class Sampler:
        def __len__(self):
            return 6

        def __iter__(self):
            draws.append(1)
            return iter([9, 9, 1, 2, 3, 4])

    loader = loader_of(sampler=Sampler())
    assert run_epoch(loader, session) == [[9, 9, 1, 2], [3, 4]]
    assert len(loader) == 2
    assert len(draws) == 1
    run_epoch(loader, session)
    assert len(draws) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(10)),
        lambda: RandomSampler(range(10), generator=torch.Generator()),
        lambda: WeightedRandomSampler([1.0] * 10, 12),
        lambda: _Shuffled(lambda: random.sample(range(10), 10)),
        lambda: _Shuffled(lambda: np.random.permutation(10)),
    ],
)
def test_samplers_draw_the_same_on_every_rank_and_differ_by_epoch(make, make_rank):
    epochs = []
    for r in range(2):
        torch.manual_seed(r)
        random.seed(r)
        np.random.seed(r)
        rank = make_rank(
            lambda: loader_of(sampler=make(), global_batch_size=12),
            Placement(generation=1, rank=0, world_size=1),
        )
        with rank.session.current():
            epochs.append([run_epoch(rank.loader, rank.session) for _ in range(2)])
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]


class _Shuffled:
    def __init__(self, draw):
        self._draw = draw

    def __iter__(self):
        return iter(self._draw())


def test_set_epoch_is_called_before_a_draw(session):
    class Sampler:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch])

    loader = loader_of(sampler=Sampler())
    assert [run_epoch(loader, session) for _ in range(3)] == [[[0]], [[1]], [[2]]]


def test_sampler_that_draws_differently_than_on_the_peers_is_found(session):
    loader = loader_of(sampler=list(range(10)), name="a")
    next(iter(loader))
    loader.committed(session.placement)
    other = loader_of(sampler=list(reversed(range(10))), name="b")
    with pytest.raises(ConfigurationError, match="order="):
        other.load_state_dict(loader.state_dict())


def test_drawing_leaves_the_global_random_numbers_alone(session):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    len(loader_of(sampler=RandomSampler(range(10)), train=False).evaluation_batches())
    next(iter(loader_of(sampler=RandomSampler(range(10)), train=False)))
    assert torch.rand(1) == expected


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        (DistributedSampler(range(10), num_replicas=2, rank=0), "DistributedSampler"),
        (BatchSampler(SequentialSampler(range(10)), 2, False), "BatchSampler"),
        ([0, "a"], "whole numbers"),
        ([0, 10], "0 to 9"),
        ([-1], "0 to 9"),
    ],
)
def test_unusable_samplers_are_refused(session, sampler, named):
    with pytest.raises(ConfigurationError, match=named):
        next(iter(loader_of(sampler=sampler)))


# ---------------------------------------------------------------------------------------- arguments


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "named"),
    [(Unsized(), "__len__"), (3, "__iter__"), (iter([1]), "iterated only once"), ([], "empty")],
)
def test_datasets_that_cannot_be_dealt_are_refused(session, dataset, named):
    with pytest.raises(ConfigurationError, match=named):
        ElasticDataLoader(dataset, global_batch_size=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_batch_size": None}, "neither"),
        ({"batch_size": 2}, "both"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 2.0}, "global_batch_size=2.0"),
        ({"global_batch_size": True}, "global_batch_size=True"),
        ({"micro_batch_size": 5}, "micro_batch_size=5"),
        ({"global_batch_size": None, "batch_size": 4, "micro_batch_size": 2}, "micro_batch_size=2"),
        ({"seed": "x"}, "seed='x'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"name": ""}, "name=''"),
        ({"drop_last": True, "global_batch_size": 11}, "drop_last"),
        ({"drop_last": True, "train": False}, "drop_last"),
    ],
)
def test_invalid_arguments_are_refused_by_name(session, options, named):
    with pytest.raises(ConfigurationError, match=named):
        loader_of(**options)


# --------------------------------------------------------------------------------------- evaluation


def test_evaluation_loader_yields_every_sample_in_order_outside_of_steps(session):
    loader = loader_of(train=False, shuffle=True)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert session.calls == []


@pytest.mark.parametrize("drawn", [7, 13])
def test_evaluation_covers_every_sample_of_a_sampler_with_a_wrong_length(session, drawn):
    class Sampler:
        def __len__(self):
            return 10

        def __iter__(self):
            return (index % 10 for index in range(drawn))

    loader = loader_of(train=False, sampler=Sampler())
    assert [sample for batch in loader for sample in batch.tolist()] == [
        index % 10 for index in range(drawn)
    ]
    assert len(loader) == -(-drawn // 4)


def test_evaluation_batches_are_numbered_and_have_the_size_of_micro_batches(session):
    batches = loader_of(train=False, micro_batch_size=3).evaluation_batches()
    assert len(batches) == 4
    assert [(number, batch.tolist()) for number, batch in batches.read([0, 3])] == [
        (0, [0, 1, 2]),
        (3, [9]),
    ]


def test_steps_of_evaluation_loaders_and_evaluation_with_training_loaders_are_refused(session):
    with pytest.raises(ConfigurationError, match="train=False"):
        loader_of(train=False).steps()
    with pytest.raises(ConfigurationError, match="train=False"):
        loader_of(train=False).epochs(3)
    with pytest.raises(ConfigurationError, match="train=False"):
        loader_of().evaluation_batches()
