"""What a process's script is to its job: one phase at a time, and only the moves that have a name."""

import pytest
from shoal_worker.elastic.phase import Phase, ScriptPhase


def after(*moves: str, live: bool = True) -> ScriptPhase:
    phase = ScriptPhase(live=live)
    for move in moves:
        getattr(phase, move)(*(["asked"] if move in ("stop", "leave") else []))
    return phase


@pytest.mark.parametrize(
    ("live", "moves", "expected"),
    [
        (False, [], Phase.REPLAYING),
        (False, ["feed"], Phase.ARRIVING),
        (False, ["feed", "arrive"], Phase.TRAINING),
        (False, ["feed", "arrive", "fall_behind"], Phase.ARRIVING),
        (False, ["begin"], Phase.TRAINING),
        (True, ["feed"], Phase.TRAINING),
        (True, ["set_aside", "feed"], Phase.ARRIVING),
        (True, ["tear"], Phase.TORN),
        (True, ["tear", "mend"], Phase.TRAINING),
        (True, ["tear", "go_back"], Phase.RETURNED),
        (True, ["go_back", "resume"], Phase.TRAINING),
        (True, ["resume"], Phase.TRAINING),
        (True, ["stop"], Phase.STOPPED),
        (True, ["leave"], Phase.LEFT),
    ],
)
def test_each_move_leads_where_its_name_says(live: bool, moves: list[str], expected: Phase) -> None:
    assert after(*moves, live=live).now is expected


@pytest.mark.parametrize(("live", "move"), [(True, "arrive"), (False, "arrive"), (False, "fall_behind"), (False, "tear")])
def test_a_move_that_no_rule_allows_is_a_bug_and_told_as_one(live: bool, move: str) -> None:
    with pytest.raises(AssertionError, match="expected to be"):
        after(move, live=live)


def test_the_first_reason_to_stop_is_kept() -> None:
    phase = after("stop")
    phase.leave("gone")
    assert phase.stopped == "asked"


def test_a_script_that_has_left_acts_for_nobody() -> None:
    phase = after("leave")
    assert not phase.holds_state
    assert not phase.replaying
