"""Collectives between real processes, and torch's own parallel code on top of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_agrees_with_numpy(ranks: Callable[[int], list[Any]], redis_url: str, prefix: str, world_size: int) -> None:
    members = ranks(world_size)
    for number, member in enumerate(members):
        member.start("collectives", url=redis_url, prefix=prefix, rank=number, world_size=world_size)
    for member in members:
        member.result()


@pytest.mark.parametrize("task", ["train_with_ddp", "shard_with_fsdp"])
def test_torchs_parallel_code_on_shoal_gloo_over_redis_equals_one_process(
    ranks: Callable[[int], list[Any]], redis_url: str, task: str
) -> None:
    members = ranks(3)
    init_method = f"{redis_url}/{uuid.uuid4().hex}"
    for number, member in enumerate(members):
        member.start(task, init_method=init_method, rank=number, world_size=3)
    trained = [member.result() for member in members]
    members[0].start("train_alone", world_size=3)
    alone = members[0].result()
    for one in trained:
        assert one == pytest.approx(alone, rel=1e-5)
