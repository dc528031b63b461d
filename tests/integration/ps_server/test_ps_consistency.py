"""The guarantees of asp, ssp and bsp, checked against recorded histories: real servers and sockets,
one thread per member, seeded delays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from shoal_common.errors import DeadlineError
from shoal_protos.v1 import parameter_server_pb2 as pb

from tests.histories import (
    BrokenPromise,
    History,
    check_asp,
    check_bsp,
    check_ssp,
    pushes_by_member,
)

LONG = timedelta(seconds=30)
MEMBERS = 3
PARTITIONS = 3
ITERATIONS = 25
SGD = pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0})
ASP = pb.Consistency(mode=pb.Consistency.MODE_ASP)
BSP = pb.Consistency(mode=pb.Consistency.MODE_BSP)


def ssp(bound: int) -> pb.Consistency:
    return pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=bound)


class Trainer:
    """One member, which records the history of its pushes and pulls."""

    def __init__(
        self,
        cluster: Any,
        client: Any,
        history: History,
        place: int,
        *,
        members: int = MEMBERS,
        generation: int = 1,
    ) -> None:
        self.member = cluster.member(client, f"m{place}", generation=generation)
        self.place = place
        self.joined_at = 0
        """Number of iterations of the job when this member joined."""
        self._history = history
        self._gradient = np.zeros(members)
        self._gradient[place] = -1.0
        self._held: dict[int, tuple[int, ...]] = {}

    def pull(self, *, wait: timedelta = LONG) -> None:
        with self._history.pulling(self.place, self.joined_at + self.member.clock) as counts:
            for partition, values in self.member.pull(wait=wait).items():
                counts[partition] = tuple(int(value) for value in values.view(np.float64))

    def read(self, *, wait: timedelta = LONG) -> None:
        """Pulls and reports the read to the server, as bsp requires."""
        self.pull(wait=wait)
        self.member.client.advance_clock(
            "job", self.member.member_id, clock=self.member.clock, has_read=True
        )

    def push(self) -> None:
        with self._history.pushing(self.place, self.member.clock + 1):
            while True:
                try:
                    self.member.push(self._gradient)
                    return
                except DeadlineError as error:
                    if error.reason != "BSP_WAIT_TIMEOUT":
                        raise

    def train(
        self, iterations: int, *, seed: int = 0, slowly: bool = False, says_so: bool = True
    ) -> None:
        delays = random.Random(f"{seed}/{self.place}")
        for _ in range(iterations):
            (self.read if says_so else self.pull)()
            time.sleep(delays.uniform(0.0, 0.006 if slowly else 0.002))
            self.push()
            time.sleep(delays.uniform(0.0, 0.001))
        self.pull()


@pytest.fixture
def begin(cluster) -> Callable[..., tuple[Any, History, list[Trainer]]]:
    """begin(consistency) -> (client, history, trainers): a server with zeros in all partitions."""

    def make(
        consistency: pb.Consistency, *, present: int = MEMBERS, **settings: Any
    ) -> tuple[Any, History, list[Trainer]]:
        names = [f"m{place}" for place in range(present)]
        client = cluster.server(
            ("counts", MEMBERS * PARTITIONS, "float64"),
            members={1: names},
            partition=MEMBERS,
            **settings,
        )
        client.configure_optimizer("job", SGD, consistency)
        history = History()
        trainers = [
            Trainer(cluster, cluster.client(cluster.running), history, place)
            for place in range(present)
        ]
        trainers[0].member.initialize(np.zeros(1))
        return client, history, trainers

    return make


def together(*calls: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for ended in [pool.submit(call) for call in calls]:
            ended.result(120)


@pytest.mark.parametrize(
    ("consistency", "check"),
    [
        (ASP, check_asp),
        (ssp(2), partial(check_ssp, bound=2)),
        (ssp(0), partial(check_ssp, bound=0)),
        (BSP, check_bsp),
    ],
    ids=["asp", "ssp2", "ssp0", "bsp"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_history_keeps_the_promises_of_its_consistency(
    begin, consistency: pb.Consistency, check: Callable[..., None], seed: int
) -> None:
    _, history, trainers = begin(consistency)
    together(
        *(
            partial(t.train, ITERATIONS, seed=seed, slowly=t.place == 0, says_so=consistency == BSP)
            for t in trainers
        )
    )
    check(history)
    assert pushes_by_member(history) == dict.fromkeys(range(MEMBERS), ITERATIONS)
    assert history.pulls[-1].counts


def test_bsp_holds_for_members_that_never_report_a_read(begin) -> None:
    """Their next push then counts as the report: all pushes of an iteration are admitted when the
    last of them has arrived."""
    _, history, trainers = begin(BSP)
    together(*(partial(t.train, 10, says_so=False) for t in trainers))
    check_bsp(history)


def overlapping(trainers: list[Trainer]) -> None:
    """The first member pulls and pushes before the others pull."""
    fast, *others = trainers
    fast.pull(wait=timedelta(0))
    fast.push()
    for each in others:
        each.pull(wait=timedelta(0))


@pytest.mark.parametrize("consistency", [ASP, ssp(0)], ids=["asp", "ssp0"])
def test_bsp_check_finds_a_push_of_a_later_iteration_also_under_ssp_with_bound_0(
    begin, consistency
) -> None:
    _, history, trainers = begin(consistency)
    overlapping(trainers)
    check_ssp(history, bound=0)
    with pytest.raises(
        BrokenPromise,
        match=r"member 1 after 0 iterations reads \(1, 0, 0\) in partition 0: exactly \(0, 0, 0\) "
        r"were due",
    ):
        check_bsp(history)


def test_ssp_check_finds_a_pull_that_did_not_wait(begin) -> None:
    _, history, trainers = begin(ASP)
    fast = trainers[0]
    for _ in range(3):
        fast.push()
    fast.pull()
    check_asp(history)
    with pytest.raises(
        BrokenPromise, match="0 pushes of member 1, at least 1 were due with a bound of 2"
    ):
        check_ssp(history, bound=2)


def test_asp_check_finds_lost_pushes_duplicate_pushes_and_values_that_go_back() -> None:
    def history(*counts: tuple[int, ...]) -> History:
        made = History()
        with made.pushing(0, 1):
            pass
        for each in counts:
            with made.pulling(0, 1) as pulled:
                pulled[0] = each
        return made

    check_asp(history((1,)))
    for wrong in ((0,), (2,)):
        with pytest.raises(BrokenPromise):
            check_asp(history(wrong))
    unsure = History()  # not acknowledged: pulls may show it or not, but not in turns
    with pytest.raises(RuntimeError), unsure.pushing(0, 1):
        raise RuntimeError
    for count in (1, 0):
        with unsure.pulling(1, 0) as pulled:
            pulled[0] = (count,)
    with pytest.raises(BrokenPromise, match="had seen"):
        check_asp(unsure)


def test_bsp_push_waits_until_all_members_have_read_what_it_changes(begin, cluster) -> None:
    client, history, (fast, slow, other) = begin(BSP)
    fast.pull()
    other.read()
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(fast.push)
        cluster.wait_until(lambda: "m0" in client.get_server().iterations, "the push to arrive")
        slow.pull()  # it does not see that push, however long the other has waited
        assert not pushing.done()
        assert client.get_server().pushes_applied == 0
        slow.member.client.advance_clock("job", "m1", clock=0, has_read=True)
        pushing.result(60)
    check_bsp(history)


@pytest.mark.parametrize("how", ["killed", "sends its leave message", "rests"])
def test_bsp_does_not_wait_for_dead_or_departed_members(begin, cluster, how: str) -> None:
    _, _, trainers = begin(BSP)
    for each in trainers[:2]:
        each.read()
    with ThreadPoolExecutor(2) as pool:
        pushing = [pool.submit(each.push) for each in trainers[:2]]
        if how == "killed":
            cluster.coordinator.members(2, "m0", "m1")
        else:
            trainers[2].member.client.advance_clock("job", "m2", clock=2**63 - 1)
        for each in pushing:
            each.result(60)
    together(*(each.read for each in trainers[:2]))
    if how == "rests":
        # The member has work again and begins with the current iteration of the others.
        back = trainers[2]
        back.joined_at = 1
        back.read()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: [trainers[0].push(), trainers[0].read()])
            trainers[1].push()
            assert not reading.done()
            back.push()
            reading.result(60)


def test_bsp_joiner_reads_complete_iterations_and_is_awaited_from_then_on(begin, cluster) -> None:
    client, history, trainers = begin(BSP, present=2)
    together(*(partial(each.train, 3) for each in trainers))
    first, second = trainers
    for each in trainers:
        each.read()
    first.push()  # its iteration is open when the joiner comes, and continues without it
    cluster.coordinator.members(2, "m0", "m1", "m2")
    cluster.wait_until(
        lambda: "m2" in client.get_server().clocks, "the server to hear of the joiner"
    )
    joiner = Trainer(cluster, cluster.client(cluster.running), history, 2, generation=2)
    joiner.joined_at = client.get_server().clocks["m2"]
    assert joiner.joined_at == 4
    together(
        partial(joiner.train, 5), lambda: [second.push(), second.train(5)], partial(first.train, 5)
    )
    check_bsp(history, since=(0, 0, 4))


def test_bsp_continues_after_a_server_restart_without_another_read(
    begin, cluster, tmp_path
) -> None:
    """Reads are not in the journal. A member's push proves that the member has read."""
    _, history, trainers = begin(BSP, data_dir=tmp_path / "data")
    together(*(partial(each.train, 2) for each in trainers))
    for each in trainers:
        each.read()
    trainers[0].push()
    cluster.running.stop()
    client = cluster.unregistered(data_dir=tmp_path / "data")
    cluster.coordinator.registrations.get(timeout=30)
    for each in trainers:
        each.member.client = cluster.client(cluster.running)
    cluster.wait_until(lambda: client.get_server().clocks, "the server to know its members")
    together(trainers[1].push, trainers[2].push)
    together(*(partial(each.train, 2) for each in trainers))
    check_bsp(history)
