"""Every backend passes the checks of conformance.py, on threads of this process and on
processes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from shoal_worker.backends.inmemory.backend import InMemoryBackend
from shoal_worker.launch import launch

from tests.integration.worker_backends.conformance import CHECKS, check_backend


def _check_inmemory(store: dist.Store) -> None:
    backend = InMemoryBackend()
    backend.initialize(rank=dist.get_rank(), world_size=dist.get_world_size(), store=store)
    check_backend(backend)
    backend.shutdown()


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(2, marks=pytest.mark.matrix), 3, pytest.param(4, marks=pytest.mark.matrix)],
)
def test_inmemory_collectives_are_right_for_every_dtype_and_op(world_size: int) -> None:
    launch(_check_inmemory, dist.HashStore(), world_size=world_size)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("check", CHECKS)
def test_torch_runs_unmodified_on_inmemory(check: str, world_size: int) -> None:
    launch(CHECKS[check], world_size=world_size)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_gloo_collectives_are_right_for_every_dtype_and_op(
    ranks: Callable[[int], list[Any]], redis_url: str, prefix: str, world_size: int
) -> None:
    members = ranks(world_size)
    for number, member in enumerate(members):
        member.start(
            "conform_backend", url=redis_url, prefix=prefix, rank=number, world_size=world_size
        )
    for member in members:
        member.result()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_torch_runs_unmodified_on_gloo(
    ranks: Callable[[int], list[Any]], redis_url: str, world_size: int
) -> None:
    members = ranks(world_size)
    init_method = f"{redis_url}/{uuid.uuid4().hex}"
    for number, member in enumerate(members):
        member.start("conform_torch", init_method=init_method, rank=number, world_size=world_size)
    failures = [member.result() for member in members]
    assert failures == [{}] * world_size
