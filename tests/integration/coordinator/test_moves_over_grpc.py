"""Partitions move between servers by decision of the coordinator, with real gRPC and a real Valkey.
The unit scenarios servers_*.txt cover the decisions in detail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from shoal_common.errors import PreconditionError, ShoalError
from shoal_common.redis import EmbeddedRedis
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator, Job, Server, create_job, eventually

MakeJob = Callable[..., Job]
MakeServer = Callable[..., Server]
FOUR_PARTITIONS = [pb.TensorSpec(name="w", shape=[8 << 20], dtype="float32")]


def owners(job: Job) -> list[int]:
    """Returns the owner of each partition in the shard map."""
    return [
        partition.primary for partition in job.client.get_shard_map(job.job_id).shard_map.partitions
    ]


def moves_of(job: Job) -> list[str]:
    kinds = ("partitions_moved", "move_failed", "server_draining", "server_drained")
    return [event.kind for event in job.events() if event.kind in kinds]


def test_joining_server_gets_a_share_and_a_drained_one_hands_over_everything_and_exits(
    make_job: MakeJob, make_server: MakeServer
) -> None:
    job = make_job(parameter_servers=1, max_parameter_servers=2)
    s0 = make_server(job, "s0", incarnation="first")
    assert s0.received("welcome").spec.max_parameter_servers == 2
    assert job.client.declare_tensors(job.job_id, FOUR_PARTITIONS).shard_map.epoch == 1
    assert s0.received("settled") == pb.MovesSettled(move=0, epoch=1)
    s1 = make_server(job, "s1", incarnation="second")
    assert s1.received("settled") == pb.MovesSettled(move=0, epoch=1)
    move = pb.MovePartitions(
        move=1,
        partition_ids=[0, 1],
        receiver_index=1,
        receiver_address="s1:7000",
        giver_incarnation="first",
    )
    assert s0.received("move") == move
    assert owners(job) == [0, 0, 0, 0]
    s0.report(1, receiver="second")
    for server in (s0, s1):
        server.received("settled", lambda settled: settled == pb.MovesSettled(move=1, epoch=2))
    assert owners(job) == [1, 1, 0, 0]
    assert [(s.partitions, s.value_bytes, s.draining) for s in job.get().servers] == [
        (2, 16 << 20, False)
    ] * 2
    refused = make_server(job, "s2").end()
    assert refused is not None
    assert refused.reason == "SERVERS_COMPLETE"
    assert "max_parameter_servers" in str(refused)

    job.client.drain_server(job.job_id, "s0", reason="its machine is wanted")
    assert [s.draining for s in job.get().servers] == [True, False]
    with pytest.raises(PreconditionError) as last:
        job.client.drain_server(job.job_id, "s1")
    assert last.value.reason == "LAST_SERVER"
    s0.received(
        "move",
        lambda move: (
            move.move == 2 and list(move.partition_ids) == [2, 3] and move.receiver_index == 1
        ),
    )
    s0.report(2, receiver="second")
    assert s0.received("stop").reason == "drained: its machine is wanted"
    assert owners(job) == [1, 1, 1, 1]
    s0.kill()
    eventually(
        lambda: [s.server_id for s in job.get().servers] == ["s1"],
        "the drained server's place to be free",
    )
    assert moves_of(job) == [
        "partitions_moved",
        "server_draining",
        "partitions_moved",
        "server_drained",
    ]
    back = make_server(job, "s0", incarnation="first")  # its stream broke, but it is alive
    assert back.received("welcome").server_index == 0
    assert back.received("stop").reason == "drained: its machine is wanted"
    assert [s.server_id for s in job.get().servers] == ["s1"]
    assert make_server(job, "s3").received("welcome").server_index == 0


def test_failed_move_is_retried_after_a_while(make_job: MakeJob, make_server: MakeServer) -> None:
    job = make_job(parameter_servers=1, max_parameter_servers=2)
    s0 = make_server(job, "s0")
    s0.received("welcome")
    job.client.declare_tensors(job.job_id, FOUR_PARTITIONS)
    make_server(job, "s1", incarnation="second")
    s0.received("move")
    s0.report(1, reason="the receiver's disk is full")
    s0.received("settled", lambda settled: settled.move == 1)
    # there is no other event meanwhile: the coordinator wakes by itself
    s0.received("move", lambda move: move.move == 2)
    s0.report(2, receiver="second")
    s0.received("settled", lambda settled: settled == pb.MovesSettled(move=2, epoch=2))
    failed = [event for event in job.events() if event.kind == "move_failed"]
    assert [event.attributes["reason"] for event in failed] == ["the receiver's disk is full"]


@pytest.mark.parametrize(
    "report",
    [
        pb.MoveReport(move=0),
        pb.MoveReport(move=1, taken=True),
        pb.MoveReport(move=1, reason="x" * 1025),
    ],
)
def test_a_malformed_report_ends_its_session(make_job: MakeJob, report: pb.MoveReport) -> None:
    job = make_job(parameter_servers=1)
    register = pb.RegisterServer(job_id=job.job_id, server_id="s", address="h:1", host="h", pid=1)
    messages = [pb.ServerMessage(register=register), pb.ServerMessage(move=report)]
    with pytest.raises(ShoalError, match=r"^move\.") as refused:
        list(job.client.server_session(iter(messages)))
    assert refused.value.reason == "REQUEST_INVALID"


# The coordinator writes when s0 registers, when tensors are declared, when s1 registers (with the
# move), and when the move is reported.
@pytest.mark.parametrize(
    ("dies", "decided", "settled"),
    [
        ("decision.before_write@3", False, False),
        ("decision.written@3", True, False),
        ("decision.before_write@4", True, False),
        ("decision.written@4", True, True),
    ],
)
def test_killed_coordinator_resumes_from_its_written_state(
    make_coordinator: Callable[..., Coordinator],
    own_redis: EmbeddedRedis,
    make_server: MakeServer,
    dies: str,
    decided: bool,
    settled: bool,
) -> None:
    coordinator = make_coordinator(
        "--redis", own_redis.url, environment={"SHOAL_FAILPOINTS": f"{dies}=kill"}
    )
    with coordinator.client() as client:
        job = create_job(coordinator, client, parameter_servers=1, max_parameter_servers=2)
        s0 = make_server(job, "s0", incarnation="first")
        s0.received("welcome")
        client.declare_tensors(job.job_id, FOUR_PARTITIONS)
        s1 = make_server(job, "s1", incarnation="second")
        if dies.endswith("@4"):
            s0.received("move")
            s0.report(1, receiver="second")
        for server in (s0, s1):
            server.end()
        coordinator.process.wait()
        coordinator.start(SHOAL_FAILPOINTS="")
        back = make_server(job, "s0", incarnation="first")
        assert back.received("settled") == (
            pb.MovesSettled(move=1, epoch=2) if settled else pb.MovesSettled(move=0, epoch=1)
        )
        assert owners(job) == ([1, 1, 0, 0] if settled else [0, 0, 0, 0])
        if decided and not settled:
            assert back.received("move").receiver_address == "s1:7000"
        make_server(job, "s1", incarnation="second").received("welcome")
        if not settled:
            assert list(back.received("move").partition_ids) == [0, 1]
        back.report(1, receiver="second")  # the giver does not know yet that it is settled
        back.received("settled", lambda received: received == pb.MovesSettled(move=1, epoch=2))
        assert owners(job) == [1, 1, 0, 0]
        assert moves_of(job) == ["partitions_moved"]
        job.close()
