"""`epochs(max_steps=)` ends with the run's step of that number, no matter where in an epoch it
is."""

import sys

import pytest
from shoal_common.errors import ConfigurationError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Placement

from tests.unit.worker_data.loaders import loader_of
from tests.unit.worker_data.sources import Numbers

EPOCH = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def run(loader, session, *, lose=(), **until):
    """Runs the loop and returns the committed batches of each epoch. The steps with attempt numbers
    in `lose` are lost."""
    attempt, epochs = 0, {}
    for epoch in loader.epochs(**until):
        taken = epochs.setdefault(epoch, [])
        for batch in loader:
            attempt += 1
            if attempt not in lose:
                loader.committed(session.placement)
                taken.append(batch.tolist())
    return epochs


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        ({"max_steps": 5}, {0: EPOCH, 1: EPOCH[:2]}),
        ({"max_steps": 6}, {0: EPOCH, 1: EPOCH}),
        ({"max_steps": 0}, {}),
        ({"n": 1, "max_steps": 5}, {0: EPOCH}),
        ({"n": 9, "max_steps": 2}, {0: EPOCH[:2]}),
    ],
)
def test_the_loop_ends_with_the_step_of_that_number(session, until, expected):
    loader = loader_of()
    assert run(loader, session, **until) == expected
    assert loader.global_step == sum(len(steps) for steps in expected.values())


def test_lost_step_does_not_count(session):
    loader = loader_of()
    assert run(loader, session, lose=(1, 6, 7), max_steps=5) == {0: EPOCH, 1: EPOCH[:2]}


def test_resumed_run_counts_earlier_steps_and_continues_within_the_epoch(session):
    loader = loader_of()
    assert run(loader, session, max_steps=5) == {0: EPOCH, 1: EPOCH[:2]}
    assert loader.gives_up is None, "saving now must not warn of an incomplete epoch"
    assert not loader.under_way
    resumed = loader_of(name="resumed")
    resumed.load_state_dict(loader.state_dict())
    assert run(resumed, session, max_steps=5) == {}
    assert run(resumed, session, max_steps=7) == {1: EPOCH[2:], 2: EPOCH[:1]}
    assert run(loader, session, max_steps=7) == {1: EPOCH[2:], 2: EPOCH[:1]}, (
        "the loop continues in the same process"
    )


def test_steps_undone_as_the_loop_ends_are_taken_again(session):
    """Steps are repeated if the ranks return to an earlier checkpoint in the operation that ends
    the last epoch."""
    loader, states, taken = loader_of(), [], {}

    def end_epoch(source):
        if loader.global_step == 5 and len(states) == 5:
            loader.load_state_dict(states[3])

    session.end_epoch = end_epoch
    for epoch in loader.epochs(max_steps=5):
        for batch in loader:
            loader.committed(session.placement)
            states.append(loader.state_dict())
            taken.setdefault(epoch, []).append(batch.tolist())
    assert loader.global_step == 5
    assert taken == {0: EPOCH, 1: [*EPOCH[:2], EPOCH[1]]}


def test_later_loop_is_not_limited(session):
    loader = loader_of()
    run(loader, session, max_steps=2)
    assert run(loader, session, n=2) == {0: EPOCH[2:], 1: EPOCH}


def test_micro_batches_and_streams_end_at_the_same_step(session):
    in_parts = loader_of(micro_batch_size=2, name="in-parts")
    taken = []
    for _ in in_parts.epochs(max_steps=4):
        for step in in_parts.steps():
            taken.append([batch.tolist() for batch in step])
            in_parts.committed(session.placement)
    assert taken == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]], [[0, 1], [2, 3]]]
    stream = ElasticDataLoader(Numbers(10), global_batch_size=4, name="stream")
    first = run(stream, session, max_steps=5)
    second = run(stream, session, max_steps=7)
    whole = run(ElasticDataLoader(Numbers(10), global_batch_size=4), session, max_steps=7)
    assert [len(whole[epoch]) for epoch in (0, 1, 2)] == [3, 3, 1]
    assert (first, second) == (
        {0: whole[0], 1: whole[1][:2]},
        {1: whole[1][2:], 2: whole[2]},
    )


def test_leased_batches_over_all_members_match_the_limit(make_rank, coordinator):
    ranks = [
        make_rank(
            lambda: ElasticDataLoader(list(range(10)), batch_size=3, shuffle=False),
            Placement(generation=1, rank=rank, world_size=2),
        )
        for rank in range(2)
    ]
    taken = []

    def loop(rank, most):
        rank.session.coordinator = coordinator
        with rank.session.current():
            for epoch in rank.loader.epochs(max_steps=6):  # an epoch has 4
                for batch in rank.loader:
                    taken.append((epoch, batch.tolist()))
                    rank.loader.committed(rank.session.placement)
                    if len(taken) == most:
                        return

    loop(ranks[0], 3)
    loop(ranks[1], None)
    batches = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert sorted(taken) == [(0, batch) for batch in batches] + [
        (1, batch) for batch in batches[:2]
    ]
    assert ranks[1].loader.epoch == 2


def test_remaining_steps_end_at_the_limit_even_if_the_length_of_an_epoch_is_unknown(session):
    loader = loader_of()
    assert loader.steps_until(3) == 9
    for _ in loader.epochs(3, max_steps=5):
        assert loader.steps_until(3) == 5
        break
    stream = ElasticDataLoader(Numbers(10), global_batch_size=4, name="stream")
    assert stream.steps_until(3) is None
    for _ in stream.epochs(max_steps=5):
        assert (stream.steps_until(sys.maxsize), stream.steps_until(3)) == (5, None)
        break


def test_last_step_is_recognized_so_that_its_round_ends_with_it(session):
    loader, ends = loader_of(), []
    for _ in loader.epochs(max_steps=5):
        for _ in loader:
            ends.append(loader.ends_epoch)
            loader.committed(session.placement)
    assert ends == [False, False, True, False, True]
    assert not loader.ends_epoch


@pytest.mark.parametrize(
    ("until", "named"),
    [
        ({}, "max_steps="),
        ({"n": 1.5}, r"epochs\(1.5\)"),
        ({"max_steps": "9"}, r"epochs\(max_steps='9'\)"),
    ],
)
def test_value_that_is_not_a_step_count_is_refused(session, until, named):
    with pytest.raises(ConfigurationError, match=named):
        loader_of().epochs(**until)
