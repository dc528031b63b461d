"""Compressed sums between real processes: the results are bit for bit equal, and the number of
bytes on the sockets matches the formulas."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from shoal_common.redis import EmbeddedRedis

from tests.ranks.processes import Rank, RankPool, run_task

TASKS = "tests.integration.compression.compressed_ranks"
WORLD = 3
NUMEL = 256 * 512 + 512 + 512 * 300 + 300
NAMES = ("fp16", "bf16", "int8", "topk", "randomk", "sign", "powersgd")
# Bytes of an uncompressed all-reduce per byte sent, and the relative error (norm) of the first sum.
SAVINGS = {
    "fp16": 1.95,
    "bf16": 1.95,
    "int8": 3.8,
    "topk": 20,
    "randomk": 48,
    "sign": 28,
    "powersgd": 30,
}
ERRORS = {
    "fp16": 4e-4,
    "bf16": 4e-3,
    "int8": 0.02,
    "topk": 1.0,
    "randomk": 1.0,
    "sign": 1.0,
    "powersgd": 1.0,
}


@pytest.fixture(scope="module")
def said(rank_pool: RankPool, _redis_server: EmbeddedRedis) -> list[dict[str, Any]]:
    """The reports of the ranks."""
    with rank_pool.taking() as take:
        return list(run_task(take(WORLD), f"{TASKS}:sums", **arguments(_redis_server.url)).values())


def arguments(url: str) -> dict[str, Any]:
    return {"world_size": WORLD, "url": url, "prefix": f"shoal:{{test}}:{uuid.uuid4().hex}"}


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_have_the_same_bits_and_a_sum_close_to_the_exact_one(
    said: list[dict[str, Any]], name: str
) -> None:
    assert all(rank[name]["results"] == said[0][name]["results"] for rank in said)
    assert 0 < said[0][name]["errors"][0] < ERRORS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_sockets_carry_the_bytes_of_the_formula_and_hardly_more(
    said: list[dict[str, Any]], name: str
) -> None:
    expected = said[0][name]["expected"]
    assert [rank[name]["asked"] for rank in said] == pytest.approx([expected] * WORLD, rel=1e-4)
    received = sum(rank[name]["received"] for rank in said)
    # Gloo's headers and three barriers
    assert WORLD * expected * 0.999 <= received <= WORLD * expected + 40_000
    buckets = 4
    assert buckets * 2 * (WORLD - 1) / WORLD * 4 * NUMEL / expected > SAVINGS[name]


def test_survivors_of_a_death_keep_their_residuals_and_redo_the_step_alike(
    take_ranks: Callable[[int], list[Rank]], redis_url: str
) -> None:
    survivors = run_task(
        take_ranks(WORLD), f"{TASKS}:shrink", dying=[WORLD - 1], **arguments(redis_url)
    ).values()
    assert all(one["failed"] for one in survivors)
    assert all(one["kept"] for one in survivors)
    assert len({one["result"] for one in survivors}) == 1
