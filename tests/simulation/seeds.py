"""Numbered scenarios: the seed alone determines the training script and the faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tests.simulation.oracle import reference
from tests.simulation.scenario import (
    LOOPS,
    STRATEGIES,
    CoordinatorAway,
    Dies,
    Drains,
    Fault,
    JobStops,
    Joins,
    Scenario,
    SlowWrites,
    Stops,
    Torn,
)

_WEIGHTS = {
    "torn": 6,
    "dies": 4,
    "two die": 2,
    "joins": 3,
    "drains": 2,
    "stands still": 1,
    "job stops": 1,
    "coordinator away": 1,
    "slow writes": 1,
}

_ON_DEVICES = 0.25


def scenario_of(
    seed: int, *, strategies: Sequence[str] = STRATEGIES, loops: Sequence[str] = LOOPS
) -> Scenario:
    """Returns the scenario that belongs to `seed`."""
    chance = random.Random(seed)
    plain = Scenario(
        strategy=chance.choice(strategies),
        loop=chance.choice(loops),
        ranks=chance.choice((2, 3, 3, 3, 4)),
    )
    undisturbed = reference(plain)
    members = [process.name for process in undisturbed.processes]
    later = "abcdefghij"[plain.ranks : plain.ranks + 2]
    points = undisturbed.processes[0].points
    alone = plain.loop == "plain"  # joiners need a loader, which knows the position of the others
    replaced = chance.random() < 0.3 and not alone
    faults: list[Fault] = []
    for _ in range(chance.choice((1, 1, 2, 2, 3, 4))):
        kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        comers = replaced or any(isinstance(fault, Joins) for fault in faults)
        who = chance.choice([*members, *(later if comers else "")])
        point = chance.randrange(4, points + (points // 2 if faults else 0))
        match kind:
            case "torn":
                faults.append(
                    _tear(chance, members, undisturbed.collectives[1], later=bool(faults))
                )
            case "dies":
                faults.append(Dies(who=who, point=point))
            case "two die":  # one of them may have the mirror of the other's shard
                first = chance.randrange(len(members))
                faults.append(Dies(who=members[first], point=point))
                faults.append(
                    Dies(
                        who=members[(first + 1) % len(members)],
                        point=point + chance.choice((0, 1, 2, 5, 10)),
                    )
                )
            case "joins" if not alone:
                faults.append(Joins(who=who, point=point))
            case "drains":
                faults.append(Drains(who=who, point=point))
            case "stands still":
                faults.append(Stops(who=who, point=point, seconds=chance.choice((1, 8, 15, 40))))
            case "job stops":
                faults.append(JobStops(who=who, point=point))
            case "coordinator away":
                faults.append(
                    CoordinatorAway(who=who, point=point, seconds=chance.choice((1, 15, 40)))
                )
            case "slow writes":
                faults.append(SlowWrites(who=who, seconds=chance.choice((1, 30))))
    devices = chance.random() < _ON_DEVICES  # drawn last, so that it changes nothing else
    return dataclasses.replace(
        plain, replaced=replaced, devices=devices, schedule=seed, faults=tuple(faults)
    )


def _tear(chance: random.Random, members: Sequence[str], collectives: int, *, later: bool) -> Torn:
    generation = chance.choice((1, 2, 3)) if later else 1
    dies = chance.choice([*members, None])
    entered = dies is None or chance.random() < 0.8
    others = [one for one in members if one != dies]
    got = tuple(one for one in others if entered and chance.random() < 0.5)
    if dies is None and len(got) == len(others):
        got = got[1:]
    return Torn(
        generation=generation,
        collective=chance.randrange(1, collectives + 1),
        dies=dies,
        entered=entered,
        got=got,
    )
