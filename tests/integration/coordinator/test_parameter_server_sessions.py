"""Parameter servers register, tensors are assigned to them, and batches are leased, over
real gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shoal_common.errors import InvalidRequestError, PreconditionError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator, Job, Server, eventually

MakeJob = Callable[..., Job]


MakeServer = Callable[..., Server]
TENSORS = [
    pb.TensorSpec(name="big", shape=[3, 1 << 20], dtype="float32"),
    pb.TensorSpec(name="small", shape=[], dtype="float64"),
]


def test_servers_take_places_and_receive_the_members(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=2, together=2)
    first = make_server(job, "s0")
    assert first.received("welcome").server_index == 0
    assert first.received("welcome").spec.parameter_servers == 2
    assert list(first.received("members").member_ids) == []
    second = make_server(job, "s1")
    assert second.received("welcome").server_index == 1
    a, _ = job.form("a", "b")
    for server in (first, second):
        assert list(server.received("members", lambda m: m.generation == 1).member_ids) == [
            "a",
            "b",
        ]
    a.kill()
    assert list(first.received("members", lambda m: m.generation == 2).member_ids) == ["b"]
    assert [(s.server_id, s.server_index, s.alive) for s in job.get().servers] == [
        ("s0", 0, True),
        ("s1", 1, True),
    ]


def test_tensors_are_laid_out_when_all_servers_are_present(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=2)
    make_server(job, "s0").received("welcome")
    with pytest.raises(UnavailableError, match="1 of 2") as waiting:
        job.client.declare_tensors(job.job_id, TENSORS)
    assert waiting.value.reason == "NO_SERVERS"
    make_server(job, "s1").received("welcome")
    shard_map = job.client.declare_tensors(job.job_id, TENSORS).shard_map
    assert shard_map.epoch == 1
    found = [
        (p.partition_id, [(piece.tensor_index, piece.offset, piece.length) for piece in p.pieces])
        for p in shard_map.partitions
    ]
    assert found == [(0, [(0, 0, 2 << 20)]), (1, [(0, 2 << 20, 1 << 20)]), (2, [(1, 0, 1)])]
    assert [s.address for s in shard_map.servers] == ["s0:7000", "s1:7000"]
    assert job.client.declare_tensors(job.job_id, TENSORS).shard_map == shard_map
    assert job.client.get_shard_map(job.job_id).shard_map == shard_map
    with pytest.raises(PreconditionError, match="small") as conflict:
        job.client.declare_tensors(
            job.job_id, [TENSORS[0], pb.TensorSpec(name="small", shape=[2], dtype="float64")]
        )
    assert conflict.value.reason == "TENSORS_CONFLICT"


def test_job_that_starts_without_servers_may_get_one_at_a_workers_request(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=0, max_parameter_servers=2)
    assert job.get().servers_awaited == 0, "nobody has asked"
    with pytest.raises(UnavailableError, match="0 of 1 are registered") as waiting:
        job.client.declare_tensors(job.job_id, TENSORS)
    assert waiting.value.reason == "NO_SERVERS"
    assert job.get().servers_awaited == 1
    make_server(job, "s0").received("welcome")
    assert [
        server.server_index
        for server in job.client.declare_tensors(job.job_id, TENSORS).shard_map.servers
    ] == [0]
    assert job.get().servers_awaited == 0
    assert make_server(job, "s1").received("welcome").server_index == 1, (
        "a further one gets its share while training goes on"
    )


def test_a_table_is_laid_out_in_buckets_over_all_servers(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=2)
    for name in ("s0", "s1"):
        make_server(job, name).received("welcome")
    table = pb.TableSpec(
        buckets=4,
        seed=2**64 - 1,
        initializer="normal",
        scale=0.5,
        optimizer="sparse_adam",
        hyperparameters={"lr": 0.5},
    )
    declared = [*TENSORS, pb.TensorSpec(name="users", shape=[0, 8], dtype="float32", table=table)]
    shard_map = job.client.declare_tensors(job.job_id, declared).shard_map
    found = [
        (p.bucket.tensor_index, p.bucket.number, p.primary)
        for p in shard_map.partitions
        if p.HasField("bucket")
    ]
    assert found == [(2, 0, 0), (2, 1, 1), (2, 2, 0), (2, 3, 1)]
    received = shard_map.tensors[2].table
    assert (received.seed, received.hyperparameters["lr"], received.hyperparameters["beta1"]) == (
        2**64 - 1,
        0.5,
        0.9,
    )
    assert job.client.get_shard_map(job.job_id).shard_map == shard_map
    declared[-1].table.seed = 3
    with pytest.raises(PreconditionError, match="table 'users'") as conflict:
        job.client.declare_tensors(job.job_id, declared)
    assert conflict.value.reason == "TENSORS_CONFLICT"


def test_place_of_a_lost_server_is_kept_for_its_return(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=1)
    server = make_server(job, "s0")
    server.received("welcome")
    job.client.declare_tensors(job.job_id, TENSORS)
    refused = make_server(job, "s0", pid=2).end()
    assert refused is not None
    assert refused.reason == "SERVER_CONFLICT"
    server.kill()
    eventually(lambda: not job.get().servers[0].alive, "the server to be lost")
    refused = make_server(job, "other").end()
    assert refused is not None
    assert refused.reason == "SERVERS_COMPLETE"
    assert make_server(job, "s0", pid=2).received("welcome").server_index == 0
    assert job.get().servers[0].alive
    assert {"server_registered", "server_lost", "tensors_declared"} <= {
        event.kind for event in job.events()
    }


def test_a_server_without_heartbeats_loses_its_lease(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=2, lease_ms=1500)
    beating, silent = make_server(job, "s0"), make_server(job, "s1")
    silent.received("welcome")

    def beaten() -> bool:
        beating.beat()
        return silent.ended

    eventually(beaten, "the silent server's lease to end")
    assert silent.error is not None
    assert silent.error.reason == "LEASE_EXPIRED"
    assert [server.alive for server in job.get().servers] == [True, False]


def test_servers_are_notified_when_the_job_is_over(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=1)
    server = make_server(job, "s0")
    server.received("welcome")
    (a,) = job.form("a")
    a.leave(pb.Leave.REASON_FINISHED)
    assert server.received("stop").reason == "member a reached the end of its script"


def test_batches_are_leased_once_and_those_of_dead_members_again(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")

    def lease(
        member: str, want: int, finished: tuple[int, ...] = (), **more: Any
    ) -> pb.LeaseBatchesResponse:
        return job.client.lease_batches(
            job.job_id,
            member,
            **{
                "loader": "train",
                "epoch": 0,
                "batches_in_epoch": 5,
                "want": want,
                "finished": finished,
                **more,
            },
        )

    assert list(lease("a", 2).batches) == [0, 1]
    assert list(lease("b", 2).batches) == [2], "its share of half of what is free"
    assert not lease("b", 2).batches
    first = lease("a", 0, epoch=1)
    assert (first.newest_epoch, first.first_key) == (0, 0), "nobody has begun it"
    assert not lease("b", 0, (2,), sequence=1).batches  # the member leaves its loop
    assert list(lease("b", 1).batches) == [3]
    assert not lease("b", 0, sequence=2).batches
    assert list(lease("b", 1, sequence=3).batches) == [3]
    b.kill()
    assert a.generation(lambda g: g.number == 2)
    assert list(lease("a", 5, (0, 1)).batches) == [3]
    assert list(lease("a", 5, (3,)).batches) == [4]
    waiting = lease("a", 1)
    assert not waiting.batches
    assert not waiting.epoch_done
    assert waiting.retry_after_ms > 0
    assert lease("a", 1, (4,)).epoch_done
    keys = [
        lease("a", 1, loader=loader, epoch=epoch).first_key
        for loader, epoch in (("train", 0), ("train", 1), ("other", 0))
    ]
    assert len(set(keys)) == 3
    assert all(keys)
    assert lease("a", 0, epoch=0).newest_epoch == 1
    with pytest.raises(InvalidRequestError, match="has 5") as conflict:
        lease("a", 1, batches_in_epoch=6)
    assert conflict.value.reason == "BATCHES_CONFLICT"
    with pytest.raises(PreconditionError) as gone:
        lease("b", 1)
    assert gone.value.reason == "MEMBER_REPLACED"


def test_returned_batches_are_dealt_again_once_despite_repeated_returns(make_job: MakeJob) -> None:
    job = make_job(together=2)
    job.form("a", "b")

    def lease(member: str, **request: Any) -> list[int]:
        return list(
            job.client.lease_batches(
                job.job_id, member, loader="l", epoch=0, batches_in_epoch=12, **request
            ).batches
        )

    assert lease("a", want=3, sequence=1) == [0, 1, 2]
    again: dict[str, Any] = {"want": 2, "returned": [0, 2], "sequence": 2}
    assert lease("a", **again) == [0, 2], "it asks for more at once, and gets them back"
    assert lease("a", **again) == [0, 2], "the first answer was lost"
    assert lease("b", want=1, sequence=1) == [3], "none of them is free"
    assert lease("a", want=0, keep=True, finished=[1], returned=[2], sequence=3) == []
    assert lease("b", want=1, finished=[3], sequence=2) == [2]


def test_leases_outlive_the_coordinator(
    make_coordinator: Callable[..., Coordinator], own_redis: Any
) -> None:
    from tests.integration.coordinator.harness import create_job

    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client)
        job.form("a")
        given = client.lease_batches(
            job.job_id, "a", loader="l", epoch=0, batches_in_epoch=9, want=3
        )
        assert list(given.batches) == [0, 1, 2]
        coordinator.kill()
        coordinator.start()
        job.join("a", last=1).welcome()
        more = client.lease_batches(
            job.job_id, "a", loader="l", epoch=0, batches_in_epoch=9, want=2, finished=[0, 1, 2]
        )
        assert list(more.batches) == [3, 4]
        job.close()
