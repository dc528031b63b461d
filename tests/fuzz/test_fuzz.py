"""Services survive arbitrary messages on their ports: they answer correctly, keep their state and
do not grow."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import grpc
import pytest

from tests.fuzz.cluster import Cluster
from tests.fuzz.targets import Shoot, Tally, bulk, donors, http, http2, rpcs

_THREADS: Final = 8
_MOST_GROWTH: Final = 10 << 20
"""Largest growth of a service in bytes between the first and the second half of a hundred thousand
messages. After the first half, everything is imported, tables are full, and Python's garbage has
reached its maximum. The measured growth is at most 2 MB. A leak of 200 bytes per message exceeds
the limit."""
_MOST_AT_FIRST: Final = 32 << 20
"""Largest growth of a service in bytes in the quick test's few thousand messages, in which Python's
collector has not run yet and pools are filled."""
MESSAGES: Final = int(os.environ.get("SHOAL_FUZZ_MESSAGES", "100000"))
SEED: Final = int(os.environ.get("SHOAL_FUZZ_SEED", "1"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        running.check()
        yield running


def shoot_at(cluster: Cluster, count: int, seed: int) -> Tally:
    """Sends this many messages, divided over all targets and threads. Raises the first error."""
    tally: Tally = Counter()
    errors: list[BaseException] = []
    lock = threading.Lock()

    def shooter(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        with ExitStack() as stack:
            channels = {
                each.name: stack.enter_context(grpc.insecure_channel(each.address))
                for each in cluster.local.services
            }
            targets: list[tuple[str, Shoot]] = [
                *rpcs(cluster, channels),
                *http2(cluster),
                *http(cluster),
                *bulk(cluster),
                *donors(stack),
            ]
            own: Tally = Counter()
            try:
                for shot in range(count // _THREADS):
                    name, shoot = targets[shot % len(targets)]
                    own[name, shoot(chance)] += 1
                    if errors:
                        return
            except BaseException as error:
                errors.append(error)
            finally:
                with lock:
                    tally.update(own)

    threads = [threading.Thread(target=shooter, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(10)
            cluster.member.beat(1)
    if errors:
        raise errors[0]
    return tally


def shoot_and_judge(cluster: Cluster, count: int, seed: int, *, most_growth: int) -> None:
    """Sends half of the messages, and then the other half. Afterwards, the services must have kept
    their state and must not be larger than after the first half."""
    tally = shoot_at(cluster, count // 2, seed)
    before = cluster.memory()
    tally.update(shoot_at(cluster, count // 2, seed + 1))
    cluster.check()
    grown = {name: after - before[name] for name, after in cluster.memory().items()}
    by_target: dict[str, Counter[str]] = {}
    for (name, outcome), count in tally.items():
        by_target.setdefault(name, Counter())[outcome] += count
    for name, outcomes in sorted(by_target.items()):
        print(f"{name}: {dict(outcomes.most_common())}")
    print({name: f"{each / 1e6:+.1f} MB" for name, each in grown.items()})
    assert all(each < most_growth for each in grown.values()), grown


def test_thousands_of_arbitrary_messages_change_nothing(cluster: Cluster) -> None:
    shoot_and_judge(cluster, 2_400, SEED, most_growth=_MOST_AT_FIRST)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_arbitrary_messages_change_nothing(cluster: Cluster) -> None:
    """SHOAL_FUZZ_MESSAGES messages with the seed SHOAL_FUZZ_SEED do not change the services."""
    shoot_and_judge(cluster, MESSAGES, SEED + 2, most_growth=_MOST_GROWTH)
