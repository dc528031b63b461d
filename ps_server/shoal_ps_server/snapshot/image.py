"""What a snapshot holds, as values, and its metadata as JSON.

The metadata names every tensor in the file with its xxh3-64, and is itself covered by one (file.py), so a snapshot is either exactly what
was written or refused. There is no pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode, MemberClock
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings, ParameterGroup, optimizer_settings
from shoal_ps_server.shard.partition import PartitionImage

FORMAT_VERSION: Final = 1
"""Grows when an older release could not read the file."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Everything but the partitions: small, and taken on the event loop."""

    job_id: str
    server_id: str
    layout: Layout
    configuration: Configuration | None
    generation: int
    members: frozenset[str]
    put_out: Mapping[str, int]
    slowest_clock: int

    def fence(self) -> Fence:
        """A fence as it was."""
        return Fence.restored(generation=self.generation, members=self.members, put_out=self.put_out)

    def restored_clocks(self) -> Clocks:
        """All members level, where the slowest stood. How far each was is not kept: it has gone on since, and one that came after the
        snapshot would stand behind the others by all that they did meanwhile (docs/decisions/0033)."""
        return Clocks(members={member: MemberClock(clock=self.slowest_clock) for member in self.members}, slowest=self.slowest_clock)


@dataclass(frozen=True, kw_only=True)
class ServerImage:
    """A whole server. Each partition is consistent in itself; they may be of slightly different moments."""

    state: ServerState
    partitions: tuple[PartitionImage, ...]


def state_to_json(state: ServerState) -> dict[str, Any]:
    """Plain JSON values."""
    layout, configuration = state.layout, state.configuration
    return {
        "job_id": state.job_id,
        "server_id": state.server_id,
        "layout": {
            "epoch": layout.epoch,
            "server_index": layout.server_index,
            "tensors": sorted(layout.tensors),
            "owners": sorted(layout.owners.items()),
            "partitions": [
                [spec.partition_id, spec.tensor, spec.offset, spec.length, spec.element.name] for spec in layout.partitions.values()
            ],
        },
        "configuration": None
        if configuration is None
        else {
            "configured": _optimizer_to_json(configuration.configured),
            "optimizer": _optimizer_to_json(configuration.optimizer),
            "consistency": {"mode": configuration.consistency.mode.value, "bound": configuration.consistency.bound},
            "revision": configuration.revision,
        },
        "membership": {
            "generation": state.generation,
            "members": sorted(state.members),
            "put_out": list(state.put_out.items()),
            "slowest_clock": state.slowest_clock,
        },
    }


def state_from_json(value: Mapping[str, Any]) -> ServerState:
    """The inverse. Raises KeyError, TypeError or ValueError for what `state_to_json` did not make."""
    layout, configuration, membership = value["layout"], value["configuration"], value["membership"]
    specs = [
        PartitionSpec(partition_id=int(number), tensor=str(tensor), offset=int(offset), length=int(length), element=BY_NAME[dtype])
        for number, tensor, offset, length, dtype in layout["partitions"]
    ]
    return ServerState(
        job_id=str(value["job_id"]),
        server_id=str(value["server_id"]),
        layout=Layout(
            epoch=int(layout["epoch"]),
            server_index=int(layout["server_index"]),
            partitions=MappingProxyType({spec.partition_id: spec for spec in specs}),
            owners=MappingProxyType({int(partition): int(owner) for partition, owner in layout["owners"]}),
            tensors=frozenset(map(str, layout["tensors"])),
        ),
        configuration=None
        if configuration is None
        else Configuration(
            configured=_optimizer_from_json(configuration["configured"]),
            optimizer=_optimizer_from_json(configuration["optimizer"]),
            consistency=Consistency(
                mode=ConsistencyMode(configuration["consistency"]["mode"]), bound=int(configuration["consistency"]["bound"])
            ),
            revision=int(configuration["revision"]),
        ),
        generation=int(membership["generation"]),
        members=frozenset(map(str, membership["members"])),
        put_out={str(member): int(generation) for member, generation in membership["put_out"]},
        slowest_clock=int(membership["slowest_clock"]),
    )


def dumps(value: Mapping[str, Any]) -> str:
    """The one spelling of a value, so that a digest of it can be compared."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _optimizer_to_json(settings: OptimizerSettings) -> dict[str, Any]:
    return {
        "name": settings.name,
        "hyperparameters": dict(settings.hyperparameters),
        "groups": [[sorted(group.tensors), dict(group.hyperparameters)] for group in settings.groups],
    }


def _optimizer_from_json(value: Mapping[str, Any]) -> OptimizerSettings:
    return optimizer_settings(
        name=value["name"],
        hyperparameters=value["hyperparameters"],
        groups=[
            ParameterGroup(tensors=frozenset(tensors), hyperparameters=hyperparameters) for tensors, hyperparameters in value["groups"]
        ],
    )
