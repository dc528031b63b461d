"""Batches made by data workers equal those made inline. Data workers never outlive or disturb the
training."""

import os
import random
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Placement
from shoal_worker.randomness import seed_generators
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from tests.unit.worker_data.killed_ranks import assert_workers_die_with


class Noisy(Dataset):
    """Draws from all three global generators, as augmentations do."""

    def __init__(self, n=12):
        self._n = n

    def __len__(self):
        return self._n

    def __getitem__(self, index):
        return torch.tensor(
            [float(index), torch.rand(()).item(), np.random.rand(), random.random()],
            dtype=torch.float64,
        )


def run_epoch(loader, session):
    batches = []
    for batch in loader:
        batches.append(batch)
        loader.committed(session.placement)
    return batches


def all_equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def noisy(**options):
    return ElasticDataLoader(Noisy(), **{"global_batch_size": 4, "seed": 3, **options})


def test_augmentation_is_the_same_inline_and_in_data_workers_and_differs_by_epoch(session):
    inline, workers = noisy(), noisy(num_workers=2)
    first = run_epoch(inline, session)
    assert all_equal(first, run_epoch(workers, session))
    second = run_epoch(inline, session)
    assert not all_equal(first, second)
    assert all_equal(second, run_epoch(workers, session))


def test_augmentation_of_a_micro_batch_does_not_depend_on_the_world(session):
    def epoch(world):
        parts = []
        for rank in range(world):
            loader = noisy(micro_batch_size=2, shuffle=False)
            session.placement = Placement(generation=1, rank=rank, world_size=world)
            for step in loader.steps():
                parts += list(step)
                loader.committed(session.placement)
        return sorted(parts, key=lambda batch: batch[0, 0].item())

    assert all_equal(epoch(1), epoch(2))


def test_a_redo_draws_the_same_numbers(session):
    for workers in (0, 1):
        iterator = iter(noisy(num_workers=workers))
        assert torch.equal(next(iterator), next(iterator))


def test_numbers_drawn_in_the_loop_depend_only_on_the_step(session):
    def drawn(workers):
        loader = noisy(num_workers=workers)
        loop = []
        for _ in loader:
            loop.append((torch.rand(1).item(), np.random.rand(), random.random()))
            loader.committed(session.placement)
        return loop

    # as the session does
    session.begin_micro_batch = lambda *, key, **_: seed_generators(key)
    inline = drawn(0)
    assert drawn(1) == inline
    assert len(set(inline)) == len(inline)
    again = iter(noisy())
    next(again), torch.rand(5), np.random.rand(5), random.random()
    next(again)  # repeats the first step
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == inline[0]


def test_evaluation_leaves_the_global_random_numbers_alone(session):
    for workers in (0, 1):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        expected = torch.rand(1), np.random.rand(), random.random()
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        assert len(list(noisy(num_workers=workers, train=False))) > 1
        assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_a_collate_function_draws_keyed_numbers_too(session):
    def collate(samples):
        return torch.stack(samples) * torch.rand(())

    one, two = noisy(collate_fn=collate), noisy(collate_fn=collate)
    assert all_equal(run_epoch(one, session), run_epoch(two, session))


@pytest.mark.parametrize("workers", [0, 1])
def test_getitems_is_used_if_the_dataset_has_it(session, workers):
    class Batched(Noisy):
        def __getitems__(self, indices):
            assert isinstance(indices, list)
            return [torch.tensor(index * 10) for index in indices]

    loader = ElasticDataLoader(Batched(), global_batch_size=4, shuffle=False, num_workers=workers)
    assert next(iter(loader)).tolist() == [0, 10, 20, 30]


def test_ranks_may_change_while_batches_are_prefetched(session):
    loader = ElasticDataLoader(list(range(40)), global_batch_size=4, shuffle=False, num_workers=2)
    iterator = iter(loader)
    seen = [next(iterator).tolist()]
    workers = _children()
    loader.committed(session.placement)
    session.placement = Placement(generation=2, rank=1, world_size=2)
    seen.append(next(iterator).tolist())
    session.placement = Placement(generation=3, rank=1, world_size=4)
    seen.append(next(iterator).tolist())
    loader.committed(session.placement)
    seen.append(next(iterator).tolist())
    assert seen == [[0, 1, 2, 3], [6, 7], [5], [9]]
    assert _children() == workers, "the data workers have not been restarted"


def test_prefetch_continues_in_a_generation_that_keeps_this_ranks_place(session):
    made = []
    fetcher = Fetcher(list(range(4)), collate_fn=list, num_workers=1, pin_memory=False)
    requests = [Request(epoch=0, indices=(i,), key=(i,)) for i in range(3)]

    def following():
        made.append(1)
        return iter(requests)

    try:
        assert [fetcher.fetch(request, following) for request in requests] == [[0], [1], [2]]
    finally:
        fetcher.close()
    assert len(made) == 1


def test_a_change_to_the_dataset_between_epochs_reaches_the_data_workers(session):
    data = [0, 1, 2, 3]
    loader = ElasticDataLoader(data, global_batch_size=4, shuffle=False, num_workers=1)
    assert run_epoch(loader, session)[0].tolist() == [0, 1, 2, 3]
    data[0] = 9
    assert run_epoch(loader, session)[0].tolist() == [9, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_loop_can_be_reentered_where_an_error_in_the_dataset_ended_it(
    session, workers, tmp_path, monkeypatch
):
    # how long torch waits for a worker that was not asked to end
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 100.0)
    broken = tmp_path / "broken"
    broken.touch()

    class Flaky(Noisy):
        def __getitem__(self, index):
            if index >= 2 and broken.exists():
                raise OSError("disk")
            return index

    loader = ElasticDataLoader(Flaky(4), global_batch_size=2, shuffle=False, num_workers=workers)
    started = time.monotonic()
    with pytest.raises(OSError, match="disk"):
        run_epoch(loader, session)
    broken.unlink()
    assert [batch.tolist() for batch in run_epoch(loader, session)] == [[2, 3]]
    assert time.monotonic() - started < 50, "the data workers end without a timeout"


def test_no_data_worker_remains_when_an_iteration_ends_or_is_left(session):
    before = _children()
    loader = noisy(num_workers=2)
    run_epoch(loader, session)
    assert _children() == before
    iterator = iter(loader)
    next(iterator)
    assert len(_children() - before) == 2
    del iterator
    assert _children() == before


def test_an_evaluation_loader_uses_data_workers_and_ends_them(session):
    before = _children()
    loader = ElasticDataLoader(list(range(5)), global_batch_size=2, train=False, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert _children() == before


def test_batches_are_pinned_only_with_an_accelerator(session):
    loader = noisy(pin_memory=True)
    assert next(iter(loader)).is_pinned() == torch.accelerator.is_available()


KILLED = """
import sys, time
from shoal_worker.data.fetch import Fetcher, Request
fetcher = Fetcher(list(range(8)), collate_fn=list, num_workers=2, pin_memory=False)
request = Request(epoch=0, indices=(0,), key=(0,))
fetcher.fetch(request, lambda: iter([request]))
print("ready", flush=True)
time.sleep(60)
"""


def test_data_workers_die_at_once_with_a_killed_rank():
    """Data workers end when their rank is killed. Otherwise they would keep the rank's sockets
    open, and its peers would wait."""
    assert_workers_die_with(KILLED)  # the workers would wait forever for batches to make


class WorkerFacts(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (
            int(signal.getsignal(signal.SIGINT) == signal.SIG_IGN),
            int(get_worker_info() is not None),
            os.getpid(),
        )


def test_data_workers_leave_ctrl_c_to_the_rank(session):
    loader = ElasticDataLoader(WorkerFacts(), global_batch_size=2, num_workers=1)
    ignores, in_worker, pid = next(iter(loader))
    assert ignores.tolist() == in_worker.tolist() == [1, 1]
    assert pid[0] != os.getpid()


def _workers(pid):
    """Returns the process's living children, except those of multiprocessing itself."""
    found = psutil.Process(pid).children()
    return [
        c
        for c in found
        if c.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(c.cmdline())
    ]


def _children():
    return {child.pid for child in _workers(os.getpid())}


def test_tensor_dataset_gives_the_same_batches_as_stacking_its_rows():
    """A TensorDataset gives the same batches as stacking its rows. A plain one is indexed by the
    whole batch at once, a subclass is not."""

    class Scaled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * column for column in super().__getitem__(index))

    columns = torch.randn(6, 2, 3), torch.arange(6), torch.rand(6) > 0.5, torch.randn(3, 6).t()
    for dataset in (TensorDataset(*columns), Scaled(*columns)):
        fetcher = Fetcher(dataset, collate_fn=default_collate, num_workers=0, pin_memory=False)
        batch = fetcher.fetch(
            Request(epoch=0, indices=(4, 0, 5), key=(0, 0, 0, 0)), lambda: iter(())
        )
        expected = default_collate([dataset[index] for index in (4, 0, 5)])
        assert type(batch) is type(expected)
        assert all_equal(batch, expected)
        assert [column.dtype for column in batch] == [column.dtype for column in expected]
