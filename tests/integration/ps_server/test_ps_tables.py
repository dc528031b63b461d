"""Sparse tables over the network: rows are pulled and pushed by id on every transport, and survive
a kill."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch
from shoal_common.bulk.transport import Transport
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import ShoalError
from shoal_common.formats.wire import checksum
from shoal_common.tables.declaration import TableSpec
from shoal_common.tables.values import buckets_of, initial_rows
from shoal_common.tables.wire import by_bucket, combined, pulled_ids, pushed_payload
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb

DIM = 16
BUCKETS = 4
SPEC = TableSpec.with_defaults(
    buckets=BUCKETS,
    seed=9,
    initializer="uniform",
    scale=0.1,
    optimizer="adagrad",
    hyperparameters={"lr": 0.1},
    max_rows=0,
)
ASP = pb.Consistency(mode=pb.Consistency.MODE_ASP)

over_each_transport = pytest.mark.parametrize(
    "transport", [Transport.GRPC, Transport.TCP, Transport.MEMORY]
)


def declare(cluster: Any, *, rows: int = 0) -> None:
    """Declares a dense tensor in partition 0, and a table in the partitions after it."""
    cluster.declare(("weight", 200, "float32"))
    shard_map = cluster.coordinator.shard_map
    shard_map.tensors.add(name="users", shape=[rows, DIM], dtype="float32", table=SPEC.message())
    for number in range(BUCKETS):
        bucket = coordinator_pb2.Bucket(tensor_index=1, number=number)
        shard_map.partitions.add(partition_id=1 + number, bucket=bucket, primary=0)


class TableMember:
    """A worker that trains the rows of a table."""

    def __init__(self, client: ParameterServerClient, name: str = "a") -> None:
        self.client = client
        self.name = name
        self.sequence = 0

    def pull(
        self, ids: np.ndarray[Any, Any], *, reader: bool = False, **changes: Any
    ) -> np.ndarray[Any, Any]:
        """Returns rows in the order of their ids."""
        rows = np.empty((len(ids), DIM), np.float32)
        buffers: dict[int, np.ndarray[Any, Any]] = {}
        places = by_bucket(ids, BUCKETS)

        def into(header: pb.PullHeader) -> memoryview:
            buffers[header.partition_id] = np.empty((header.length // DIM, DIM), np.float32)
            return memoryview(buffers[header.partition_id])

        wanted = [
            pb.PartitionPull(partition_id=1 + n, ids=pulled_ids(ids[places[n]]))
            for n in range(BUCKETS)
        ]
        member = {} if reader else {"member_id": self.name, "generation": 1}
        request = pb.PullRequest(
            job_id="job", shard_map_epoch=1, partitions=wanted, checksums=True, **member, **changes
        )
        self.versions = {
            header.partition_id: header.version for header in self.client.pull(request, into)
        }
        for number, chosen in enumerate(places):
            rows[chosen] = buffers[1 + number]
        return rows

    def uploads(
        self, ids: np.ndarray[Any, Any], gradients: np.ndarray[Any, Any], **changes: Any
    ) -> Any:
        """Yields one upload per bucket, also for buckets without ids."""
        unique, summed = combined(ids, gradients)
        for number, chosen in enumerate(by_bucket(unique, BUCKETS)):
            payload = pushed_payload(unique[chosen], summed[chosen])
            fields = {
                "job_id": "job",
                "member_id": self.name,
                "generation": 1,
                "partition_id": 1 + number,
                "shard_map_epoch": 1,
                "sequence": self.sequence + 1,
                "base_version": 1,
                "clock": self.sequence + 1,
                "dtype": pb.DTYPE_FLOAT32,
                "codec": pb.CODEC_RAW,
                "length": len(chosen) * DIM,
                "rows": len(chosen),
                "payload_bytes": payload.nbytes,
                "checksum": checksum(payload),
            }
            yield pb.PushHeader(**{**fields, **changes}), payload

    def push(
        self, ids: np.ndarray[Any, Any], gradients: np.ndarray[Any, Any], *, again: bool = False
    ) -> list[pb.PartitionResult]:
        """Pushes one iteration; `again`: repeats the previous one."""
        self.sequence -= again
        results = self.client.push(self.uploads(ids, gradients))
        self.sequence += 1
        return results


def steps(count: int, seed: int = 0) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Returns `count` pairs of ids, some of which repeat, and their gradients."""
    generator = np.random.default_rng(seed)
    return [
        (generator.integers(0, 60, 30), generator.standard_normal((30, DIM)).astype(np.float32))
        for _ in range(count)
    ]


@pytest.fixture
def member(cluster: Any) -> TableMember:
    """A worker of a server that has the table."""
    declare(cluster)
    client = cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    client.configure_optimizer("job", pb.OptimizerSpec(name="sgd"), ASP)
    return TableMember(client)


@over_each_transport
def test_rows_are_trained_by_id_like_sparse_gradients_in_torch(member) -> None:
    ids = np.arange(-40, 60)
    begun = initial_rows(ids, DIM, seed=9, initializer="uniform", scale=0.1)
    assert (member.pull(ids) == begun).all()
    reference = torch.nn.Parameter(torch.from_numpy(begun.copy()))
    optimizer = torch.optim.Adagrad([reference], lr=0.1)
    for step, (chosen, gradients) in enumerate(steps(10), 1):
        assert [(each.version, each.duplicate) for each in member.push(chosen, gradients)] == [
            (step + 1, False)
        ] * BUCKETS
        assert all(each.duplicate for each in member.push(chosen, gradients, again=True))
        optimizer.zero_grad()
        torch.nn.functional.embedding(torch.from_numpy(chosen + 40), reference).backward(
            torch.from_numpy(gradients)
        )
        optimizer.step()
    np.testing.assert_allclose(
        member.pull(ids, reader=True), reference.detach().numpy(), rtol=1e-6, atol=1e-6
    )
    assert member.versions == dict.fromkeys(range(1, 5), 11)
    repeated = member.pull(np.array([5, 5, -3, 5]))
    assert (repeated == member.pull(np.array([5, -3]))[[0, 0, 1, 0]]).all()


@over_each_transport
def test_pull_of_everything_contains_only_dense_tensors(cluster, member) -> None:
    dense = cluster.member(member.client)
    member.client.initialize(
        [(dense.header(0, sequence=0, base_version=0), memoryview(np.ones(200, np.float32)))]
    )
    assert set(dense.pull()) == {0}


@over_each_transport
@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"rows": -1}, "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ({"rows": 29}, "INVALID_ARGUMENT", "LENGTH_MISMATCH"),
        ({"length": 16}, "INVALID_ARGUMENT", "LENGTH_MISMATCH"),
        ({"payload_bytes": 0}, "INVALID_ARGUMENT", "PAYLOAD_SIZE_MISMATCH"),
        ({"codec": pb.CODEC_FLOAT16}, "INVALID_ARGUMENT", "CODEC_UNSUPPORTED"),
        ({"dtype": pb.DTYPE_FLOAT64}, "INVALID_ARGUMENT", "DTYPE_MISMATCH"),
        ({"absent_pieces": [0]}, "INVALID_ARGUMENT", "PIECES_INVALID"),
        ({"sequence": 3}, "FAILED_PRECONDITION", "SEQUENCE_GAP"),
        ({"base_version": 9}, "FAILED_PRECONDITION", "BASE_VERSION_AHEAD"),
        ({"checksum": 1}, "DATA_LOSS", "CHECKSUM_MISMATCH"),
        ({"partition_id": 0}, "INVALID_ARGUMENT", "ROWS_INVALID"),
        ({"partition_id": 2}, "INVALID_ARGUMENT", "ROWS_INVALID"),
    ],
)
def test_a_wrong_push_of_rows_gets_its_status_and_changes_nothing(
    member, change, code, reason
) -> None:
    ids = np.arange(200)
    ids = ids[buckets_of(ids, BUCKETS) == 0][:20]
    gradients = np.ones((len(ids), DIM), np.float32)
    with pytest.raises(ShoalError) as caught:
        member.client.push([next(member.uploads(ids, gradients, **change))])
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert {each.version for each in member.push(ids, gradients)} == {2}


@over_each_transport
@pytest.mark.parametrize(
    ("wanted", "code", "reason"),
    [
        (pb.PartitionPull(partition_id=0, ids=bytes(8)), "INVALID_ARGUMENT", "ROWS_INVALID"),
        (pb.PartitionPull(partition_id=1, ids=bytes(9)), "INVALID_ARGUMENT", "ROWS_INVALID"),
        (
            pb.PartitionPull(partition_id=1, ids=np.arange(50).tobytes()),
            "INVALID_ARGUMENT",
            "ROWS_INVALID",
        ),
        (
            pb.PartitionPull(partition_id=4, ids=bytes(8 * (1 << 18) + 8)),
            "RESOURCE_EXHAUSTED",
            "PAYLOAD_TOO_LARGE",
        ),
    ],
)
def test_a_wrong_pull_of_rows_gets_its_status(member, wanted, code, reason) -> None:
    request = pb.PullRequest(job_id="job", shard_map_epoch=1, partitions=[wanted])
    with pytest.raises(ShoalError) as caught:
        member.client.pull(request, lambda header: None)
    assert (caught.value.code, caught.value.reason) == (code, reason)


def test_first_values_of_a_bucket_are_refused(member) -> None:
    with pytest.raises(
        ShoalError, match="the rows of a sparse table need no initial values"
    ) as caught:
        member.client.initialize(
            list(
                member.uploads(
                    np.arange(3), np.ones((3, DIM), np.float32), sequence=0, base_version=0
                )
            )[:1]
        )
    assert caught.value.reason == "ROWS_INVALID"


def test_ids_beyond_the_declared_rows_are_refused(cluster) -> None:
    declare(cluster, rows=50)
    client = cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=30)
    client.configure_optimizer("job", pb.OptimizerSpec(name="sgd"), ASP)
    member = TableMember(client)
    assert member.pull(np.arange(50), reader=True).shape == (50, DIM)
    for wrong in (50, -1):
        with pytest.raises(ShoalError, match=f"id {wrong}: expected 0 to 49"):
            member.pull(np.array([wrong]), reader=True)


def test_killed_server_returns_with_every_row_it_acknowledged(cluster, start, tmp_path) -> None:
    declare(cluster)
    flags = (
        "--coordinator",
        cluster.address,
        "--job",
        "job",
        "--server-id",
        "server",
        "--data-dir",
        str(tmp_path / "data"),
    )
    process = start(*flags)
    member = TableMember(process.client())
    cluster.coordinator.registrations.get(timeout=30)
    member.client.configure_optimizer("job", pb.OptimizerSpec(name="sgd"), ASP)
    member.pull(np.arange(1))  # makes the member known to the server
    for number, (ids, gradients) in enumerate(steps(8)):
        member.push(ids, gradients)
        if number == 4:
            member.client.snapshot("job")
    before = member.pull(np.arange(60))
    process.end(signal.SIGKILL)
    member.client.close()
    again = TableMember(start(*flags).client())
    again.sequence = 8
    assert (again.pull(np.arange(60), reader=True) == before).all()
    assert again.versions == member.versions
    assert all(each.duplicate for each in again.push(*steps(8)[7], again=True))
    again.client.close()
