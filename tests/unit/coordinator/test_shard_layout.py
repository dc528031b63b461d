"""The shard map contains every element once, in small enough partitions with even loads, and is
deterministic."""

from __future__ import annotations

import json
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given
from shoal_common.tables.declaration import TableSpec
from shoal_coordinator.membership.model.shards import (
    ITEM_BYTES,
    LARGEST_PIECE_BYTES,
    Partition,
    ShardLayout,
    TensorSpec,
    count_pieces,
    lay_out,
)
from shoal_coordinator.state import codec

tensors = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=3),
        shape=st.lists(st.integers(min_value=0, max_value=3000), max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        frozen=st.booleans(),
        apart=st.booleans(),
    ).filter(lambda tensor: tensor.elements < 1 << 26),
    max_size=30,
)

TABLE = TableSpec.with_defaults(
    buckets=16, seed=1, initializer="zeros", scale=0.0, optimizer="sgd", hyperparameters={}
)


def size_of(layout: ShardLayout, partition: Partition) -> int:
    return sum(
        piece.length * ITEM_BYTES[layout.tensors[piece.tensor_index].dtype]
        for piece in partition.pieces
    )


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_each_element_is_in_exactly_one_partition_of_at_most_eight_mebibytes(
    tensors: list[TensorSpec], servers: int
) -> None:
    layout = lay_out(tensors, range(servers))
    pieces = [piece for partition in layout.partitions for piece in partition.pieces]
    assert len(pieces) == count_pieces(tensors)
    covered = [0] * len(tensors)
    for piece in sorted(pieces, key=lambda piece: (piece.tensor_index, piece.offset)):
        assert piece.offset == covered[piece.tensor_index], "pieces leave no gaps"
        covered[piece.tensor_index] += piece.length
    assert covered == [tensor.elements for tensor in tensors]
    assert all(
        0 < size_of(layout, partition) <= LARGEST_PIECE_BYTES for partition in layout.partitions
    )


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_tensors_packed_together_have_one_dtype_and_settings_in_declaration_order(
    tensors: list[TensorSpec], servers: int
) -> None:
    for partition in lay_out(tensors, range(servers)).partitions:
        assert (
            len(
                {
                    (tensors[piece.tensor_index].dtype, tensors[piece.tensor_index].frozen)
                    for piece in partition.pieces
                }
            )
            == 1
        )
        assert (
            len(
                {
                    piece.tensor_index
                    for piece in partition.pieces
                    if tensors[piece.tensor_index].apart
                }
            )
            <= 1
        )
        assert len({tensors[piece.tensor_index].apart for piece in partition.pieces}) == 1
        places = [(piece.tensor_index, piece.offset) for piece in partition.pieces]
        assert places == sorted(places)


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_servers_partition_counts_differ_by_at_most_one_per_kind(
    tensors: list[TensorSpec], servers: int
) -> None:
    layout = lay_out(tensors, range(servers))
    for frozen in (False, True):
        loads = [0] * servers
        kind = [
            partition
            for partition in layout.partitions
            if tensors[partition.pieces[0].tensor_index].frozen is frozen
        ]
        for partition in kind:
            loads[partition.primary] += size_of(layout, partition)
        assert max(loads) - min(loads) <= max(
            (size_of(layout, partition) for partition in kind), default=0
        )


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_equal_declarations_are_laid_out_equally(tensors: list[TensorSpec], servers: int) -> None:
    assert lay_out(tensors, range(servers)) == lay_out(list(tensors), range(servers))


def test_a_large_model_is_spread_within_ten_percent() -> None:
    model = [
        TensorSpec(name=f"layer{i}", shape=(4096, 4096 + 64 * i), dtype="float32")
        for i in range(32)
    ]
    loads = [0] * 7
    for partition in lay_out(model, range(7)).partitions:
        loads[partition.primary] += sum(piece.length for piece in partition.pieces)
    assert max(loads) <= 1.1 * min(loads)


def test_many_small_tensors_give_few_partitions() -> None:
    model = [TensorSpec(name=f"layer{i}", shape=(64, 64), dtype="float32") for i in range(1000)]
    for servers in (1, 4):
        layout = lay_out(model, range(servers))
        assert len(layout.partitions) <= 5 * servers
        loads = [0] * servers
        for partition in layout.partitions:
            loads[partition.primary] += size_of(layout, partition)
        assert max(loads) <= 1.5 * min(loads)


def test_large_tensor_is_split_between_rows() -> None:
    (table,) = [TensorSpec(name="table", shape=(100_000, 300), dtype="float32")]
    for partition in lay_out([table], range(2)).partitions:
        for piece in partition.pieces:
            assert piece.offset % 300 == piece.length % 300 == 0
    (wide,) = [TensorSpec(name="wide", shape=(2, 5 << 20), dtype="float32")]
    assert [
        piece.length
        for partition in lay_out([wide], range(1)).partitions
        for piece in partition.pieces
    ] == [2 << 20] * 5


def test_trained_tensors_beside_a_large_frozen_model_are_spread_over_all_servers() -> None:
    frozen = [
        TensorSpec(name=f"layer{i}", shape=(4096, 4096), dtype="float32", frozen=True)
        for i in range(16)
    ]
    trained = [TensorSpec(name=f"lora{i}", shape=(4096, 8), dtype="float32") for i in range(32)]
    layout = lay_out(
        [tensor for pair in zip(frozen, trained[:16], strict=True) for tensor in pair]
        + trained[16:],
        range(8),
    )
    loads = [0] * 8
    for partition in layout.partitions:
        if not layout.tensors[partition.pieces[0].tensor_index].frozen:
            loads[partition.primary] += size_of(layout, partition)
    assert loads == [sum(loads) // 8] * 8


def test_tensors_to_be_kept_apart_share_no_partition() -> None:
    model = [
        TensorSpec(name=f"layer{i}", shape=(8,), dtype="float32", apart=True) for i in range(5)
    ]
    assert [len(partition.pieces) for partition in lay_out(model, range(2)).partitions] == [1] * 5


def test_tables_are_spread_in_buckets_after_the_dense_tensors() -> None:
    tensors = [
        TensorSpec(name="users", shape=(0, 16), dtype="float32", table=TABLE),
        TensorSpec(name="weight", shape=(10,), dtype="float32"),
        TensorSpec(name="items", shape=(10**9, 64), dtype="float32", table=TABLE),
    ]
    layout = lay_out(tensors, range(3))
    assert count_pieces(tensors) == 33
    assert [partition.bucket for partition in layout.partitions[:1]] == [None]
    buckets = [partition.bucket for partition in layout.partitions[1:]]
    assert [(each.tensor_index, each.number) for each in buckets if each is not None] == [
        (0, n) for n in range(16)
    ] + [(2, n) for n in range(16)]
    assert sorted(Counter(partition.primary for partition in layout.partitions[1:]).values()) == [
        10,
        11,
        11,
    ]
    assert not any(partition.pieces for partition in layout.partitions[1:])
    assert not any(layout.is_frozen(partition) for partition in layout.partitions)
    assert set(layout.sizes[1:]) == {LARGEST_PIECE_BYTES}
    small = TensorSpec(name="small", shape=(1000, 4), dtype="float32", table=TABLE)
    assert lay_out([small], range(1)).sizes == (1000,) * 16
    assert codec._parse_layout(json.loads(json.dumps(codec._layout(layout)))) == layout
