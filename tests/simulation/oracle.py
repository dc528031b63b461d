"""Conditions that must be true at the end of every run, no matter which faults occurred.

Two terms: a *finisher* reached the end of its script; a *survivor* is a finisher that was present
from the beginning.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch
from shoal_common.exit_status import EVICTED
from shoal_worker.data.record import audit

from tests.simulation import loops, seams
from tests.simulation.holdings import parts_by_rank, replica_size
from tests.simulation.processes import Process
from tests.simulation.scenario import (
    DIVIDED,
    SAVING,
    Drains,
    Fault,
    JobStops,
    Scenario,
    SlowWrites,
    Torn,
)
from tests.simulation.transfers import tensors_of
from tests.simulation.world import World

_STATES = ("state", "optimizer", "averaged")
"""Parts of a script's final state that are compared as tensors."""
_LONG_S = 15
"""Shortest stop or write, in seconds, for which others may wait until a timeout in addition to
their own work."""
_REPORTED_AFTER_S = 0.1
"""Longest time in seconds until the coordinator learns of a death."""
_DIVERGED = "ranks diverged"
_STATE_LOST = (
    "is lost, because an update failed",
    "only a checkpoint can restore",
    "no rank can send its state",
    "are fewer than the",
    "no rank has all parameters",
)
_GIVEN_UP = "was abandoned: a worker was lost before it had written its part"
_NO_WAY_BACK = "The script cannot continue from the newest checkpoint"
_ALL_GONE = "no worker with the run's state is left"


class Verdict:
    """A run and its violations."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario, self.world = scenario, world
        self.violations: list[tuple[str, str]] = list(world.violations)
        """Pairs of kind and description. Empty if the run is correct."""

    @property
    def ok(self) -> bool:
        """True if the run has no violations."""
        return not self.violations

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the violations."""
        return frozenset(kind for kind, _ in self.violations)

    def __str__(self) -> str:
        return "\n".join(f"{kind}: {text}" for kind, text in self.violations) or "no violations"


def run(scenario: Scenario, *, keeps_trails: bool = False) -> Verdict:
    """Runs a scenario and judges it."""
    resolved = dataclasses.replace(
        scenario, faults=tuple(_resolved(scenario, fault) for fault in scenario.faults)
    )
    with seams.installed():
        world = World(resolved, loops.train, loops.options_of(resolved), keeps_trails=keeps_trails)
        audits: list[Any] = []
        world.at_end = lambda: audits.append(
            audit(world.records) if world.records.is_dir() else None
        )
        world.run()
    verdict = Verdict(scenario, world)
    if _lacks_ranks(world):
        verdict.violations = [(kind, text) for kind, text in verdict.violations if kind != "hang"]
    if _is_refused(world):
        # one rank is in an operation and others in a step, so their collectives do not match
        verdict.violations.clear()
    elif not any(kind == "hang" for kind, _ in verdict.violations):
        _judge(verdict, audits[0])
    return verdict


@functools.cache
def reference(scenario: Scenario) -> World:
    """Runs a scenario without faults. Raises AssertionError if that run fails."""
    with seams.installed():
        world = World(scenario, loops.train, loops.options_of(scenario), keeps_trails=True)
        world.run()
    if world.violations or any(process.exit_code for process in world.processes):
        raise AssertionError(
            "the run without faults "
            f"fails:\n{scenario}\n{world.violations}\n{''.join(world.tracebacks)}"
        )
    world.forget()
    return world


def _resolved(scenario: Scenario, fault: Fault) -> Fault:
    """Converts a collective's number within a step to its number within the generation."""
    if not isinstance(fault, Torn) or fault.step is None:
        return fault
    firsts = reference(scenario.without_faults()).first_collectives
    begin, end = firsts.get(fault.step - 1, 1), firsts[fault.step]
    return dataclasses.replace(
        fault,
        step=None,
        collective=begin + fault.collective - 1 if fault.collective > 0 else end + fault.collective,
    )


def _judge(verdict: Verdict, audited: Any) -> None:
    world, scenario = verdict.world, verdict.scenario
    finishers = _finishers(world)
    survivors = [process for process in finishers if not _is_late(process)]

    def wrong(kind: str, text: str) -> None:
        verdict.violations.append((kind, text))

    _judge_ends(world, finishers, wrong)
    _judge_beginnings(world, wrong)
    slow = any(process.stopped_for_s >= _LONG_S for process in world.processes) or any(
        isinstance(fault, SlowWrites) and fault.seconds >= _LONG_S for fault in scenario.faults
    )
    if world.timeouts and not _was_unreported(world) and not slow and not scenario.parted:
        wrong("timeout", f"{len(world.timeouts)} waits took a whole timeout: {world.timeouts[0]}")
    _judge_statuses(world, wrong)
    _judge_returns(world, survivors, wrong)
    for process in finishers[1:]:
        _compare_ends(finishers[0], process, wrong)
    _judge_steps(world, wrong)
    if not finishers:
        return
    if scenario.loop == "plain":
        _judge_plain(world, finishers, survivors, wrong)
        return
    _judge_state(world, finishers[0], wrong)
    _judge_saved(world, finishers, wrong)
    for process in survivors:
        _judge_counters(process, wrong)
    for process in finishers:
        _judge_answers(world, process, wrong)
    unfinished = finishers[0].diary.ended_with["steps"] < _all_steps(world)
    if audited is not None:
        for epoch in audited.epochs:
            if epoch.repeated or (epoch.lost and not unfinished):
                wrong(
                    "samples",
                    f"epoch {epoch.epoch}: {epoch.lost} samples lost, {epoch.repeated} repeated",
                )


def _is_refused(world: World) -> bool:
    """Returns whether the run was refused as documented: a joiner's `enumerate(loader)` counts from
    zero. All remaining ranks got the error that names it, and none failed for another reason."""
    if world.scenario.loop != "enumerate" or any(
        kind != "unmatched" for kind, _ in world.violations
    ):
        return False
    ended = [process for process in world.processes if not process.dead and process.exit_code]
    refused = [
        process
        for process in ended
        if process.failure
        and _DIVERGED in process.failure
        and "enumerate(loader)" in process.failure
    ]
    joined = any(
        process.late and (process in refused or process.diary.statuses)
        for process in world.processes
    )
    others = [process for process in ended if process not in refused]
    return joined and len(refused) > 0 and all(_is_excused(world, process) for process in others)


def _lacks_ranks(world: World) -> bool:
    """Returns whether the remaining ranks wait for more because they are too few for a replica. No
    rank has reached its script's end, unless all holders of the model left before the last step
    because one of them was drained."""
    scenario = world.scenario
    left = [process for process in world.processes if not process.gone]
    drained = any(process.asked_at is not None for process in world.processes)
    ends = [
        process.diary.ended_with["steps"]
        for process in world.processes
        if process.diary.ended_with is not None
    ]
    finished = bool(ends) and (max(ends) >= _last_step(world) or not drained)
    size = replica_size(loops.options_of(scenario))
    waiting = all(process.is_spare or process.lacks_ranks for process in left)
    return scenario.strategy in DIVIDED and not finished and 0 < len(left) < size and waiting


def _is_late(process: Process) -> bool:
    """Returns whether `process` joined later or began as a spare."""
    most = max(len(other.diary.statuses) for other in process.world.processes)
    return process.late or (
        process.world.scenario.strategy in DIVIDED and len(process.diary.statuses) < most
    )


def _finishers(world: World) -> list[Process]:
    """Returns the processes that reached their script's end. Drained processes are left out if
    others continued from the state that they saved."""
    ended = [process for process in world.processes if process.diary.ended_with is not None]
    most = max((process.diary.ended_with["steps"] for process in ended), default=0)
    return [
        process
        for process in ended
        if process.asked_at is None or process.diary.ended_with["steps"] == most
    ]


def _judge_ends(world: World, finishers: list[Process], wrong: Any) -> None:
    scenario = world.scenario
    stopped = world.stopped_at is not None
    never_began = stopped and world.steps == 0
    plain = scenario.loop == "plain"
    # Without a loader of Shoal's nothing can end the loop. All processes stop if the last replica
    # is to lose a rank.
    stops = stopped or (
        scenario.strategy in DIVIDED
        and any(process.asked_at is not None for process in world.processes)
    )
    for process in world.processes:
        if process.dead:
            continue
        if process.evicted and process.exit_code == 0:
            wrong("evicted", f"{process.name} was evicted from the job, and ended with 0")
        if process.exit_code and not _is_excused(world, process):
            wrong("failed", f"{process.name} ended with {process.exit_code}: {process.failure}")
        elif process.exit_code == 0 and process.diary.ended_with is None:
            over = stopped or any(_ended_before(other, process) for other in finishers)
            asked = process.asked_at is not None
            if not (
                asked
                or ((process.late or process.spare) and over)
                or (plain and stops)
                or never_began
            ):
                wrong("left early", f"{process.name} ended with 0 before its script's end")
    left = [process for process in world.processes if not process.dead]
    if not left or finishers or plain or never_began or any(process.exit_code for process in left):
        return  # failures are judged above
    if not all(process.asked_at is not None for process in left):
        # the others died during the stop
        only_joiners = stopped and all(
            process.late and not process.diary.statuses for process in left
        )
        if not only_joiners and not _lacks_ranks(world):
            wrong("unfinished", "no process reached its script's end")
    elif all(process.asked_at is not None for process in world.processes) and not _was_unreported(
        world
    ):
        wrong("preempted", "all processes got SIGTERM, and none ran the code after the loop")


def _ended_before(one: Process, other: Process) -> bool:
    """Returns whether `one` sent its leave message before `other` ended. Once a finisher has left,
    the run may be over for joiners and spares."""
    at = one.left_at if one.left_at is not None else one.ended_at
    return at is not None and other.ended_at is not None and at <= other.ended_at


def _was_unreported(world: World) -> bool:
    """Returns whether a death went unreported because the coordinator was away."""
    return any(
        begin - _REPORTED_AFTER_S <= at <= end
        for _, at in world.losses
        for begin, end in world.absences
    )


def _judge_beginnings(world: World, wrong: Any) -> None:
    """Checks that processes which join later continue from the steps that the others have
    committed."""
    for process in world.processes:
        begins = process.diary.statuses[0][0] if process.diary.statuses else process.steps_before
        went_back = world.scenario.loop in SAVING and (
            world.holdings.ever_lost() or not process.peers_before
        )
        if process.late and begins < process.steps_before and not went_back:
            wrong(
                "restarted",
                f"{process.name} began with step {begins} when {process.steps_before} had been "
                "committed",
            )


def _is_excused(world: World, process: Process) -> bool:
    """Returns whether `process` failed in a way that docs/elastic.md lists as not survived, after a
    fault that is listed there."""
    if process.exit_code == EVICTED:
        nobody = process.spare and _finds_nobody(world, process)
        return _was_missed(world, process) or _is_left_over(world, process) or nobody
    failure = process.failure or ""
    if _ALL_GONE in failure:
        fed = bool(process.diary.statuses) or not process.late
        checkpoint = world.scenario.loop in SAVING and process.newest_checkpoint is not None
        return not fed and not checkpoint and _finds_nobody(world, process)
    if _GIVEN_UP in failure:  # a writer of a part of the last checkpoint was lost while writing
        return any(
            one.diary.statuses and one.diary.statuses[-1][0] >= process.steps
            for one, _ in world.losses
        )
    return any(text in failure for text in _STATE_LOST) and _may_be_lost(world, process)


def _was_missed(world: World, process: Process) -> bool:
    """Returns whether `process` was stopped until its peers continued without it."""
    return any(one is process for one, _ in world.losses)


def _is_left_over(world: World, process: Process) -> bool:
    """Returns whether `process` was left over in its last group: no whole replica could include
    it."""
    if world.scenario.strategy not in DIVIDED or not process.spare or not process.hosts:
        return False
    return not parts_by_rank(
        world.scenario.strategy, loops.options_of(world.scenario), process.hosts
    )[process.rank]


def _finds_nobody(world: World, process: Process) -> bool:
    """Returns whether all holders of the run's state are gone, and none of them ended with the
    run."""
    at = process.ended_at
    assert at is not None
    drained = any(other.asked_at is not None for other in world.processes)
    for other in world.processes:
        held_nothing = other.spare or other.is_spare or _ALL_GONE in (other.failure or "")
        if (
            other is process
            or held_nothing
            or any(one is other and when <= at for one, when in world.losses)
        ):
            continue
        if other.ended_at is None or other.ended_at > at:
            return False
        # The last replica of hybrid was to lose a rank, and all stopped.
        asked = other.asked_at is not None or (
            drained and world.scenario.strategy in DIVIDED and other.steps < _last_step(world)
        )
        if other.exit_code == 0 and not asked:
            return False
    return True


def _judge_returns(world: World, survivors: list[Process], wrong: Any) -> None:
    """Checks that survivors return to a checkpoint only after a loss that nothing else could
    replace. local_sgd is exempt, because a torn round is always undone."""
    if world.scenario.strategy == "local_sgd" or world.holdings.ever_lost():
        return
    for process in survivors:
        reached = [steps for steps, _ in process.diary.statuses]
        if any(later < earlier for earlier, later in itertools.pairwise(reached)):
            wrong(
                "went back",
                f"{process.name} went back to an older state, and no part of the newest was lost",
            )


def _may_be_lost(world: World, process: Process) -> bool:
    """Returns whether all holders of a part were gone before it was mirrored again, and no
    checkpoint can replace it."""
    scenario, failure, at = world.scenario, process.failure or "", process.ended_at
    assert at is not None
    if "are fewer than the" in failure:
        gone = [one for one, when in (*world.losses, *world.departures) if when <= at]
        return len(world.processes) - len(gone) < replica_size(loops.options_of(scenario))
    if not world.holdings.lost(at, to=process.name):
        return False
    if scenario.loop not in SAVING or (world.stopped_at is not None and world.stopped_at <= at):
        return True
    return _NO_WAY_BACK in failure and not _has_checkpoint(process)


def _has_checkpoint(process: Process) -> bool:
    """Returns whether a checkpoint existed of the epoch in which `process` ended."""
    newest, steps = process.newest_checkpoint, process.world.scenario.steps
    if newest is None or process.steps >= _all_steps(process.world):
        return newest == process.steps
    return newest // steps == process.steps // steps


def _last_step(world: World) -> int:
    """Returns the number of committed steps after which the script leaves its loop."""
    return (
        world.scenario.steps + loops.BREAKS_IN
        if world.scenario.loop == "break"
        else _all_steps(world)
    )


def _all_steps(world: World) -> int:
    return world.scenario.steps * loops.EPOCHS


def _judge_statuses(world: World, wrong: Any) -> None:
    """Checks that all survivors have the same sequence of outcomes, and later members its end."""
    complete = _finishers(world)
    if not complete:
        return
    longest = max((_outcomes(p) for p in complete), key=len)
    for process in complete:
        mine = _outcomes(process)
        if _is_late(process) and not process.late and _left_out(mine, longest):
            continue
        if _is_late(process):
            mine = mine[1:]  # the step before its first live batch may belong to a dry run
        if mine != longest[len(longest) - len(mine) :] or (
            not _is_late(process) and len(mine) != len(longest)
        ):
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, longest, strict=False)) if a != b),
                min(len(mine), len(longest)),
            )
            wrong(
                "outcomes",
                f"{process.name}'s outcomes differ from {at} on: {mine[at : at + 3]} and "
                f"{longest[at : at + 3]}",
            )


def _outcomes(process: Process) -> list[tuple[int | None, str]]:
    """Returns the outcomes of a process's script. The last outcome before a return to a checkpoint
    has no step number: ranks learn of the loss in that call or after it."""
    statuses, returned = process.diary.statuses, process.diary.returned
    outcomes: list[tuple[int | None, str]] = [*statuses]
    for at, (steps, status) in enumerate(statuses):
        then = statuses[at + 1 : at + 2]
        undone = then and at + 1 not in returned and _is_repeat(steps, *then[0])
        if at in returned or undone:
            outcomes[at] = None, status
    return outcomes


def _is_repeat(steps: int, then: int, status: str) -> bool:
    """Returns whether the outcome after `then` steps belongs to a step that was committed
    before."""
    return then < steps or (then == steps and status == "committed")


def _left_out(mine: list[Any], longest: list[Any]) -> bool:
    """Returns whether `mine` is a beginning and an end of `longest`, as after a while as a
    spare."""
    return any(
        mine[:begun] == longest[:begun]
        and mine[begun:] == longest[len(longest) - len(mine) + begun :]
        for begun in range(len(mine))
    )


def _judge_steps(world: World, wrong: Any) -> None:
    """Checks that all ranks have equal values after every common step."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    finished = _finishers(world)
    for process in finished:
        for step, value in process.diary.values.items():
            if not value.isfinite().all():
                wrong(
                    "parameters",
                    f"after step {step} those of {process.name} are not finite: a failed "
                    "collective left them",
                )
                return
            first = held.setdefault(step, (process.name, value))
            if not torch.equal(first[1], value):
                wrong(
                    "parameters",
                    f"after step {step} {first[0]} and {process.name} differ by "
                    f"{_distance(first[1], value):.3g}",
                )
                return


def _compare_ends(first: Process, other: Process, wrong: Any) -> None:
    mine, theirs = first.diary.ended_with, other.diary.ended_with
    assert mine is not None
    assert theirs is not None
    for name in ("steps", "count", "average", "rate", "scale"):
        if mine[name] != theirs[name]:
            wrong(
                "counters", f"{name}: {mine[name]} on {first.name}, {theirs[name]} on {other.name}"
            )
    for name in _STATES:
        apart = _different(tensors_of(mine[name]), tensors_of(theirs[name]))
        if apart:
            wrong("parameters", f"{name} of {first.name} and {other.name} differ: {apart}")


def _judge_state(world: World, process: Process, wrong: Any) -> None:
    """Checks that the final state equals that of the run without faults after the same number of
    steps."""
    scenario, ended = world.scenario, process.diary.ended_with
    assert ended is not None
    expected = reference(scenario.without_faults()).processes[0].diary.ended_with
    assert expected is not None
    tolerance = 0.0 if loops.is_bitwise(scenario) else 1e-9
    if ended["steps"] == expected["steps"]:
        for name in _STATES:
            apart = _different(tensors_of(expected[name]), tensors_of(ended[name]), tolerance)
            if apart:
                wrong("result", f"{name} is not that of the run without faults: {apart}")
        return
    if not any(isinstance(fault, (JobStops, Drains)) for fault in scenario.faults):
        wrong(
            "result",
            f"{process.name} ended after {ended['steps']} steps, the run without faults after "
            f"{expected['steps']}",
        )


def _judge_saved(world: World, finishers: list[Process], wrong: Any) -> None:
    """Checks that the checkpoint saved after the loop is the newest one when all processes have
    ended."""
    last = max(finishers, key=lambda process: process.ended_at or 0.0)
    assert last.diary.ended_with is not None
    steps = last.diary.ended_with["steps"]
    if world.scenario.loop in SAVING and last.exit_code == 0 and last.newest_checkpoint != steps:
        wrong(
            "saved",
            f"{last.name} ended after {steps} steps, and the newest checkpoint is of "
            f"{last.newest_checkpoint}",
        )


def _judge_plain(
    world: World, finishers: list[Process], survivors: list[Process], wrong: Any
) -> None:
    """Checks that each survivor took every batch of torch's DataLoader once. The batch of a lost
    step is not dealt again."""
    expected = reference(world.scenario.without_faults()).processes[0]
    stopped = world.stopped_at is not None or any(
        process.asked_at is not None for process in world.processes
    )
    for process in survivors:
        _judge_counters(process, wrong)
        had = len(process.diary.statuses)
        if not stopped and had != len(expected.diary.statuses):
            wrong(
                "batches",
                f"{process.name} has taken {had} batches, without faults "
                f"{len(expected.diary.statuses)}",
            )
    lost = any(
        status != "committed" for process in finishers for _, status in process.diary.statuses
    )
    if not lost and len(survivors) == len(finishers):
        _judge_state(world, finishers[0], wrong)
        for process in finishers:
            _judge_answers(world, process, wrong)


def _judge_counters(process: Process, wrong: Any) -> None:
    """Checks that the loop counted as many steps as the session committed."""
    ended = process.diary.ended_with
    assert ended is not None
    if ended["count"] != ended["steps"]:
        wrong("counters", f"{process.name} has counted {ended['count']} of {ended['steps']} steps")


def _judge_answers(world: World, process: Process, wrong: Any) -> None:
    """Checks the last answer of each operation. Answers that were undone later do not count."""
    expected = dict(reference(world.scenario.without_faults()).processes[0].diary.answers)
    for step, answer in dict(process.diary.answers).items():
        if step in expected and abs(answer - expected[step]) > 1e-6 * abs(expected[step]):
            wrong(
                "answers",
                f"{process.name}'s evaluation after step {step} is {answer}, without faults "
                f"{expected[step]}",
            )
            return


def _different(
    expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor], tolerance: float = 0.0
) -> str:
    if expected.keys() != got.keys():
        return f"other entries: {sorted(expected.keys() ^ got.keys())[:3]}"
    for name, value in expected.items():
        same = (
            torch.equal(value, got[name])
            if tolerance == 0.0
            else _distance(value, got[name]) <= tolerance
        )
        if not same:
            return f"{name} by {_distance(value, got[name]):.3g}"
    return ""


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    distance = (one.double() - other.double()).abs().max() if one.numel() else torch.tensor(0.0)
    return float("inf") if torch.isnan(distance) else float(distance)
