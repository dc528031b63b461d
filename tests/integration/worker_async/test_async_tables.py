"""One worker, in the tests' own process, that trains sparse tables on real servers: what its steps push, and what faults make of it."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import shoal_worker.api as shoal
import torch
from shoal.parameter_servers import ModelReader
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import ConfigurationError, CorruptDataError, DeadlineError, InvalidRequestError, LimitError, PreconditionError
from shoal_common.rpc.channel import ChannelSettings
from shoal_worker.asynchronous import row_reader, tables
from shoal_worker.checkpoint import manifest
from shoal_worker.elastic.session import Session
from shoal_worker.tables import SparseEmbedding, SparseEmbeddingBag
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster, Server
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]
DIM = 8
IDS = 200


class Recommender(nn.Module):
    """Two tables and a dense part."""

    def __init__(self, users: nn.Module, words: nn.Module) -> None:
        super().__init__()
        self.users = users
        self.words = words
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.users(users), self.words(words)], dim=1)).squeeze(1)


def sparse(num_embeddings: int | None = IDS, **options: Any) -> Recommender:
    torch.manual_seed(0)
    users = SparseEmbedding(num_embeddings, DIM, name="users", optimizer=partial(torch.optim.Adagrad, lr=0.1), scale=0.5, **options)
    words = SparseEmbeddingBag(
        num_embeddings, DIM, name="words", mode="sum", optimizer=partial(torch.optim.SparseAdam, lr=0.01), seed=1, buckets=3
    )
    return Recommender(users, words)


def dense_twin(model: Recommender) -> tuple[Recommender, list[torch.optim.Optimizer]]:
    """The same model with torch's embeddings, and torch's optimizers for each part."""
    ids = torch.arange(IDS)
    with torch.no_grad():
        users = nn.Embedding(IDS, DIM, sparse=True, _weight=model.users(ids))
        words = nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True, _weight=model.words(ids.unsqueeze(1)))
    twin = Recommender(users, words)
    twin.out = copy.deepcopy(model.out)
    optimizers = [
        torch.optim.Adagrad(users.parameters(), 0.1),
        torch.optim.SparseAdam(list(words.parameters()), 0.01),
        torch.optim.SGD(twin.out.parameters(), 0.1),
    ]
    return twin, optimizers


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        users, words = torch.randint(0, IDS, (16,), generator=generator), torch.randint(0, IDS, (16, 3), generator=generator)
        yield users, words, ((users + words.sum(1)) % 2).float()


def distributed(net: nn.Module, **options: Any) -> tuple[Any, Any]:
    return shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd", **options)


def train(model: Any, optimizers: list[Any], count: int = 8) -> None:
    for users, words, labels in batches(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(users, words), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def begin_step(model: Any) -> None:
    """A forward pass of which nothing comes."""
    model(torch.tensor([0]), torch.tensor([[0]]))


def rows_of(net: Recommender) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return net.users(torch.arange(IDS)), net.words(torch.arange(IDS).unsqueeze(1))


def versions(running: AsyncCluster) -> set[int]:
    return {partition.version for server in running.servers for partition in server.look().partitions}


@pytest.fixture
def torchs_sparse_gradients() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        yield


@pytest.mark.parametrize("server_count", [1, 2])
def test_alone_in_its_job_a_worker_takes_the_steps_of_torchs_embeddings(
    cluster: Make, server_count: int, torchs_sparse_gradients: None
) -> None:
    running = cluster(servers=server_count, keeps_data=False)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        train(model, [optimizer])
        train(twin, plain)
        users, words = rows_of(net)
        torch.testing.assert_close(users, twin.users.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(words, twin.words.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(net.out.weight, twin.out.weight, rtol=1e-5, atol=1e-6)
        assert versions(running) == {9}
        assert optimizer.last_staleness == 0
        assert set(model.full_state_dict()) == {"out.weight", "out.bias"}
        assert torch.equal(model.clone().users(torch.arange(IDS)), users)


def test_a_server_that_is_killed_comes_back_and_every_push_of_rows_counts_once(cluster: Make, torchs_sparse_gradients: None) -> None:
    running = cluster(servers=2)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        killed = running.servers[0]
        for number, (users, words, labels) in enumerate(batches(8)):
            optimizer.zero_grad()
            if number in (2, 5):  # before the rows are looked up, and before they are pushed
                restart(killed)
            loss = nn.functional.binary_cross_entropy_with_logits(model(users, words), labels)
            if number == 4:
                restart(killed)
            loss.backward()
            optimizer.step()
        train(twin, plain)
        torch.testing.assert_close(rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6)
        assert versions(running) == {9}


def restart(server: Server) -> None:
    server.process.kill()
    server.process.wait()
    server.start()


def test_rows_survive_the_loss_of_a_primary_whose_backup_takes_over(cluster: Make, torchs_sparse_gradients: None) -> None:
    running = cluster(servers=1, backups=1)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        for number, (users, words, labels) in enumerate(batches(8)):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(users, words), labels).backward()
            optimizer.step()
            if number == 3:
                in_sync(running)
                running.servers[0].process.kill()
        train(twin, plain)
        torch.testing.assert_close(rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6)


def test_buckets_move_between_servers_while_their_rows_are_trained(cluster: Make, torchs_sparse_gradients: None) -> None:
    """A server comes and gets its share of the buckets, then the first one gives all away: the rows are as if none had moved."""
    running = cluster(servers=1, max_servers=2)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        for number, (users, words, labels) in enumerate(batches(24)):
            if number == 4:
                running.start_server()
            if number == 12:
                eventually(lambda: len(running.servers[1].look().partitions) >= 3, "the new server's buckets")
                running.client.drain_server(running.job_id, "server-0")
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(users, words), labels).backward()
            optimizer.step()
        assert running.servers[0].process.wait() == 0
        train(twin, plain, 24)
        torch.testing.assert_close(rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6)
        assert {each.version for each in running.servers[1].look().partitions} == {25}


def in_sync(running: AsyncCluster) -> None:
    eventually(lambda: any(server.in_sync for server in running.job().servers), "the backup to be in sync")


def test_prefetched_rows_are_used_by_the_lookup_that_wants_them(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 2)
    before = rows_of(net)[0]
    ids = torch.tensor([3, 9, 3])
    net.users.prefetch(torch.tensor([9, 3, 50]))
    net.users.prefetch(torch.tensor([150]))
    net.users._source._ahead[-1][1].result()  # both are here
    begin_step(model)
    net.users(torch.arange(IDS)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(net.users(torch.tensor([7])), rows_of(net)[0][7:8])  # of no prefetch
        assert torch.equal(net.users(ids), before[ids])  # as they were then
        assert torch.equal(net.users(ids), rows_of(net)[0][ids])
        assert not torch.equal(net.users(ids), before[ids])


def test_what_is_prefetched_is_trained_with_the_version_that_it_is_of(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    users = torch.tensor([3, 9])
    net.users.prefetch(users)
    train(model, [optimizer], 4)
    begin_step(model)
    net.users(users).sum().backward()
    optimizer.step()
    assert optimizer.last_staleness == 4


def test_a_table_without_gradients_in_a_step_is_left_alone(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 1)
    users, words = rows_of(net)
    begin_step(model)
    net.users(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(net)[1], words)
    assert not torch.equal(rows_of(net)[0], users)
    assert versions(running) == {2, 3}


def test_a_gradient_of_rows_that_is_not_finite_is_not_sent_and_the_batch_can_be_left_out(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    (net.users(torch.tensor([5, 7])) * torch.tensor([[1.0], [float("nan")]])).sum().backward()
    model(torch.tensor([1]), torch.tensor([[1]])).sum().backward()
    with pytest.raises(
        InvalidRequestError, match="the gradient of table 'users' has 1 of 3 rows that are NaN or infinite, the first of id 7"
    ):
        optimizer.step()
    assert versions(running) == {1}
    optimizer.zero_grad()
    assert optimizer.step()
    train(model, [optimizer], 1)
    assert versions(running) == {2}


def test_more_rows_than_a_push_may_have_are_refused_before_anything_is_sent(
    session: Session, running: AsyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 1)
    monkeypatch.setattr(tables, "LARGEST_PAYLOAD_BYTES", 8)
    with pytest.raises(LimitError, match=r"the batch has \d+ rows of one of its 4 buckets, .*take smaller batches, or more buckets"):
        train(model, [optimizer], 1)
    assert versions(running) == {2}


def test_a_push_that_failed_is_sent_again_as_it_was(session: Session, running: AsyncCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is taken again by the script: what the servers had of its batch counts once."""
    net = sparse()
    model, optimizer = distributed(net)
    before = rows_of(net)[0]
    attempts = itertools.count()
    pushed: list[bytes] = []
    push = ParameterServerClient.push

    def failing(client: ParameterServerClient, partitions: Any, **options: Any) -> Any:
        sent = list(partitions)
        first = next(attempts) == 0
        pushed.append(b"".join(bytes(data) for header, data in sent if header.rows))
        results = push(client, sent, **options)
        if first:
            raise InvalidRequestError("the network made this up")
        return results

    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(torch.tensor([5, 7])), batch_size=2, name="train", shuffle=False)
    for (users,) in loader:
        monkeypatch.setattr(ParameterServerClient, "push", failing)
        model(users, users.unsqueeze(1)).sum().backward()
        with pytest.raises(InvalidRequestError, match="made this up"):
            optimizer.step()
        assert optimizer.step()
    assert len(pushed) == 4
    assert sorted(pushed[:2]) == sorted(pushed[2:])
    assert versions(running) == {2}
    moved = (rows_of(net)[0] != before).any(dim=1).nonzero().flatten()
    assert moved.tolist() == [5, 7]


def test_ssp_takes_tables_and_bsp_says_why_it_does_not(session: Session, running: AsyncCluster) -> None:
    with pytest.raises(ConfigurationError, match=r'consistency="bsp" with sparse tables: .* use "asp" or "ssp"'):
        distributed(sparse(), consistency="bsp")


def test_inner_steps_are_refused(session: Session) -> None:
    net = sparse()
    with pytest.raises(ConfigurationError, match="inner_steps=4 with sparse tables"):
        distributed(net, inner_steps=4, outer_optimizer=torch.optim.SGD(net.parameters(), 0.7))


def test_with_ssp_rows_are_trained_too(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net, consistency="ssp", staleness_bound=1)
    train(model, [optimizer], 5)
    assert versions(running) == {6}


def test_a_gradient_scaler_is_refused(session: Session) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.tensor([1]), torch.tensor([[1]])).sum()).backward()
    with pytest.raises(ConfigurationError, match="a GradScaler with sparse tables"):
        scaler.step(optimizer)


def test_names_are_each_tables_own(session: Session) -> None:
    net = sparse()
    net.words.name = "users"
    with pytest.raises(ConfigurationError, match="table name='users' is another table's, or a parameter's"):
        distributed(net)


def test_rows_that_were_trained_before_are_not_lost_without_a_word(session: Session) -> None:
    net = sparse()
    net.users(torch.tensor([1])).sum().backward()
    net.users.apply_gradients()
    with pytest.raises(ConfigurationError, match="table 'users' has 1 rows that were trained in this process"):
        distributed(net)


def test_gradients_are_applied_by_the_step_alone(session: Session) -> None:
    net = sparse()
    distributed(net)
    with pytest.raises(PreconditionError, match=r"is on the parameter servers: optimizer\.step\(\) pushes"):
        net.users.apply_gradients()


def test_rows_of_a_server_that_stays_away_are_one_clear_error(cluster: Make) -> None:
    running = cluster(servers=1, keeps_data=False)
    with running.member():
        net = sparse()
        model, optimizer = distributed(net, server_timeout=timedelta(seconds=0.3))
        train(model, [optimizer], 1)
        running.servers[0].process.kill()
        running.servers[0].process.wait()
        with pytest.raises(DeadlineError, match=r"rows of a sparse table could not be had for more than 0 s \(server_timeout\)") as caught:
            net.users(torch.tensor([1]))
        assert caught.value.reason == "SERVER_AWAY"


def test_rows_beyond_what_one_request_may_ask_for_come_in_several(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    net = sparse(None)
    distributed(net)
    ids = torch.arange(5000)
    whole = net.users(ids).detach()
    monkeypatch.setattr(row_reader, "_MOST_IDS", 64)
    assert torch.equal(net.users(ids), whole)
    assert torch.equal(whole, sparse(None).users(ids))


def another(cluster: Make, tmp_path: Path, **settings: Any) -> AsyncCluster:
    """One with servers that have nothing."""
    directory = tmp_path / "another"
    directory.mkdir()
    return cluster(directory=directory, **settings)


def test_a_checkpoint_has_the_rows_and_makes_the_servers_write_theirs(cluster: Make, tmp_path: Path) -> None:
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


def test_fresh_servers_get_rows_and_state_of_the_checkpoint_and_go_on_to_the_last_bit(cluster: Make, tmp_path: Path) -> None:
    """`train` takes the same eight steps each time."""
    with cluster(servers=1).member():
        net = sparse()
        model, optimizer = distributed(net)
        train(model, [optimizer])
        shoal.save_checkpoint(tmp_path / "checkpoint")
        eventually((tmp_path / "checkpoint" / "step-8").exists, "the checkpoint, which is written beside the training")
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
        assert versions(running) == {9, 17}  # of what is dense the servers count anew
        shoal.shutdown()


def test_servers_that_have_rows_keep_them(cluster: Make, tmp_path: Path) -> None:
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
        shoal.shutdown()


def test_a_checkpoint_without_a_table_or_with_one_of_another_kind_is_refused(cluster: Make, tmp_path: Path) -> None:
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
            ({"spec": {"seed": 3}}, "table 'users' with seed=3, the model declares 0"),
            ({"embedding_dim": 4}, "table 'users' with embedding_dim=4, the model declares 8"),
            ({"num_embeddings": 300}, "table 'users' with num_embeddings=300, the model declares 200, which leaves ids out"),
            ({"num_embeddings": None}, "table 'users' with num_embeddings=None, the model declares 200"),
            ({"spec": {"optimizer": "sparse_adam"}}, "the state of sparse_adam, the model declares adagrad"),
            (None, "no rows of table 'users', which the model has"),
        ):
            rewrite(tmp_path / "checkpoint" / "step-2", change)
            with pytest.raises(CorruptDataError, match=said):
                shoal.resume(tmp_path / "checkpoint")
        assert versions(running) <= {0, 1}


def rewrite(checkpoint: Path, change: dict[str, Any] | None) -> None:
    """Declares the table of users otherwise than it was saved; None: leaves it out."""
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
    rest = {name: value for name, value in content.items() if name not in ("format", "version", "xxh3_64", "layout")}
    manifest.write_manifest(checkpoint, info, content["layout"], **rest)


def test_a_model_that_is_read_has_no_tables(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 2)
    with ModelReader(ChannelSettings(address=running.coordinator.address), running.job_id) as reader:
        found = reader.state_dict()
        assert set(found) == {"out.weight", "out.bias"}
        np.testing.assert_array_equal(found["out.weight"].numpy(), net.out.weight.detach().numpy())
