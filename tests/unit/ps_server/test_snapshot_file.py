"""A snapshot is read exactly as it was written, or refused. It is never pickled and never partly
written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_common.formats.wire import checksum
from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Consistency, ConsistencyMode, MemberClock
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import ParameterGroup, optimizer_settings
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import FORMAT_VERSION, Members, ServerImage, ServerState, dumps
from shoal_ps_server.storage.snapshot import FORMAT, read_snapshot, write_snapshot

CLOCKS = {"a": MemberClock(clock=12, origin=-100), "b": MemberClock(clock=10)}


@pytest.fixture
def image(make) -> ServerImage:
    """Image of a server with three trained partitions of different types, one of which has two
    tensors with separate updates, and a partition without values."""
    optimizer = optimizer_settings(
        name="adamw",
        hyperparameters={"lr": 0.1},
        groups=[ParameterGroup(tensors=frozenset({"bias"}), hyperparameters={"weight_decay": 0.0})],
    )
    specs = (
        make.spec(0),
        make.spec(4, length=3, dtype="bfloat16", tensor="bias"),
        make.packed(5, ("first", 4), ("second", 2)),
        make.spec(6, tensor="unused"),
    )
    shard = make.shard(*specs[:3], optimizer=optimizer)
    shard.push(make.upload(torch.ones(6), specs[2]))
    shard.push(make.upload(torch.ones(2), specs[2], absent=[0], sequence=2))
    for step in (1, 2):
        shard.push(make.upload(torch.arange(6), specs[0], sequence=step, base_version=step))
    shard.push(make.upload(torch.ones(3), specs[1], member="b", batch=2**64 - 1))
    shard.adopt(make.layout(*specs))
    state = ServerState(
        job_id="job",
        server_id="server",
        layout=make.layout(*specs, epoch=3),
        configuration=Configuration(
            configured=optimizer,
            optimizer=optimizer.changed({"lr": 0.05}, []),
            consistency=Consistency(mode=ConsistencyMode.SSP, bound=4),
            revision=9,
        ),
        membership=Members(
            generation=7,
            members=frozenset({"a", "b"}),
            evicted={"c": 6, "b": 5},
            clocks=CLOCKS,
            slowest_clock=10,
        ),
        batches=((2**63, 2**63 + 7), (5, 6)),
        journal=3,
    )
    images = tuple(
        taken for number in shard.partition_ids() if (taken := shard.image(number)) is not None
    )
    return ServerImage(state=state, partitions=images)


def assert_same(left: ServerImage, right: ServerImage) -> None:
    assert left.state == right.state
    assert list(left.state.membership.evicted) == list(right.state.membership.evicted)
    assert len(left.partitions) == len(right.partitions)
    for one, other in zip(left.partitions, right.partitions, strict=True):
        for field in ("spec", "version", "sequences", "batches", "left"):
            assert getattr(one, field) == getattr(other, field)
        assert set(one.state()) == set(other.state())
        assert torch.equal(one.values, other.values)
        assert all(torch.equal(one.state()[name], other.state()[name]) for name in one.state())


def test_sums_over_rows_and_values_for_delay_compensation_are_read_back_too(
    make, tmp_path, image
) -> None:
    optimizer = optimizer_settings(
        name="rowwise_adagrad", hyperparameters={}, delay_compensation=0.04
    )
    piece = Piece(tensor="table", offset=4, length=8, row=4)
    spec = PartitionSpec(
        partition_id=0,
        pieces=(piece, replace(piece, tensor="bias", row=1)),
        element=BY_NAME["bfloat16"],
    )
    shard = make.shard(spec, optimizer=optimizer)
    for member in "ab":
        shard.note_pull(0, member)
    shard.push(make.upload(torch.ones(16), spec))
    shard.note_pull(0, "a")
    configuration = Configuration(
        configured=optimizer, optimizer=optimizer, consistency=Consistency()
    )
    state = replace(image.state, layout=make.layout(spec), configuration=configuration)
    written = ServerImage(state=state, partitions=(shard.image(0),))
    write_snapshot(tmp_path / "snapshot", written)
    found = read_snapshot(tmp_path / "snapshot")
    assert_same(found, written)
    assert {name: tuple(tensor.shape) for name, tensor in found.partitions[0].state().items()} == {
        "0:sum": (2,),
        "1:sum": (8,),
    }
    assert found.partitions[0].pulled == {"a": 2, "b": 1}
    assert [
        (version, values.tolist()) for version, values in found.partitions[0].base_values.items()
    ] == [(1, [0.0] * 16)]

    (partition,) = written.partitions
    wrong = replace(
        partition,
        runs=(replace(partition.runs[0], state={"sum": torch.zeros(8)}), partition.runs[1]),
    )
    write_snapshot(tmp_path / "snapshot", replace(written, partitions=(wrong,)))
    with pytest.raises(CorruptDataError, match=r"sum of partition 0 is torch\.float32\[8\]"):
        read_snapshot(tmp_path / "snapshot")


def test_snapshot_is_read_back_as_written(tmp_path, image) -> None:
    path = tmp_path / "snapshot"
    assert write_snapshot(path, image) == path.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]
    found = read_snapshot(path)
    assert found is not None
    assert_same(found, image)


def test_restored_shard_trains_on_unchanged(make, tmp_path, image) -> None:
    write_snapshot(tmp_path / "snapshot", image)
    found = read_snapshot(tmp_path / "snapshot")
    configuration = found.state.configuration
    before = Shard(optimizer=configuration.optimizer, restored=image.partitions)
    after = Shard(optimizer=configuration.optimizer, restored=found.partitions)
    spec = image.partitions[0].spec
    for shard in (before, after):
        assert shard.push(make.upload(torch.ones(6), spec, sequence=2, base_version=2)).duplicate
        assert (
            shard.push(make.upload(torch.ones(6), spec, sequence=3, base_version=2)).staleness == 1
        )
    assert torch.equal(make.values(before), make.values(after))


def test_snapshot_can_be_opened_by_other_tools(tmp_path, image) -> None:
    write_snapshot(tmp_path / "snapshot", image)
    tensors = load_file(tmp_path / "snapshot")
    assert torch.equal(tensors["0:values"], image.partitions[0].values)
    assert "4:state:0:exp_avg_sq" in tensors


def test_restored_clocks_continue(image) -> None:
    clocks = image.state.membership.restored_clocks()
    assert {member: clocks.lead(member) for member in clocks.members} == {"a": 2, "b": 0}
    clocks.follow(["a", "b", "joined since"])
    for member, finished in (("a", 112), ("b", 110), ("joined since", 500)):
        clocks.report(member, finished)
    assert {member: clocks.lead(member) for member in clocks.members} == {
        "a": 2,
        "b": 0,
        "joined since": 0,
    }


def test_missing_file_is_no_snapshot(tmp_path) -> None:
    assert read_snapshot(tmp_path / "none") is None


def refused(path: Path) -> str:
    with pytest.raises(CorruptDataError) as caught:
        read_snapshot(path)
    assert str(path) in str(caught.value)
    return caught.value.reason


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_changed_bit_is_detected_anywhere(tmp_path, image, data) -> None:
    path = tmp_path / "snapshot"
    write_snapshot(path, image)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert refused(path) in {"SNAPSHOT_CORRUPT", "SNAPSHOT_FOREIGN"}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_truncated_or_lengthened_file_is_refused(tmp_path, image, data) -> None:
    path = tmp_path / "snapshot"
    size = write_snapshot(path, image)
    content = path.read_bytes()
    kept = data.draw(st.integers(0, size - 1))
    path.write_bytes(content[:kept])
    assert refused(path) == "SNAPSHOT_CORRUPT"
    path.write_bytes(content + bytes(kept + 1))
    assert refused(path) == "SNAPSHOT_CORRUPT"


@pytest.mark.parametrize(
    "content", [b"", b"not a snapshot", b"\x80\x04K\x01.", bytes(64), b"\xff" * 64]
)
def test_file_of_another_kind_is_refused(tmp_path, content) -> None:
    (tmp_path / "snapshot").write_bytes(content)
    assert refused(tmp_path / "snapshot") == "SNAPSHOT_CORRUPT"


def test_directory_in_place_of_the_file_is_refused(tmp_path) -> None:
    assert refused(tmp_path) == "SNAPSHOT_CORRUPT"


def test_another_programs_safetensors_file_is_refused_as_such(tmp_path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "snapshot", metadata={"format": "pt"})
    assert refused(tmp_path / "snapshot") == "SNAPSHOT_FOREIGN"


def rewritten(path: Path, **changes: object) -> None:
    """Rewrites the file with other metadata and the matching digest."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = dumps({**json.loads(header["__metadata__"]["shoal"]), **changes})
    header["__metadata__"] = {
        "format": FORMAT,
        "shoal": text,
        "xxh3": f"{checksum(text.encode()):016x}",
    }
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def test_a_newer_releases_snapshot_is_refused_as_such(tmp_path, image) -> None:
    write_snapshot(tmp_path / "snapshot", image)
    rewritten(tmp_path / "snapshot", version=FORMAT_VERSION + 1)
    assert refused(tmp_path / "snapshot") == "SNAPSHOT_NEWER"


@pytest.mark.parametrize(
    "changes",
    [{"partitions": []}, {"state": {}}, {"partitions": [{"partition_id": 77, "digests": {}}]}],
)
def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path, image, changes) -> None:
    write_snapshot(tmp_path / "snapshot", image)
    rewritten(tmp_path / "snapshot", **changes)
    assert refused(tmp_path / "snapshot") == "SNAPSHOT_CORRUPT"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, image) -> None:
    path = tmp_path / "snapshot"
    write_snapshot(path, image)
    before = path.read_bytes()
    broken = PartitionImage(
        spec=image.partitions[0].spec,
        version=1,
        values=torch.zeros(2, dtype=torch.int8),
        runs=(),
        sequences={},
        batches={},
        left=[],
    )
    with pytest.raises(KeyError):
        write_snapshot(path, ServerImage(state=image.state, partitions=(broken,)))
    path.unlink()
    path.mkdir()  # makes the rename fail
    with pytest.raises(OSError, match="directory"):
        write_snapshot(path, image)
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]
    path.rmdir()
    path.write_bytes(before)
    assert read_snapshot(path) is not None


def test_a_data_directory_belongs_to_one_server_at_a_time(tmp_path) -> None:
    with (
        DataDirectory(tmp_path / "data"),
        pytest.raises(ConfigurationError, match="is in use by another server"),
    ):
        DataDirectory(tmp_path / "data")
    DataDirectory(tmp_path / "data").close()


def test_data_directory_that_cannot_be_created_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="data_dir="):
        DataDirectory(tmp_path / "file" / "data")


@pytest.mark.parametrize("names", [("other", "server"), ("job", "other")])
def test_another_jobs_or_servers_snapshot_is_refused(tmp_path, image, names) -> None:
    with DataDirectory(tmp_path) as directory:
        write_snapshot(directory.snapshot, image)
        with pytest.raises(ConfigurationError, match="belongs to server 'server' of job 'job'"):
            directory.read(job_id=names[0], server_id=names[1])


def test_leftovers_of_a_dying_server_are_removed_only_after_a_successful_read(
    tmp_path, image
) -> None:
    with DataDirectory(tmp_path) as directory:
        leftover = tmp_path / "snapshot.safetensors.123.tmp"
        leftover.write_bytes(b"half")
        directory.snapshot.write_bytes(b"damaged")
        with pytest.raises(CorruptDataError):
            directory.read(job_id="job", server_id="server")
        assert leftover.exists()
        write_snapshot(directory.snapshot, image)
        directory.read(job_id="job", server_id="server")
        assert not leftover.exists()
