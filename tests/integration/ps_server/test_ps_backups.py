"""A primary and its backup at critical moments; the test plays either the backup or the
coordinator."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from shoal_common.errors import ShoalError, UnavailableError
from shoal_common.formats.wire import decode_follow_chunk
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.replication import standby as standby_module
from shoal_ps_server.replication.items import FORMAT_VERSION
from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.service import primary_place
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import PUSH, Replay

from tests.integration.ps_server.conftest import Cluster, Running, ScriptedCoordinator, wait_until

BACKUP = coordinator_pb2.SERVER_ROLE_BACKUP
DATA = ("weight", 8 << 20, "float32")


class Follower:
    """The stream of backup `b`, as the primary receives it."""

    def __init__(self, address: str, *, epoch: int = 2) -> None:
        self._out: queue.Queue[pb.FollowRequest | None] = queue.Queue()
        begin = pb.FollowBegin(job_id="job", server_id="b", epoch=epoch, format=FORMAT_VERSION)
        self._out.put(pb.FollowRequest(begin=begin))
        self._channel = grpc.insecure_channel(address)
        follow = self._channel.stream_stream(
            "/shoal.v1.ParameterServer/Follow",
            request_serializer=pb.FollowRequest.SerializeToString,
        )
        self.call = follow(iter(self._out.get, None))
        self._position = 0

    def read_all(self) -> None:
        """Reads until the primary has sent all that it holds."""
        for data in self.call:
            header, _ = decode_follow_chunk(data)
            if header is not None:
                self._position = max(self._position, header.position)
                if header.kind == pb.FollowHeader.KIND_WHOLE:
                    return
        pytest.fail("the stream ended before all had come")

    def has_all(self) -> None:
        """Acknowledges that everything read is on the backup's disk."""
        self._out.put(pb.FollowRequest(kept=pb.FollowKept(position=self._position, whole=True)))

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()


@contextmanager
def follower(cluster: Cluster) -> Iterator[Follower]:
    following = Follower(cluster.running.address)
    try:
        yield following
    finally:
        following.close()


@contextmanager
def eventually_followed(cluster: Cluster) -> Iterator[Follower]:
    """Yields a follower that has read everything. Connects again as long as the primary answers
    UNAVAILABLE."""
    while True:
        with follower(cluster) as following:
            try:
                following.read_all()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                continue
            yield following
            return


def primary(cluster: Cluster, *tensors: Any, **settings: Any) -> Any:
    """Starts the only server of a job, to which the coordinator has assigned the backup `b`;
    returns a member of the job."""
    cluster.coordinator.place = coordinator_pb2.ServerPlace(epoch=2, backup_id="b")
    return cluster.trainable(
        cluster.server(*tensors, data_dir=cluster.directory / "data", **settings)
    )


def report(cluster: Cluster) -> coordinator_pb2.BackupReport:
    """Returns the next report to the coordinator."""
    return cluster.coordinator.reports.get(timeout=30)


def in_sync(cluster: Cluster, following: Follower) -> None:
    following.read_all()
    following.has_all()
    assert report(cluster).in_sync


def test_stream_that_ends_while_the_journal_notifies_it_delays_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = primary(cluster)
    member.push(1.0)
    go, syncing, slow = threading.Event(), threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def synced(descriptor: int) -> None:
        if slow.is_set():
            syncing.set()
            go.wait(30)
        fdatasync(descriptor)

    ended = threading.Event()
    seen = Backup._ended
    monkeypatch.setattr(
        Backup, "_ended", lambda backup, stream: (seen(backup, stream), ended.set())
    )
    with follower(cluster) as following:
        following.read_all()
        monkeypatch.setattr(os, "fdatasync", synced)
        slow.set()
        following.has_all()
        assert syncing.wait(30)
        following.call.cancel()
    assert ended.wait(30)
    slow.clear()
    go.set()
    member.push(1.0)
    assert cluster.running.failure is None
    with eventually_followed(cluster) as again:
        again.has_all()
        assert report(cluster).in_sync


def test_backup_that_does_not_read_is_reported_out_of_sync_and_can_be_dropped(
    cluster: Cluster,
) -> None:
    member = primary(cluster, DATA, partition=2 << 20)
    with follower(cluster) as following:
        in_sync(cluster, following)
        pushing = threading.Thread(target=lambda: member.push(1.0))
        pushing.start()
        assert not report(cluster).in_sync
        cluster.coordinator.placed(epoch=3)
        pushing.join(60)
        assert not pushing.is_alive()


def test_callers_that_wait_for_a_backup_are_redirected_each_time(
    cluster: Cluster,
) -> None:
    member = primary(cluster)
    with follower(cluster) as following:
        in_sync(cluster, following)
        waited_from = time.monotonic()
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                member.push(1.0)
            assert caught.value.reason in ("CHANGE_PENDING", "PLACE_UNKNOWN")
        assert time.monotonic() - waited_from < 30


def test_primary_abandoned_by_its_backup_refuses_calls_until_the_coordinator_drops_the_backup(
    cluster: Cluster,
) -> None:
    member = primary(cluster)
    with follower(cluster) as following:
        in_sync(cluster, following)
        following.call.cancel()
    assert not report(cluster).in_sync

    def is_refused() -> bool:
        try:
            member.pull()
        except UnavailableError as error:
            return error.reason == "PLACE_UNKNOWN"
        return False

    wait_until(is_refused, "pulls to be refused: another server may have the place")
    cluster.coordinator.placed(epoch=3)
    wait_until(lambda: not is_refused(), "pulls to be answered")
    member.push(1.0)


def test_former_backup_asks_the_coordinator_before_it_serves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary_place, "_PLACE_WAIT", timedelta(milliseconds=50))
    member = primary(cluster)
    member.push(1.0)
    with asked_to_follow(cluster) as other:
        settings: dict[str, Any] = {
            "coordinator": other.address,
            "server_id": "b",
            "data_dir": cluster.directory / "b",
        }
        backup = Running(cluster.directory, **settings)
        assert report(cluster).in_sync
        backup.stop()
        backup.thread.join(30)
        other.stop()  # the coordinator is away
        again = Running(cluster.directory, **settings)
        try:
            late = cluster.member(cluster.client(again), "a")
            with pytest.raises(ShoalError) as caught:
                late.push(1.0)
            assert caught.value.reason == "PLACE_UNKNOWN"
        finally:
            again.stop()
            again.thread.join(30)


def test_restarted_primary_does_not_serve_beside_a_backup_considered_in_sync(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary_place, "_PLACE_WAIT", timedelta(milliseconds=50))
    primary(cluster)
    with follower(cluster) as following:
        in_sync(cluster, following)
        following.call.cancel()
    cluster.running.stop()
    cluster.running.thread.join(30)
    cluster.coordinator.place = coordinator_pb2.ServerPlace(epoch=2, backup_id="b", in_sync=True)
    client = cluster.unregistered(data_dir=cluster.directory / "data")
    while report(cluster).in_sync:
        pass  # messages from before it ended
    member = cluster.member(client)
    with pytest.raises(UnavailableError) as caught:
        member.push(1.0)
    assert caught.value.reason == "PLACE_UNKNOWN"
    cluster.coordinator.placed(epoch=3)
    wait_until(lambda: _pushes(member), "the server to serve")


@contextmanager
def asked_to_follow(cluster: Cluster) -> Iterator[ScriptedCoordinator]:
    """Yields a coordinator that makes server `b` follow the cluster's server."""
    other = ScriptedCoordinator()
    other.start()
    other.place = coordinator_pb2.ServerPlace(
        epoch=2, role=BACKUP, primary_address=cluster.running.address, backup_id="b"
    )
    other.shard_map = cluster.coordinator.shard_map
    other.members(1, "a", "b")
    try:
        yield other
    finally:
        other.close()


def holds(directory: Path) -> dict[int, int]:
    """Returns the partition versions that a stopped server has left in its directory."""
    with DataDirectory(directory) as data:
        recovered = data.recover(job_id="job", server_id="b")
        return dict(recovered.shard.summary().versions)


def test_backup_that_cannot_apply_a_change_copies_everything_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "_DIVERGED_AGAIN_S", 0.1)
    make, failed = Replay.make, threading.Event()

    def fails_once(replay: Replay, record: Record) -> None:
        if record.kind == PUSH and not failed.is_set():
            failed.set()
            raise ValueError("it cannot be")
        make(replay, record)

    monkeypatch.setattr(Replay, "make", fails_once)
    member = primary(cluster)
    with asked_to_follow(cluster) as other:
        backup = Running(
            cluster.directory,
            coordinator=other.address,
            server_id="b",
            data_dir=cluster.directory / "b",
        )
        try:
            assert report(cluster).in_sync
            pushing = threading.Thread(
                target=wait_until, args=(lambda: _pushes(member), "the push to be acknowledged")
            )
            pushing.start()
            while report(cluster).in_sync:
                pass
            assert failed.is_set()
            cluster.coordinator.placed(epoch=3, backup_id="b")
            other.placed(
                epoch=3, role=BACKUP, primary_address=cluster.running.address, backup_id="b"
            )
            while not report(cluster).in_sync:
                pass
            pushing.join(30)
            wait_until(lambda: _pushes(member), "a push that the backup has as well")
        finally:
            backup.stop()
        assert backup.failure is None
    assert holds(cluster.directory / "b") == {
        each.partition_id: each.version for each in member.client.get_server().partitions
    }


@pytest.mark.parametrize("damaged", ["snapshot.safetensors", "journal.00000001"])
def test_backup_with_an_unreadable_directory_copies_everything_again(
    cluster: Cluster, damaged: str
) -> None:
    member = primary(cluster)
    member.push(1.0)
    data = cluster.directory / "b"
    data.mkdir()
    (data / damaged).write_bytes(b"nothing that it wrote")
    with asked_to_follow(cluster) as other:
        backup = Running(
            cluster.directory,
            until_serving=False,
            coordinator=other.address,
            server_id="b",
            data_dir=data,
        )
        try:
            assert report(cluster).in_sync
        finally:
            backup.stop()
        assert backup.failure is None
    assert holds(data) == {
        each.partition_id: each.version for each in member.client.get_server().partitions
    }


def test_the_event_loop_of_a_backup_is_watched(cluster: Cluster) -> None:
    primary(cluster)
    with asked_to_follow(cluster) as other:
        backup = Running(
            cluster.directory,
            until_serving=False,
            coordinator=other.address,
            server_id="b",
            data_dir=cluster.directory / "b",
        )
        try:
            while (registered := other.registrations.get(timeout=30)).address:
                pass  # before it knows that it is a backup
            with urlopen(f"http://{registered.metrics_address}/metrics", timeout=30) as page:
                assert "shoal_event_loop_blocked_seconds_total" in page.read().decode()
        finally:
            backup.stop()
        assert backup.failure is None


def _pushes(member: Any) -> bool:
    try:
        member.push(1.0)
    except UnavailableError:
        return False
    return True
