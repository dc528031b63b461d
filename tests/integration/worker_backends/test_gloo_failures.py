"""The cost of a failure to the other ranks: ranks are killed, stopped or stuck, and new groups
form."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from shoal_worker.store.redis_store import RedisStore

Ranks = Callable[[int], list[Any]]
_AT_ONCE_S = 50.0
"""Takes milliseconds on an idle machine. It must not be the groups' timeout, 300 s."""


def _signals(url: str, prefix: str) -> RedisStore:
    return RedisStore(url, prefix + ":signals", timeout=timedelta(seconds=60))


def test_survivors_of_a_kill_fail_at_once_and_form_the_next_group(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    members = ranks(3)
    for number, member in enumerate(members[:2]):
        member.start(
            "survive",
            url=redis_url,
            prefix=prefix,
            rank=number,
            world_size=3,
            next_rank=number,
            next_world_size=2,
        )
    members[2].start("be_reducing", url=redis_url, prefix=prefix, rank=2, world_size=3)
    for member in members:
        member.event("reducing")
    members[2].send_signal(signal.SIGKILL)
    killed_at = time.time()
    for survivor in [member.result() for member in members[:2]]:
        assert survivor["failed_at"] - killed_at < _AT_ONCE_S
        assert "failed: " in survivor["reason"]
        assert survivor["total"] == 2.0


def test_a_forked_child_of_the_killed_rank_does_not_keep_its_connections_alive(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    members = ranks(2)
    members[0].start(
        "survive",
        url=redis_url,
        prefix=prefix,
        rank=0,
        world_size=2,
        next_rank=0,
        next_world_size=1,
    )
    members[1].start("be_reducing", url=redis_url, prefix=prefix, rank=1, world_size=2, fork=True)
    members[0].event("reducing")
    child = members[1].event("reducing")["child"]
    try:
        members[1].send_signal(signal.SIGKILL)
        killed_at = time.time()
        assert members[0].result()["failed_at"] - killed_at < _AT_ONCE_S
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_abort_frees_all_but_the_stopped_rank_which_fails_when_it_continues(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    """The stopped rank does not answer, but its sockets stay open. Without the abort the others
    would wait for their timeout."""
    members = ranks(3)
    for number, member in enumerate(members[:2]):
        group = {"url": redis_url, "prefix": prefix, "rank": number, "world_size": 3}
        member.start(
            "survive", **group, next_rank=number, next_world_size=2, abort_when_told=not number
        )
    members[2].start("be_reducing", url=redis_url, prefix=prefix, rank=2, world_size=3)
    for member in members:
        member.event("reducing")
    signals = _signals(redis_url, prefix)
    members[2].send_signal(signal.SIGSTOP)
    try:
        signals.set("abort", "")
        aborted_at = float(signals.get("aborted"))
        first, second = [member.result() for member in members[:2]]
    finally:
        members[2].send_signal(signal.SIGCONT)
    assert first["failed_at"] - aborted_at < _AT_ONCE_S
    assert second["failed_at"] - aborted_at < _AT_ONCE_S
    assert first["reason"] == "told to abort"
    assert (
        "closed by peer" in second["reason"] or "a peer closed the connection" in second["reason"]
    )
    assert first["total"] == second["total"] == 2.0
    assert members[2].result()
    signals.close()


def test_peer_that_dies_while_connecting_delays_others_by_at_most_the_connect_timeout(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    members = ranks(3)
    for number, member in enumerate(members[:2]):
        member.start(
            "try_to_connect",
            url=redis_url,
            prefix=prefix,
            rank=number,
            world_size=3,
            connect_timeout_s=3.0,
        )
    members[2].start("die_while_connecting", url=redis_url, prefix=prefix, rank=2, world_size=3)
    for member in members[:2]:
        outcome = member.result()
        assert outcome["error"] in ("DeadlineError", "GroupEndedError"), outcome
        assert outcome["after_s"] < 30.0  # not the groups' timeout, 300 s


def test_thirty_groups_created_and_aborted_leave_no_descriptor_or_thread(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    members = ranks(3)
    for number, member in enumerate(members):
        member.start("cycle", url=redis_url, prefix=prefix, rank=number, world_size=3, cycles=30)
    for member in members:
        outcome = member.result()
        assert outcome["after"]["descriptors"] <= outcome["before"]["descriptors"]
        assert outcome["after"]["threads"] <= outcome["before"]["threads"]


def test_ranks_that_leave_right_after_the_last_collective_disturb_nobody(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    members = ranks(3)
    for number, member in enumerate(members):
        member.start(
            "leave_in_order", url=redis_url, prefix=prefix, rank=number, world_size=3, cycles=30
        )
    for member in members:
        member.result()


def test_torchs_default_group_on_shoal_gloo_can_be_aborted(
    ranks: Ranks, redis_url: str, prefix: str
) -> None:
    init_method = f"{redis_url}/aborted-{prefix[-32:]}"
    members = ranks(3)
    for number, member in enumerate(members):
        member.start(
            "abort_torch_group", url=redis_url, init_method=init_method, rank=number, world_size=3
        )
    members[2].event("idle")
    for member in members[:2]:
        said = member.result()  # either its own abort or its peer's
        assert any(
            words in said
            for words in (
                "the process group was aborted",
                "Connection closed by peer",
                "a peer closed the connection",
            )
        )
    signals = RedisStore(redis_url, init_method)
    signals.set("over", "")
    assert members[2].result() == "idle"
    signals.close()
