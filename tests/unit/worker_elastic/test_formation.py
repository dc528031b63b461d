"""The ranks that form a generation agree on the valid state, on which rank sends it to which, and
on which rank acts for all."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.step import ScriptPosition

from tests.unit.worker_elastic.ranks import Member, Model, form

OLD, NEW = StateName(1, 4), StateName(1, 5)
BORDER = ScriptPosition("loader", 1, 0, 5)


def reform(member: Member) -> None:
    member.formation.reform()


def synchronize(member: Member) -> None:
    member.formation.synchronize_first()


def boundary(member: Member) -> ScriptPosition | None:
    member.formation.reform()
    return member.formation.let_joiners_in(BORDER)


def test_rank_with_an_older_state_receives_that_of_the_others() -> None:
    members = [
        Member(Model(5.0), state=NEW),
        Member(Model(4.0), state=OLD),
        Member(Model(5.0), state=NEW),
    ]
    assert form(members, reform) == [None] * 3
    assert [m.model.value for m in members] == [5.0] * 3
    assert {m.held.name for m in members} == {NEW}


def test_rank_whose_update_raised_halfway_receives_the_state_again() -> None:
    members = [Member(Model(-1.0), state=NEW, torn=True), Member(Model(5.0), state=NEW)]
    assert form(members, reform) == [None] * 2
    assert members[0].model.value == 5.0
    assert members[0].held.phase.now is not Phase.TORN


def test_state_torn_on_every_holder_is_reported_lost_on_all_ranks() -> None:
    members = [Member(Model(-1.0), state=NEW, torn=True), Member(Model(4.0), state=OLD)]
    outcomes = form(members, reform)
    assert all(isinstance(outcome, PreconditionError) for outcome in outcomes)
    assert "restart from a checkpoint" in str(outcomes[0])
    assert members[1].model.value == 4.0


def test_state_torn_on_every_holder_is_not_sent_to_joiners() -> None:
    members = [Member(Model(-1.0), state=NEW, torn=True), Member(Model(0.0), live=False)]
    outcomes = form(members, boundary)
    assert [str(o) for o in outcomes] == [
        "no rank can send its state to the joiners; restart from a checkpoint"
    ] * 2
    assert not members[1].held.phase.holds_state


@pytest.mark.parametrize("first_is_joiner", [False, True])
def test_weights_of_the_first_rank_that_is_not_a_joiner_win(first_is_joiner: bool) -> None:
    members = [Member(Model(2.0)), Member(Model(3.0)), Member(Model(0.0, meta=True))]
    if not first_is_joiner:
        assert form(members, synchronize) == [None] * 3
        assert [m.model.value for m in members] == [2.0] * 3
        return
    joiner = Member(Model(9.0), live=False)
    outcomes = form(
        [joiner, *members],
        lambda m: (
            boundary(m) if m is joiner else (synchronize(m), m.formation.let_joiners_in(BORDER))[1]
        ),
    )
    assert outcomes == [BORDER, None, None, None]
    assert [m.model.value for m in (joiner, *members)] == [2.0] * 4


def test_the_first_rank_must_have_values() -> None:
    outcomes = form([Member(Model(0.0, meta=True)), Member(Model(3.0))], synchronize)
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes)
    assert "meta" in str(outcomes[0])


def test_recovering_rank_releases_its_group_before_it_waits_for_the_next_one() -> None:
    members, failed = [Member(Model(4.0), state=OLD), Member(Model(4.0), state=OLD)], []
    for member in members:
        reasons: list[str] = []
        member.membership.group = SimpleNamespace(abort=reasons.append)
        member.membership.failed = lambda error, reasons=reasons: failed.append(
            (str(error), reasons)
        )
    form(members, lambda member: member.formation.recover(MembershipChanged("a peer is gone")))
    assert failed == [("a peer is gone", ["a peer is gone"])] * 2


def test_joiner_on_the_meta_device_receives_its_values_from_its_peers() -> None:
    members = [Member(Model(5.0), state=NEW), Member(Model(0.0, meta=True), live=False)]
    assert form(members, boundary) == [None, BORDER]
    assert members[1].model.value == 5.0
    assert members[1].held.name == NEW
    assert members[1].held.phase.holds_state


def test_joiner_never_represents_the_group_before_it_has_the_state() -> None:
    joiner, member = Member(Model(0.0), live=False), Member(Model(5.0), state=NEW)
    form([joiner, member], lambda m: m.formation.reform())
    assert not joiner.formation.is_first
    assert member.formation.is_first


def test_lowest_rank_represents_the_group_once_all_have_the_state() -> None:
    joiner, member = Member(Model(0.0), live=False), Member(Model(5.0), state=NEW)
    form([joiner, member], boundary)
    assert joiner.formation.is_first
    assert not member.formation.is_first


def test_ranks_at_different_loops_refuse_to_send_a_joiner_the_state() -> None:
    members = [
        Member(Model(5.0), state=NEW),
        Member(Model(5.0), state=NEW),
        Member(Model(0.0), live=False),
    ]
    places = {id(members[0]): BORDER, id(members[1]): ScriptPosition("other", 2, 0, 5)}

    def at_its_place(member: Member) -> None:
        member.formation.reform()
        member.formation.let_joiners_in(places.get(id(member), BORDER))

    outcomes = form(members, at_its_place)
    assert [getattr(o, "reason", None) for o in outcomes[:2]] == ["RANKS_DIVERGED"] * 2
    assert not members[2].held.phase.holds_state


def test_joiners_without_peers_start_from_the_checkpoint() -> None:
    members = [Member(Model(1.0), live=False), Member(Model(2.0), live=False)]
    for member in members:
        member.formation.syncing.fallback = lambda member=member: (
            member.model.restore(Model(7.0).capture()) is None
        )
    assert form(members, boundary) == [None, None]
    assert [m.model.value for m in members] == [7.0, 7.0]


@pytest.mark.parametrize("reads", [lambda: False, None], ids=["no-checkpoint", "no-resume"])
def test_joiners_without_state_or_checkpoint_do_not_silently_start_at_step_0(
    reads: Callable[[], bool] | None,
) -> None:
    members = [Member(Model(1.0), live=False), Member(Model(2.0), live=False)]
    for member in members:
        member.formation.syncing.fallback = reads
    outcomes = form(members, boundary)
    assert [getattr(o, "reason", None) for o in outcomes] == ["PROGRESS_LOST"] * 2
    assert "shoal.resume" in str(outcomes[0])
    assert not any(m.held.phase.holds_state for m in members)
