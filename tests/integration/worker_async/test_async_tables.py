"""One worker in the test process trains sparse tables on real servers: what its steps push, and the
effects of faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import shoal_worker.api as shoal
import torch
from shoal.parameter_servers import ModelReader
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_worker.elastic.session.session import Session
from shoal_worker.sparse_tables import row_reader
from shoal_worker.sparse_tables import worker_tables as tables
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster, Server
from tests.integration.worker_async.recommenders import (
    IDS,
    batches,
    begin_step,
    dense_twin,
    distributed,
    rows_of,
    sparse,
    train,
    versions,
)
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]


@pytest.fixture
def torchs_sparse_gradients() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        yield


@pytest.mark.parametrize("server_count", [1, 2])
def test_single_worker_takes_the_steps_of_torchs_embeddings(
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


def test_killed_server_returns_and_every_push_of_rows_counts_once(
    cluster: Make, torchs_sparse_gradients: None
) -> None:
    running = cluster(servers=2)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        killed = running.servers[0]
        for number, (users, words, labels) in enumerate(batches(8)):
            optimizer.zero_grad()
            if number in (2, 5):  # before the lookup of the rows, and before their push
                restart(killed)
            loss = nn.functional.binary_cross_entropy_with_logits(model(users, words), labels)
            if number == 4:
                restart(killed)
            loss.backward()
            optimizer.step()
        train(twin, plain)
        torch.testing.assert_close(
            rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6
        )
        assert versions(running) == {9}


def restart(server: Server) -> None:
    server.process.kill()
    server.process.wait()
    server.start()


def test_rows_survive_the_loss_of_a_primary_whose_backup_takes_over(
    cluster: Make, torchs_sparse_gradients: None
) -> None:
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
        torch.testing.assert_close(
            rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6
        )


def test_buckets_move_between_servers_while_their_rows_are_trained(
    cluster: Make, torchs_sparse_gradients: None
) -> None:
    """A server joins and gets its share of the buckets, then the first server gives all of its
    buckets away. The rows equal those of a run without moves."""
    running = cluster(servers=1, max_servers=2)
    with running.member():
        net = sparse()
        twin, plain = dense_twin(net)
        model, optimizer = distributed(net)
        for number, (users, words, labels) in enumerate(batches(24)):
            if number == 4:
                running.start_server()
            if number == 12:
                eventually(
                    lambda: len(running.servers[1].look().partitions) >= 3,
                    "the new server's buckets",
                )
                running.client.drain_server(running.job_id, "server-0")
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(users, words), labels).backward()
            optimizer.step()
        assert running.servers[0].process.wait() == 0
        train(twin, plain, 24)
        torch.testing.assert_close(
            rows_of(net)[0], twin.users.weight.detach(), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            rows_of(net)[1], twin.words.weight.detach(), rtol=1e-5, atol=1e-6
        )
        assert {each.version for each in running.servers[1].look().partitions} == {25}


def in_sync(running: AsyncCluster) -> None:
    eventually(
        lambda: any(server.in_sync for server in running.job().servers), "the backup to be in sync"
    )


def test_prefetched_rows_are_used_only_by_a_lookup_of_the_same_rows(
    session: Session, running: AsyncCluster
) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 2)
    before = rows_of(net)[0]
    ids = torch.tensor([3, 9, 3])
    net.users.prefetch(torch.tensor([9, 3, 50]))
    net.users.prefetch(torch.tensor([150]))
    net.users._source._ahead[-1][1].result()  # both servers have arrived
    begin_step(model)
    net.users(torch.arange(IDS)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(net.users(torch.tensor([7])), rows_of(net)[0][7:8])  # not of a prefetch
        assert torch.equal(net.users(ids), before[ids])  # as they were then
        assert torch.equal(net.users(ids), rows_of(net)[0][ids])
        assert not torch.equal(net.users(ids), before[ids])


def test_prefetched_rows_are_trained_with_the_version_of_their_fetch(
    session: Session, running: AsyncCluster
) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    users = torch.tensor([3, 9])
    net.users.prefetch(users)
    train(model, [optimizer], 4)
    begin_step(model)
    net.users(users).sum().backward()
    optimizer.step()
    assert optimizer.last_staleness == 4


def test_table_without_gradients_in_a_step_is_left_unchanged(
    session: Session, running: AsyncCluster
) -> None:
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


def test_non_finite_gradient_of_rows_is_not_sent_and_its_batch_can_be_skipped(
    session: Session, running: AsyncCluster
) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    (net.users(torch.tensor([5, 7])) * torch.tensor([[1.0], [float("nan")]])).sum().backward()
    model(torch.tensor([1]), torch.tensor([[1]])).sum().backward()
    with pytest.raises(
        InvalidRequestError,
        match="the gradient of table 'users' has NaN or infinite values in 1 of 3 rows, first in "
        "that of id 7",
    ):
        optimizer.step()
    assert versions(running) == {1}
    optimizer.zero_grad()
    assert optimizer.step()
    train(model, [optimizer], 1)
    assert versions(running) == {2}


def test_push_of_too_many_rows_is_refused_before_anything_is_sent(
    session: Session, running: AsyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 1)
    monkeypatch.setattr(tables, "LARGEST_PAYLOAD_BYTES", 8)
    with pytest.raises(
        LimitError,
        match=r"the batch has \d+ rows in one of its 4 buckets, .*use smaller batches, or more "
        r"buckets",
    ):
        train(model, [optimizer], 1)
    assert versions(running) == {2}


def test_failed_push_is_repeated_unchanged(
    session: Session, running: AsyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script repeats the step. The part of its batch that servers had already applied counts
    once."""
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

    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.tensor([5, 7])),
        batch_size=2,
        name="train",
        shuffle=False,
    )
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


def test_ssp_accepts_tables_and_bsp_refuses_them_with_a_reason(
    session: Session, running: AsyncCluster
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r'consistency="bsp" cannot be used with sparse tables: .* use "asp" or "ssp"',
    ):
        distributed(sparse(), consistency="bsp")


def test_inner_steps_are_refused(session: Session) -> None:
    net = sparse()
    with pytest.raises(ConfigurationError, match="inner_steps=4 cannot be used with sparse tables"):
        distributed(net, inner_steps=4, outer_optimizer=torch.optim.SGD(net.parameters(), 0.7))


def test_rows_are_trained_under_ssp_too(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net, consistency="ssp", staleness_bound=1)
    train(model, [optimizer], 5)
    assert versions(running) == {6}


def test_a_gradient_scaler_is_refused(session: Session) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.tensor([1]), torch.tensor([[1]])).sum()).backward()
    with pytest.raises(ConfigurationError, match="a GradScaler cannot be used with sparse tables"):
        scaler.step(optimizer)


def test_names_are_unique_per_table(session: Session) -> None:
    net = sparse()
    net.words.name = "users"
    with pytest.raises(
        ConfigurationError,
        match="table name='users' is also the name of another table or of a parameter",
    ):
        distributed(net)


def test_previously_trained_rows_are_not_lost_silently(session: Session) -> None:
    net = sparse()
    net.users(torch.tensor([1])).sum().backward()
    net.users.apply_gradients()
    with pytest.raises(
        ConfigurationError, match="table 'users' has 1 rows that were trained in this process"
    ):
        distributed(net)


def test_gradients_are_applied_only_by_the_step(session: Session) -> None:
    net = sparse()
    distributed(net)
    with pytest.raises(
        PreconditionError, match=r"is stored on the parameter servers, to which optimizer\.step\(\)"
    ):
        net.users.apply_gradients()


def test_rows_of_an_absent_server_are_one_clear_error(cluster: Make) -> None:
    running = cluster(servers=1, keeps_data=False)
    with running.member():
        net = sparse()
        model, optimizer = distributed(net, server_timeout=timedelta(seconds=0.3))
        train(model, [optimizer], 1)
        running.servers[0].process.kill()
        running.servers[0].process.wait()
        with pytest.raises(
            DeadlineError,
            match=r"could not read rows of a sparse table for more than 0 s \(server_timeout\)",
        ) as caught:
            net.users(torch.tensor([1]))
        assert caught.value.reason == "SERVER_AWAY"


def test_rows_beyond_the_limit_of_one_request_are_fetched_in_several(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = sparse(None)
    distributed(net)
    ids = torch.arange(5000)
    whole = net.users(ids).detach()
    monkeypatch.setattr(row_reader, "_MOST_IDS", 64)
    assert torch.equal(net.users(ids), whole)
    assert torch.equal(whole, sparse(None).users(ids))


def test_read_model_contains_no_tables(session: Session, running: AsyncCluster) -> None:
    net = sparse()
    model, optimizer = distributed(net)
    train(model, [optimizer], 2)
    with ModelReader(
        ChannelSettings(address=running.coordinator.address), running.job_id
    ) as reader:
        found = reader.state_dict()
        assert set(found) == {"out.weight", "out.bias"}
        np.testing.assert_array_equal(found["out.weight"].numpy(), net.out.weight.detach().numpy())
