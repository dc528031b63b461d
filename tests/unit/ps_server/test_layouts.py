"""The parts of a shard map that a server keeps."""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.v1 import coordinator_pb2
from shoal_ps_server.shard.layout import layout_from_shard_map
from shoal_ps_server.storage.image import layout_from_json, layout_to_json


def test_shard_map_lists_frozen_tensors_unless_it_is_of_an_older_release() -> None:
    shard_map = coordinator_pb2.ShardMap(
        epoch=1, partitions=[coordinator_pb2.Partition(partition_id=0, primary=0)]
    )
    for index, (name, frozen) in enumerate((("weight", False), ("table", True))):
        shard_map.tensors.append(
            coordinator_pb2.TensorSpec(name=name, shape=[4], dtype="float32", frozen=frozen)
        )
        shard_map.partitions[0].pieces.append(coordinator_pb2.Piece(tensor_index=index, length=4))
    layout = layout_from_shard_map(shard_map, server_index=0)
    assert layout.frozen == {"table"}
    written = layout_to_json(layout)
    assert layout_from_json(written) == layout
    del written["frozen"]
    assert layout_from_json(written) == replace(layout, frozen=frozenset())
