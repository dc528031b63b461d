"""The shard map: every element once, small enough partitions, even loads, the same answer every time."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from shoal_coordinator.membership.shards import ITEM_BYTES, LARGEST_PARTITION_BYTES, TensorSpec, count_partitions, lay_out

tensors = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=3),
        shape=st.lists(st.integers(min_value=0, max_value=3000), max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
    ).filter(lambda tensor: tensor.elements < 1 << 26),
    max_size=30,
)


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_each_element_lies_in_exactly_one_partition_of_at_most_eight_mebibytes(tensors: list[TensorSpec], servers: int) -> None:
    layout = lay_out(tensors, servers)
    assert len(layout.partitions) == count_partitions(tensors)
    covered = [0] * len(tensors)
    for partition in layout.partitions:
        assert partition.offset == covered[partition.tensor_index], "ordered by tensor, then offset, without holes"
        covered[partition.tensor_index] += partition.length
        assert 0 < partition.length * ITEM_BYTES[tensors[partition.tensor_index].dtype] <= LARGEST_PARTITION_BYTES
    assert covered == [tensor.elements for tensor in tensors]


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_no_server_holds_more_than_one_partition_above_another(tensors: list[TensorSpec], servers: int) -> None:
    loads = [0] * servers
    largest = 0
    for partition in lay_out(tensors, servers).partitions:
        size = partition.length * ITEM_BYTES[tensors[partition.tensor_index].dtype]
        loads[partition.primary] += size
        largest = max(largest, size)
    assert max(loads) - min(loads) <= largest


@given(tensors=tensors, servers=st.integers(min_value=1, max_value=9))
def test_equal_declarations_are_laid_out_equally(tensors: list[TensorSpec], servers: int) -> None:
    assert lay_out(tensors, servers) == lay_out(list(tensors), servers)


def test_a_large_model_is_spread_within_ten_percent() -> None:
    model = [TensorSpec(name=f"layer{i}", shape=(4096, 4096 + 64 * i), dtype="float32") for i in range(32)]
    loads = [0] * 7
    for partition in lay_out(model, 7).partitions:
        loads[partition.primary] += partition.length
    assert max(loads) <= 1.1 * min(loads)
