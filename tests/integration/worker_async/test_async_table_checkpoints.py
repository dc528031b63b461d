"""Checkpoints of sparse tables under async_sgd, with one worker in the test process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import shoal_worker.api as shoal
import torch
from shoal_common.errors import CorruptDataError
from shoal_worker.checkpoint import manifest

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.recommenders import (
    begin_step,
    distributed,
    rows_of,
    sparse,
    train,
    versions,
)
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]


def another(cluster: Make, tmp_path: Path, **settings: Any) -> AsyncCluster:
    """Returns another cluster, whose servers have no data."""
    directory = tmp_path / "another"
    directory.mkdir()
    return cluster(directory=directory, **settings)


def test_a_checkpoint_has_the_rows_and_makes_the_servers_write_theirs(
    cluster: Make, tmp_path: Path
) -> None:
    running = cluster(servers=2)
    with running.member():
        net = sparse()
        model, optimizer = distributed(net)
        train(model, [optimizer], 2)
        users, words = rows_of(net)
        shoal.save_checkpoint(tmp_path / "checkpoint")
        shoal.shutdown()
    assert set(shoal.load_full_state(tmp_path / "checkpoint")) == {"out.weight", "out.bias"}
    assert all(list(server.data.glob("snapshot*")) for server in running.servers)
    for name, buckets, rows in (("users", 4, users), ("words", 3, words)):
        files = sorted((tmp_path / "checkpoint" / "step-2").glob(f"rows-{name}-*.safetensors"))
        assert len(files) == buckets
        loaded = [safetensors.torch.load_file(file) for file in files]
        ids = torch.cat([each["ids"] for each in loaded])
        assert len(ids) == len(ids.unique()) > 20
        assert torch.equal(torch.cat([each["rows"] for each in loaded]), rows[ids])


def test_fresh_servers_receive_checkpointed_rows_and_continue_bit_for_bit(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call to `train` takes the same eight steps."""
    with cluster(servers=1).member():
        net = sparse()
        model, optimizer = distributed(net)
        train(model, [optimizer])
        shoal.save_checkpoint(tmp_path / "checkpoint")
        eventually(
            (tmp_path / "checkpoint" / "step-8").exists,
            "the checkpoint, which is written beside the training",
        )
        then = rows_of(net)
        train(model, [optimizer])
        through = [*rows_of(net), net.out.weight.detach().clone()]
        shoal.shutdown()
    running = another(cluster, tmp_path, servers=2)
    with running.member():
        again = sparse()
        model, optimizer = distributed(again)
        assert shoal.resume(tmp_path / "checkpoint")
        assert all(map(torch.equal, rows_of(again), then))  # before the first step, too
        train(model, [optimizer])
        assert all(map(torch.equal, [*rows_of(again), again.out.weight], through))
        assert versions(running) == {9, 17}  # versions of dense partitions start anew
        assert caplog.text.count("Their momentum and moments start from zero") == 1
        shoal.shutdown()


def test_servers_with_rows_keep_them(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = cluster(servers=1)
    with running.member() as first:
        net = sparse()
        model, optimizer = distributed(net)
        train(model, [optimizer], 2)
        shoal.save_checkpoint(tmp_path / "checkpoint")
        train(model, [optimizer], 3)
        newest = rows_of(net)
        first.close(failed="the job is to go on without this worker")
    with running.member():
        again = sparse()
        model, optimizer = distributed(again)
        assert shoal.resume(tmp_path / "checkpoint")
        begin_step(model)
        assert all(map(torch.equal, rows_of(again), newest))
        assert "moments start from zero" not in caplog.text
        shoal.shutdown()


def test_a_checkpoint_without_a_table_or_with_one_of_another_kind_is_refused(
    cluster: Make, tmp_path: Path
) -> None:
    with cluster(servers=1, keeps_data=False).member():
        net = sparse(buckets=2)
        model, optimizer = distributed(net)
        train(model, [optimizer], 2)
        shoal.save_checkpoint(tmp_path / "checkpoint")
        shoal.shutdown()
    running = another(cluster, tmp_path, servers=1, keeps_data=False)
    with running.member():
        distributed(sparse(max_rows=100, buckets=2))
        for change, said in (
            ({"spec": {"seed": 3}}, "table 'users' with seed=3, but the model declares 0"),
            ({"embedding_dim": 4}, "table 'users' with embedding_dim=4, but the model declares 8"),
            (
                {"num_embeddings": 300},
                "table 'users' with num_embeddings=300, but the model declares 200, which "
                "excludes some of its ids",
            ),
            (
                {"num_embeddings": None},
                "table 'users' with num_embeddings=None, but the model declares 200",
            ),
            (
                {"spec": {"optimizer": "sparse_adam"}},
                "optimizer state of sparse_adam, but the model declares adagrad",
            ),
            (None, "no rows for table 'users' of the model"),
        ):
            rewrite(tmp_path / "checkpoint" / "step-2", change)
            with pytest.raises(CorruptDataError, match=said):
                shoal.resume(tmp_path / "checkpoint")
        assert versions(running) <= {0, 1}


def rewrite(checkpoint: Path, change: dict[str, Any] | None) -> None:
    """Rewrites the checkpoint's manifest: it declares the table of users with these settings
    instead of the saved ones. `change` is None: removes the table."""
    original = checkpoint.parent / "original.json"
    if not original.exists():
        shutil.copy(checkpoint / "checkpoint.json", original)
    content = json.loads(original.read_text())
    if change is None:
        del content["rows"]["users"]
    else:
        declared = content["rows"]["users"]["declared"]
        declared["spec"] |= change.get("spec", {})
        declared |= {name: value for name, value in change.items() if name != "spec"}
    info = manifest.CheckpointInfo(**content.pop("info"))
    rest = {
        name: value
        for name, value in content.items()
        if name not in ("format", "version", "xxh3_64", "layout")
    }
    manifest.write_manifest(checkpoint, info, content["layout"], **rest)
