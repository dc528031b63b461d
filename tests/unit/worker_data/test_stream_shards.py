"""The assignment of a list of shards to steps, tested on plain values: seeded schedules of shards,
lanes and owners."""

import json
import random

import pytest
from shoal_common.errors import CorruptDataError
from shoal_worker.data.streaming.lanes import Allotment, Place, Report, ShardsRead


def settle(read, lengths, sizes):
    """Runs one step over shards of these lengths. Returns the allotment and the number of
    rounds."""
    allotment, rounds = Allotment(read, shards=len(lengths), sizes=sizes), 0
    while not allotment.settled:
        reports = []
        for lane in range(len(sizes)):
            wanted = allotment.to_read(lane)
            if wanted is None:
                reports.append(None)
                continue
            at, most = wanted
            count = min(most, lengths[at.shard] - at.offset)
            reports.append(Report(count, at.offset + count < lengths[at.shard], at.offset + count))
        allotment.hear(reports)
        rounds += 1
        assert rounds <= 3 * len(lengths) + 3
    return allotment, rounds


def items_of(allotment, lanes):
    return [
        (part.shard, part.offset + i)
        for lane in range(lanes)
        for part in allotment.segments(lane)
        for i in range(part.items)
    ]


@pytest.mark.parametrize("seed", range(150))
def test_items_of_all_shards_are_dealt_once_in_full_steps(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, 5, 17, 60]) for _ in range(draw.randint(1, 20))]
    sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 6))]
    read, seen, steps = ShardsRead(lanes=(None,) * len(sizes)), [], []
    while True:
        allotment, _ = settle(read, lengths, sizes)
        read = ShardsRead.from_state(allotment.after.to_state())
        items = items_of(allotment, len(sizes))
        if items:
            seen, steps = seen + items, [*steps, len(items)]
        if read.is_over(len(lengths)):
            break
        if draw.random() < 0.1:  # a resume with other sizes
            sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 6))]
            read, steps = read.with_lanes(len(sizes)), []
            continue
        assert items, "a step without items must be the end"
        assert len(items) == sum(sizes) or read.is_over(len(lengths))
    assert sorted(seen) == [
        (shard, place) for shard, length in enumerate(lengths) for place in range(length)
    ]
    assert all(step == sum(sizes) for step in steps[:-1]), (
        "only the last step of an epoch may be short"
    )


def test_step_takes_one_round_if_no_shard_ends():
    first, _ = settle(ShardsRead(lanes=(None, None)), [100, 100], [4, 4])
    _, rounds = settle(first.after, [100, 100], [4, 4])
    assert rounds == 1
    assert first.after.lanes == (Place(0, 4, 4, following=0), Place(1, 4, 4, following=0))


def test_state_is_stored_with_its_shard_and_absent_from_earlier_releases():
    allotment, _ = settle(ShardsRead(lanes=(None, None)), [100, 100], [4, 4])
    allotment.hear_states(["here", None])
    state = allotment.after.to_state()
    assert ShardsRead.from_state(json.loads(json.dumps(state))) == allotment.after
    assert allotment.after.lanes == (Place(0, 4, 4, 0, "here"), Place(1, 4, 4, 0))
    earlier = {**state, "lanes": [place[:3] for place in state["lanes"]]}
    assert ShardsRead.from_state(earlier).lanes == (Place(0, 4, 4), Place(1, 4, 4))


def test_exhausted_lanes_are_compensated_by_the_others():
    allotment, _ = settle(ShardsRead(lanes=(None, None)), [1, 100], [4, 4])
    assert allotment.counts() == [1, 7]


def test_the_end_is_known_with_the_last_item_though_empty_shards_follow():
    allotment, _ = settle(ShardsRead(lanes=(None, None)), [4, 4, 0, 0, 0], [4, 4])
    assert allotment.after.is_over(5)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"lanes": [[1, 2]], "next_shard": 0, "waiting": []},
        {"lanes": [], "next_shard": -1, "waiting": []},
        {"lanes": [[1, 2, 3, 4, 5]], "next_shard": 2, "waiting": []},
    ],
)
def test_malformed_state_is_refused(state):
    with pytest.raises(CorruptDataError, match="shards"):
        ShardsRead.from_state(state)
