"""init_method="redis://...": plain scripts meet through Redis, and job names can be reused, no
matter what an earlier run has left there."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from shoal_common.errors import UnavailableError
from shoal_common.system.processes import tied_to_parent
from shoal_worker.store import rendezvous, scripts
from shoal_worker.store.errors import StoreTimeoutError
from shoal_worker.store.redis_store import RedisStore

_SCRIPT = Path(__file__).with_name("plain_script.py")
_DAY_S = 24 * 3600


_RUN = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
_WAYS = (
    ("-m", "shoal_worker.store"),
    ("-c", f"import shoal, torch; {_RUN}"),
    ("-c", f"import torch.distributed, shoal; {_RUN}"),
)
"""Ways to register the init method: through the module that starts the script, or by importing
shoal before or after torch."""


def test_plain_scripts_rendezvous_through_redis_repeatedly(redis_url: str) -> None:
    url = f"{redis_url}/{uuid.uuid4().hex}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "env": environment, "text": True}
    commands = [
        [sys.executable, *way, str(_SCRIPT), url, str(rank), "3"] for rank, way in enumerate(_WAYS)
    ]
    ranks = [subprocess.Popen(tied_to_parent(command), **options) for command in commands]
    for number, rank in enumerate(ranks):
        said, _ = rank.communicate(timeout=90)
        assert rank.returncode == 0
        assert said.splitlines() == [
            f"attempt {attempt}: rank {number} of 3: 6.0" for attempt in range(2)
        ]


def test_ranks_of_one_round_share_their_own_store(redis_url: str) -> None:
    url = f"{redis_url}/{uuid.uuid4().hex}?world_size=2"
    with ThreadPoolExecutor() as threads:

        def join(rank: int) -> RedisStore:
            opened, given, size = next(
                dist.rendezvous(f"{url}&rank={rank}", timeout=timedelta(seconds=60))
            )
            assert (given, size) == (rank, 2)
            return opened

        first, second = threads.map(join, range(2))
        again, _ = threads.map(join, range(2))
    assert first.prefix == second.prefix != again.prefix
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert not again.check(["a"])


def test_rank_whose_wait_times_out_names_the_missing_ones(redis_url: str) -> None:
    url = f"{redis_url}/lonely?rank=1&world_size=3"
    with pytest.raises(
        StoreTimeoutError,
        match=r"job 'lonely': rank 1 waited 0\.05 s for rank 0, rank 2 of world_size=3",
    ):
        next(dist.rendezvous(url, timeout=timedelta(milliseconds=50)))


def test_missing_server_is_named() -> None:
    with pytest.raises(UnavailableError, match="redis://127"):
        next(rendezvous.rendezvous("redis://127.0.0.1:1/job?rank=0&world_size=1"))


@pytest.fixture
def arrive(store: RedisStore) -> Callable[..., tuple[bytes, ...]]:
    """Registers one rank at a rendezvous round; ranks that have been silent for `patience_ms` count
    as dead."""

    def call(
        rank: int, token: str, *, size: int = 2, patience_ms: int = 60_000
    ) -> tuple[bytes, ...]:
        return tuple(
            store.run_script(
                scripts.ARRIVE, size, rank, token, patience_ms, uuid.uuid4().hex, _DAY_S
            )
        )

    return call


def test_round_is_complete_when_its_last_rank_arrives(
    arrive: Callable[..., tuple[bytes, ...]],
) -> None:
    (name, *absent) = arrive(0, "a")
    assert absent == [b"rank 1"]
    assert arrive(0, "a") == (name, b"rank 1")
    assert arrive(1, "b") == (name,)
    assert arrive(0, "a") == (name,)


def test_a_complete_round_is_not_joined_by_a_later_run(
    arrive: Callable[..., tuple[bytes, ...]],
) -> None:
    arrive(0, "a")
    (old,) = arrive(1, "b")
    (new, *absent) = arrive(1, "c")
    assert new != old
    assert absent == [b"rank 0"]


def test_a_rank_that_died_waiting_is_not_counted(arrive: Callable[..., tuple[bytes, ...]]) -> None:
    arrive(0, "dead")
    (_, *absent) = arrive(1, "b", patience_ms=0)
    assert b"rank 0" in absent


def test_restarted_rank_takes_the_place_of_its_dead_predecessor(
    arrive: Callable[..., tuple[bytes, ...]],
) -> None:
    arrive(0, "dead")
    (name, *absent) = arrive(0, "alive", patience_ms=0)
    assert b"another process that has rank 0 too" not in absent
    arrive(0, "alive")
    assert arrive(1, "b") == (name,)


def test_two_live_processes_with_one_rank_are_distinguished(
    arrive: Callable[..., tuple[bytes, ...]],
) -> None:
    arrive(0, "a")
    assert arrive(0, "b")[1:] == (b"another process that has rank 0 too",)


def test_run_of_another_size_waits_for_the_present_ranks(
    arrive: Callable[..., tuple[bytes, ...]],
) -> None:
    arrive(0, "a", size=3)
    assert arrive(0, "b", size=2)[1:] == (b"the end of a round of 3 ranks",)
    (_, *absent) = arrive(1, "b", size=2, patience_ms=0)
    assert b"rank 0" in absent
