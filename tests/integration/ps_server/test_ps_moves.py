"""Partitions move between two servers while a worker trains: no push is lost or applied twice, even
if a server is killed during a move."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import trustme
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import PreconditionError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import TlsSettings
from shoal_protos.v1 import parameter_server_pb2 as pb

from tests.integration.ps_server.conftest import JOB
from tests.integration.ps_server.moving import MovingCoordinator, MovingServer, Trainer, holds
from tests.unit.common.test_failpoints import documented
from tests.zygote.children import Zygote, eventually

Start = Callable[..., "Pair"]


class Pair:
    """Two servers, the first of which has all partitions at the beginning."""

    def __init__(
        self,
        zygote: Zygote,
        directory: Path,
        *tensors: tuple[str, int, str],
        partition: int,
        keeps_data: bool = True,
    ) -> None:
        self.coordinator = MovingCoordinator(*tensors, partition=partition)
        self.servers = [
            MovingServer(zygote, directory, self.coordinator, index, keeps_data=keeps_data)
            for index in range(2)
        ]
        for server in self.servers:
            server.start()
        self.trainer = Trainer(self.coordinator)

    def move(self, *partition_ids: int, giver: int = 0) -> None:
        """Moves partitions and waits for the coordinator's decision that they have moved."""
        self.coordinator.move(partition_ids, giver, 1 - giver)
        self.wait_for(*partition_ids, owner=1 - giver)

    def wait_for(self, *partition_ids: int, owner: int) -> None:
        def have_moved() -> bool:
            return self.coordinator.order is None and {
                self.coordinator.owner(each) for each in partition_ids
            } == {owner}

        eventually(have_moved, f"partitions {partition_ids} to be server {owner}'s")

    def held(self, index: int) -> set[int]:
        return set(holds(self.coordinator.address_of(index)))

    def close(self) -> None:
        self.trainer.close()
        for server in self.servers:
            server.process.kill()
            server.process.wait()
        self.coordinator.close()


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Start]:
    """Fixture `start(*tensors, partition=)`: a Pair."""
    with ExitStack() as stack:

        def started(
            *tensors: tuple[str, int, str], partition: int = 256, keeps_data: bool = True
        ) -> Pair:
            pair = Pair(
                zygote,
                tmp_path,
                *(tensors or (("weight", 1000, "float32"),)),
                partition=partition,
                keeps_data=keeps_data,
            )
            stack.callback(pair.close)
            return pair

        yield started


@pytest.mark.parametrize("keeps_data", [True, False])
def test_partitions_move_during_pushes_without_loss_or_duplication(
    start: Start, keeps_data: bool
) -> None:
    pair = start(keeps_data=keeps_data)
    trainer = pair.trainer
    trainer.begin()
    enough = threading.Event()

    def train() -> None:
        while not enough.is_set():
            trainer.step()

    training = threading.Thread(target=train)
    training.start()
    try:
        eventually(lambda: trainer.steps > 3, "the training to begin")
        pair.move(1, 3)
        pair.move(0)
        pair.move(3, giver=1)
        before = trainer.steps
        eventually(lambda: trainer.steps > before + 3, "the training to go on")
    finally:
        enough.set()
        training.join()
    trainer.check()
    assert trainer.push_again(0).duplicate
    assert trainer.push_again(3).duplicate
    assert (pair.held(0), pair.held(1)) == ({2, 3}, {0, 1})
    assert pair.servers[0].metric("shoal_ps_frozen_seconds_count") == 2
    assert pair.servers[1].metric("shoal_ps_moved_partitions_total") == 4


def test_partitions_move_between_servers_with_mutual_tls_and_tokens(
    zygote: Zygote, tmp_path: Path
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(files["authority"])
    issued.cert_chain_pems[0].write_to_path(files["certificate"])
    issued.private_key_pem.write_to_path(files["key"])
    tokens = tmp_path / "tokens"
    tokens.write_text("server: st\nworker: wt\n")
    (tmp_path / "token").write_text("st\n")
    flags = [
        "--tokens",
        str(tokens),
        "--token-file",
        str(tmp_path / "token"),
        "--tls-client-ca",
        str(files["authority"]),
    ]
    flags += [
        "--tls-ca",
        str(files["authority"]),
        "--tls-cert",
        str(files["certificate"]),
        "--tls-key",
        str(files["key"]),
    ]
    credentials = grpc.ssl_server_credentials(
        [(files["key"].read_bytes(), files["certificate"].read_bytes())]
    )
    coordinator = MovingCoordinator(
        ("weight", 1000, "float32"), partition=256, credentials=credentials
    )
    trainer = Trainer(coordinator, tls=TlsSettings(**files), token="wt")
    servers = [
        MovingServer(zygote, tmp_path, coordinator, index, flags=flags) for index in range(2)
    ]
    try:
        for server in servers:
            server.start()
        trainer.begin()
        trainer.step()
        coordinator.move([1, 3], 0, 1)
        report = coordinator.reports.get(timeout=60)
        assert report.taken, report.reason
        trainer.step()
        trainer.check()
        assert (coordinator.owner(1), coordinator.owner(3)) == (1, 1)
    finally:
        trainer.close()
        for server in servers:
            server.process.kill()
            server.process.wait()
        coordinator.close()


@pytest.mark.slow
def test_moving_32_mib_with_adamw_state_pauses_briefly(start: Start) -> None:
    pair = start(("weight", 8 << 20, "float32"), partition=2 << 20)
    pair.trainer.begin()
    pair.trainer.step()
    pauses = []
    for giver in (0, 1, 0):
        pair.move(0, 1, 2, 3, giver=giver)
        eventually(
            lambda giver=giver: pair.held(1 - giver) == {0, 1, 2, 3} and not pair.held(giver),
            "both servers to know",
        )
        pauses.append(
            sum(server.metric("shoal_ps_frozen_seconds_sum") for server in pair.servers)
            - sum(pauses)
        )
    pair.trainer.step()
    pair.trainer.check()
    print(f"pauses of {', '.join(f'{pause:.3f}' for pause in pauses)} s")
    assert min(pauses) < 2.0  # 0.5 s on an idle machine


@pytest.mark.parametrize(
    "other",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["returns", "other-is-killed-too"],
)
def test_servers_can_be_killed_at_each_failpoint_of_a_move(start: Start, other: bool) -> None:
    """Kills the server that passes the failpoint, or both servers. Each acknowledged push is
    applied once, on the server that the shard map names."""
    pair = start()
    trainer = pair.trainer
    trainer.begin()
    for name in sorted(
        name for name in documented("Parameter servers") if name.startswith("move.")
    ):
        giver = pair.coordinator.owner(1)
        armed = 1 - giver if name in ("move.taken", "move.activated") else giver
        trainer.step()
        victim = pair.servers[armed]
        victim.process.kill()
        victim.process.wait()
        victim.start(SHOAL_FAILPOINTS=f"{name}@1=kill")
        pair.coordinator.move([1, 3], giver, 1 - giver)
        assert victim.process.wait() == -signal.SIGKILL, f"{name}: {victim.process.said()}"
        if other:
            pair.servers[1 - armed].process.kill()
            pair.servers[1 - armed].process.wait()
            pair.servers[1 - armed].start()
        victim.start()
        eventually(lambda: pair.coordinator.order is None, f"a decision after {name}")
        trainer.step()
        trainer.check()
        assert trainer.push_again(1).duplicate
        owners = [
            {each for each in range(4) if pair.coordinator.owner(each) == index}
            for index in range(2)
        ]
        assert [pair.held(0), pair.held(1)] == owners, name


def test_partitions_that_a_sink_does_not_accept_in_time_stay_and_are_served(start: Start) -> None:
    pair = start()
    pair.trainer.begin()
    pair.servers[1].process.kill(signal.SIGSTOP)
    pair.coordinator.move([1, 3], 0, 1)
    report = pair.coordinator.reports.get(timeout=60)
    assert not report.taken
    assert "RECEIVER_SLOW" in report.reason
    pair.trainer.step()
    pair.servers[1].process.kill(signal.SIGCONT)
    pair.move(1, 3)
    pair.trainer.step()
    pair.trainer.check()


def test_move_settled_differently_in_the_meantime_changes_nothing(
    start: Start,
) -> None:
    """The coordinator has given up on the move: the giver serves its frozen partitions again, and
    the receiver drops its copies."""
    pair = start()
    coordinator, trainer = pair.coordinator, pair.trainer
    trainer.begin()
    coordinator.decides = False
    for report_first in (True, False):
        if not report_first:
            pair.servers[1].process.kill(signal.SIGSTOP)
        coordinator.move([1, 3], 0, 1)
        if report_first:
            assert coordinator.reports.get(timeout=60).taken
        coordinator.decide()
        trainer.step()
        pair.servers[1].process.kill(signal.SIGCONT)
    assert pair.held(1) == set()
    trainer.check()
    coordinator.decides = True
    pair.move(1, 3)
    trainer.step()
    trainer.check()


def test_clocks_are_not_sent_to_a_server_that_has_handed_over_a_copy_of_them(start: Start) -> None:
    """The giver refuses the clock until the member knows the server that has the copy. The member
    then sends its clock to that server too."""
    pair = start()
    coordinator = pair.coordinator
    pair.trainer.begin(pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=1))
    with (
        ParameterServerClient(ChannelSettings(address=coordinator.address_of(0))) as giver,
        ParameterServerClient(ChannelSettings(address=coordinator.address_of(1))) as receiver,
    ):

        def tell(client: ParameterServerClient, clock: int, epoch: int) -> int:
            return client.advance_clock(
                JOB, "a", clock=clock, generation=1, shard_map_epoch=epoch
            ).slowest_clock

        tell(giver, 0, 1)
        tell(giver, 3, 1)
        coordinator.decides = False
        coordinator.move([1, 3], 0, 1)
        report = coordinator.reports.get(timeout=60)
        with pytest.raises(UnavailableError) as moving:
            tell(giver, 4, 1)
        assert moving.value.reason == "PARTITION_MOVING"
        assert moving.value.retry_after is not None
        assert {each.partition_id for each in giver.get_server().partitions if each.moving} == {
            1,
            3,
        }
        coordinator.decide(report)
        with pytest.raises(PreconditionError) as stale:
            eventually(lambda: _answers(lambda: tell(giver, 4, 1)), "the giver to know the new map")
        assert stale.value.reason == "STALE_SHARD_MAP"
        assert tell(receiver, 4, 2) == 0  # b is behind
        assert dict(receiver.get_server().clocks) == {"a": 4, "b": 0}
        assert tell(giver, 4, 2) == 0


@pytest.mark.parametrize(
    ("decided", "refusal"), [(False, "PARTITION_MOVING"), (True, "STALE_SHARD_MAP")]
)
def test_clock_that_waits_for_its_generation_during_a_move_is_not_counted(
    start: Start, decided: bool, refusal: str
) -> None:
    """The clock was sent before the move, so only the giver would know of it."""
    pair = start()
    coordinator = pair.coordinator
    pair.trainer.begin(pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=1))
    coordinator.decides = False
    with (
        ParameterServerClient(ChannelSettings(address=coordinator.address_of(0))) as giver,
        ThreadPoolExecutor(1) as threads,
    ):
        calls = pair.servers[0].metric("grpc_server_started_total")
        telling = threads.submit(
            giver.advance_clock, JOB, "a", clock=1, generation=2, shard_map_epoch=1
        )
        eventually(
            lambda: pair.servers[0].metric("grpc_server_started_total") > calls,
            "the clock to be told",
        )
        coordinator.move([1, 3], 0, 1)
        report = coordinator.reports.get(timeout=60)
        assert report.taken
        if decided:
            coordinator.decide(report)
            eventually(lambda: pair.held(0) == {0, 2}, "the giver to know the new map")
        coordinator.send_members(2, "a", "b")
        with pytest.raises((UnavailableError, PreconditionError)) as refused:
            telling.result(60)
        assert refused.value.reason == refusal
        assert dict(giver.get_server().clocks) == {"a": 0, "b": 0}


def _answers(call: Callable[[], object]) -> bool:
    """Makes a call; returns False if the call must be repeated."""
    try:
        call()
    except UnavailableError:
        return False
    return True
