"""The phases of a process's script: it is in one phase at a time, and changes it only by named
transitions."""

import itertools

import pytest
from shoal_common.errors import InternalError
from shoal_worker.elastic.contract.phase import Phase, ScriptPhase

REPLAYING, ARRIVING, TRAINING, TORN, RETURNED, STOPPED, LEFT = PHASES = tuple(Phase)

PATHS = {
    REPLAYING: (),
    ARRIVING: ("sync",),
    TRAINING: ("begin",),
    TORN: ("begin", "tear"),
    RETURNED: ("begin", "go_back"),
    STOPPED: ("begin", "stop"),
    LEFT: ("leave",),
}
"""Calls that bring a joiner into each phase."""

BUG = None
MOVES = {
    # from:         REPLAYING  ARRIVING  TRAINING  TORN      RETURNED  STOPPED   LEFT
    "begin":       (TRAINING,  BUG,      BUG,      BUG,      BUG,      BUG,      BUG),
    "be_alone":    (TRAINING,  TRAINING, TRAINING, TORN,     TRAINING, STOPPED,  LEFT),
    "sync":        (ARRIVING,  ARRIVING, TRAINING, TORN,     RETURNED, STOPPED,  BUG),
    "arrive":      (BUG,       TRAINING, BUG,      BUG,      BUG,      BUG,      BUG),
    "fall_behind": (BUG,       BUG,      ARRIVING, TORN,     BUG,      BUG,      BUG),
    "set_aside":   (REPLAYING, REPLAYING, REPLAYING, REPLAYING, REPLAYING, BUG,  BUG),
    "tear":        (BUG,       BUG,      TORN,     BUG,      BUG,      BUG,      BUG),
    "mend":        (BUG,       BUG,      BUG,      TRAINING, BUG,      BUG,      BUG),
    "replace":     (REPLAYING, ARRIVING, TRAINING, TRAINING, TRAINING, STOPPED,  LEFT),
    "go_back":     (BUG,       ARRIVING, RETURNED, TORN,     RETURNED, STOPPED,  BUG),
    "resume":      (BUG,       ARRIVING, TRAINING, TORN,     TRAINING, BUG,      BUG),
    "stop":        (BUG,       BUG,      STOPPED,  TORN,     STOPPED,  STOPPED,  BUG),
    "leave":       (LEFT,      LEFT,     LEFT,     LEFT,     LEFT,     LEFT,     LEFT),
}  # fmt: skip


def take(phase: ScriptPhase, *moves: str) -> ScriptPhase:
    for move in moves:
        getattr(phase, move)(*(["asked"] if move in ("stop", "leave") else []))
    return phase


def invariant(phase: ScriptPhase) -> bool:
    """Returns whether `stopped` and `holds_state` fit the phase, as the module's docstring
    promises."""
    stopped = {STOPPED: True, LEFT: True, TORN: phase.stopped is not None}.get(phase.now, False)
    return (phase.stopped is not None) == stopped and phase.holds_state == (
        phase.now not in (REPLAYING, LEFT)
    )


def test_table_lists_every_transition() -> None:
    moves = {
        name
        for name, value in vars(ScriptPhase).items()
        if callable(value) and not name.startswith("_")
    }
    assert moves == set(MOVES)


def test_each_transition_leads_to_the_listed_phase_and_only_from_listed_ones(
    subtests: pytest.Subtests,
) -> None:
    for move, source in itertools.product(MOVES, PHASES):
        with subtests.test(move, source=source.value):
            phase = take(ScriptPhase(live=False), *PATHS[source])
            assert phase.now is source
            assert invariant(phase)
            expected = MOVES[move][PHASES.index(source)]
            if expected is BUG:
                refusal = rf"^{move}\(\) was called in phase {source.value}; it is allowed only in "
                with pytest.raises(InternalError, match=refusal):
                    take(phase, move)
                assert phase.now is source
            else:
                assert take(phase, move).now is expected
            assert invariant(phase)


def test_a_process_that_is_alone_from_the_start_trains() -> None:
    assert ScriptPhase(live=True).now is TRAINING


@pytest.mark.parametrize("cure", ["mend", "replace"])
def test_torn_state_stays_torn_through_a_stop_and_takes_no_step_once_restored(
    cure: str,
) -> None:
    phase = take(ScriptPhase(live=True), "tear", "stop")
    assert phase.now is TORN
    assert phase.stopped == "asked"
    assert take(phase, cure).now is STOPPED
    assert invariant(phase)


def test_the_first_reason_to_stop_is_kept() -> None:
    phase = take(ScriptPhase(live=True), "stop")
    phase.leave("gone")
    assert phase.stopped == "asked"


def test_a_script_that_has_left_acts_for_nobody() -> None:
    phase = take(ScriptPhase(live=True), "leave")
    assert not phase.holds_state
    assert not phase.replaying
