"""Every way in which a step of three ranks can be torn: in every collective of it, whoever dies, whoever got the result."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tests.simulation.oracle import reference
from tests.simulation.scenario import LOOPS, STRATEGIES, Scenario, Torn

_MEMBERS = ("a", "b", "c")


def cells() -> list[tuple[str, str]]:
    """Strategies and loops."""
    return list(itertools.product(STRATEGIES, LOOPS))


def tears(strategy: str, loop: str, *, collectives: range | None = None) -> Iterator[Scenario]:
    """All scenarios of a cell. `collectives`: which; None: all from the last step of the first epoch to the second step of the next."""
    plain = Scenario(strategy=strategy, loop=loop, steps=3)
    for collective in collectives if collectives is not None else _middle(plain):
        for torn in _ways(collective):
            yield dataclasses.replace(plain, faults=(torn,))


def _middle(plain: Scenario) -> range:
    """Collectives of the steps on both sides of an epoch's end, and of what lies between them."""
    world = reference(plain)
    begins = world.first_collectives
    return range(begins[plain.steps - 1], begins[plain.steps + 1])


def _ways(collective: int) -> Iterator[Torn]:
    for dies in _MEMBERS:
        others = [one for one in _MEMBERS if one != dies]
        yield Torn(generation=1, collective=collective, dies=dies, entered=False)
        for count in range(len(others) + 1):
            for got in itertools.combinations(others, count):
                yield Torn(generation=1, collective=collective, dies=dies, got=got)
    for count in range(len(_MEMBERS)):
        for got in itertools.combinations(_MEMBERS, count):
            yield Torn(generation=1, collective=collective, dies=None, got=got)
