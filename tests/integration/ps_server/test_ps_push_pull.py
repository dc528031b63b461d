"""Training over the network: each push is applied once, and pulls return the result."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from shoal_common.bulk.transport import Transport
from shoal_common.errors import (
    DeadlineError,
    InvalidRequestError,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb

pytestmark = pytest.mark.parametrize("transport", [Transport.GRPC, Transport.TCP, Transport.MEMORY])


def floats(buffers):
    return {partition_id: data.view(np.float32) for partition_id, data in buffers.items()}


def test_push_changes_the_values_of_the_next_pull(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client, lr=0.5)
    assert {number: values.size for number, values in floats(member.pull()).items()} == {
        0: 256,
        1: 256,
        2: 88,
    }
    results = member.push(1.0)
    assert [
        (each.partition_id, each.version, each.staleness, each.duplicate) for each in results
    ] == [(n, 2, 0, False) for n in (0, 1, 2)]
    assert all((values == -0.5).all() for values in floats(member.pull()).values())
    assert member.versions == {0: 2, 1: 2, 2: 2}


def test_many_steps_match_torch(cluster) -> None:
    client = cluster.server()
    client.configure_optimizer(
        "job",
        pb.OptimizerSpec(name="adamw", hyperparameters={"lr": 0.01, "weight_decay": 0.1}),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )
    generator = np.random.default_rng(1)
    start = generator.standard_normal(256).astype(np.float32)
    reference = torch.from_numpy(start.copy())
    optimizer = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.1)
    member = cluster.member(client)
    member.initialize(start)
    for _ in range(10):
        gradient = generator.standard_normal(256).astype(np.float32)
        member.push(gradient)
        reference.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(floats(member.pull())[0], reference.numpy(), rtol=1e-5, atol=1e-6)


def test_every_element_type_is_transferred(cluster) -> None:
    client = cluster.server(("a", 300, "float32"), ("b", 300, "float64"), ("c", 300, "bfloat16"))
    member = cluster.trainable(client)
    member.push(2.0)
    pulled = member.pull()
    assert (pulled[0].view(np.float32) == -2).all()
    assert (pulled[2].view(np.float64) == -2).all()
    assert (pulled[4].view(np.uint16) == 0xC000).all()


def test_first_initializer_wins_and_the_others_are_notified(cluster) -> None:
    client = cluster.server()
    first, second = cluster.member(client, "a"), cluster.member(client, "b")
    assert not any(each.duplicate for each in first.initialize(np.ones(1)))
    assert all(each.duplicate and each.version == 1 for each in second.initialize(np.zeros(1)))
    assert (floats(second.pull())[0] == 1).all()


def test_repeated_push_is_acknowledged_and_counted_but_not_applied(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    member.push(1.0)
    assert all(each.duplicate for each in member.push(1.0, sequence=1))
    assert (floats(member.pull())[0] == -1).all()
    status = client.get_server(member_id="a")
    assert (status.pushes_applied, status.pushes_deduplicated) == (3, 3)
    assert [(each.version, each.sequence) for each in status.partitions] == [(2, 1)] * 3


def test_a_stream_broken_halfway_can_be_sent_again(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)

    def broken():
        yield member.header(0), memoryview(np.ones(256, np.float32))
        raise ConnectionAbortedError("the worker lost its nerve")

    with pytest.raises(ConnectionAbortedError):
        client.push(broken())
    assert {each.version for each in member.push(1.0)} == {2}
    assert all((values == -1).all() for values in floats(member.pull()).values())


def test_staleness_is_reported(cluster) -> None:
    client = cluster.server()
    slow, fast = cluster.trainable(client), cluster.member(client, "b")
    for _ in range(3):
        fast.push(1.0)
        fast.pull()
    assert {each.staleness for each in slow.push(1.0)} == {3}


def test_pull_sends_only_newer_values(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    member.push(1.0, partitions=[1])
    newer = [pb.PartitionPull(partition_id=number, newer_than=1) for number in (2, 1, 0)]
    assert set(member.pull(partitions=newer)) == {1}
    assert member.versions == {2: 1, 1: 2, 0: 1}


def test_schedule_changes_the_learning_rate_and_never_goes_back(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client, lr=1.0)
    assert client.set_hyperparameters("job", revision=5, hyperparameters={"lr": 0.25}).applied
    assert not client.set_hyperparameters("job", revision=4, hyperparameters={"lr": 8.0}).applied
    assert not client.set_hyperparameters("job", revision=5, hyperparameters={"lr": 8.0}).applied
    member.push(1.0)
    assert (floats(member.pull())[0] == -0.25).all()
    assert client.get_server().optimizer.hyperparameters["lr"] == 0.25
    # A worker that comes later requests the job's initial settings.
    again = client.configure_optimizer(
        "job",
        pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0}),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )
    assert not again.configured


def test_pulls_during_pushes_read_consistent_partitions(cluster) -> None:
    """All elements of a partition get the same gradients, so a pull with differing elements has
    seen a partly applied push."""
    client = cluster.server(("weight", 3 << 20, "float32"), partition=2 << 20)
    pusher, puller = cluster.trainable(client), cluster.member(client, "b")
    done = threading.Event()

    def push() -> None:
        for _ in range(8):
            pusher.push(1.0)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        while not done.is_set() and not pushing.done():
            for number, values in floats(puller.pull()).items():
                assert (values == 1 - puller.versions[number]).all()
        pushing.result()


def test_concurrent_pushes_of_many_members_are_each_applied_once(cluster) -> None:
    names = [f"worker-{number}" for number in range(6)]
    client = cluster.server(members={1: names})
    cluster.member(client, names[0]).initialize(np.zeros(1))
    cluster.client(cluster.running).configure_optimizer(
        "job",
        pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0}),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )

    def work(name: str) -> None:
        member = cluster.member(cluster.client(cluster.running), name)
        for _ in range(10):
            member.push(1.0)
            member.pull()

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(work, names))
    assert (floats(cluster.member(client, names[0]).pull())[0] == -60).all()
    assert client.get_server().pushes_applied == 180


def test_a_pull_waits_for_first_values(cluster) -> None:
    client = cluster.server()
    early, member = cluster.member(client, "b"), cluster.member(client)
    with pytest.raises(DeadlineError) as caught:
        early.pull(wait=timedelta(milliseconds=20))
    assert caught.value.reason == "PARTITION_UNINITIALIZED"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: early.pull(wait=timedelta(seconds=30)))
        member.initialize(np.ones(1))
        assert (floats(waiting.result(30))[2] == 1).all()


def test_a_reader_may_pull_in_any_generation(cluster) -> None:
    client = cluster.server()
    cluster.trainable(client)
    assert len(cluster.member(client, "", generation=0).pull()) == 3


def test_metrics_report_pushes_and_pulls(cluster, transport) -> None:
    import urllib.request

    client = cluster.server()
    member = cluster.trainable(client)
    member.push(1.0)
    member.push(1.0, sequence=1)
    member.pull()
    member.pull(partitions=[pb.PartitionPull(partition_id=0, newer_than=2)])
    with pytest.raises(ShoalError):
        member.push(1.0, sequence=9)
    client.get_server()
    with urllib.request.urlopen(f"http://{cluster.running.http}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    for line in (
        'shoal_ps_pushes_total{outcome="applied"} 3.0',
        'shoal_ps_pushes_total{outcome="duplicate"} 3.0',
        'shoal_ps_initializations_total{outcome="applied"} 3.0',
        'shoal_ps_pulls_total{outcome="sent"} 3.0',
        'shoal_ps_pulls_total{outcome="unchanged"} 1.0',
        'shoal_ps_refused_total{method="Push",reason="SEQUENCE_GAP"} 1.0',
        "shoal_ps_sent_bytes_total 2400.0",
        "shoal_ps_staleness_count 3.0",
        "shoal_ps_coordinator_connected 1.0",
        "shoal_ps_clock_bound +Inf",
        "shoal_ps_disk_bytes 0.0",
        "shoal_ps_generation 1.0",
        "shoal_ps_members 2.0",
        f'shoal_ps_streams_total{{method="Push",transport="{transport}"}} 3.0',
        'grpc_server_handled_total{grpc_code="OK",grpc_method="GetServer",',
    ):
        assert line in text


def test_a_server_that_never_received_the_tensors_says_so(cluster) -> None:
    client = cluster.server()
    cluster.coordinator.shard_map, known = None, cluster.coordinator.shard_map
    with pytest.raises(ShoalError, match="no tensors were declared"):
        client.pull(pb.PullRequest(job_id="job", shard_map_epoch=1), lambda _: None)
    cluster.coordinator.shard_map = known
    cluster.trainable(client)


def test_a_map_of_another_epoch_is_stale(cluster) -> None:
    member = cluster.trainable(cluster.server())
    for epoch in (2, 0):
        with pytest.raises(ShoalError) as caught:
            member.pull(shard_map_epoch=epoch)
        assert caught.value.reason == "STALE_SHARD_MAP"


def test_a_lost_server_is_unavailable(cluster) -> None:
    client = cluster.server()
    cluster.running.stop()
    with pytest.raises(UnavailableError):
        client.get_server(deadline=timedelta(seconds=20))


def test_gradient_is_compensated_for_pushes_since_its_members_pull(cluster) -> None:
    client = cluster.server()
    client.configure_optimizer(
        "job",
        pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0}, delay_compensation=0.5),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )
    assert client.get_server().optimizer.delay_compensation == 0.5
    slow, fast = cluster.member(client), cluster.member(client, "b")
    slow.initialize(np.zeros(1))
    plain = client.get_server().stored_bytes
    for member in (slow, fast):
        member.pull()
    fast.push(2.0)
    fast.pull()
    assert client.get_server().stored_bytes == 2 * plain
    assert {each.staleness for each in slow.push(3.0)} == {1}
    assert all((values == -2 - (3 + 0.5 * 9 * -2)).all() for values in floats(fast.pull()).values())
    slow.pull()
    fast.push(1.0)
    assert client.get_server().stored_bytes == 2 * plain
    cluster.coordinator.members(2, "b")
    cluster.wait_until(
        lambda: set(client.get_server().clocks) == {"b"}, "the server to hear of generation 2"
    )
    fast.pull()
    assert client.get_server().stored_bytes == plain


def test_split_rows_are_refused_before_anything_is_configured(cluster) -> None:
    cluster.declare(("table", 600, "float32"))
    cluster.coordinator.shard_map.tensors[0].shape[:] = [2, 300]
    client = cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=30)
    with pytest.raises(
        InvalidRequestError,
        match="rowwise_adagrad updates whole rows, but a row of tensor 'table' has 300 elements",
    ):
        client.configure_optimizer(
            "job",
            pb.OptimizerSpec(name="rowwise_adagrad"),
            pb.Consistency(mode=pb.Consistency.MODE_ASP),
        )
    assert not client.get_server().HasField("optimizer")
    client.configure_optimizer(
        "job", pb.OptimizerSpec(name="lamb"), pb.Consistency(mode=pb.Consistency.MODE_ASP)
    )


@pytest.mark.parametrize("codec", codecs.FOR_VALUES)
def test_compressed_pulls_are_equal_for_all_and_the_server_keeps_full_precision(
    cluster, codec: int
) -> None:
    client = cluster.server(
        ("weight", 600, "float32"), ("half", 100, "bfloat16"), ("double", 300, "float64")
    )
    member = cluster.trainable(client, lr=1.0)
    member.push(1 / 3)
    raw, rounded, again = (member.pull(codec=each) for each in (pb.CODEC_RAW, codec, codec))
    assert all(bytes(rounded[number]) == bytes(again[number]) for number in rounded)
    lengths = {0: 256, 1: 256, 2: 88, 3: 100, 4: 256, 5: 44}
    for number, length in lengths.items():
        if number == 3 and codec != codecs.INT8:  # compressing a 16-bit dtype would save nothing
            assert bytes(rounded[number]) == bytes(raw[number])
            continue
        assert rounded[number].nbytes == codecs.payload_bytes(codec, length)
        out = np.empty(length, np.float32)
        codecs.decode(codec, rounded[number].data, out)
        np.testing.assert_allclose(out, -1 / 3, rtol=2**-8)
    assert (raw[0].view(np.float32) == np.float32(-1 / 3)).all()


def test_pull_with_a_codec_that_drops_values_is_refused(cluster) -> None:
    member = cluster.trainable(cluster.server())
    for codec in (pb.CODEC_SIGN, pb.CODEC_TOPK, pb.CODEC_RANDOMK, pb.CODEC_POWERSGD):
        with pytest.raises(
            InvalidRequestError, match="cannot be used in a pull, since it omits values"
        ) as refusal:
            member.pull(codec=codec)
        assert refusal.value.reason == "CODEC_UNSUPPORTED"


def test_values_too_large_for_a_codec_are_refused_and_can_be_pulled_uncompressed(cluster) -> None:
    member = cluster.trainable(cluster.server())
    member.push(-1e5)
    with pytest.raises(
        PreconditionError, match="CODEC_FLOAT16 supports only magnitudes"
    ) as refusal:
        member.pull(codec=pb.CODEC_FLOAT16)
    assert refusal.value.reason == "VALUES_TOO_LARGE"
    assert (member.pull()[0].view(np.float32) == 1e5).all()


def test_a_push_of_factors_is_multiplied_by_the_server(cluster) -> None:
    cluster.declare()
    cluster.coordinator.shard_map.tensors[0].shape[:] = [60, 10]
    for partition, rows in zip(cluster.coordinator.shard_map.partitions, (20, 20, 20), strict=True):
        partition.pieces[0].offset, partition.pieces[0].length = (
            200 * partition.partition_id,
            10 * rows,
        )
    client = cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=20)
    cluster.coordinator.heartbeats.get(timeout=20)
    member = cluster.trainable(client)
    left, right = (
        np.arange(40, dtype=np.float32).reshape(20, 2),
        np.arange(20, dtype=np.float32).reshape(2, 10),
    )

    def push(payload: memoryview) -> None:
        client.push(
            [(member.header(1, codec=pb.CODEC_POWERSGD, payload_bytes=payload.nbytes), payload)]
        )

    for wrong, reason in (
        (codecs.encode_powersgd([(left * np.float32("nan"), right)]), "GRADIENT_NOT_FINITE"),
        (codecs.encode_powersgd([(left * np.float32(1e36), right)]), "GRADIENT_NOT_FINITE"),
        (codecs.encode_powersgd([(left[:10], right)]), "PAYLOAD_SIZE_MISMATCH"),
        (
            codecs.encode_powersgd([(np.ones((20, 9), np.float32), np.ones((9, 10), np.float32))]),
            "PAYLOAD_SIZE_MISMATCH",
        ),
        (
            codecs.encode_powersgd([(np.ones((20, 7), np.float32), np.ones((7, 5), np.float32))]),
            "PAYLOAD_INVALID",
        ),
    ):
        with pytest.raises(InvalidRequestError) as refusal:
            push(wrong)
        assert refusal.value.reason == reason
    push(codecs.encode_powersgd([(left, right)]))
    pulled = floats(member.pull())
    np.testing.assert_array_equal(pulled[1].reshape(20, 10), -(left @ right))
    assert not pulled[0].any()
