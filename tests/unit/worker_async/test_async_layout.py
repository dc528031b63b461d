"""The mapping from the coordinator's shard map to the bytes on each server."""

from __future__ import annotations

import pytest
import torch
from shoal_common.errors import PreconditionError
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.parameter_servers.tensors import HostTensor, shares
from torch import nn


def shard_map(*, addresses: dict[int, str]) -> pb.ShardMap:
    return pb.ShardMap(
        epoch=3,
        tensors=[
            pb.TensorSpec(name="a", shape=[6], dtype="float32"),
            pb.TensorSpec(name="b", shape=[2], dtype="float32"),
            pb.TensorSpec(name="c", shape=[2], dtype="float64"),
        ],
        partitions=[
            pb.Partition(
                partition_id=0, pieces=[pb.Piece(tensor_index=0, offset=0, length=4)], primary=0
            ),
            pb.Partition(
                partition_id=1,
                pieces=[
                    pb.Piece(tensor_index=0, offset=4, length=2),
                    pb.Piece(tensor_index=1, offset=0, length=2),
                ],
                primary=1,
            ),
            pb.Partition(
                partition_id=2, pieces=[pb.Piece(tensor_index=2, offset=0, length=2)], primary=1
            ),
        ],
        servers=[
            pb.ServerStatus(server_index=index, address=address)
            for index, address in addresses.items()
        ],
    )


def tensors() -> list[HostTensor]:
    a = HostTensor("a", nn.Parameter(torch.arange(6.0)), trained=True)
    b = HostTensor("b", nn.Parameter(torch.tensor([7.0, 8.0])), trained=True)
    c = HostTensor("c", nn.Parameter(torch.tensor([9.0, 10.0], dtype=torch.float64)), trained=True)
    return [a, b, c]


def test_each_server_gets_its_ranges_of_elements() -> None:
    declared = tensors()
    first, second = shares(shard_map(addresses={1: "one:1", 0: "zero:1"}), declared)
    assert (first.index, first.address, first.epoch) == (0, "zero:1", 3)
    assert [(each.partition_id, each.length, each.size_bytes) for each in second.partitions] == [
        (1, 4, 16),
        (2, 2, 16),
    ]
    packed, alone = second.partitions
    values = {tensor.name: tensor.values() for tensor in declared}
    assert packed.gathered(values).tolist() == [4.0, 5.0, 7.0, 8.0]
    assert alone.gathered(values).tolist() == [9.0, 10.0]


def test_received_values_reach_each_tensor_of_a_partition() -> None:
    declared = tensors()
    packed, alone = shares(shard_map(addresses={0: "zero:1", 1: "one:1"}), declared)[1].partitions
    targets = {tensor.name: tensor.target() for tensor in declared}
    packed.landing(targets).copy_(torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert declared[0].parameter.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], (
        "values are written only when all have arrived"
    )
    packed.landed(targets)
    alone.landing(targets).copy_(torch.tensor([-5.0, -6.0]))
    alone.landed(targets)
    assert [tensor.parameter.tolist() for tensor in declared] == [
        [0.0, 1.0, 2.0, 3.0, -1.0, -2.0],
        [-3.0, -4.0],
        [-5.0, -6.0],
    ]


def test_scripts_default_device_changes_nothing() -> None:
    packed, _ = shares(shard_map(addresses={0: "zero:1", 1: "one:1"}), declared := tensors())[
        1
    ].partitions
    with torch.device("meta"):
        assert (
            packed.landing({tensor.name: tensor.target() for tensor in declared}).device.type
            == "cpu"
        )


def test_tensor_without_a_gradient_is_omitted_from_its_partition() -> None:
    packed, alone = shares(shard_map(addresses={0: "zero:1", 1: "one:1"}), tensors())[1].partitions
    gradients = {"b": torch.tensor([0.5, 0.25]), "c": torch.zeros(2, dtype=torch.float64)}
    assert packed.absent_from(gradients) == (0,)
    assert alone.absent_from(gradients) == ()
    assert packed.gathered(gradients, (0,)).tolist() == [0.5, 0.25]
    assert packed.places((0,)) == ((2, 4),)


def test_server_without_a_part_is_not_contacted() -> None:
    assert [
        share.index
        for share in shares(shard_map(addresses={0: "a:1", 1: "b:1", 2: "c:1"}), tensors())
    ] == [0, 1]


def test_a_map_that_names_no_address_for_a_part_is_refused() -> None:
    with pytest.raises(PreconditionError, match=r"to servers \[1\]") as refusal:
        shares(shard_map(addresses={0: "a:1"}), tensors())
    assert refusal.value.reason == "SHARD_MAP_INCOMPLETE"
