"""Contents of a snapshot, and the conversion of its metadata to and from JSON.

The metadata lists the xxh3-64 of each tensor in the file, and another xxh3-64 covers the metadata
itself (snapshot.py). A file is therefore accepted only if it is unchanged. Pickle is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from shoal_common.tables.declaration import TableSpec

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode, MemberClock
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import Bucket, Layout, PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import OptimizerSettings, ParameterGroup, optimizer_settings
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.storage.moves import Leaving, Taken

FORMAT_VERSION: Final = 7
"""Version of the file format, incremented by every change that older releases cannot read. Since
version 2, a journal accompanies the snapshot; since 3, a partition has pieces of several tensors;
since 4, pieces record their rows; since 5, partitions may move between servers; since 6, they may
be buckets of tables; since 7, buckets may have been restored from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Membership and clocks of a job, as stored in a snapshot."""

    generation: int = -1
    members: frozenset[str] = frozenset()
    evicted: Mapping[str, int] = field(default_factory=dict)
    key_digests: Mapping[str, str] = field(default_factory=dict)
    clocks: Mapping[str, MemberClock] = field(default_factory=dict)
    """Member -> clock."""
    slowest_clock: int = 0
    opened: int = 0
    """Under bsp, the newest iteration with an admitted push."""

    def fence(self) -> Fence:
        """Creates a fence with the stored state."""
        return Fence.restored(
            generation=self.generation,
            members=self.members,
            evicted=self.evicted,
            key_digests=self.key_digests,
        )

    def restored_clocks(self) -> Clocks:
        """Creates the members' clocks with the stored state."""
        clocks = Clocks(members=self.clocks, slowest=self.slowest_clock, opened=self.opened)
        clocks.follow(self.members)
        return clocks

    @classmethod
    def of(cls, fence: Fence, clocks: Clocks) -> Members:
        """Captures the current state of a fence and of clocks."""
        return cls(
            generation=fence.generation,
            members=fence.members,
            evicted=dict(fence.evicted),
            key_digests=dict(fence.key_digests),
            clocks=clocks.members,
            slowest_clock=clocks.slowest,
            opened=clocks.opened,
        )


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of a server without its partitions. It is small and is captured on the event loop."""

    job_id: str
    server_id: str
    layout: Layout
    configuration: Configuration | None
    membership: Members
    batches: Sequence[tuple[int, int]] = ()
    """Finished leased batches, as ranges of keys, as in `Batches`."""
    backup: str = ""
    """Id of the backup that must receive all acknowledged changes, as in `Recovered.backup`."""
    settled: int = 0
    """Number of the last move of partitions that the coordinator has decided; `leaving`: partitions
    that are leaving this server."""
    leaving: Leaving | None = None
    journal: int = 0
    """Number of the first journal file with changes that are not in the snapshot; 0 if there is no
    journal yet."""


@dataclass(frozen=True, kw_only=True)
class ServerImage:
    """Complete state of a server. Each partition is consistent; different partitions may have been
    copied at slightly different times."""

    state: ServerState
    partitions: tuple[PartitionImage, ...]
    taken: Taken | None = None
    """Partitions that another server has handed over, but that do not belong to this server yet;
    `coming`: partitions received so far in an incomplete move."""
    coming: Taken | None = None


def state_to_json(state: ServerState) -> dict[str, Any]:
    """Converts the state to JSON-compatible values."""
    return {
        "job_id": state.job_id,
        "server_id": state.server_id,
        "layout": layout_to_json(state.layout),
        "configuration": None
        if state.configuration is None
        else configuration_to_json(state.configuration),
        "membership": members_to_json(state.membership),
        "batches": list(state.batches),
        "backup": state.backup,
        "settled": state.settled,
        "leaving": None
        if state.leaving is None
        else [state.leaving.move, sorted(state.leaving.partitions)],
        "journal": state.journal,
    }


def state_from_json(value: Mapping[str, Any]) -> ServerState:
    """Restores the state from JSON values. Raises KeyError, TypeError or ValueError for values not
    produced by `state_to_json`."""
    return ServerState(
        job_id=str(value["job_id"]),
        server_id=str(value["server_id"]),
        layout=layout_from_json(value["layout"]),
        configuration=None
        if value["configuration"] is None
        else configuration_from_json(value["configuration"]),
        membership=members_from_json(value["membership"]),
        batches=tuple((int(first), int(end)) for first, end in value["batches"]),
        backup=str(value.get("backup", "")),  # older releases had none
        settled=int(value.get("settled", 0)),  # nor partitions that move
        leaving=_leaving_from_json(value.get("leaving")),
        journal=int(value["journal"]),
    )


def _leaving_from_json(value: Sequence[Any] | None) -> Leaving | None:
    if value is None:
        return None
    move, partitions = value
    return Leaving(move=int(move), partitions=frozenset(map(int, partitions)))


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Converts a layout to JSON-compatible values."""
    return {
        "epoch": layout.epoch,
        "server_index": layout.server_index,
        "tensors": sorted(layout.tensors),
        "frozen": sorted(layout.frozen),
        "owners": sorted(layout.owners.items()),
        "partitions": list(map(spec_to_json, layout.partitions.values())),
    }


def layout_from_json(value: Mapping[str, Any]) -> Layout:
    """Restores a layout from JSON values. Raises the errors of `state_from_json`."""
    specs = list(map(spec_from_json, value["partitions"]))
    return Layout(
        epoch=int(value["epoch"]),
        server_index=int(value["server_index"]),
        partitions=MappingProxyType({spec.partition_id: spec for spec in specs}),
        owners=MappingProxyType(
            {int(partition): int(owner) for partition, owner in value["owners"]}
        ),
        tensors=frozenset(map(str, value["tensors"])),
        frozen=frozenset(map(str, value.get("frozen", ()))),  # missing in data from older releases
    )


def spec_to_json(spec: PartitionSpec) -> list[Any]:
    """Converts the specification of a partition to JSON-compatible values. A bucket of a table has
    one value more than other partitions."""
    pieces = [[piece.tensor, piece.offset, piece.length, piece.row] for piece in spec.pieces]
    bucket = [] if spec.bucket is None else [_bucket_to_json(spec.bucket)]
    return [spec.partition_id, spec.element.name, pieces, *bucket]


def spec_from_json(value: Sequence[Any]) -> PartitionSpec:
    """Restores the specification of a partition from JSON values. Raises the errors of
    `state_from_json`."""
    number, dtype, pieces, *bucket = value
    return PartitionSpec(
        partition_id=int(number),
        pieces=tuple(
            Piece(tensor=str(tensor), offset=int(offset), length=int(length), row=int(row))
            for tensor, offset, length, row in pieces
        ),
        element=BY_NAME[dtype],
        bucket=_bucket_from_json(bucket[0]) if bucket else None,
    )


def configuration_to_json(configuration: Configuration) -> dict[str, Any]:
    """Converts a configuration to JSON-compatible values."""
    return {
        "configured": _optimizer_to_json(configuration.configured),
        "optimizer": _optimizer_to_json(configuration.optimizer),
        "consistency": {
            "mode": configuration.consistency.mode.value,
            "bound": configuration.consistency.bound,
        },
        "revision": configuration.revision,
    }


def configuration_from_json(value: Mapping[str, Any]) -> Configuration:
    """Restores a configuration from JSON values. Raises the errors of `state_from_json`."""
    return Configuration(
        configured=_optimizer_from_json(value["configured"]),
        optimizer=_optimizer_from_json(value["optimizer"]),
        consistency=Consistency(
            mode=ConsistencyMode(value["consistency"]["mode"]),
            bound=int(value["consistency"]["bound"]),
        ),
        revision=int(value["revision"]),
    )


def members_to_json(members: Members) -> dict[str, Any]:
    """Converts membership and clocks to JSON-compatible values."""
    return {
        "generation": members.generation,
        "members": sorted(members.members),
        "put_out": list(members.evicted.items()),
        "key_digests": dict(members.key_digests),
        "clocks": {member: [each.clock, each.origin] for member, each in members.clocks.items()},
        "slowest_clock": members.slowest_clock,
        "resting": sorted(member for member, each in members.clocks.items() if each.rests),
        "taking_part": sorted(member for member, each in members.clocks.items() if each.takes_part),
        "opened": members.opened,
    }


def members_from_json(value: Mapping[str, Any]) -> Members:
    """Restores membership and clocks from JSON values. Raises the errors of `state_from_json`."""
    # missing in data written before bsp existed
    resting = frozenset(map(str, value.get("resting", ())))
    # missing in data from older releases
    taking_part = frozenset(map(str, value.get("taking_part", ())))
    return Members(
        generation=int(value["generation"]),
        members=frozenset(map(str, value["members"])),
        evicted={str(member): int(generation) for member, generation in value["put_out"]},
        # likewise
        key_digests={
            str(member): str(digest) for member, digest in value.get("key_digests", {}).items()
        },
        clocks={
            str(member): MemberClock(
                clock=int(clock),
                origin=None if origin is None else int(origin),
                takes_part=str(member) in taking_part,
                rests=str(member) in resting,
            )
            for member, (clock, origin) in value["clocks"].items()
        },
        slowest_clock=int(value["slowest_clock"]),
        opened=int(value.get("opened", 0)),
    )


def dumps(value: Mapping[str, Any]) -> str:
    """Serializes a value as canonical JSON, so that equal values have the same digest."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _bucket_to_json(bucket: Bucket) -> list[Any]:
    return [bucket.table, bucket.rows, bucket.dim, bucket.number, bucket.spec.to_json()]


def _bucket_from_json(value: Sequence[Any]) -> Bucket:
    table, rows, dim, number, spec = value
    return Bucket(
        table=str(table),
        rows=int(rows),
        dim=int(dim),
        number=int(number),
        spec=TableSpec.from_json(spec),
    )


def _optimizer_to_json(settings: OptimizerSettings) -> dict[str, Any]:
    return {
        "name": settings.name,
        "hyperparameters": dict(settings.hyperparameters),
        "groups": [
            [sorted(group.tensors), dict(group.hyperparameters)] for group in settings.groups
        ],
        "delay_compensation": settings.delay_compensation,
    }


def _optimizer_from_json(value: Mapping[str, Any]) -> OptimizerSettings:
    return optimizer_settings(
        name=value["name"],
        hyperparameters=value["hyperparameters"],
        groups=[
            ParameterGroup(tensors=frozenset(tensors), hyperparameters=hyperparameters)
            for tensors, hyperparameters in value["groups"]
        ],
        delay_compensation=value["delay_compensation"],
    )
