"""Costs of a schedule, computed from its order of computations."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_worker.pipelining.schedule import Action, Kind, Schedule


def in_flight(schedule: Schedule, rank: int) -> int:
    """Returns the largest number of (stage, micro-batch) pairs whose activations the rank keeps at
    once. A pair is kept from the forward pass to the last part of the backward pass."""
    held = most = 0
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= 1
    return most


def bubble(
    schedule: Schedule,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float:
    """Returns the average fraction of the step in which ranks idle, given the time that a stage
    takes for each part. Communication takes no time."""
    costs = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_input + backward_weight,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    end = _finishing_times(schedule, costs)
    busy = sum(
        costs[action.kind]
        for actions in schedule.actions
        for action in actions
        if action.kind in costs
    )
    return 1 - busy / (max(end) * len(schedule.actions))


def _finishing_times(schedule: Schedule, costs: Mapping[Kind, float]) -> list[float]:
    """Returns when each rank is done. Every rank runs its computations in order, each as soon as
    its inputs are available."""
    done: dict[Action, float] = {}
    waiting = [
        [action for action in actions if action.kind in costs] for actions in schedule.actions
    ]
    clocks = [0.0] * len(waiting)
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready_at(actions[0], schedule.stages, done)) is not None:
                action = actions.pop(0)
                clocks[rank] = max(clocks[rank], ready) + costs[action.kind]
                done[action] = clocks[rank]
        if sum(map(len, waiting)) == before:
            raise AssertionError(
                f"schedule {schedule.name!r} cannot be carried out: "
                f"{[actions[:1] for actions in waiting]}"
            )
    return clocks


def _ready_at(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """Returns when the action's inputs from other ranks are available, or None if this is not known
    yet."""
    if action.kind is Kind.FORWARD:
        return (
            0.0
            if action.stage == 0
            else done.get(Action(Kind.FORWARD, action.stage - 1, action.micro_batch))
        )
    if action.kind is Kind.BACKWARD_WEIGHT or action.stage == stages - 1:
        return 0.0
    for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        found = done.get(Action(kind, action.stage + 1, action.micro_batch))
        if found is not None:
            return found
    return None
