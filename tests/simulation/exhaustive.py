"""Every way in which a step can be torn: in every collective of it, whoever dies, whoever got the
result. By three ranks; by four where it takes as many for replicas whose ranks hold different
parts, of which every so many is tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tests.simulation.oracle import reference
from tests.simulation.scenario import ALL_LOOPS, ALL_STRATEGIES, LOOPS, Parted, Scenario, Torn

_IN_REPLICAS = ("hsdp", "hybrid", "pipeline")
"""Two ranks hold a replica between them: hsdp cuts it into shards, hybrid into tensor-parallel
parts, pipeline into stages."""
_EVERY = {"hsdp": 4, "hybrid": 7, "pipeline": 8}
"""Tries every 4th scenario of hsdp, every 7th of hybrid and every 8th of pipeline, which have
several times as many as the others. None of these numbers divides the number of ways in which one
collective can be torn, so that all ways are tried."""
_EVERY_CUT = 7
"""Divides neither the number of cuts, of their lengths nor of ways to replace."""
_CUT_FOR_S = (4, 13, 20, 25, 40)
"""Shorter than a look at whom a rank reaches, so long that a group ends, that a rank is kept out
and returns, or does not."""
_REFUSED = (("pipeline", "scaler"),)
"""A GradScaler raises in a pipeline."""


def cells() -> list[tuple[str, str]]:
    """Strategies and loops."""
    return [cell for cell in itertools.product(ALL_STRATEGIES, LOOPS) if cell not in _REFUSED]


def tears(strategy: str, loop: str, *, collectives: range | None = None) -> Iterator[Scenario]:
    """All scenarios of a cell. `collectives`: which; None: all from the last step of the first
    epoch to the second step of the next."""
    plain = Scenario(
        strategy=strategy, loop=loop, steps=3, ranks=4 if strategy in _IN_REPLICAS else 3
    )
    members = "abcd"[: plain.ranks]
    every = (
        torn
        for collective in (collectives if collectives is not None else _middle(plain))
        for torn in _ways(collective, members)
    )
    for torn in itertools.islice(every, 0, None, _EVERY.get(strategy, 1)):
        yield dataclasses.replace(plain, faults=(torn,))


def parted_cells() -> list[tuple[str, str]]:
    """Strategies and loops that partitions are tried on: those of the tears, and operations that
    have no other loop."""
    return [cell for cell in itertools.product(ALL_STRATEGIES, ALL_LOOPS) if cell not in _REFUSED]


def partitions(strategy: str, loop: str, *, every: int | None = None) -> Iterator[Scenario]:
    """Partitions that begin at points from the last step but one of the first epoch to the first
    step of the next, and so in all that lies between them: between two ranks, or between one and
    all others, for different times, with and without replacements. Of all that there are every so
    many."""
    plain = Scenario(
        strategy=strategy, loop=loop, steps=4, ranks=4 if strategy in _IN_REPLICAS else 3
    )
    members = "abcd"[: plain.ranks]
    cuts = [
        ("b", ("a",)),
        (members[-1], ("b",)),
        (members[-1], tuple(members[:-1])),
        ("a", tuple(members[1:])),
    ]
    points = reference(plain).first_points
    numbered = itertools.product(range(points[plain.steps - 2], points[plain.steps + 1]), cuts)
    for schedule, (point, (one, others)) in itertools.islice(
        enumerate(numbered), 0, None, every or _EVERY_CUT
    ):
        cut = Parted(
            who="a",
            point=point,
            one=one,
            others=others,
            seconds=_CUT_FOR_S[schedule % len(_CUT_FOR_S)],
        )
        yield dataclasses.replace(
            plain, replaced=loop != "plain" and schedule % 3 > 0, schedule=schedule, faults=(cut,)
        )


def _middle(plain: Scenario) -> range:
    """Collectives of the steps on both sides of an epoch's end, and of what lies between them."""
    world = reference(plain)
    begins = world.first_collectives
    return range(begins[plain.steps - 1], begins[plain.steps + 1])


def _ways(collective: int, members: str) -> Iterator[Torn]:
    for dies in members:
        others = [one for one in members if one != dies]
        yield Torn(generation=1, collective=collective, dies=dies, entered=False)
        for count in range(len(others) + 1):
            for got in itertools.combinations(others, count):
                yield Torn(generation=1, collective=collective, dies=dies, got=got)
    for count in range(len(members)):
        for got in itertools.combinations(members, count):
            yield Torn(generation=1, collective=collective, dies=None, got=got)
