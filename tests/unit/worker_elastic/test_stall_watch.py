"""The stall watch finds out which peers are unreachable and which connections are busy while a
collective stalls."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.base import Traffic
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.coordinator import stall_watch as watching
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.coordinator.stall_watch import BusyLinks, StallWatch, neighbours
from shoal_worker.elastic.group.group import Group

from tests.zygote.children import eventually


class Link:
    """The stall watch's reports to the coordinator."""

    notice = ""
    apart_from = ""
    newest_generation = None

    def __init__(self) -> None:
        self.reports: list[tuple[int, ...]] = []

    def cannot_reach(self, ranks: Sequence[int]) -> None:
        self.reports.append(tuple(ranks))


def generation(*addresses: str) -> Generation:
    peers = tuple(
        Peer(rank=r, member_id=f"{r}", host=f"h{r}", donor_address=a, joining=False)
        for r, a in enumerate(addresses)
    )
    return Generation(number=3, nonce="0" * 32, peers=peers, rank=0, interrupts_below=0)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_TICK_S": 0.01, "LOOK_AFTER_S": 0.05, "_LOOK_AGAIN_S": 0.05}.items():
        monkeypatch.setattr(watching, name, value)


@pytest.fixture
def watched(quickly: None) -> Iterator[Callable[[Group], tuple[Link, Waits]]]:
    started: list[StallWatch] = []

    def start(group: Group) -> tuple[Link, Waits]:
        link, waits = Link(), Waits()
        watch = StallWatch(cast(CoordinatorLink, link), waits, lambda: group)
        watch.start()
        started.append(watch)
        return link, waits

    yield start
    for watch in started:
        watch.close()


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_collective_stalled_by_an_unreachable_peer_is_ended_and_the_peer_named(
    watched: Any,
) -> None:
    with listening() as there, listening() as gone:
        unreached = address(gone)
    with listening() as there:
        group = Group(generation("", address(there), unreached), None, None)
        link, waits = watched(group)
        with waits.of("all_reduce"):
            eventually(lambda: group.broken, "the end of the group")
    assert link.reports[0] == (2,)
    with pytest.raises(
        MembershipChanged, match=r"all_reduce timed out: could not reach rank 2 \(gone\)"
    ):
        group.all_gather_integers([0])


def test_stalled_collective_continues_to_wait_while_all_peers_are_reachable(
    watched: Any,
) -> None:
    with listening() as there:
        group = Group(generation("", address(there)), None, None)
        link, waits = watched(group)
        with waits.of("all_reduce"):
            eventually(lambda: len(link.reports) >= 4, "several reports")
    assert group.broken is None
    assert set(link.reports) == {()}


def test_short_waits_are_not_investigated(watched: Any) -> None:
    group = Group(generation("", "127.0.0.1:1"), None, None)
    link, waits = watched(group)
    for _ in range(200):
        with waits.of("all_reduce"):
            pass
    assert not link.reports
    assert group.broken is None


def test_constantly_sending_connection_is_named_with_its_speed() -> None:
    now = [100.0]
    links = BusyLinks(lambda: now[0])
    ranks = generation("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")

    def sent(to_1: tuple[int, float], to_2: tuple[int, float]) -> dict[str, Traffic]:
        return {
            f"10.0.0.{n}": Traffic(acknowledged_bytes=size, busy_s=busy)
            for n, (size, busy) in ((2, to_1), (3, to_2))
        }

    links.look(ranks, sent((0, 0.0), (0, 0.0)))
    now[0] += 6.0
    links.look(ranks, sent((900_000_000, 1.0), (3_600_000, 5.5)))
    assert links.busiest is not None
    assert links.busiest.rank == 2
    assert links.busiest.bytes_per_s == pytest.approx(3_600_000 / 5.5)
    now[0] += 6.0
    links.look(ranks, sent((1_800_000_000, 2.0), (3_700_000, 6.0)))
    assert links.busiest is None


@pytest.mark.parametrize("world", [2, 16, 17, 1000, 10_000])
def test_rank_of_a_large_world_probes_only_a_few_peers(world: int) -> None:
    for rank in (0, world - 1):
        peers = neighbours(rank, world)
        assert rank not in peers
        assert set(peers) <= set(range(world))
        assert len(peers) <= 28
        assert (rank + 1) % world in peers
