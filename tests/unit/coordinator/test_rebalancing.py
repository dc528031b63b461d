"""The choice of the next partitions to move: moves end with equal shares, and a draining server
gives away everything."""

from __future__ import annotations

from collections.abc import Collection

import hypothesis.strategies as st
from hypothesis import given
from shoal_coordinator.membership.model.shards import (
    SMALLEST_FULL_BYTES,
    Partition,
    Piece,
    ShardLayout,
    TensorSpec,
    lay_out,
)
from shoal_coordinator.membership.servers.rebalancing import MOST_BYTES, next_move

KIB = 1 << 10
MIB = 1 << 20

sizes = st.one_of(
    st.integers(min_value=1, max_value=8 * MIB), st.sampled_from([40, 64 * KIB, MIB, 8 * MIB])
)
servers = st.integers(min_value=0, max_value=6)


def layout_of(partitions: Collection[tuple[int, int, bool]]) -> ShardLayout:
    """Returns a layout with one tensor per partition, given as its bytes, its owner and whether it
    is frozen."""
    return ShardLayout(
        epoch=1,
        tensors=tuple(
            TensorSpec(name=f"t{i}", shape=(size, 1), dtype="float32", frozen=f)
            for i, (size, _, f) in enumerate(partitions)
        ),
        partitions=tuple(
            Partition(
                pieces=(Piece(tensor_index=index, offset=0, length=max(1, size // 4)),),
                primary=owner,
            )
            for index, (size, owner, _) in enumerate(partitions)
        ),
    )


def loads(layout: ShardLayout, indices: Collection[int], *, frozen: bool) -> dict[int, int]:
    found = dict.fromkeys(indices, 0)
    for partition, size in zip(layout.partitions, layout.sizes, strict=True):
        if layout.is_frozen(partition) is frozen and partition.primary in found:
            found[partition.primary] += size
    return found


def largest(layout: ShardLayout, *, frozen: bool) -> int:
    kind = (
        size
        for partition, size in zip(layout.partitions, layout.sizes, strict=True)
        if layout.is_frozen(partition) is frozen
    )
    return max(kind, default=0)


def rebalanced(
    layout: ShardLayout,
    *,
    givers: Collection[int],
    receivers: Collection[int],
    draining: Collection[int] = (),
) -> tuple[ShardLayout, int]:
    """Returns the layout after all moves and their number. Checks each move."""
    moves = 0
    while (
        plan := next_move(layout, givers=givers, receivers=receivers, draining=draining)
    ) is not None:
        assert plan.giver != plan.receiver
        assert plan.giver in givers
        assert plan.receiver in receivers
        assert plan.receiver not in draining
        assert plan.partitions
        assert list(plan.partitions) == sorted(set(plan.partitions))
        assert all(
            layout.partitions[partition].primary == plan.giver for partition in plan.partitions
        )
        assert (
            sum(max(layout.sizes[partition], SMALLEST_FULL_BYTES) for partition in plan.partitions)
            <= MOST_BYTES
        )
        layout = layout.moved(plan.partitions, plan.receiver)
        moves += 1
        assert moves <= 2 * len(layout.partitions), "partitions move back and forth"
    return layout, moves


@given(
    partitions=st.lists(st.tuples(sizes, servers, st.booleans()), max_size=40),
    fresh=st.sets(servers, max_size=3),
    draining=st.sets(servers, max_size=3),
)
def test_moves_end_with_equal_shares_and_nothing_on_draining_servers(
    partitions: list[tuple[int, int, bool]], fresh: set[int], draining: set[int]
) -> None:
    layout = layout_of(partitions)
    places = {owner for _, owner, _ in partitions} | fresh
    after, _ = rebalanced(layout, givers=places, receivers=places, draining=draining & places)
    staying = places - draining
    if not staying:
        assert after == layout
        return
    assert not after.shares.keys() & draining
    assert [partition.pieces for partition in after.partitions] == [
        partition.pieces for partition in layout.partitions
    ]
    for frozen in (False, True):
        shares = loads(after, staying, frozen=frozen).values()
        assert max(shares) - min(shares) <= largest(layout, frozen=frozen)


@given(
    partitions=st.lists(st.tuples(sizes, servers, st.booleans()), max_size=40),
    givers=st.sets(servers),
    receivers=st.sets(servers),
    draining=st.sets(servers, max_size=3),
)
def test_moves_end_for_any_sources_and_sinks(
    partitions: list[tuple[int, int, bool]],
    givers: set[int],
    receivers: set[int],
    draining: set[int],
) -> None:
    rebalanced(layout_of(partitions), givers=givers, receivers=receivers, draining=draining)


@given(
    tensors=st.lists(
        st.tuples(st.integers(min_value=1, max_value=1 << 22), st.booleans()), max_size=30
    ),
    count=st.integers(1, 9),
)
def test_fresh_layout_is_not_rebalanced(tensors: list[tuple[int, bool]], count: int) -> None:
    specs = [
        TensorSpec(name=f"t{i}", shape=(length,), dtype="float32", frozen=frozen)
        for i, (length, frozen) in enumerate(tensors)
    ]
    assert (
        next_move(
            lay_out(specs, range(count)), givers=range(count), receivers=range(count), draining=()
        )
        is None
    )


def test_joining_server_gets_an_equal_share_and_no_byte_moves_twice() -> None:
    layout = lay_out([TensorSpec(name="w", shape=(320 * MIB,), dtype="float32")], range(3))
    after, moves = rebalanced(layout, givers=range(4), receivers=range(4))
    shares = loads(after, range(4), frozen=False)
    assert all(abs(share - 320 * MIB) <= 8 * MIB for share in shares.values())
    before = {
        index
        for index, partition in enumerate(layout.partitions)
        if partition.primary != after.partitions[index].primary
    }
    assert all(after.partitions[index].primary == 3 for index in before)
    assert moves <= 320 // 32 + 3, "the number of moves is nearly minimal"


def test_leaving_server_gives_to_the_least_loaded_one() -> None:
    layout = lay_out([TensorSpec(name="w", shape=(240 * MIB,), dtype="float32")], range(4))
    after, moves = rebalanced(layout, givers=range(4), receivers=range(4), draining={1})
    shares = loads(after, (0, 2, 3), frozen=False)
    assert all(abs(share - 320 * MIB) <= 8 * MIB for share in shares.values())
    assert all(
        after.partitions[index].primary == p.primary
        for index, p in enumerate(layout.partitions)
        if p.primary != 1
    )
    assert moves <= 240 // 32 + 3


def test_thousands_of_tiny_partitions_do_not_all_move_at_once() -> None:
    layout = layout_of([(400, 0, False)] * 4000)
    plan = next_move(layout, givers=[0], receivers=[1], draining=[0])
    assert plan is not None
    assert len(plan.partitions) == MOST_BYTES // SMALLEST_FULL_BYTES


def test_smallest_partition_moves_if_each_exceeds_its_share() -> None:
    layout = layout_of(
        [(size * MIB, owner, False) for owner in range(3) for size in (8, 6, 6)]
        + [(8 * MIB, 3, False)]
    )
    plan = next_move(layout, givers=range(4), receivers=range(4), draining=())
    assert plan is not None
    assert (
        plan.giver,
        plan.receiver,
        [layout.sizes[partition] for partition in plan.partitions],
    ) == (0, 3, [6 * MIB])


def test_unavailable_servers_neither_send_nor_receive_partitions() -> None:
    layout = layout_of([(MIB, 0, False)] * 4)
    assert next_move(layout, givers=[], receivers=[0, 1], draining=[]) is None
    assert next_move(layout, givers=[0, 1], receivers=[0], draining=[]) is None
    assert next_move(layout, givers=[0, 1], receivers=[], draining=[0]) is None
    assert next_move(layout, givers=[1], receivers=[1], draining=[0]) is None
