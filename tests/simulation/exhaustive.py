"""Every way in which a step can be torn: each collective, each rank that dies, and each set of
ranks that gets the result.

Scenarios have three ranks, or four where a replica needs two ranks with different parts. Of the
latter only a sample is run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tests.simulation.oracle import reference
from tests.simulation.scenario import ALL_LOOPS, ALL_STRATEGIES, LOOPS, Parted, Scenario, Torn

_TRIED = tuple(strategy for strategy in ALL_STRATEGIES if strategy != "fsdp")
"""All strategies except fsdp, which is zero3 by another name."""

_IN_REPLICAS = ("hsdp", "hybrid", "pipeline")
"""Strategies in which two ranks share a replica: hsdp cuts it into shards, hybrid into
tensor-parallel parts, pipeline into stages."""
_EVERY = {"hsdp": 4, "hybrid": 7, "pipeline": 8}
"""Sampling interval: every 4th scenario of hsdp, every 7th of hybrid and every 8th of pipeline,
which have several times as many as the others. No interval divides the number of ways to tear one
collective, so all ways are tried."""
_EVERY_CUT = 7
"""Sampling interval of partitions. It divides neither the number of cuts, nor of their lengths, nor
of the ways to replace members."""
_CUT_FOR_S = (4, 13, 20, 25, 40)
"""Lengths of partitions in seconds: shorter than the interval between probes of peers, long enough
to end a group, and long enough to quarantine a rank that returns or does not return."""
_REFUSED = (("pipeline", "scaler"),)
"""Combinations that the product refuses: a GradScaler raises in a pipeline."""


def cells() -> list[tuple[str, str]]:
    """Returns the pairs of strategy and loop on which tears are tried."""
    return [cell for cell in itertools.product(_TRIED, LOOPS) if cell not in _REFUSED]


def tears(strategy: str, loop: str, *, collectives: range | None = None) -> Iterator[Scenario]:
    """Yields all scenarios of a cell.

    collectives: numbers of the collectives to tear. None: all from the last step of the first epoch
    to the second step of the next.
    """
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
    """Returns the pairs of strategy and loop on which partitions are tried: those of `cells`, and
    the loop `operations`."""
    return [cell for cell in itertools.product(_TRIED, ALL_LOOPS) if cell not in _REFUSED]


def partitions(strategy: str, loop: str, *, every: int | None = None) -> Iterator[Scenario]:
    """Yields partitions that begin at each point from the last step but one of the first epoch to
    the first step of the next, operations between the steps included. Each separates two ranks, or
    one rank from all others, for various times, with and without replacements.

    every: sampling interval.
    """
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
    """Returns the collectives of the steps around an epoch's end and of the operations between
    them."""
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
