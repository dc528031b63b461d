"""Gloo receives only collectives whose names cannot corrupt memory (gloo/interruptible.py), and the
collectives that are made of others give the same results as Gloo's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import InvalidRequestError
from shoal_worker.backends.gloo import interruptible
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.python_group import ForwardingGroup
from torch._C._distributed_c10d import OpType

from tests.fake_device.library import in_threads

_IN_PLACE = 15
"""Longest text that libstdc++'s std::string stores without allocating memory."""
_TRANSFERS = {"send", "recv", "recv_anysource"}
"""They do not pass through the threads that store names."""


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Any:
    store = dist.HashStore()
    backends = [GlooBackend() for _ in range(request.param)]
    in_threads(
        [
            lambda rank=rank, backend=backend: backend.initialize(
                rank=rank, world_size=len(backends), store=store
            )
            for rank, backend in enumerate(backends)
        ]
    )
    yield backends
    for backend in backends:
        backend.shutdown()


def _on_all(ranks: list[GlooBackend], call: Callable[[int, Any], Any]) -> list[Any]:
    return in_threads(
        [
            lambda rank=rank, group=backend.process_group: call(rank, group)
            for rank, backend in enumerate(ranks)
        ]
    )


def _calls() -> dict[str, tuple[Any, ...]]:
    """Returns the arguments of each collective in a group of one rank."""
    one, two = torch.ones(2), torch.empty(2)
    rows = torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (2, 3), check_invariants=True)
    return {
        "allgather": ([[two]], [one]),
        "allgather_coalesced": ([[two]], [one]),
        "all_gather_single": (two, one),
        "all_gather_single_coalesced": ([two], [one]),
        "allreduce": ([rows],),
        "allreduce_coalesced": ([one, two], dist.AllreduceCoalescedOptions()),
        "alltoall": ([two], [one]),
        "all_to_all_single": (two, one, [], []),
        "barrier": (),
        "broadcast": ([one], dist.BroadcastOptions()),
        "gather": ([[two]], [one], dist.GatherOptions()),
        "reduce": ([one], dist.ReduceOptions()),
        "reduce_scatter": ([two], [[one]]),
        "reduce_scatter_single": (two, one),
        "reduce_scatter_single_coalesced": ([two], [one]),
        "scatter": ([two], [[one]], dist.ScatterOptions()),
    }


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_collectives_reach_gloo_under_names_that_need_no_memory(
    ranks: list[GlooBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: list[int] = []
    native = interruptible.native_collective

    def recorded(group: Any, name: str) -> Any:
        def issue(*arguments: Any, **options: Any) -> dist.Work:
            work = native(group, name)(*arguments, **options)
            issued.append(work._get_op_type())
            return work

        return issue

    monkeypatch.setattr(interruptible, "native_collective", recorded)
    calls = _calls()
    expected = {
        function.__name__
        for _, function in inspect.getmembers(ForwardingGroup, inspect.isfunction)
        if function.__qualname__ == "_collective.<locals>.issue"
    }
    assert set(calls) | _TRANSFERS == expected, "this test must call every collective"
    group = ranks[0].process_group
    for name, arguments in calls.items():
        getattr(group, name)(*arguments).wait()
    assert len(issued) >= len(calls)
    names = {int(kind): name for name, kind in OpType.__members__.items()}
    assert [names[kind] for kind in issued if len(names[kind]) > _IN_PLACE] == []


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "row", "sparse_dims"),
    [
        (torch.float32, (3,), 1),
        (torch.float64, (), 2),
        (torch.complex128, (2,), 1),
        (torch.bfloat16, (5,), 1),
        (torch.int64, (), 1),
    ],
)
def test_sparse_tensors_are_summed(
    ranks: list[GlooBackend], dtype: torch.dtype, row: tuple[int, ...], sparse_dims: int
) -> None:
    def tensor(rank: int) -> torch.Tensor:
        dense = torch.zeros(*[4] * sparse_dims, *row, dtype=dtype)
        if rank != 1:  # this rank has no entries
            dense[rank], dense[3] = rank + 1, 10 * rank + 1
        return dense.to_sparse(sparse_dims)

    def total(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        waited, followed = tensor(rank), tensor(rank)
        group.allreduce([waited]).wait()
        (value,) = group.allreduce([followed]).get_future().wait()
        assert value is followed
        return waited.to_dense(), followed.to_dense()

    expected = sum((tensor(rank).to_dense() for rank in range(3)), torch.zeros((), dtype=dtype))
    for waited, followed in _on_all(ranks, total):
        assert torch.equal(waited, expected)
        assert torch.equal(followed, expected)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sparse_tensors_without_entries_stay_empty(ranks: list[GlooBackend]) -> None:
    def entries(rank: int, group: Any) -> int:
        tensor = torch.zeros(4, 2).to_sparse(1)
        group.allreduce([tensor]).wait()
        return int(tensor._nnz())

    assert _on_all(ranks, entries) == [0, 0]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sparse_tensors_that_differ_are_refused_on_all_ranks(ranks: list[GlooBackend]) -> None:
    def refused(rank: int, group: Any) -> str:
        with pytest.raises(InvalidRequestError, match="ranks 0 and 1 differ in shape") as caught:
            group.allreduce([torch.ones(4 + rank).to_sparse()])
        group.barrier().wait()  # the group is still usable
        return str(caught.value)

    first, second = _on_all(ranks, refused)
    assert "rank 0 has [4], torch.float32, 1 sparse dimensions" in first
    assert "rank 1 has [5]" in second


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_sparse_maximum_is_refused(ranks: list[GlooBackend]) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    with pytest.raises(InvalidRequestError, match="with MAX: expected SUM"):
        ranks[0].process_group.allreduce([torch.ones(4).to_sparse()], options)
