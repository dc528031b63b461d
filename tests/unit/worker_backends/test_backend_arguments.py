"""Arguments that backends refuse before sending anything. The world has one rank and uses torch's
in-memory store, so no network is needed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import ClassVar

import pytest
import shoal
import torch
import torch.distributed as dist
from shoal_common.errors import (
    ConfigurationError,
    InvalidRequestError,
    MembershipChanged,
    PreconditionError,
)
from shoal_worker.backends import (
    CommunicationBackend,
    ReduceOp,
    backend_class,
    backend_names,
    registry,
)
from shoal_worker.backends.gloo.backend import GlooBackend


@pytest.fixture
def alone() -> Iterator[GlooBackend]:
    backend = GlooBackend()
    backend.initialize(rank=0, world_size=1, store=dist.HashStore(), hostname="127.0.0.1")
    yield backend
    backend.shutdown()


def test_backends_are_found_by_name() -> None:
    assert backend_class("gloo") is GlooBackend
    assert {backend_class(name).name for name in backend_names()} == set(backend_names())


class NewBackend(GlooBackend):
    """A backend that a user adds."""

    name: ClassVar[str] = "new"


def test_a_new_backend_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BACKENDS, "new", f"{__name__}:NewBackend")
    backend = backend_class("new")()
    backend.initialize(rank=0, world_size=1, store=dist.HashStore(), hostname="127.0.0.1")
    backend.all_reduce(torch.ones(1))
    backend.shutdown()
    with pytest.raises(ConfigurationError, match="expected one of gloo, inmemory, mpi, nccl, new"):
        backend_class("glo")
    net = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=r"backend='new'.*'inmemory'"):
        shoal.launch(
            lambda: shoal.as_distributed(net, torch.optim.SGD(net.parameters()), backend="new"),
            world_size=1,
        )


def test_an_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        ConfigurationError, match="backend='glo': expected one of gloo, inmemory, mpi, nccl"
    ):
        backend_class("glo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_nccl_without_cuda_names_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="use backend='gloo'"):
        backend_class("nccl")()


def test_an_abstract_backend_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        CommunicationBackend()  # type: ignore[abstract]


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="expected 0 <= rank < world_size"):
        GlooBackend().initialize(rank=rank, world_size=world_size, store=dist.HashStore())


def test_zero_timeout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="connect_timeout"):
        GlooBackend().initialize(
            rank=0, world_size=1, store=dist.HashStore(), connect_timeout=timedelta(0)
        )


def test_a_hostname_of_another_machine_is_refused() -> None:
    backend = GlooBackend()
    with pytest.raises(
        ConfigurationError,
        match=r"hostname='192\.0\.2\.1'.*expected an address, name or interface of this host",
    ):
        backend.initialize(rank=0, world_size=1, store=dist.HashStore(), hostname="192.0.2.1")


def test_ranks_of_different_address_families_are_reported() -> None:
    store = dist.HashStore()

    def connect(rank: int) -> str:
        backend = GlooBackend()
        with pytest.raises(ConfigurationError) as refused:
            backend.initialize(
                rank=rank,
                world_size=2,
                store=store,
                hostname=["127.0.0.1", "::1"][rank],
                connect_timeout=timedelta(seconds=30),
            )
        return str(refused.value)

    with ThreadPoolExecutor(2) as ranks:
        errors = list(ranks.map(connect, range(2)))
    for each in errors:
        assert (
            "rank 0 listens at 127.0.0.1 and rank 1 at ::1: Gloo needs all ranks in one address "
            "family" in each
        )
        assert "--local-addr" in each


def test_collectives_before_initialize_say_what_to_call() -> None:
    with pytest.raises(PreconditionError, match=r"call initialize\(\) first"):
        GlooBackend().all_reduce(torch.ones(1))


def test_a_backend_serves_one_group_only(alone: GlooBackend) -> None:
    with pytest.raises(PreconditionError, match="create a new backend"):
        alone.initialize(rank=0, world_size=1, store=dist.HashStore())


def test_state_shows_the_position_in_the_life_cycle(alone: GlooBackend) -> None:
    assert (alone.rank, alone.world_size, alone.is_initialized) == (0, 1, True)
    assert (alone.process_group.rank(), alone.process_group.size()) == (0, 1)
    alone.shutdown()
    alone.shutdown()
    assert not alone.is_initialized
    with pytest.raises(MembershipChanged, match="was shut down"):
        alone.barrier()


def test_first_reason_of_an_abort_is_kept(alone: GlooBackend) -> None:
    alone.abort("generation 7")
    alone.abort("generation 8")
    with pytest.raises(MembershipChanged, match="generation 7"):
        alone.all_reduce(torch.ones(1))


def test_backend_aborted_before_initialization_stays_aborted() -> None:
    backend = GlooBackend()
    backend.abort("too late")
    with pytest.raises(PreconditionError):
        backend.initialize(rank=0, world_size=1, store=dist.HashStore())


def test_invalid_arguments_are_named(alone: GlooBackend) -> None:
    grid = torch.ones(2, 2)
    with pytest.raises(InvalidRequestError, match=r"non-contiguous.*\.contiguous\(\)"):
        alone.all_reduce(grid.t())
    with pytest.raises(
        InvalidRequestError, match=r"layout torch\.sparse_coo: expected a dense tensor"
    ):
        alone.all_reduce(torch.zeros(2, 2, layout=torch.sparse_coo))
    with pytest.raises(InvalidRequestError, match=r"AVERAGE of torch\.int64"):
        alone.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVERAGE)
    with pytest.raises(InvalidRequestError, match="expected the same dtype"):
        alone.all_gather(torch.empty(2), torch.ones(2, dtype=torch.float64))
    with pytest.raises(InvalidRequestError, match="expected world_size=1 times as many"):
        alone.all_gather(torch.empty(3), torch.ones(2))
    with pytest.raises(InvalidRequestError, match="expected world_size=1 times as many"):
        alone.reduce_scatter(torch.empty(3), torch.ones(2))
    with pytest.raises(InvalidRequestError, match="source=1; expected a rank from 0 to 0"):
        alone.broadcast(grid, 1)
    with pytest.raises(
        InvalidRequestError, match="tensor is missing; the source rank must pass it"
    ):
        alone.scatter(grid, None, 0)
    with pytest.raises(
        InvalidRequestError, match=r"output_sizes=\[1\]; expected 1 sizes that sum to 2"
    ):
        alone.all_to_all(grid, grid, [1], [2])
    with pytest.raises(InvalidRequestError, match="destination=0 is this rank itself"):
        alone.send(grid, 0)
    assert alone.is_initialized


def test_unsupported_dtype_is_the_callers_error_and_leaves_the_group_intact(
    alone: GlooBackend,
) -> None:
    with pytest.raises(RuntimeError) as caught:
        alone.all_reduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX)
    assert not isinstance(caught.value, MembershipChanged)
    alone.all_reduce(torch.ones(2))
