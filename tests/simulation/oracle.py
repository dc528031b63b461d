"""What must hold at the end of a run, whatever went wrong in it.

The words: a *survivor* was there from the beginning to its script's end; a *finisher* came to its script's end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch
from shoal_common.exit_status import PUT_OUT
from shoal_worker.data.record import audit

from tests.simulation import loops, seams
from tests.simulation.processes import Process
from tests.simulation.scenario import CoordinatorAway, Drains, Fault, JobStops, Scenario, SlowWrites, Stops, Torn
from tests.simulation.transfers import tensors_of
from tests.simulation.world import World

_LEASE_S = 10
_STATE_LOST = ("is lost", "only a checkpoint can replace", "no rank can give its state", "are fewer than the", "not whole on any of them")
_NO_WAY_BACK = "The newest checkpoint cannot take its place in the running script"
_ALL_GONE = "every process that held the state of the run is gone"


class Verdict:
    """A run, and what is wrong with it."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario, self.world = scenario, world
        self.violations: list[tuple[str, str]] = list(world.violations)
        """Kind, and what was seen; empty: nothing is wrong."""

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.violations

    @property
    def kinds(self) -> frozenset[str]:
        """What is wrong, in a word each."""
        return frozenset(kind for kind, _ in self.violations)

    def __str__(self) -> str:
        return "\n".join(f"{kind}: {text}" for kind, text in self.violations) or "nothing is wrong"


def run(scenario: Scenario, *, keeps_trails: bool = False) -> Verdict:
    """Runs a scenario and judges it."""
    resolved = dataclasses.replace(scenario, faults=tuple(_resolved(scenario, fault) for fault in scenario.faults))
    with seams.installed():
        world = World(resolved, loops.train, keeps_trails=keeps_trails)
        audits: list[Any] = []
        world.at_end = lambda: audits.append(audit(world.records) if world.records.is_dir() else None)
        world.run()
    verdict = Verdict(scenario, world)
    if _is_refused(world) or _lacks_ranks(world):
        verdict.violations.clear()
    elif not any(kind == "hang" for kind, _ in verdict.violations):
        _judge(verdict, audits[0])
    return verdict


@functools.cache
def reference(scenario: Scenario) -> World:
    """The fault-free run of a scenario without faults."""
    with seams.installed():
        world = World(scenario, loops.train, keeps_trails=True)
        world.run()
    if world.violations or any(process.exit_code for process in world.processes):
        raise AssertionError(f"the run without faults fails:\n{scenario}\n{world.violations}\n{''.join(world.tracebacks)}")
    world.forget()
    return world


def _resolved(scenario: Scenario, fault: Fault) -> Fault:
    """Collectives are counted from the beginning of the generation."""
    if not isinstance(fault, Torn) or fault.step is None:
        return fault
    firsts = reference(scenario.without_faults()).first_collectives
    begin, end = firsts.get(fault.step - 1, 1), firsts[fault.step]
    return dataclasses.replace(
        fault, step=None, collective=begin + fault.collective - 1 if fault.collective > 0 else end + fault.collective
    )


def _judge(verdict: Verdict, audited: Any) -> None:
    world, scenario = verdict.world, verdict.scenario
    finishers = _finishers(world)
    survivors = [process for process in finishers if not _is_late(process)]

    def wrong(kind: str, text: str) -> None:
        verdict.violations.append((kind, text))

    _judge_ends(world, finishers, wrong)
    _judge_beginnings(world, wrong)
    unheard = bool(world.losses) and any(isinstance(fault, CoordinatorAway) for fault in scenario.faults)  # nobody tells of a death
    if world.timeouts and not unheard and not any(isinstance(fault, Stops | SlowWrites) for fault in scenario.faults):
        wrong("timeout", f"{len(world.timeouts)} waits took a whole timeout: {world.timeouts[0]}")
    _judge_statuses(world, wrong)
    for process in finishers[1:]:
        _compare_ends(finishers[0], process, wrong)
    _judge_steps(world, wrong)
    if not finishers:
        return
    if scenario.loop == "plain":
        return  # what a lost step was to learn from is nowhere else
    _judge_state(world, finishers[0], wrong)
    for process in survivors:
        _judge_counters(process, wrong)
    for process in finishers:
        _judge_answers(world, process, wrong)
    unfinished = finishers[0].diary.ended_with["steps"] < scenario.steps * loops.EPOCHS
    if audited is not None:
        for epoch in audited.epochs:
            if epoch.repeated or (epoch.lost and not unfinished):
                wrong("samples", f"epoch {epoch.epoch}: {epoch.lost} samples lost, {epoch.repeated} repeated")


def _is_refused(world: World) -> bool:
    """A joiner's `enumerate(loader)` counts from nought; the ranks were told so by name."""
    failures = [process.failure for process in world.processes if process.failure and process.exit_code != PUT_OUT]
    told = ["scripts went different ways" in failure and "enumerate(loader)" in failure for failure in failures]
    named = all(said or _ALL_GONE in failure for said, failure in zip(told, failures, strict=True))
    return world.scenario.loop == "enumerate" and any(process.late for process in world.processes) and any(told) and named


def _lacks_ranks(world: World) -> bool:
    """Who is left waits for more: an even number of ranks began, of which each two hold a replica of the model."""
    scenario = world.scenario
    left = [process for process in world.processes if not process.gone]
    return scenario.strategy == "hybrid" and scenario.ranks % 2 == 0 and len(left) == 1 and left[0].is_spare


def _is_late(process: Process) -> bool:
    """It came later, or was a spare at first."""
    most = max(len(other.diary.statuses) for other in process.world.processes)
    return process.late or (process.world.scenario.strategy == "hybrid" and len(process.diary.statuses) < most)


def _finishers(world: World) -> list[Process]:
    """Who came to the script's end, but for those that were asked to leave on the way, after which others went on from what they saved."""
    ended = [process for process in world.processes if process.diary.ended_with is not None]
    asked = {fault.who for fault in world.scenario.faults if isinstance(fault, Drains)}
    most = max((process.diary.ended_with["steps"] for process in ended), default=0)
    return [process for process in ended if process.name not in asked or process.diary.ended_with["steps"] == most]


def _judge_ends(world: World, finishers: list[Process], wrong: Any) -> None:
    scenario = world.scenario
    # Without a loader of Shoal's there is nothing that could end the loop.
    stops_at_once = scenario.loop == "plain" and any(isinstance(fault, JobStops | Drains) for fault in scenario.faults)
    stopped = any(isinstance(fault, JobStops) for fault in scenario.faults)
    never_began = stopped and world.steps == 0
    for process in world.processes:
        if process.dead or never_began:
            continue
        if process.put_out and process.exit_code == 0:
            wrong("put out", f"{process.name} was put out of the job, and ended with 0")
        put_out = any(isinstance(f, Stops) and f.who == process.name and f.seconds >= _LEASE_S for f in scenario.faults)
        spare = process.exit_code == PUT_OUT and scenario.strategy == "hybrid"  # no replica could be made with it
        drained = any(isinstance(f, Drains) and f.who == process.name for f in scenario.faults)
        if process.exit_code and not put_out and not spare and not _may_be_lost(world, process):
            wrong("failed", f"{process.name} ended with {process.exit_code}: {process.failure}")
        elif (
            process.exit_code == 0 and process.diary.ended_with is None and not (drained or process.late or process.spare or stops_at_once)
        ):
            wrong("left early", f"{process.name} ended with 0 before its script's end")
    left = [process for process in world.processes if not process.dead]
    asked = {f.who for f in scenario.faults if isinstance(f, Drains)}
    away = any(isinstance(f, CoordinatorAway) for f in scenario.faults) and len(left) < len(world.processes)  # nobody says who is left
    # Without a loader of Shoal's nothing ends the loop.
    if (
        left
        and not finishers
        and not away
        and scenario.loop != "plain"
        and asked >= {process.name for process in world.processes}
        and not any(p.exit_code for p in world.processes)
    ):
        wrong("preempted", "all got SIGTERM, and the code after the loop has run nowhere")
    drains = sum(isinstance(f, Drains) for f in scenario.faults)
    only_joiners = stopped and not any(process.diary.statuses for process in left)  # they leave at the stop, the others die in it
    if (
        left
        and not finishers
        and not only_joiners
        and len(left) > drains
        and not stops_at_once
        and not never_began
        and not any(process.exit_code for process in left)
    ):
        wrong("unfinished", "nobody came to the script's end")


def _judge_beginnings(world: World, wrong: Any) -> None:
    """Who comes later goes on with what the others have reached."""
    for process in world.processes:
        begins = process.diary.statuses[0][0] if process.diary.statuses else process.steps_before
        if process.late and begins < process.steps_before and world.scenario.loop not in ("save", "plain"):
            wrong("restarted", f"{process.name} began with step {begins} when {process.steps_before} had been committed")


def _may_be_lost(world: World, process: Process) -> bool:
    """All that held a part of the state may have gone: two at once, before what they held was mirrored again."""
    failure = process.failure or ""
    if _ALL_GONE in failure:
        asked = {fault.who for fault in world.scenario.faults if isinstance(fault, Drains)}
        stopped = bool(asked) and world.scenario.strategy == "hybrid"  # the last replica was to lose a rank, and all stopped
        return stopped or not any(other.exit_code == 0 and other.name not in asked for other in world.processes)
    if not any(text in failure for text in _STATE_LOST):
        return False
    stops = any(isinstance(fault, JobStops) for fault in world.scenario.faults)
    if world.scenario.loop == "save" and world.scenario.strategy != "hybrid" and not stops and _NO_WAY_BACK not in failure:
        return False
    # Of an even number of ranks each two hold a replica, which nobody mirrors.
    drained = {fault.who for fault in world.scenario.faults if isinstance(fault, Drains)}
    gone = len(world.losses) + len(drained)
    last_replica = world.scenario.strategy == "hybrid" and world.scenario.ranks % 2 == 0 and gone >= world.scenario.ranks // 2
    # A rank that was drained, and one that died before the other's shard was mirrored again, are two as well.
    pairs = itertools.combinations(range(len(world.losses) + len(world.departures)), 2)
    steps = [*world.losses, *world.departures]
    return last_replica or any(abs(steps[one] - steps[other]) <= 1 and one < len(world.losses) for one, other in pairs)


def _judge_statuses(world: World, wrong: Any) -> None:
    """Every survivor's sequence of outcomes is the same; one that came later has the end of it."""
    complete = _finishers(world)
    if not complete:
        return
    longest = max((p.diary.statuses for p in complete), key=len)
    for process in complete:
        mine = process.diary.statuses
        if _is_late(process) and not process.late and _left_out(mine, longest):
            continue
        if _is_late(process):
            mine = mine[1:]  # the step before its first live batch may be one of a dry run
        if mine != longest[len(longest) - len(mine) :] or (not _is_late(process) and len(mine) != len(longest)):
            at = next((i for i, (a, b) in enumerate(zip(mine, longest, strict=False)) if a != b), min(len(mine), len(longest)))
            wrong("outcomes", f"{process.name}'s outcomes differ from {at} on: {mine[at : at + 3]} and {longest[at : at + 3]}")


def _left_out(mine: list[Any], longest: list[Any]) -> bool:
    """A spare for a while: the beginning of the outcomes and their end."""
    return any(
        mine[:begun] == longest[:begun] and mine[begun:] == longest[len(longest) - len(mine) + begun :] for begun in range(len(mine))
    )


def _judge_steps(world: World, wrong: Any) -> None:
    """After every common step all ranks hold the same."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    finished = _finishers(world)
    for process in finished:
        for step, value in process.diary.values.items():
            if not value.isfinite().all():
                wrong("parameters", f"after step {step} those of {process.name} are no numbers: what a failed collective left")
                return
            first = held.setdefault(step, (process.name, value))
            if not torch.equal(first[1], value):
                wrong("parameters", f"after step {step} {first[0]} and {process.name} differ by {_distance(first[1], value):.3g}")
                return


def _compare_ends(first: Process, other: Process, wrong: Any) -> None:
    mine, theirs = first.diary.ended_with, other.diary.ended_with
    assert mine is not None
    assert theirs is not None
    for name in ("steps", "count", "average", "rate", "scale"):
        if mine[name] != theirs[name]:
            wrong("counters", f"{name}: {mine[name]} on {first.name}, {theirs[name]} on {other.name}")
    for name in ("state", "optimizer"):
        apart = _different(tensors_of(mine[name]), tensors_of(theirs[name]))
        if apart:
            wrong("parameters", f"{name} of {first.name} and {other.name} differ: {apart}")


def _judge_state(world: World, process: Process, wrong: Any) -> None:
    """As the run without faults had it after as many steps."""
    scenario, ended = world.scenario, process.diary.ended_with
    assert ended is not None
    expected = reference(scenario.without_faults()).processes[0].diary.ended_with
    assert expected is not None
    tolerance = 0.0 if loops.is_bitwise(scenario) else 1e-9
    if ended["steps"] == expected["steps"]:
        for name in ("state", "optimizer"):
            apart = _different(tensors_of(expected[name]), tensors_of(ended[name]), tolerance)
            if apart:
                wrong("result", f"{name} is not that of the run without faults: {apart}")
        return
    if not any(isinstance(fault, (JobStops, Drains)) for fault in scenario.faults):
        wrong("result", f"{process.name} ended after {ended['steps']} steps, the run without faults after {expected['steps']}")


def _judge_counters(process: Process, wrong: Any) -> None:
    """What the loop counted is what it has taken."""
    ended = process.diary.ended_with
    assert ended is not None
    if ended["count"] != ended["steps"]:
        wrong("counters", f"{process.name} has counted {ended['count']} of {ended['steps']} steps")


def _judge_answers(world: World, process: Process, wrong: Any) -> None:
    """But for what was undone afterwards."""
    expected = dict(reference(world.scenario.without_faults()).processes[0].diary.told)
    for step, answer in dict(process.diary.told).items():
        if step in expected and abs(answer - expected[step]) > 1e-6 * abs(expected[step]):
            wrong("answers", f"{process.name}'s evaluation after step {step} is {answer}, without faults {expected[step]}")
            return


def _different(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor], tolerance: float = 0.0) -> str:
    if expected.keys() != got.keys():
        return f"other entries: {sorted(expected.keys() ^ got.keys())[:3]}"
    for name, value in expected.items():
        same = torch.equal(value, got[name]) if tolerance == 0.0 else _distance(value, got[name]) <= tolerance
        if not same:
            return f"{name} by {_distance(value, got[name]):.3g}"
    return ""


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    distance = (one.double() - other.double()).abs().max() if one.numel() else torch.tensor(0.0)
    return float("inf") if torch.isnan(distance) else float(distance)
