"""Simulates a pipeline's schedule. The results are a step's duration, the fraction of this time
that ranks spend waiting, and the memory for activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_common.errors import InternalError

from shoal_worker.pipelining.schedule import Action, Kind, Schedule

_FORWARD = Kind.FORWARD
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one micro-batch in each stage."""

    forward_flops: tuple[float, ...]
    backward_share: float
    """Number of operations of a backward pass, divided by the number of operations of the forward
    pass."""
    kept: tuple[float, ...]
    """Bytes that autograd keeps from the forward to the backward pass, by stage."""
    recomputed: float
    """Bytes kept temporarily while activations are recomputed."""
    border_bytes: tuple[float, ...]
    """Bytes sent from each stage to the next."""


def most_in_flight(schedule: Schedule, costs: StageCosts) -> list[float]:
    """Returns the maximum number of bytes of activations that each rank keeps at any time."""
    most = []
    for actions in schedule.actions:
        kept = highest = 0.0
        for action in actions:
            if action.kind is _FORWARD:
                kept += costs.kept[action.stage]
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                kept -= costs.kept[action.stage]
            highest = max(highest, kept)
        most.append(highest + costs.recomputed)
    return most


def play(
    schedule: Schedule,
    costs: StageCosts,
    *,
    flops_per_second: float,
    bytes_per_second: float,
    latency: float = 0.0,
) -> tuple[float, float]:
    """Simulates one step. Returns its duration, from the first forward to the last backward pass,
    in seconds, and the average fraction of this time that ranks spend waiting. `latency`: time that
    each action takes in addition to its computation, in seconds."""
    ends: dict[tuple[bool, int, int], float] = {}
    queues = [
        [action for action in actions if action.kind in _COMPUTES] for actions in schedule.actions
    ]
    clocks, places, busy = [0.0] * len(queues), [0] * len(queues), 0.0
    left = sum(map(len, queues))
    while left:
        before = left
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                action = queue[places[rank]]
                ready = _ready(action, schedule, costs, ends, bytes_per_second)
                if ready is None:
                    break
                seconds = _flops(action, costs) / flops_per_second + latency
                clocks[rank] = max(clocks[rank], ready) + seconds
                busy += seconds
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ends[action.kind is _FORWARD, action.stage, action.micro_batch] = clocks[rank]
                places[rank] += 1
                left -= 1
        if left == before:
            raise InternalError(
                f"schedule {schedule.name!r} cannot finish: its actions wait for "
                "each other in a cycle"
            )
    longest = max(clocks)
    return longest, 1.0 - busy / (longest * len(queues)) if longest else 0.0


def _ready(
    action: Action,
    schedule: Schedule,
    costs: StageCosts,
    ends: dict[tuple[bool, int, int], float],
    bytes_per_second: float,
) -> float | None:
    """Returns the time at which an action's inputs are available; None if it is not known yet."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return 0.0  # the same rank has computed the rest of this pass before
    forward = action.kind is _FORWARD
    source = action.stage - 1 if forward else action.stage + 1
    if source < 0:
        return 0.0
    if source == schedule.stages:
        return ends.get((True, action.stage, action.micro_batch))
    end = ends.get((forward, source, action.micro_batch))
    if end is None or schedule.rank_of[source] == schedule.rank_of[action.stage]:
        return end
    return end + costs.border_bytes[min(source, action.stage)] / bytes_per_second


def _flops(action: Action, costs: StageCosts) -> float:
    forward = costs.forward_flops[action.stage]
    if action.kind is _FORWARD:
        return forward
    return forward * costs.backward_share / (1 if action.kind is Kind.BACKWARD else 2)
