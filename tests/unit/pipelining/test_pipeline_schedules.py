"""The schedules' orders of computation, numbers of micro-batches in flight and bubbles, compared
with the figures in the papers."""

from __future__ import annotations

import pytest
from shoal_common.errors import ConfigurationError
from shoal_worker.pipelining.schedule import (
    Action,
    Kind,
    Schedule,
    forward_schedule,
    schedule_kind,
    schedule_names,
    stage_ranks,
    training_schedule,
)

from tests.unit.pipelining.schedule_costs import bubble, in_flight

RANKS, MICRO_BATCHES = 4, 8
_COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _made(name: str, ranks: int = RANKS, micro_batches: int = MICRO_BATCHES) -> Schedule:
    return training_schedule(
        name,
        ranks=ranks,
        stages_per_rank=schedule_kind(name).default_stages_per_rank,
        micro_batches=micro_batches,
    )


def test_one_forward_one_backward_holds_as_many_micro_batches_as_remaining_stages() -> None:
    """1F1B keeps as many micro-batches in flight as there are stages from the rank's stage to the
    last one (Narayanan et al., PipeDream-2BW 2021, section 3.2). GPipe keeps all of them."""
    assert [in_flight(_made("1f1b"), rank) for rank in range(RANKS)] == [4, 3, 2, 1]
    assert [in_flight(_made("gpipe"), rank) for rank in range(RANKS)] == [MICRO_BATCHES] * RANKS


def test_micro_batches_in_flight_with_two_stages_per_rank_match_the_formulas() -> None:
    """Schedules with two stages per rank keep the published numbers of activations in flight. These
    are half as large as with one stage per rank.

    Interleaved: 2(p - 1 - r) + (v - 1)p warm-up passes, plus one (Narayanan et al. 2021, section
    2.2). ZBV: 2p, as much as the p full-size ones of 1F1B (Qi et al. 2024, section 6). Looped BFS:
    all (Lamy-Poirier 2022).
    """
    expected = [2 * (RANKS - 1 - rank) + RANKS + 1 for rank in range(RANKS)]
    assert [in_flight(_made("interleaved_1f1b"), rank) for rank in range(RANKS)] == expected
    assert [in_flight(_made("zbv"), rank) for rank in range(RANKS)] == [2 * RANKS] * RANKS
    assert [in_flight(_made("looped_bfs"), rank) for rank in range(RANKS)] == [
        2 * MICRO_BATCHES
    ] * RANKS
    assert max(in_flight(_made("dualpipe_v"), rank) for rank in range(RANKS)) == 2 * RANKS + 1
    assert max(in_flight(_made("zero_bubble"), rank) for rank in range(RANKS)) < 2 * MICRO_BATCHES


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_p_minus_1_over_m_plus_p_minus_1(name: str) -> None:
    """The bubble of GPipe and 1F1B is (p - 1) / (m + p - 1) (Huang et al., GPipe 2019, section
    2.3)."""
    assert bubble(_made(name), 1, 1, 1) == pytest.approx((RANKS - 1) / (MICRO_BATCHES + RANKS - 1))


def test_interleaving_divides_the_bubble_and_zero_bubble_schedules_nearly_remove_it() -> None:
    plain = bubble(_made("1f1b"), 2, 2, 2)  # stages that are twice as large
    stages = 2
    assert bubble(_made("interleaved_1f1b")) == pytest.approx(
        (RANKS - 1) / (stages * MICRO_BATCHES + RANKS - 1)
    )
    assert bubble(_made("looped_bfs")) == pytest.approx(
        (RANKS - 1) / (stages * MICRO_BATCHES + RANKS - 1)
    )
    for name in ("zero_bubble", "zbv", "dualpipe_v"):
        assert bubble(_made(name)) < 0.06 < bubble(_made("interleaved_1f1b")) < plain


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 3), (4, 5), (4, 1), (3, 7)])
def test_any_number_of_micro_batches_runs_without_deadlock(
    name: str, ranks: int, micro_batches: int
) -> None:
    """The two ranks of each pair transfer the same things in the same order, and every wait
    ends."""
    schedule = _made(name, ranks, micro_batches)
    assert schedule.micro_batches == micro_batches
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                step = 1 if action.kind is Kind.SEND_FORWARD else -1
                arrives = Kind.RECEIVE_FORWARD if step == 1 else Kind.RECEIVE_BACKWARD
                peer = schedule.rank_of[action.stage + step]
                sent.setdefault((rank, peer), []).append(
                    Action(arrives, action.stage + step, action.micro_batch)
                )
            elif action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                step = -1 if action.kind is Kind.RECEIVE_FORWARD else 1
                received.setdefault((schedule.rank_of[action.stage + step], rank), []).append(
                    action
                )
    assert sent == received
    assert bubble(schedule) < 1


def test_schedules_are_also_known_by_torchs_names_and_others_are_refused() -> None:
    assert schedule_kind("ScheduleZBVZeroBubble").name == "zbv"
    assert schedule_kind("Interleaved1F1B").name == "interleaved_1f1b"
    with pytest.raises(
        ConfigurationError, match="schedule='pipedream': expected one of gpipe, 1f1b"
    ):
        schedule_kind("pipedream")
    with pytest.raises(
        ConfigurationError, match="stages_per_rank=3 with schedule='zbv': expected 2"
    ):
        training_schedule("zbv", ranks=2, stages_per_rank=3, micro_batches=4)


def test_stages_are_placed_round_robin_or_in_a_v_and_forward_passes_are_breadth_first() -> None:
    assert stage_ranks(schedule_kind("interleaved_1f1b"), 2, 2) == (0, 1, 0, 1)
    assert stage_ranks(schedule_kind("zbv"), 2, 2) == (0, 1, 1, 0)
    forward = forward_schedule((0, 1, 1, 0), 2)
    computed = [(a.stage, a.micro_batch) for a in forward.actions[1] if a.kind is Kind.FORWARD]
    assert computed == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_messages_need_no_buffer_and_one_queue_on_each_rank(
    name: str, ranks: int, micro_batches: int
) -> None:
    """A schedule does not deadlock if each message must run when both sides reach it, as on one
    NCCL communicator."""
    schedule = _made(name, ranks, micro_batches)
    queues = [
        [action for action in actions if action.kind not in _COMPUTES]
        for actions in schedule.actions
    ]
    while any(queues):
        heads = [queue[0] if queue else None for queue in queues]
        met = [
            (rank, heads.index(_sender(head)))
            for rank, head in enumerate(heads)
            if head is not None and _sender(head) in heads
        ]
        assert met, f"ranks wait for each other: {heads}"
        for rank in met[0]:
            del queues[rank][0]


def _sender(action: Action) -> Action | str:
    """Returns the send that matches a receive."""
    if action.kind is Kind.RECEIVE_FORWARD:
        return Action(Kind.SEND_FORWARD, action.stage - 1, action.micro_batch)
    if action.kind is Kind.RECEIVE_BACKWARD:
        return Action(Kind.SEND_BACKWARD, action.stage + 1, action.micro_batch)
    return "none: it sends"
