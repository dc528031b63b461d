"""The loader's guarantees to the training loop and to the session, one at a time."""

import math

import pytest
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    InternalError,
    PreconditionError,
)
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.data.sampling import permutation
from shoal_worker.elastic.contract.loader_interface import Placement
from torch.utils.data import Subset

from tests.unit.worker_data.loaders import loader_of, run_epoch

# ----------------------------------------------------------------------------------- the plain form


def test_one_iteration_is_one_step_and_each_sample_is_dealt_once(session):
    loader = loader_of()
    assert run_epoch(loader, session) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert loader.global_step == 3


def test_shuffled_epochs_follow_the_published_permutation(session):
    loader = ElasticDataLoader(list(range(10)), global_batch_size=10, seed=5)
    for epoch in range(3):
        assert run_epoch(loader, session) == [list(permutation(5, epoch, 10, True))]


def test_each_rank_gets_its_part_and_a_rank_without_samples_a_placeholder_of_weight_zero(make_rank):
    ranks = [make_rank(loader_of, Placement(generation=1, rank=r, world_size=3)) for r in range(3)]
    taken = []
    while (batches := [rank.take() for rank in ranks])[0] is not None:
        taken.append((batches, [rank.commit() for rank in ranks]))
    assert taken == [
        ([[0, 1], [2], [3]], [2, 1, 1]),
        ([[4, 5], [6], [7]], [2, 1, 1]),
        ([[8], [9], [8]], [1, 1, 0]),
    ]
    share = ranks[2].session.calls_of("assign")[-1][1]
    assert (share.weight, share.total_weight, share.micro_batches) == (0.0, 2.0, None)


def test_session_receives_all_calls_in_order(session):
    loader = loader_of(4)
    run_epoch(loader, session)
    kinds = [call[0] for call in session.calls]
    assert kinds == ["register", "begin", "assign", "micro", "end_micro", "end_epoch"]
    assert session.calls_of("micro") == [("micro", 0, 4.0, (0, 0, 0, 0))]


def test_uncommitted_batch_is_dealt_again(session):
    loader = loader_of()
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    assert next(iterator).tolist() == [0, 1, 2, 3]
    loader.committed(session.placement)
    assert next(iterator).tolist() == [4, 5, 6, 7]


def test_lost_step_is_dealt_again_under_the_new_placement(session):
    loader = loader_of()
    iterator = iter(loader)
    session.placement = Placement(generation=1, rank=1, world_size=2)
    assert next(iterator).tolist() == [2, 3]
    session.placement = Placement(generation=2, rank=0, world_size=1)
    assert next(iterator).tolist() == [0, 1, 2, 3]


def test_rank_that_received_its_peers_state_continues_after_the_step(session):
    loader = loader_of()
    iterator = iter(loader)
    next(iterator)
    ahead = loader_of(name="ahead")
    next(iter(ahead))
    ahead.committed(session.placement)
    loader.load_state_dict(ahead.state_dict())
    assert next(iterator).tolist() == [4, 5, 6, 7]


def test_rank_that_received_the_state_after_the_last_step_ends_its_epoch_like_the_others(session):
    loader, ahead = loader_of(4), loader_of(4, name="ahead")
    iterator = iter(loader)
    next(iterator)
    run_epoch(ahead, session)
    session.calls.clear()
    loader.load_state_dict(ahead.state_dict())
    assert next(iterator, None) is None
    assert session.calls_of("end_epoch")
    assert run_epoch(loader, session) == [[0, 1, 2, 3]]
    assert loader.state_dict()["epoch"] == 2


def test_drop_last_leaves_out_the_short_step(session):
    loader = loader_of(drop_last=True)
    assert run_epoch(loader, session) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    assert loader.state_dict()["epoch"] == 1


def test_peeking_at_a_batch_consumes_no_epoch(session):
    loader = loader_of()
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert len(run_epoch(loader, session)) == 3


def test_leaving_a_loop_early_gives_up_the_rest_of_the_epoch(session):
    loader = loader_of()
    for _ in loader:
        loader.committed(session.placement)
        break
    assert loader.state_dict()["samples"] == 4
    assert len(run_epoch(loader, session)) == 3
    assert loader.state_dict()["epoch"] == 2


def test_epoch_left_early_stays_over_after_a_resume(session):
    loader = loader_of()
    for _ in loader:
        loader.committed(session.placement)
        break
    resumed = loader_of(name="resumed")
    resumed.load_state_dict(loader.state_dict())
    assert run_epoch(resumed, session) == []
    assert len(run_epoch(resumed, session)) == 3
    assert resumed.state_dict()["epoch"] == 2


def test_iteration_in_progress_continues_after_a_resume(session):
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    loader.committed(session.placement)
    resumed = loader_of(name="resumed")
    resumed.load_state_dict(loader.state_dict())
    assert len(run_epoch(resumed, session)) == 2


def test_next_on_a_finished_iteration_names_the_reason(session):
    loader = loader_of()
    assert len(run_epoch(loader, session)) == 3
    resumed = loader_of(name="resumed")
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(
        StopIteration,
        match=r"'resumed' yields no batches, because the run is past that epoch .* train=False",
    ):
        next(iter(resumed))


def test_joiner_skips_loops_that_its_peers_are_not_in(session):
    loader, other = loader_of(name="first"), loader_of(name="second")
    session.is_elsewhere = lambda source, epoch: (source.name, epoch) != ("second", 1)
    assert [len(run_epoch(each, session)) for each in (loader, other, loader, other)] == [
        0,
        0,
        0,
        3,
    ]
    assert loader.state_dict()["samples"] == loader.state_dict()["epoch"] == 0


def test_a_step_finished_after_the_loop_was_left_counts(session):
    loader = loader_of()
    for _ in loader:
        break
    assert loader.committed(session.placement) == 4
    assert loader.state_dict()["samples"] == 4


def test_commit_without_a_step_is_a_reported_bug(session):
    with pytest.raises(InternalError, match="loader"):
        loader_of().committed(session.placement)


# ----------------------------------------------------------------------------------------- epochs()


def test_epochs_starts_at_the_epoch_of_the_run(session):
    first = loader_of(name="a")
    for epoch in first.epochs(3):
        run_epoch(first, session)
        if epoch == 1:
            break
    second = loader_of(name="b")
    second.load_state_dict(first.state_dict())
    seen = []
    for epoch in second.epochs(4):
        seen.append((epoch, len(run_epoch(second, session))))
    assert seen == [(2, 3), (3, 3)]


def test_joiner_learns_its_epoch_at_the_start_of_epochs(make_rank):
    donor = make_rank(loader_of, Placement(generation=1, rank=0, world_size=1))
    for _ in range(4):
        if donor.take() is None:
            donor.take()
        donor.commit()
    assert donor.loader.state_dict()["samples"] == 4
    joiner = make_rank(
        loader_of, Placement(generation=2, rank=1, world_size=2), donor.loader.state_dict()
    )
    with joiner.session.current():
        for epoch in joiner.loader.epochs(9):
            assert epoch == 1
            assert next(iter(joiner.loader)).tolist() == [6, 7]
            break


def test_joiner_with_a_plain_range_of_epochs_skips_those_before_the_cursor(make_rank):
    donor = make_rank(loader_of, Placement(generation=1, rank=0, world_size=1))
    for _ in range(2 * 4 + 1):
        if donor.take() is not None:
            donor.commit()
    state = donor.loader.state_dict()
    assert (state["epoch"], state["samples"]) == (2, 4)
    joiner = make_rank(loader_of, Placement(generation=2, rank=1, world_size=2), state)
    with joiner.session.current():
        counts = [len(run_epoch(joiner.loader, joiner.session)) for _ in range(4)]
    assert counts == [0, 0, 2, 3]
    assert len(joiner.session.calls_of("end_epoch")) == 2


def test_members_move_their_cursor_to_a_new_epoch_before_joiners_receive_the_state(
    session,
):
    loader = loader_of()
    for _ in loader:
        loader.committed(session.placement)
        break
    epochs = []
    session.begin_step = lambda source: (
        epochs.append(source.state_dict()["epoch"]) or session.placement
    )
    next(iter(loader))
    assert epochs == [1]


def test_stop_ends_the_iteration_and_the_epochs(session):
    loader = loader_of()
    seen = []
    for epoch in loader.epochs(5):
        for batch in loader:
            seen.append((epoch, batch.tolist()))
            loader.committed(session.placement)
            session.stopped = True
    assert seen == [(0, [0, 1, 2, 3])]
    assert list(loader.epochs(5)) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_break_counts_as_the_scripts_own_unless_the_run_was_stopped_within_the_epoch(
    session, stopped
):
    loader = loader_of()
    for _ in loader.epochs(5):
        for _ in loader:
            loader.committed(session.placement)
            session.stopped = stopped
        break
    assert len(session.calls_of("epochs_left")) == (not stopped)


def test_two_loaders_keep_separate_cursors(session):
    one, two = loader_of(), loader_of(12)
    assert (one.name, two.name) == ("loader", "loader-2")
    a, b = iter(one), iter(two)
    next(a)
    one.committed(session.placement)
    next(a)
    next(b)
    assert (one.state_dict()["samples"], two.state_dict()["samples"]) == (4, 0)
    two.committed(session.placement)
    assert next(b).tolist() == [4, 5, 6, 7]


# ------------------------------------------------------------------------------------ micro-batches


def test_plain_iteration_with_micro_batches_is_refused_naming_steps(session):
    with pytest.raises(ConfigurationError, match=r"loader\.steps\(\)"):
        iter(loader_of(micro_batch_size=2))


def test_steps_yield_complete_micro_batches_and_possibly_none(make_rank):
    ranks = [
        make_rank(
            lambda: loader_of(micro_batch_size=3), Placement(generation=1, rank=r, world_size=3)
        )
        for r in range(3)
    ]
    taken = []
    while (batches := [rank.take() for rank in ranks])[0] is not None:
        taken.append((batches, [rank.commit() for rank in ranks]))
    assert taken == [
        ([[0, 1, 2], [3], []], [3, 1, 0]),
        ([[4, 5, 6], [7], []], [3, 1, 0]),
        ([[8, 9], [], []], [2, 0, 0]),
    ]
    assert [call[0] for call in ranks[2].session.calls[1:4]] == ["begin", "assign", "finish"]
    assert ranks[1].session.calls_of("micro")[0] == ("micro", 1, 1.0, (0, 0, 0, 1))


def test_session_receives_micro_batches_in_order(session):
    loader = loader_of(4, micro_batch_size=2)
    for step in loader.steps():
        assert (step.epoch, step.number, len(step)) == (0, 0, 2)
        for _ in step:
            session.calls.append(("backward",))
        loader.committed(session.placement)
    kinds = [call[0] for call in session.calls[1:]]
    assert kinds == [
        "begin",
        "assign",
        "micro",
        "backward",
        "end_micro",
        "micro",
        "backward",
        "end_micro",
        "finish",
        "end_epoch",
    ]
    share = session.calls_of("assign")[0][1]
    assert (share.weight, share.total_weight, share.micro_batches) == (4.0, 4.0, 2)


def test_step_yields_its_batches_once(session):
    step = next(loader_of(micro_batch_size=2).steps())
    list(step)
    with pytest.raises(PreconditionError, match="its samples would count twice"):
        iter(step)


def test_finished_step_yields_nothing(session):
    steps = loader_of(micro_batch_size=2).steps()
    first = next(steps)
    next(steps)
    with pytest.raises(PreconditionError, match="has ended"):
        next(iter(first))


def test_steps_without_micro_batches_hold_one_batch(session):
    step = next(loader_of(4).steps())
    assert [batch.tolist() for batch in step] == [[0, 1, 2, 3]]
    assert [call[0] for call in session.calls[1:]] == ["begin", "assign", "micro", "end_micro"]


# ------------------------------------------------------------------------------------------ weights


def test_weight_fn_replaces_the_number_of_samples_and_leaves_the_total_open(session):
    loader = loader_of(4, weight_fn=lambda batch: batch.sum())
    next(iter(loader))
    share = session.calls_of("assign")[0][1]
    assert (share.weight, share.total_weight) == (6.0, None)


def test_weight_fn_with_micro_batches_reports_each_weight(session):
    loader = loader_of(4, micro_batch_size=2, weight_fn=lambda batch: batch.sum())
    list(next(loader.steps()))
    share = session.calls_of("assign")[0][1]
    assert math.isnan(share.weight)
    assert share.total_weight is None
    assert [call[2] for call in session.calls_of("micro")] == [1.0, 5.0]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weight_is_refused(session, weight):
    with pytest.raises(ConfigurationError, match="weight_fn"):
        next(iter(loader_of(weight_fn=lambda batch: weight)))


# -------------------------------------------------------------------------------------------- state


def test_cursor_in_samples_continues_with_another_batch_size(session):
    loader = loader_of(20, name="a")
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        loader.committed(session.placement)
    other = loader_of(20, name="b", global_batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert run_epoch(other, session) == [[8, 9, 10, 11, 12], [13, 14, 15, 16, 17], [18, 19]]
    assert other.global_step == 5


def test_a_cursor_whose_rest_is_dropped_under_the_new_batch_size_moves_to_the_next_epoch(session):
    loader = loader_of(20, name="a")
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
        loader.committed(session.placement)
    other = loader_of(20, name="b", global_batch_size=8, drop_last=True)
    other.load_state_dict(loader.state_dict())
    assert run_epoch(other, session) == []
    assert run_epoch(other, session) == [list(range(8)), list(range(8, 16))]


def test_a_cursor_within_an_epoch_of_another_split_of_the_dataset_is_refused(session):
    """A cursor within an epoch is refused if the dataset is a different split, as in a joiner whose
    script splits without a seed. The joiner exits, and its peers continue."""
    loader, other = (
        loader_of(name=name, dataset=Subset(range(20), indices))
        for name, indices in (("a", range(10)), ("b", range(10, 20)))
    )
    next(iter(loader))
    loader.committed(session.placement)
    state = loader.state_dict()
    with pytest.raises(ConfigurationError, match="identity="):
        other.load_state_dict(state)
    del state["identity"]  # as an earlier release wrote it
    other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "seed=0"),
        ({"shuffle": False}, "shuffle=True"),
        ({"n": 11}, "length=10"),
        ({"sampler": range(10)}, "order"),
    ],
)
def test_a_cursor_within_an_epoch_of_another_order_is_refused(session, options, named):
    loader = loader_of(name="a", shuffle=True)
    next(iter(loader))
    loader.committed(session.placement)
    other = loader_of(**{"shuffle": True, **options}, name="b")
    with pytest.raises(ConfigurationError, match=named):
        other.load_state_dict(loader.state_dict())
    assert other.state_dict()["samples"] == 0


def test_between_epochs_another_order_is_allowed(session):
    loader = loader_of(name="a", shuffle=True)
    run_epoch(loader, session)
    other = loader_of(name="b", shuffle=True, seed=1, n=12)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2},
        {"version": 1, "epoch": -1},
        {"version": 1, "epoch": 0, "samples": "4", "step": 0, "global_step": 0},
    ],
)
def test_malformed_state_is_corrupt_data(session, state):
    with pytest.raises(CorruptDataError):
        loader_of().load_state_dict(state)


def test_loader_is_registered_once_per_session(session):
    loader = loader_of()
    run_epoch(loader, session)
    assert session.calls_of("register") == [("register", "loader")]
    with type(session)().current() as other:
        next(iter(loader))
        assert other.calls_of("register") == [("register", "loader")]
    with session.current():
        pass


def test_next_batch_can_be_peeked_at(make_rank):
    ranks = [
        make_rank(lambda: loader_of(12), Placement(generation=1, rank=r, world_size=2))
        for r in range(2)
    ]
    for expected in ([4, 5], [6, 7]), ([8, 9], [10, 11]), (None, None):
        for rank, upcoming in zip(ranks, expected, strict=True):
            rank.take()
            found = rank.loader.peek()
            assert (None if found is None else found.tolist()) == upcoming
        for rank in ranks:
            rank.commit()


def test_an_evaluation_has_no_next_batch():
    with pytest.raises(ConfigurationError, match="has no steps"):
        ElasticDataLoader([1, 2], batch_size=1, train=False).peek()
