"""The simulator repeats a schedule exactly, reads its own text, detects errors and shrinks
scenarios."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import PreconditionError
from shoal_common.exit_status import EVICTED
from shoal_worker.data.step_batches import DealtSupply
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.recovery.step_lifecycle import StepLifecycle
from shoal_worker.engine.state.holders import ShardsLostError
from shoal_worker.sharding.sharded_state import ShardedState

from tests.simulation import oracle
from tests.simulation.loops import Training
from tests.simulation.processes import Process, own_process
from tests.simulation.scenario import (
    CoordinatorAway,
    Dies,
    Drains,
    JobStops,
    Joins,
    Scenario,
    SlowWrites,
    Stops,
    Torn,
    parse,
)
from tests.simulation.seeds import scenario_of
from tests.simulation.shrinking import shrink

_DEATH = Scenario(faults=(Dies(who="b", point=40),))


@pytest.mark.parametrize("seed", [None, 15], ids=["a death", "the coordinator away"])
def test_schedule_is_reproducible(seed: int | None) -> None:
    scenario = _DEATH if seed is None else scenario_of(seed)
    first, second = oracle.run(scenario), oracle.run(scenario)
    assert first.world.notes == second.world.notes
    assert first.world.scheduler.turns == second.world.scheduler.turns


def test_another_schedule_of_the_same_faults_differs() -> None:
    first, second = oracle.run(_DEATH), oracle.run(dataclasses.replace(_DEATH, schedule=1))
    assert first.world.notes != second.world.notes


def test_scenario_is_parsed_from_its_own_text() -> None:
    scenario = Scenario(
        strategy="zero3",
        loop="micro-batches",
        replaced=True,
        devices=True,
        schedule=5,
        faults=(
            Dies(who="a", point=1),
            Stops(who="b", point=2, seconds=3),
            Drains(who="c", point=4),
            Joins(who="a", point=5),
            JobStops(who="b", point=6),
            CoordinatorAway(who="c", point=7, seconds=8),
            SlowWrites(who="a", seconds=9),
            Torn(generation=1, collective=2, dies="a", got=("b", "c")),
            Torn(generation=1, collective=2, dies="a", entered=False),
            Torn(generation=1, collective=2, dies=None),
            Torn(step=4, collective=-1, dies="a", got=("b",)),
        ),
    )
    assert parse(f"# A comment\n{scenario}\n") == scenario
    assert all(parse(str(scenario_of(seed))) == scenario_of(seed) for seed in range(4))


@pytest.mark.parametrize("text", ["ddp", "ddp, loop flat, 3 ranks, schedule 0\nb sings"])
def test_invalid_scenarios_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse(text)


def test_rank_with_different_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training._step

    def damaging(training: Training) -> None:
        step(training)
        if training.process.name == "b" and training.loader.global_step == 4:
            with torch.no_grad():
                next(training.net.parameters()).view(-1)[0] += 1e-7

    oracle.reference(Scenario())
    monkeypatch.setattr(Training, "_step", damaging)
    # otherwise the ranks would find it themselves
    monkeypatch.setattr(StepLifecycle, "_compare_before_update", lambda *_: None)
    assert {"parameters", "result"} <= oracle.run(Scenario(schedule=1)).kinds


def test_samples_dealt_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DealtSupply._advance
    received = [0]

    def stuck(supply: Any, dealt: Any) -> None:
        received[0] += 1
        if received[0] > 12:
            advance(supply, dealt)

    oracle.reference(Scenario())
    monkeypatch.setattr(DealtSupply, "_advance", stuck)
    assert oracle.run(Scenario(schedule=1)).kinds


def test_ranks_that_wait_for_an_absent_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training._step

    def dreaming(training: Training) -> None:
        if training.process.name == "b" and training.loader.global_step == 4:
            time.sleep(1e9)
        step(training)

    oracle.reference(Scenario())
    monkeypatch.setattr(Training, "_step", dreaming)
    assert {"hang", "timeout"} & oracle.run(Scenario(schedule=1)).kinds


def test_garbage_left_by_a_failed_collective_reaches_no_parameter() -> None:
    verdict = oracle.run(Scenario(faults=(Torn(generation=1, collective=8, dies="a", got=("b",)),)))
    for process in verdict.world.processes:
        for value in process.diary.values.values():
            assert torch.isfinite(value).all()


def test_failing_scenario_is_shrunk() -> None:
    guilty = Torn(generation=1, collective=7, dies="b")
    scenario = Scenario(
        strategy="zero2",
        loop="save",
        replaced=True,
        faults=(Dies(who="a", point=30), guilty, Drains(who="c", point=50)),
    )
    smallest = shrink(scenario, lambda one: guilty in one.faults)
    assert smallest == Scenario(strategy="ddp", loop="flat", ranks=2, faults=(guilty,))


def test_run_that_has_just_ended_accepts_no_joiner() -> None:
    scenario = Scenario(
        ranks=2, faults=(Dies(who="a", point=40), Dies(who="b", point=45), Joins(who="b", point=45))
    )
    verdict = oracle.run(scenario)
    assert [process.name for process in verdict.world.processes] == ["a", "b"]
    assert not verdict.kinds


def _raises(
    monkeypatch: pytest.MonkeyPatch, scenario: Scenario, who: Any, error: BaseException
) -> frozenset[str]:
    """Returns the kinds of violations found if the processes selected by `who` raise `error` at the
    end of a step."""
    step = Training._step

    def raising(training: Training) -> None:
        step(training)
        if who(training.process):
            raise error

    oracle.reference(scenario.without_faults())
    monkeypatch.setattr(Training, "_step", raising)
    return oracle.run(scenario).kinds


@pytest.mark.parametrize(("loop", "kind"), [("flat", "failed"), ("save", "went back")])
def test_state_given_up_after_one_death_is_found(
    monkeypatch: pytest.MonkeyPatch, loop: str, kind: str
) -> None:
    scenario = Scenario(strategy="zero1", loop=loop, faults=(Dies(who="b", point=100),))
    oracle.reference(scenario.without_faults())
    reshard, gave_up = ShardedState.reshard, set[int]()

    def losing(state: ShardedState, group: Any) -> None:
        if group.world_size == 2 and group.rank not in gave_up:
            gave_up.add(group.rank)
            raise ShardsLostError(lost=1, shards=3)
        reshard(state, group)

    monkeypatch.setattr(ShardedState, "reshard", losing)
    assert kind in oracle.run(scenario).kinds


def test_failing_survivor_is_not_a_departure(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(strategy="zero1", faults=(Dies(who="b", point=100),))
    seen = _raises(
        monkeypatch,
        scenario,
        lambda process: bool(process.world.losses),
        ShardsLostError(lost=1, shards=3),
    )
    assert "failed" in seen


def test_survivors_that_all_end_as_spares_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(strategy="hybrid", ranks=4, faults=(Dies(who="d", point=100),))
    assert "failed" in _raises(
        monkeypatch, scenario, lambda process: process.points > 150, SystemExit(EVICTED)
    )


def test_progress_given_up_despite_a_checkpoint_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(
        loop="save",
        ranks=2,
        faults=(Joins(who="a", point=100), Dies(who="a", point=101), Dies(who="b", point=101)),
    )
    error = PreconditionError(
        "no worker with the run's state is left, and no checkpoint was loaded",
        reason="PROGRESS_LOST",
    )
    assert "failed" in _raises(monkeypatch, scenario, lambda process: process.late, error)


def test_stalled_member_may_only_end_as_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(faults=(Stops(who="b", point=60, seconds=40),))
    assert "failed" in _raises(
        monkeypatch, scenario, lambda process: process.name == "b", RuntimeError("a bug")
    )


def test_joiner_that_leaves_a_continuing_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(faults=(Joins(who="a", point=5), Dies(who="b", point=40)))
    seen = _raises(monkeypatch, scenario, lambda process: process.late, SystemExit(0))
    assert {"left early", "failed"} & seen


def test_wait_of_a_full_timeout_beside_a_short_stop_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(
        faults=(Stops(who="a", point=30, seconds=1), SlowWrites(who="a", seconds=1))
    )
    step, dreamt = Training._step, set[str]()

    def dreaming(training: Training) -> None:
        if training.process.name == "b" and training.loader.global_step == 4 and not dreamt:
            dreamt.add("b")
            time.sleep(25)
        step(training)

    oracle.reference(Scenario())
    monkeypatch.setattr(Training, "_step", dreaming)
    assert "timeout" in oracle.run(scenario).kinds


def _violates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records an unrelated violation when process a starts."""
    start = Process.start

    def violating(process: Process, script: Any) -> None:
        if process.name == "a":
            process.world.violated("donors", "made up")
        start(process, script)

    monkeypatch.setattr(Process, "start", violating)


_LEFT_OVER = Scenario(
    strategy="hybrid",
    loop="save",
    ranks=2,
    faults=(Joins(who="a", point=5), Dies(who="a", point=150), Dies(who="b", point=150)),
)
_REFUSED = Scenario(loop="enumerate", faults=(Joins(who="a", point=5), Dies(who="b", point=34)))


@pytest.mark.parametrize("scenario", [_LEFT_OVER, _REFUSED])
def test_run_that_may_end_badly_is_judged_in_all_other_respects(
    monkeypatch: pytest.MonkeyPatch, scenario: Scenario
) -> None:
    assert oracle.run(scenario).ok
    _violates(monkeypatch)
    assert "donors" in oracle.run(scenario).kinds


@pytest.mark.parametrize("who", ["ab", "abc"])
def test_plain_loop_that_learns_different_values_is_found(
    monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    scenario = Scenario(loop="plain", schedule=1)
    step = Training._step

    def damaging(training: Training) -> None:
        step(training)
        if training.process.name in who and len(training.process.diary.statuses) == 4:
            with torch.no_grad():
                next(training.net.parameters()).view(-1)[0] += 1e-7

    oracle.reference(scenario.without_faults())
    monkeypatch.setattr(Training, "_step", damaging)
    # otherwise the ranks would find it themselves
    monkeypatch.setattr(StepLifecycle, "_compare_before_update", lambda *_: None)
    assert "result" in oracle.run(scenario).kinds


def test_a_plain_loop_that_skips_a_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(loop="plain", schedule=1, faults=(Torn(step=3, collective=-2, dies="c"),))
    step, skipped = Training._step, set[str]()

    def skipping(training: Training) -> None:
        if training.process.world.losses and training.process.name not in skipped:
            skipped.add(training.process.name)
            return
        step(training)

    oracle.reference(scenario.without_faults())
    monkeypatch.setattr(Training, "_step", skipping)
    assert "batches" in oracle.run(scenario).kinds


def test_a_stopped_job_that_saves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(strategy="zero2", loop="save", faults=(JobStops(who="c", point=40),))
    assert oracle.run(scenario).ok
    save = shoal.save_checkpoint
    monkeypatch.setattr(
        shoal,
        "save_checkpoint",
        lambda directory: None if own_process().world.stopped_at is not None else save(directory),
    )
    assert "saved" in oracle.run(scenario).kinds


def test_ranks_that_ignore_the_outcome_of_their_collectives_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault occurs in a gather before the commit all-reduce, and hosts learn of it
    afterwards."""
    scenario = parse(
        "zero3, loop flat, 3 ranks, 3 steps, on devices, schedule 0\ncollective 34 of generation "
        "1: connections break, c got it"
    )
    assert oracle.run(scenario).ok
    monkeypatch.setattr(Group, "settle", lambda _: None)
    assert {"parameters", "result"} <= oracle.run(scenario).kinds
