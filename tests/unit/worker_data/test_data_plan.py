"""Every position of an epoch is dealt exactly once, for any sizes and any sequence of world sizes.
The order never changes between releases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import ConfigurationError
from shoal_worker.data.sampling import EpochPlan, permutation

worlds = st.lists(st.integers(1, 9), min_size=1, max_size=20)


@st.composite
def plans(draw):
    batch = draw(st.integers(1, 40))
    return EpochPlan(
        length=draw(st.integers(0, 200)),
        global_batch_size=batch,
        micro_batch_size=draw(st.none() | st.integers(1, batch)),
        drop_last=draw(st.booleans()),
    )


def walk(plan, world_of_step):
    """Deals an epoch step by step. Returns each step's blocks by rank."""
    cursor, steps = 0, []
    while step := plan.step(cursor):
        world = world_of_step(len(steps))
        steps.append([plan.deal(step, rank, world) for rank in range(world)])
        cursor = step.stop
    return steps


@settings(max_examples=300, deadline=None)
@given(plans(), worlds)
def test_every_position_is_dealt_once_for_any_sequence_of_world_sizes(plan, sizes):
    steps = walk(plan, lambda index: sizes[index % len(sizes)])
    dealt = [
        position
        for ranks in steps
        for blocks in ranks
        for block in blocks
        for position in block.positions
    ]
    assert dealt == list(range(plan.counted))
    assert len(steps) == len(plan)
    assert plan.counted == plan.length or plan.drop_last


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 9))
def test_parts_are_contiguous_and_differ_by_at_most_one(plan, world):
    for ranks in walk(plan, lambda _: world):
        sizes = [len(blocks) if plan.micro_batch_size else len(blocks[0]) for blocks in ranks]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=300, deadline=None)
@given(plans().filter(lambda plan: plan.micro_batch_size is None), worlds)
def test_no_rank_gets_one_sample_of_a_short_step_if_full_steps_give_it_two(plan, sizes):
    cursor, index, dealt = 0, 0, []
    while step := plan.step(cursor):
        world = sizes[index % len(sizes)]
        parts = [plan.deal(step, rank, world, least=2)[0].positions for rank in range(world)]
        dealt += [position for part in parts for position in part]
        if plan.global_batch_size >= 2 * world and len(step) > 1:
            assert all(len(part) != 1 for part in parts)
        else:
            assert parts == [plan.deal(step, rank, world)[0].positions for rank in range(world)]
        cursor, index = step.stop, index + 1
    assert dealt == list(range(plan.counted))


@settings(max_examples=200, deadline=None)
@given(plans().filter(lambda plan: plan.micro_batch_size), st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_are_equal_for_any_world(plan, one, other):
    def flat(steps):
        return [[block for blocks in ranks for block in blocks] for ranks in steps]

    first = flat(walk(plan, lambda _: one))
    assert first == flat(walk(plan, lambda _: other))
    for blocks in first:
        assert [block.index for block in blocks] == list(range(len(blocks)))
        assert all(len(block) == plan.micro_batch_size for block in blocks[:-1])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_the_batch_size_may_change_at_any_step(length, sizes):
    cursor, index, dealt = 0, 0, []
    while step := EpochPlan(length=length, global_batch_size=sizes[index % len(sizes)]).step(
        cursor
    ):
        dealt += step
        cursor, index = step.stop, index + 1
    assert dealt == list(range(length))


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(0, 500))
def test_permutation_contains_every_index_once(seed, epoch, length):
    assert sorted(permutation(seed, epoch, length, True)) == list(range(length))
    assert list(permutation(seed, epoch, length, False)) == list(range(length))


def test_order_of_samples_never_changes():
    assert list(permutation(0, 0, 10, True)) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert list(permutation(0, 1, 10, True)) == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]
    assert list(permutation(7, 0, 10, True)) == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert list(permutation(-1, 3, 10, True)) == [3, 2, 8, 0, 1, 6, 9, 5, 4, 7]


def test_every_index_comes_first_equally_often():
    counts = [0] * 8
    for epoch in range(4000):
        counts[permutation(3, epoch, 8, True)[0]] += 1
    assert max(abs(count - 500) for count in counts) < 110  # five standard deviations


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 4, "micro_batch_size": 0}, "micro_batch_size=0"),
        ({"global_batch_size": 4, "micro_batch_size": 5}, "micro_batch_size=5"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes, named):
    with pytest.raises(ConfigurationError, match=named):
        EpochPlan(length=10, **sizes)


def test_a_rank_outside_the_world_is_refused():
    plan = EpochPlan(length=10, global_batch_size=4)
    with pytest.raises(ConfigurationError, match="rank=2"):
        plan.deal(plan.step(0), 2, 2)
