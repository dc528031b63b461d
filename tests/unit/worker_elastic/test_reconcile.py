"""Decisions about which ranks send state to which: worked cases, and invariants over arbitrary rank
statuses."""

from hypothesis import given
from hypothesis import strategies as st
from shoal_worker.elastic.contract.reconcile import Interrupted, RankStatus, StateName, reconcile


def status(
    state: tuple[int, int] | None,
    *,
    attached: bool = True,
    learner: bool = False,
    poisoned: bool = False,
    operations: int = 0,
    rewinds: bool = False,
    interrupted: tuple[int, bool] | None = None,
    doubt: tuple[int, int] | None = None,
    outcomes: int = 0,
) -> RankStatus:
    return RankStatus(
        state=None if state is None else StateName(*state),
        doubt=None if doubt is None else StateName(*doubt),
        outcomes=outcomes,
        attached=attached,
        learner=learner,
        poisoned=poisoned,
        operations=operations,
        rewinds=rewinds,
        interrupted=None if interrupted is None else Interrupted(*interrupted),
    )


def test_equal_states_need_no_action() -> None:
    plan = reconcile([status((1, 5)), status((1, 5))])
    assert (plan.donors, plan.behind, plan.results_from) == ((0, 1), (), None)


def test_rank_in_doubt_of_a_step_committed_by_its_peers_applies_it_before_the_generation() -> None:
    plan = reconcile([status((1, 6), outcomes=6), status((1, 5), doubt=(1, 6), outcomes=6)])
    assert (plan.committed, plan.behind, plan.moving) == ((1,), (), (1,))


def test_step_whose_commit_all_reduce_no_survivor_received_is_aborted_on_all_at_once() -> None:
    plan = reconcile(
        [
            status((1, 5), doubt=(1, 6), outcomes=6),
            status((1, 5), outcomes=6),
            status((1, 5), doubt=(1, 6), outcomes=6),
        ]
    )
    assert (plan.newest, plan.committed, plan.moving) == (StateName(1, 5), (), ())


def test_rank_that_has_not_begun_a_step_lost_by_its_peers_must_lose_it_too() -> None:
    plan = reconcile([status((1, 6), outcomes=7), status((1, 6), outcomes=6)])
    assert (plan.moving, plan.outcomes) == ((1,), 7)


def test_a_joiner_need_not_have_received_anything() -> None:
    assert reconcile([status((1, 6), outcomes=7), status(None, learner=True)]).moving == ()


def test_rank_with_an_older_state_and_no_doubt_receives_the_newest_from_all_holders() -> None:
    plan = reconcile([status((1, 6)), status((1, 5)), status((1, 6))])
    assert plan.newest == StateName(1, 6)
    assert plan.donors == (0, 2)
    assert plan.behind == (1,)


def test_overtaken_ranks_are_replaced_and_receive_no_state() -> None:
    in_an_operation = status((1, 20), operations=1, outcomes=20, interrupted=(1, True))
    in_a_step = status((1, 20), doubt=(1, 21), outcomes=21, interrupted=(1, False))
    before_its_first_state = status(None)
    plan = reconcile(
        [status((3, 168), outcomes=169), in_an_operation, in_a_step, before_its_first_state]
    )
    assert plan.overtaken == (1, 2, 3)
    assert (plan.behind, plan.moving, plan.committed) == ((), (), ())


def test_a_rank_that_missed_the_return_to_a_checkpoint_is_behind_but_not_overtaken() -> None:
    plan = reconcile([status((3, 10), operations=1, outcomes=20), status((1, 20), outcomes=20)])
    assert (plan.overtaken, plan.behind) == ((), (1,))


def test_a_later_generation_wins_over_a_higher_step() -> None:
    plan = reconcile([status((1, 9)), status((2, 7))])
    assert plan.newest == StateName(2, 7)
    assert plan.behind == (0,)


def test_learner_receives_nothing_before_the_step_boundary_and_does_not_count() -> None:
    plan = reconcile([status((1, 5)), status(None, learner=True)])
    assert plan.behind == ()
    assert plan.learners == (1,)


def test_rank_whose_update_raised_halfway_never_donates_and_receives_the_state_again() -> None:
    plan = reconcile([status((1, 5), poisoned=True), status((1, 5))])
    assert plan.donors == (1,)
    assert plan.behind == (0,)


def test_state_is_lost_when_every_holder_is_torn() -> None:
    assert reconcile([status((1, 5), poisoned=True)]).state_lost


def test_rank_with_an_unfinished_first_synchronization_receives_anothers_state() -> None:
    plan = reconcile([status((1, 0)), status(None)])
    assert plan.behind == (1,)
    assert plan.donors == (0,)


def test_results_come_from_the_rank_that_finished_most_operations() -> None:
    plan = reconcile([status((1, 5), operations=1), status((1, 5), operations=3), status((1, 5))])
    assert plan.results_from == 1


def test_results_of_an_undone_round_go_only_to_ranks_that_must_reach_its_end() -> None:
    ends_the_round = status((1, 5), operations=1, outcomes=9, rewinds=True)
    in_the_operation = status((1, 5), outcomes=8)
    has_rewound = status((1, 5), outcomes=9)
    plan = reconcile([ends_the_round, in_the_operation, has_rewound])
    assert (plan.results_from, plan.results_to) == (0, (1,))
    assert reconcile([ends_the_round, has_rewound]).results_from is None


def test_rank_behind_receives_the_results_that_followed_the_step_it_missed() -> None:
    plan = reconcile([status((1, 6), operations=1), status((1, 5))])
    assert plan.results_from == 0


IN_OPERATION, IN_STEP = (3, True), (3, False)


def test_ranks_with_one_state_in_an_operation_and_in_a_step_diverged() -> None:
    assert reconcile(
        [status((1, 5), interrupted=IN_OPERATION), status((1, 5), interrupted=IN_STEP)]
    ).apart == (0,)
    assert reconcile([status((1, 5), interrupted=IN_OPERATION)] * 2).apart == ()
    assert reconcile([status((1, 5), interrupted=IN_STEP)] * 2).apart == ()


def test_ranks_separated_by_a_fault_did_not_diverge() -> None:
    behind = status((1, 4), interrupted=IN_STEP)
    further = status((1, 5), interrupted=IN_STEP, operations=1)
    of_another_group = status((1, 5), interrupted=(2, False))
    learner = status(None, interrupted=IN_STEP, learner=True)
    for other in (behind, further, of_another_group, learner, status((1, 5))):
        assert reconcile([status((1, 5), interrupted=IN_OPERATION), other]).apart == ()


statuses = st.lists(
    st.builds(
        status,
        st.none() | st.tuples(st.integers(1, 3), st.integers(0, 3)),
        attached=st.booleans(),
        learner=st.booleans(),
        poisoned=st.booleans(),
        operations=st.integers(0, 3),
        interrupted=st.none() | st.tuples(st.integers(1, 3), st.booleans()),
        doubt=st.none() | st.tuples(st.integers(1, 3), st.integers(0, 3)),
        outcomes=st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@given(statuses)
def test_donors_have_the_complete_newest_state_and_no_rank_both_sends_and_receives(
    ranks: list[RankStatus],
) -> None:
    plan = reconcile(ranks)
    assert not set(plan.donors) & set(plan.behind)
    for rank in plan.donors:
        assert ranks[rank].state == plan.newest
        assert not ranks[rank].poisoned
        assert not ranks[rank].learner
    for rank in plan.behind:
        assert ranks[rank].attached
        assert not ranks[rank].learner
    for s in ranks:
        if s.state is not None and not s.learner:
            assert plan.newest is not None
            assert s.state <= plan.newest


@given(statuses)
def test_ranks_never_wait_for_idle_ones_and_each_without_state_learns_what_to_do(
    ranks: list[RankStatus],
) -> None:
    plan = reconcile(ranks)
    members = [r for r, s in enumerate(ranks) if not s.learner]
    assert set(plan.moving) <= set(members)
    assert not set(plan.committed) & set(plan.behind)
    assert not set(plan.overtaken) & {*plan.behind, *plan.committed, *plan.donors}
    if not plan.moving and not plan.overtaken:
        assert {ranks[r].outcomes for r in members} <= {plan.outcomes}
        assert not plan.committed


@given(statuses)
def test_rank_statuses_survive_serialization(ranks: list[RankStatus]) -> None:
    assert [RankStatus.decode(s.encode()) for s in ranks] == ranks
