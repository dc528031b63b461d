"""Streams in a loader: unsupported uses are refused, differing sources are detected, and states and
evaluation work."""

import json

import numpy as np
import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError
from shoal_worker.data.streaming.fingerprints import fingerprint
from shoal_worker.elastic.contract.loader_interface import Placement

from tests.unit.worker_data.loaders import run_epoch
from tests.unit.worker_data.sources import Numbers, Seeking

ALONE = Placement(generation=1, rank=0, world_size=1)


def loader_of(stream, **options):
    return shoal.ElasticDataLoader(stream, **{"global_batch_size": 4, **options})


def shards(lengths=(3, 5)):
    return shoal.ShardedStream(
        range(len(lengths)), lambda shard: range(10 * shard, 10 * shard + lengths[shard])
    )


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (lambda: iter([1, 2]), {}, "iterated only once"),
        (lambda: (i for i in range(3)), {}, "iterated only once"),
        (lambda: Numbers(9), {"shuffle": True}, "set_epoch"),
        (lambda: Numbers(9), {"sampler": [1]}, "sampler"),
        (lambda: Numbers(9), {"num_workers": 2}, "num_workers=1 it reads ahead"),
        (lambda: Numbers(9), {"global_batch_size": None, "batch_size": 3}, "async_sgd"),
        (shards, {}, "micro_batch_size="),
        (shards, {"micro_batch_size": 5}, "micro_batch_size=5"),
        (lambda: shoal.ShardedStream([], range), {}, "at least one shard"),
        (lambda: shoal.ShardedStream("a.tar", range), {}, "list"),
        (lambda: shoal.ShardedStream(["a.tar"], None), {}, "read=None"),
    ],
)
def test_unsupported_operations_on_streams_are_refused_by_name(session, make, options, named):
    with pytest.raises(ConfigurationError, match=named):
        next(iter(loader_of(make(), **options).steps()))


def test_stream_has_no_known_length(session):
    loader = loader_of(Numbers(9))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert len(list(loader_of(Numbers(9), name="other", train=False))) == 3


@pytest.mark.parametrize("drop_last", [False, True])
def test_last_step_of_a_stream_is_recognized(session, drop_last):
    loader, ends = loader_of(Numbers(10), drop_last=drop_last), []
    for _ in loader:
        ends.append(loader.ends_epoch)
        loader.committed(session.placement)
    assert ends == ([False, True] if drop_last else [False, False, True])
    assert loader.epoch == 1


@pytest.mark.parametrize("options", [{}, {"drop_last": True}])
def test_a_stream_without_a_step_is_refused(session, options):
    with pytest.raises(ConfigurationError, match="expected at least one"):
        run_epoch(loader_of(Numbers(0) if not options else Numbers(3, 1), **options), session)


def test_exhausted_stream_is_not_mistaken_for_one_without_samples(session):
    class Once:
        def __init__(self):
            self.items = iter(range(6))

        def __iter__(self):
            return self.items

    loader = loader_of(Once())
    assert run_epoch(loader, session) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigurationError, match="start over"):
        run_epoch(loader, session)


def test_collate_and_workers_without_numbers_behave_as_for_datasets(session):
    loader = loader_of(Numbers(5, 1), collate_fn=lambda items: torch.tensor(items) * 2)
    assert run_epoch(loader, session) == [[0, 2, 4, 6], [8]]


def test_error_in_the_source_ends_the_loop_and_the_epoch_continues_where_it_was(session):
    class Failing(Numbers):
        fails = True

        def __iter__(self):
            for number in super().__iter__():
                if number == 6 and self.fails:
                    raise OSError("the network")
                yield number

    stream = Failing(10, 1)
    loader, seen = loader_of(stream), []

    def loop():
        for batch in loader:
            seen.append(batch.tolist())
            loader.committed(session.placement)

    with pytest.raises(OSError, match="network"):
        loop()
    stream.fails = False
    assert seen + run_epoch(loader, session) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# ------------------------------------------------------------- a source that does not repeat itself


class Changed(Numbers):
    """Yields different items each time it is created."""

    def __init__(self, n, other):
        super().__init__(n, 1)
        self.other = other

    def __iter__(self):
        return (self.other.get(i, i) for i in range(self.n))


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (Changed(20, {1: 99}), "first 8 items"),
        (Changed(20, {8: 99}), "item 8"),
        (Changed(5, {}), "ended after 5"),
        (Changed(8, {}), "ended after 8"),
    ],
)
def test_stream_that_yields_different_items_on_resumption_is_an_error(make_rank, there, message):
    first = make_rank(lambda: loader_of(Changed(20, {})), ALONE)
    for _ in range(2):
        first.take()
        first.commit()
    again = make_rank(lambda: loader_of(there), ALONE, first.loader.state_dict())
    with pytest.raises(PreconditionError, match=message) as raised:
        again.take()
    assert raised.value.reason == "STREAM_NOT_REPEATED"


def test_shard_that_yields_different_items_to_its_next_rank_is_an_error(make_rank):
    def stream(first):
        return shoal.ShardedStream([0], lambda _: iter([first, *range(1, 20)]))

    first = make_rank(lambda: loader_of(stream(0), micro_batch_size=2), ALONE)
    first.take()
    first.commit()
    again = make_rank(
        lambda: loader_of(stream(7), micro_batch_size=2), ALONE, first.loader.state_dict()
    )
    with pytest.raises(PreconditionError, match="shard 0 did not repeat itself"):
        again.take()


def test_items_read_by_a_rank_are_compared_with_the_others(make_rank):
    def dealing(stream):
        rank = make_rank(lambda: loader_of(stream), Placement(generation=1, rank=0, world_size=2))
        rank.take()
        return rank.loader.dealing

    # item 8 has not been read yet
    assert dealing(Changed(9, {})) == dealing(Changed(9, {})) == dealing(Changed(9, {8: 5}))
    assert dealing(Changed(9, {})) != dealing(Changed(9, {3: 5}))
    assert dealing(Changed(4, {})) != dealing(Changed(9, {})), "the streams have different lengths"
    assert json.loads(dealing(Changed(4, {})))["the stream's items"].endswith("an end after 4")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        (b"a", b"b"),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"b": 1}),
        ({"__key__": "x"}, {"__key__": "y"}),
        (torch.tensor([1]), torch.tensor([2])),
        (torch.zeros(2), torch.zeros(3)),
        (torch.tensor([1]).numpy(), torch.tensor([2]).numpy()),
        (True, 1),
    ],
)
def test_items_that_differ_have_different_fingerprints(one, other):
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_machine_dependent_values_are_not_in_fingerprints():
    assert fingerprint({"x": 0.1, "__url__": "/a"}) == fingerprint(
        {"x": 0.1000001, "__url__": "/b"}
    )


# -------------------------------------------------------------------------------------------- state


def test_state_resumes_with_another_batch_size(make_rank):
    for kind in (Numbers, Seeking):
        first = make_rank(lambda kind=kind: loader_of(kind(20)), ALONE)
        first.take()
        first.commit()
        state = json.loads(json.dumps(first.loader.state_dict()))
        again = make_rank(lambda kind=kind: loader_of(kind(20), global_batch_size=6), ALONE, state)
        assert again.take() == Numbers(20).order()[4:10]


def test_shards_resume_with_another_batch_size(make_rank):
    first = make_rank(
        lambda: loader_of(shards((9, 9, 9)), micro_batch_size=1, shuffle=False), ALONE
    )
    seen = first.take()
    first.commit()
    state = json.loads(json.dumps(first.loader.state_dict()))
    again = make_rank(
        lambda: loader_of(
            shards((9, 9, 9)), global_batch_size=5, micro_batch_size=5, shuffle=False
        ),
        ALONE,
        state,
    )
    while again.loader.epoch == 0:
        seen += again.take() or []
        again.commit()
    assert sorted(seen) == [10 * shard + i for shard in range(3) for i in range(9)]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda state: state.pop("stream"), ConfigurationError, "of an indexed dataset"),
        (lambda state: state["stream"].update(fingerprint="x"), CorruptDataError, "stream"),
        (lambda state: state.update(identity="2 shards"), ConfigurationError, "identity"),
    ],
)
def test_state_of_another_source_is_refused(session, change, error, named):
    loader = loader_of(Numbers(9), name="a")
    next(iter(loader))
    loader.committed(session.placement)
    state = loader.state_dict()
    change(state)
    with pytest.raises(error, match=named):
        loader_of(Numbers(9), name="b").load_state_dict(state)


class Changeable(Numbers):
    """Yields values that a collate_fn can change in place: a tensor, a list, and an array in a
    dictionary."""

    def __iter__(self):
        for number in super().__iter__():
            yield {
                "tensor": torch.tensor([number]),
                "list": [number, [number]],
                "more": {"array": np.array([number])},
            }


def in_place(items):
    for item in items:
        item["tensor"] += 1000
        item["list"][1][0] += 1000
        item["more"]["array"] += 1000
    return [(item["tensor"].item(), item["list"], item["more"]["array"].item()) for item in items]


@pytest.mark.parametrize("sharded", [False, True])
def test_in_place_changes_by_a_collate_fn_are_not_repeated_with_a_step(session, sharded):
    stream = (
        shoal.ShardedStream([0], lambda shard: iter(Changeable(6))) if sharded else Changeable(6)
    )
    loader = loader_of(stream, collate_fn=in_place, **({"micro_batch_size": 4} if sharded else {}))
    first = next(iter(next(iter(loader.steps()))))
    again = next(iter(next(iter(loader.steps()))))
    assert again == first
    assert all(tensor > 999 for tensor, _, _ in first)
