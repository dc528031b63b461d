"""Records which member had which part of the state.

Parts are computed from the ranks alone, independently of the product. A generation is *whole* once
each of its ranks was seen in a healthy group without joiners to feed: from then on the state is
sharded and mirrored for these ranks. A generation is also whole once one of its ranks has become a
spare, because a spare has given up its part. A part is lost when all members that had it in the
newest whole generation are gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal_worker.elastic.contract.generation import topology_of
from shoal_worker.mesh.layouts import Axes
from shoal_worker.sharding.layout import Division, among_all, in_replicas

from tests.simulation.scenario import DIVIDED

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

Part = tuple[int, int, int]
"""Index on the pipeline axis, index on the tensor axis, and shard."""

_LEAVES_AFTER_S = 20.0
"""Longest time in seconds for which a drained member waits for an absent coordinator after a death
(docs/elastic.md)."""


def replica_size(options: dict[str, object]) -> int:
    """Returns the minimum number of ranks that one replica of the model needs.

    options: keyword options of the strategy.
    """
    axes = _axes(options, 0)
    return axes.replica_size


def parts_by_rank(
    strategy: str, options: dict[str, object], hosts: Sequence[str]
) -> list[frozenset[Part]]:
    """Returns the parts that each rank owns or mirrors. A spare has none."""
    if strategy in ("ddp", "local_sgd"):
        return [frozenset({(0, 0, 0)})] * len(hosts)
    if strategy not in DIVIDED:
        shard_size = options.get("shard_size")
        size, topology = shard_size if isinstance(shard_size, int) else None, topology_of(hosts)
        division = in_replicas(topology, size) if strategy == "hsdp" else among_all(topology)
        return [
            frozenset((0, 0, shard) for shard in division.held(rank)) for rank in range(len(hosts))
        ]
    axes = _axes(options, len(hosts))
    cut = options.get("data_parallel_strategy", "ddp") != "ddp"
    parts = []
    for rank in range(len(hosts)):
        at = axes.at(rank)
        if at is None:
            parts.append(frozenset[Part]())
            continue
        line = [hosts[axes.rank(at.pipeline, at.tensor, data)] for data in range(axes.data)]
        division = among_all(topology_of(line)) if cut else Division(world_size=axes.data, shards=1)
        parts.append(frozenset((at.pipeline, at.tensor, shard) for shard in division.held(at.data)))
    return parts


def _axes(options: dict[str, object], ranks: int) -> Axes:
    pipeline, tensor = (
        int(str(options.get(f"{axis}_parallel_size", 1))) for axis in ("pipeline", "tensor")
    )
    return Axes(pipeline=pipeline, tensor=tensor, data=ranks // (pipeline * tensor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """A generation whose ranks together have the state."""

    since: float
    number: int
    parts: dict[str, frozenset[Part]]
    """Parts of each member, by its name."""

    def lacks(self, gone: set[str]) -> bool:
        """Returns whether some part is lost, given the names of the members that are gone."""
        held = {
            part for member, parts in self.parts.items() if member not in gone for part in parts
        }
        return any(parts - held for parts in self.parts.values())


class Holdings:
    """The whole generations of one run, as defined in the module's docstring."""

    def __init__(self, world: World, options: dict[str, object]) -> None:
        self._world, self._options = world, options
        self.whole: list[Whole] = []
        """Whole generations, oldest first."""
        self._seen: dict[int, set[str]] = {}

    def look(self, process: Process) -> None:
        """Records the generation of `process`. Called at each of the process's points."""
        formation = process.session._formation if process.session is not None else None
        group = formation.group if formation is not None else None
        if formation is None or group is None or formation._learners:
            return
        number = group.generation.number
        peers = self._world.coordinator.members_of[number]
        if self.whole and self.whole[-1].number >= number:
            return
        parts = parts_by_rank(
            self._world.scenario.strategy, self._options, [host for _, host in peers]
        )
        # in the first step the others still have all of it
        gave_up = process.is_spare and not parts[group.rank] and self._world.steps > 0
        seen = self._seen.setdefault(number, set())
        if formation.healthy:
            seen.add(process.name)
        if len(seen) == len(peers) or gave_up:
            named = {member_id: held for (member_id, _), held in zip(peers, parts, strict=True)}
            self.whole.append(Whole(since=self._world.scheduler.now, number=number, parts=named))

    def newest(self, until: float, *, of: str | None = None) -> Whole | None:
        """Returns the newest generation that was whole at `until`.

        of: member that must belong to it, if there is such a generation.
        """
        found = [whole for whole in self.whole if whole.since <= until]
        found = [whole for whole in found if of in whole.parts] or found
        return max(found, key=lambda whole: whole.number, default=None)

    def lost(self, until: float, *, to: str | None = None) -> bool:
        """Returns whether all members that had some part were gone at `until`.

        A member that leaves makes sure that two others have its parts. One death plus any number of
        departures therefore loses nothing. After a death, however, a member waits at most 20 s for
        an absent coordinator.

        to: a member, whose newest generation counts. Others may have continued when it ended.
        """
        whole = self.newest(until, of=to)
        if whole is None:
            return False
        deaths = {one.name for one, at in self._world.losses if at <= until} & whole.parts.keys()
        departures = {one.name: at for one, at in self._world.departures if at <= until}
        if len(deaths) < 2:
            departures = {
                name: at
                for name, at in departures.items()
                if deaths and self._world.away_since(at, _LEAVES_AFTER_S)
            }
        return whole.lacks(deaths | departures.keys())

    def ever_lost(self) -> bool:
        """Returns whether a part was lost at any moment of the run."""
        moments = [at for _, at in (*self._world.losses, *self._world.departures)]
        return any(self.lost(at) for at in moments)
