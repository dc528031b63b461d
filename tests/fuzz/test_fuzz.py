"""Whatever comes to a port, the services go on, answer well, keep what they hold, and grow no larger than a bound."""

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
_MOST_GROWTH: Final = 256 << 20
"""Bytes: what Python and gRPC keep for so many calls at a time, with the jobs and events that some messages do make."""
MESSAGES: Final = int(os.environ.get("SHOAL_FUZZ_MESSAGES", "100000"))
SEED: Final = int(os.environ.get("SHOAL_FUZZ_SEED", "1"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        running.check()
        yield running


def shoot_at(cluster: Cluster, count: int, seed: int) -> Tally:
    """So many messages, dealt over all targets and threads; raises the first error."""
    tally: Tally = Counter()
    errors: list[BaseException] = []
    lock = threading.Lock()

    def shooter(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        with ExitStack() as stack:
            channels = {each.name: stack.enter_context(grpc.insecure_channel(each.address)) for each in cluster.local.services}
            targets: list[tuple[str, Shoot]] = [*rpcs(cluster, channels), *http2(cluster), *http(cluster), *bulk(cluster), *donors(stack)]
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


def judge(cluster: Cluster, tally: Tally, before: dict[str, int]) -> None:
    cluster.check()
    grown = {name: after - before[name] for name, after in cluster.memory().items()}
    assert all(each < _MOST_GROWTH for each in grown.values()), grown
    by_target: dict[str, Counter[str]] = {}
    for (name, outcome), count in tally.items():
        by_target.setdefault(name, Counter())[outcome] += count
    for name, outcomes in sorted(by_target.items()):
        print(f"{name}: {dict(outcomes.most_common())}")
    print({name: f"{each / 1e6:+.1f} MB" for name, each in grown.items()})


def test_some_thousands_of_arbitrary_messages_change_nothing(cluster: Cluster) -> None:
    shoot_at(cluster, 320, SEED)  # everything is imported, and every pool full, once all has been asked for
    before = cluster.memory()
    judge(cluster, shoot_at(cluster, 2_000, SEED + 1), before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_arbitrary_messages_change_nothing(cluster: Cluster) -> None:
    """SHOAL_FUZZ_MESSAGES and SHOAL_FUZZ_SEED say how many, and which."""
    shoot_at(cluster, 1_000, SEED)
    before = cluster.memory()
    judge(cluster, shoot_at(cluster, MESSAGES, SEED + 2), before)
