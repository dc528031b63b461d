"""The network between simulated processes. Messages that cannot be delivered wait, as in TCP's
buffers.

Partitions separate processes from each other only. The coordinator and the store run on other
machines, which all processes reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World


class Network:
    """Reachability among the processes of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut: list[frozenset[str]] = []
        """Pairs of separated processes, once per partition that separates them."""
        self._held_back: list[Callable[[], None]] = []

    def cut(self, one: str, others: Sequence[str], seconds: float) -> None:
        """Cuts `one` off from `others` for `seconds` of virtual time."""
        pairs = [frozenset((one, other)) for other in others]
        self._cut += pairs

        def heal() -> None:
            for pair in pairs:
                self._cut.remove(pair)
            self._world.note(f"{one} reaches {' '.join(others)} again")
            held_back, self._held_back = self._held_back, []
            for deliver in held_back:
                deliver()

        self._world.scheduler.after(seconds, heal)

    def reaches(self, one: str, other: str) -> bool:
        """Returns whether no partition separates two processes."""
        return frozenset((one, other)) not in self._cut

    def separated(self, names: Iterable[str]) -> set[str]:
        """Returns the members of a group that cannot reach all of its others."""
        names = set(names)
        return {name for pair in self._cut if pair <= names for name in pair}

    def when_healed(self, deliver: Callable[[], None]) -> None:
        """Calls `deliver` when the next partition ends."""
        self._held_back.append(deliver)

    def between(self, one: Process, other: Process, deliver: Callable[[], None]) -> None:
        """Delivers immediately, or once the two processes reach each other again."""
        if self.reaches(one.name, other.name):
            deliver()
        else:
            self.when_healed(lambda: self.between(one, other, deliver))
