"""Effects of membership on pushes and pulls: fencing, ssp's waits, and an absent coordinator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.formats.wire import encode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.service import primary_place

LONG = timedelta(seconds=30)

PUSHES_FOR_EVER = """
import sys, threading, grpc
def chunks():
    for file in sys.argv[2:]:
        yield open(file, "rb").read()
    threading.Event().wait()
with grpc.insecure_channel(sys.argv[1]) as channel:
    channel.stream_unary("/shoal.v1.ParameterServer/Push")(chunks())
"""


def test_member_continues_in_its_old_generation_when_others_join_and_leave(cluster) -> None:
    member = cluster.trainable(cluster.server())
    cluster.coordinator.members(2, "a", "c")
    cluster.coordinator.members(3, "a")
    assert {each.version for each in member.push(1.0)} == {2}


def test_an_evicted_member_can_neither_push_nor_pull(cluster) -> None:
    client = cluster.server()
    cluster.trainable(client)
    out = cluster.member(client, "b")
    out.push(1.0)
    cluster.coordinator.members(2, "a")
    cluster.wait_until(
        lambda: set(client.get_server().clocks) == {"a"}, "the server to hear of generation 2"
    )
    for attempt in (lambda: out.push(1.0), out.pull, lambda: out.initialize(np.zeros(1))):
        with pytest.raises(StaleGenerationError):
            attempt()
    out.generation = 2
    with pytest.raises(StaleGenerationError, match="member 'b'"):
        out.push(1.0)
    assert client.get_server().pushes_applied == 3


def test_push_in_progress_is_not_applied_when_its_member_is_evicted(cluster) -> None:
    client = cluster.server()
    cluster.trainable(client)
    out = cluster.member(client, "b")

    def uploads():
        yield out.header(0), memoryview(np.ones(256, np.float32))
        cluster.wait_until(
            lambda: client.get_server().pushes_applied == 1, "the first partition to be applied"
        )
        cluster.coordinator.members(2, "a")
        cluster.wait_until(
            lambda: "b" not in client.get_server().clocks, "the server to hear of generation 2"
        )
        yield out.header(1), memoryview(np.ones(256, np.float32))

    with pytest.raises(StaleGenerationError):
        client.push(uploads())
    assert [each.version for each in client.get_server().partitions] == [2, 1, 1]


def test_member_of_an_unknown_generation_waits_for_the_coordinators_confirmation(
    cluster,
) -> None:
    client = cluster.server()
    cluster.trainable(client)
    joiner = cluster.member(client, "joiner", generation=2)
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(joiner.push, 1.0)
        cluster.coordinator.members(2, "a", "b", "joiner")
        assert {each.version for each in pushing.result(60)} == {2}


def test_clock_report_of_an_unknown_generation_waits_for_the_coordinators_confirmation(
    cluster,
) -> None:
    client = cluster.server()
    cluster.trainable(client)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(client.advance_clock, "job", "joiner", clock=0, generation=2)
        cluster.coordinator.members(2, "a", "b", "joiner")
        received.result(60)
    cluster.coordinator.members(3, "a", "b")
    cluster.wait_until(
        lambda: set(client.get_server().clocks) == {"a", "b"}, "the server to hear of generation 3"
    )
    with pytest.raises(StaleGenerationError):
        client.advance_clock("job", "joiner", clock=1, generation=2)


def test_ssp_holds_fast_members_until_slow_ones_catch_up(cluster) -> None:
    client = cluster.server()
    fast, slow = cluster.trainable(client, bound=1), cluster.member(client, "b")
    slow.pull()
    fast.pull()
    for _ in range(2):
        fast.push(1.0)
    with pytest.raises(DeadlineError) as caught:
        fast.pull(wait=timedelta(milliseconds=20))
    assert caught.value.reason == "SSP_WAIT_TIMEOUT"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: fast.pull(wait=LONG))
        slow.push(1.0)
        waiting.result(60)
    assert dict(client.get_server().clocks) == {"a": 2, "b": 1}


def test_clock_of_a_member_without_a_push_survives_a_crash(cluster, tmp_path) -> None:
    """The member's count begins with its first request. That was a pull, which the journal does not
    record."""
    client = cluster.server(data_dir=tmp_path / "data")
    others, joiner = cluster.trainable(client, bound=5), cluster.member(client, "b")
    others.pull()
    others.push(1.0)
    joiner.pull()
    client.advance_clock("job", "b", clock=3)
    before = dict(client.get_server().clocks)
    assert before == {"a": 1, "b": 3}
    others.push(1.0)  # writes the earlier state to the journal
    shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    after = cluster.unregistered(data_dir=tmp_path / "crashed").get_server().clocks
    assert dict(after) == before


def test_ssp_does_not_wait_for_departed_members(cluster) -> None:
    client = cluster.server()
    fast = cluster.trainable(client, bound=0)
    fast.pull()
    fast.push(1.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: fast.pull(wait=LONG))
        cluster.coordinator.members(2, "a")
        waiting.result(60)


def test_worker_killed_during_a_push_leaves_complete_partitions_and_blocks_nobody(
    cluster, tmp_path
) -> None:
    client = cluster.server()
    other, victim = cluster.trainable(client, bound=0), cluster.member(client, "b")
    other.pull()
    victim.pull()
    ones = np.ones(256, np.float32).tobytes()
    whole, half = (
        encode_push_chunk((victim.header(0), memoryview(ones))),
        encode_push_chunk((victim.header(1), memoryview(ones)[:512])),
    )
    (tmp_path / "0").write_bytes(whole)
    (tmp_path / "1").write_bytes(half)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PUSHES_FOR_EVER,
            cluster.running.address,
            str(tmp_path / "0"),
            str(tmp_path / "1"),
        ]
    )
    try:
        cluster.wait_until(
            lambda: client.get_server().pushes_applied == 1, "the first partition to be applied"
        )
        other.push(1.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: other.pull(wait=LONG))
            process.kill()
            process.wait()
            cluster.coordinator.members(2, "a")
            waiting.result(60)
    finally:
        process.kill()
        process.wait()
    assert [each.version for each in client.get_server().partitions] == [3, 2, 2]
    heir = cluster.member(client, "a", generation=2)
    assert np.frombuffer(heir.pull()[1], np.float32)[0] == -1.0


def test_a_clock_can_be_advanced_without_a_push(cluster) -> None:
    client = cluster.server()
    fast = cluster.trainable(client, bound=0)
    fast.pull()
    fast.push(1.0)
    client.advance_clock("job", "b", clock=0)
    assert client.advance_clock("job", "b", clock=1).slowest_clock == 1
    fast.pull()
    # 2**63 - 1 means that nobody waits for this member any more.
    client.advance_clock("job", "b", clock=2**63 - 1)
    for _ in range(5):
        fast.push(1.0)
        fast.pull()
    with pytest.raises(UnknownResourceError) as caught:
        client.advance_clock("job", "nobody", clock=1)
    assert caught.value.reason == "MEMBER_UNKNOWN"


def test_clock_counts_only_once_the_entire_stream_has_arrived(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    member.pull()
    with pytest.raises(InvalidRequestError):
        client.push(
            [
                (member.header(0), memoryview(np.ones(256, np.float32))),
                (member.header(1), memoryview(np.full(256, np.nan, np.float32))),
            ]
        )
    assert client.get_server().clocks["a"] == 0
    member.push(1.0)
    assert client.get_server().clocks["a"] == 1


def test_training_continues_without_the_coordinator_and_membership_updates_on_its_return(
    cluster,
) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    cluster.coordinator.stop()
    for _ in range(3):
        member.push(1.0)
        member.pull()
    with pytest.raises(StaleGenerationError):
        cluster.member(client, "stranger").push(1.0)
    cluster.coordinator.start()
    assert cluster.coordinator.registrations.get(timeout=30).server_id == "server"
    cluster.coordinator.members(2, "a")
    cluster.wait_until(
        lambda: set(client.get_server().clocks) == {"a"}, "the server to hear of generation 2"
    )
    member.push(1.0)


def test_stored_bytes_are_reported_to_the_coordinator(cluster) -> None:
    cluster.trainable(cluster.server())
    cluster.wait_until(
        lambda: cluster.coordinator.heartbeats.get(timeout=30).stored_bytes == 2400,
        "a heartbeat with 2400 bytes",
    )


def test_callers_are_asked_to_retry_until_the_coordinator_has_answered(
    cluster, monkeypatch
) -> None:
    monkeypatch.setattr(primary_place, "_PLACE_WAIT", timedelta(milliseconds=50))
    cluster.coordinator.stop()
    cluster.coordinator.shard_map = None
    client = cluster.unregistered()
    with pytest.raises(UnavailableError) as caught:
        client.pull(pb.PullRequest(job_id="job", shard_map_epoch=1), lambda _: None)
    assert caught.value.reason == "PLACE_UNKNOWN"
    assert client.get_server().server_index == -1


def test_a_server_ends_when_the_job_is_over(cluster) -> None:
    cluster.server()
    cluster.coordinator.over()
    cluster.running.thread.join(30)
    assert not cluster.running.thread.is_alive()
    assert cluster.running.failure is None


def test_server_of_a_recreated_job_exits_and_reports_the_reason(cluster) -> None:
    cluster.trainable(cluster.server())
    cluster.coordinator.members(0)
    cluster.running.thread.join(30)
    assert isinstance(cluster.running.failure, ConfigurationError)
    assert "is at generation 0" in str(cluster.running.failure)


def test_stopping_server_does_not_wait_for_waiting_callers(cluster) -> None:
    client = cluster.server(drain_timeout=timedelta(minutes=10))
    cluster.member(client).initialize(np.zeros(1))
    cluster.trainable(client, bound=0)
    fast = cluster.member(client)
    fast.pull()
    fast.push(1.0)
    once = cluster.client(cluster.running, attempts=1)
    fast.client = once
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: fast.pull(wait=timedelta(minutes=10)))
        cluster.wait_until(lambda: client.get_server().clocks["a"] == 1, "the clock")
        cluster.running.stop()  # long before drain_timeout
        with pytest.raises(UnavailableError):
            waiting.result(60)


def test_map_with_other_partitions_than_the_stored_ones_is_refused(cluster) -> None:
    member = cluster.trainable(cluster.server())
    changed = type(cluster.coordinator.shard_map)()
    changed.CopyFrom(cluster.coordinator.shard_map)
    changed.epoch = 2
    changed.partitions[0].pieces[0].length = 100
    cluster.coordinator.shard_map = changed
    with pytest.raises(PreconditionError) as caught:
        member.pull(shard_map_epoch=2)
    assert caught.value.reason == "LAYOUT_CONFLICT"
    member.push(1.0)
