"""At a step boundary, a rank obeys what all ranks agreed on in the step vote, and leaves if it was
evicted."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from shoal_common.errors import CorruptDataError, PreconditionError, UnavailableError
from shoal_worker.elastic.contract.loader_interface import Share, StepStatus, StopTraining
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group import transfer
from shoal_worker.elastic.group.transfer import StateExchange
from shoal_worker.elastic.recovery.step_boundaries import Departure
from shoal_worker.elastic.recovery.step_lifecycle import StepLifecycle
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings

from tests.unit.worker_elastic.ranks import Member, Model, form


class Strategy(Model):
    """An engine whose commit all-reduce adds votes given by a test."""

    steps: StepLifecycle
    others: tuple[float, float] = (0.0, 0.0)
    """Votes of the other ranks: a step boundary is wanted; a stop was announced."""

    def reduce(self, step: Step) -> None:
        step.prepare()

    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        word = [*vote]
        word[0] += self.others[0]
        word[3] += self.others[1]
        return word, {}


@pytest.fixture
def rank() -> SimpleNamespace:
    """One rank in its own group, between two steps."""
    strategy = Strategy(1.0)
    member = Member(strategy, state=StateName(1, 0))
    member.membership.left = []
    member.membership.leave_group = member.membership.left.append
    form([member], lambda m: m.formation.reform())
    metrics = WorkerMetrics()
    departure = Departure(None, member.held)
    strategy.steps = StepLifecycle(
        member.held,
        member.formation,
        departure,
        operation=lambda kind: None,
        progress=ProgressMeter(metrics),
        metrics=metrics,
    )
    member.membership.link.finished_steps = None
    return SimpleNamespace(
        steps=strategy.steps,
        strategy=strategy,
        link=member.membership.link,
        membership=member.membership,
    )


def take_step(rank: SimpleNamespace) -> StepStatus:
    rank.steps.begin_step(None)
    rank.steps.assign(Share(weight=1.0, total_weight=1.0, micro_batches=None))
    status: StepStatus = rank.steps.finish_step(lambda: None)
    return status


def test_a_rank_that_has_received_a_stop_takes_one_more_step_with_those_that_have_not(
    rank: SimpleNamespace,
) -> None:
    assert take_step(rank)
    rank.link.stopped = "enough"
    assert take_step(rank)  # its step vote informs the others
    with pytest.raises(StopTraining, match="enough"):
        rank.steps.begin_step(None)


def test_a_stop_before_there_is_a_model_is_obeyed() -> None:
    held = CommittedState(live=True)
    membership: Any = SimpleNamespace(link=SimpleNamespace(finished_steps=None))
    departure = Departure(membership, held)
    departure.obey(StopTraining("enough"))
    assert departure.stopped == "enough"


def test_rank_that_has_not_received_the_stop_stops_with_the_others(rank: SimpleNamespace) -> None:
    rank.strategy.others = (1.0, 1.0)
    assert take_step(rank)
    with pytest.raises(StopTraining, match="stopped"):
        rank.steps.begin_step(None)


def test_evicted_member_releases_its_group_and_reports_the_reason(rank: SimpleNamespace) -> None:
    assert take_step(rank)
    rank.link.refused = PreconditionError("its lease expired", reason="LEASE_EXPIRED")
    assert take_step(rank)
    with pytest.raises(PreconditionError, match="lease expired"):
        rank.steps.begin_step(None)
    assert rank.membership.left == ["the coordinator evicted this member"]


def test_state_damaged_in_transit_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State that is damaged in transfer raises UnavailableError, so that it is requested again. A
    damaged file, in contrast, would end the run."""

    def damaged(*_: Any, **__: Any) -> None:
        raise CorruptDataError("a checksum is wrong", reason="STATE_DAMAGED")

    monkeypatch.setattr(transfer, "take_state", damaged)
    members = [Member(Model(5.0), state=StateName(1, 5)), Member(Model(4.0), state=StateName(1, 4))]

    def take(member: Member) -> None:
        state = StateExchange(member.donor, WorkerSettings(), WorkerMetrics())
        state.take(member._form(), [0])

    outcomes = form(members, take)
    assert [(type(o), o.reason) for o in outcomes] == [(UnavailableError, "STATE_DAMAGED")] * 2


class Counted:
    """An object that the script registers."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_loop_left_at_a_lost_step_leaves_registered_objects_to_the_script(
    rank: SimpleNamespace,
) -> None:
    seen, source = (
        Counted(),
        SimpleNamespace(is_over=False, under_way=False, name="loader", epoch=0),
    )
    registered = rank.steps._held.registered
    registered.register("seen", seen, copied=True)
    registered.step_begins()
    registered.step_taken(may_be_lost=True)
    seen.count += 1  # during a step that is lost
    registered.step_aborted()
    rank.steps.loop_left(source)
    assert seen.count == 0
    seen.count = 100  # after the loop
    assert take_step(rank)
    assert seen.count == 100
