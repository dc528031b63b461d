"""Leased batches are dealt in the order of requests, with one RPC per step. A dead member's batches
are dealt again, and no batch is dealt twice to one member."""

import pytest
import torch
from shoal_common.errors import UnavailableError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.data.record import audit
from shoal_worker.elastic.contract.loader_interface import Placement


def make(n=10, **options):
    return ElasticDataLoader(list(range(n)), **{"batch_size": 3, "shuffle": False, **options})


@pytest.fixture
def alone(session, coordinator):
    session.coordinator = coordinator
    return session


@pytest.fixture
def members(make_rank, coordinator):
    def start(count, **options):
        ranks = [
            make_rank(lambda: make(**options), Placement(generation=1, rank=r, world_size=count))
            for r in range(count)
        ]
        for rank in ranks:
            rank.session.coordinator = coordinator
        return ranks

    return start


def test_one_member_gets_every_batch_once_with_one_call_per_step(alone):
    loader = make()
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        loader.committed(alone.placement)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(loader) == loader.global_step == 4
    left = ("lease", 0, (), 0)
    assert alone.calls_of("lease") == [
        ("lease", 0, (), 1),
        *[("lease", 0, (b,), 1) for b in range(4)],
        left,
    ]
    assert loader.state_dict()["epoch"] == 1
    assert len(alone.calls_of("end_epoch")) == 1


def test_leased_batch_is_weighted_by_itself(alone):
    next(iter(make()))
    share = alone.calls_of("assign")[0][1]
    assert (share.weight, share.total_weight, share.micro_batches) == (3.0, 3.0, None)
    assert alone.calls_of("micro") == [("micro", 0, 3.0, (0, 0, 0, 0))]


def test_lost_batch_is_dealt_again_without_a_new_lease(alone):
    iterator = iter(make())
    assert next(iterator).tolist() == [0, 1, 2]
    assert next(iterator).tolist() == [0, 1, 2]
    assert len(alone.calls_of("lease")) == 1


def test_a_dead_members_batches_are_dealt_again(members, coordinator):
    one, two = members(2)
    assert (one.take(), two.take()) == ([0, 1, 2], [3, 4, 5])
    coordinator.drop(two.session)
    seen = []
    one.commit()
    while (got := one.take()) is not None:
        seen.append(got)
        one.commit()
    assert sorted(seen) == [[3, 4, 5], [6, 7, 8], [9]]


def test_member_at_the_end_of_an_epoch_waits_for_batches_that_may_be_returned(members, coordinator):
    one, two = members(2, n=6)
    assert (one.take(), two.take()) == ([0, 1, 2], [3, 4, 5])
    one.commit()
    begun = []
    granted = one.session.begin_step

    def begin_step(source):
        begun.append(1)
        if len(begun) == 3:
            coordinator.drop(two.session)
        return granted(source)

    one.session.begin_step = begin_step
    assert one.take() == [3, 4, 5]
    assert len(begun) == 3
    one.commit()
    assert one.take() is None


def test_leaving_the_loop_acknowledges_finished_batches(alone, coordinator):
    loader = make(3)
    for _ in loader:
        loader.committed(alone.placement)
        break
    assert alone.calls_of("lease")[-1] == ("lease", 0, (0,), 0)
    assert coordinator.held == {0: {}}


def test_leaving_the_loop_returns_prefetched_leases(members, coordinator):
    one, other = members(2, n=12, num_workers=2)
    one.take()
    assert coordinator.held[0].keys() == {0, 1, 2}
    one.commit()
    with one.session.current():
        one.iterator.close()
    assert not coordinator.held[0]
    done = 0
    while other.take() is not None:
        done += other.commit()
    assert done == 9


def test_delivered_batch_is_not_returned_while_its_step_may_still_finish(alone, coordinator):
    loader = make(12)
    for _ in loader:
        break
    assert coordinator.held[0].keys() == {0}
    loader.committed(alone.placement)


def test_a_failed_acknowledgement_at_the_end_is_logged_not_raised(alone, caplog):
    loader = make(6)
    iterator = iter(loader)
    next(iterator)
    loader.committed(alone.placement)

    def refuse(*_):
        raise UnavailableError("gone")

    alone.coordinator.lease = refuse
    del iterator
    assert "could not be acknowledged" in caplog.text


def test_a_finished_batch_is_reported_again_when_the_call_failed(alone, coordinator):
    loader = make(6)
    iterator = iter(loader)
    next(iterator)
    loader.committed(alone.placement)
    lease = coordinator.lease

    def refuse(*_):
        raise UnavailableError("gone")

    coordinator.lease = refuse
    with pytest.raises(UnavailableError):
        next(iterator)
    coordinator.lease = lease
    assert next(iter(loader)).tolist() == [3, 4, 5]
    assert coordinator.held[0].keys() == {1}


def test_record_of_leased_batches_counts_the_uses_of_each_sample(
    members, coordinator, tmp_path, monkeypatch
):
    monkeypatch.setenv("SHOAL_RECORD_DIR", str(tmp_path))
    one, two = members(2)
    one.take(), two.take()
    two.commit()  # its push is applied, but it dies before it reports to the coordinator
    coordinator.drop(two.session)
    one.commit()
    while one.take() is not None:
        one.commit()
    (epoch,) = audit(tmp_path).epochs
    assert (epoch.expected, epoch.once, epoch.lost, epoch.repeated_samples) == (10, 7, 0, (3, 4, 5))


def test_data_workers_prefetch_leased_batches(alone, coordinator):
    loader = make(20, num_workers=1)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        loader.committed(alone.placement)
    assert seen == [list(range(start, min(start + 3, 20))) for start in range(0, 20, 3)]
    assert alone.calls_of("lease")[0] == ("lease", 0, (), 2)


def test_data_workers_continue_after_running_dry(alone, coordinator):
    coordinator.free[0] = [0]
    loader = make(9, num_workers=1)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2]
    coordinator.free[0] = [2, 1]
    loader.committed(alone.placement)
    assert next(iterator).tolist() == [6, 7, 8]
    loader.committed(alone.placement)
    assert next(iterator).tolist() == [3, 4, 5]


def test_next_batch_is_known_if_it_is_leased_ahead(alone):
    loader = make(look_ahead=True)
    assert loader.peek() is None
    seen, peeked = [], []
    for batch in loader:
        upcoming = loader.peek()
        assert upcoming is loader.peek()
        seen.append(batch.tolist())
        peeked.append(None if upcoming is None else upcoming.tolist())
        loader.committed(alone.placement)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert peeked == [*seen[1:], None]


def test_next_batch_is_unknown_without_prefetching(alone):
    loader = make()
    next(iter(loader))
    assert loader.peek() is None


def test_peeked_batch_is_made_once_and_leaves_the_random_numbers_unchanged(alone):
    made = []

    def collate(samples):
        made.append(samples)
        return torch.rand(1)

    loader = make(look_ahead=True, collate_fn=collate)
    expected = None
    for batch in loader:
        assert expected is None or torch.equal(batch, expected)
        before = torch.get_rng_state()
        expected = loader.peek()
        assert torch.equal(torch.get_rng_state(), before)
        loader.committed(alone.placement)
    assert made == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
