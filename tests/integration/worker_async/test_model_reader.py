"""A process outside the job reads a model from real servers while real workers train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_worker import api
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.train import FEATURES, network
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_while_training.py"


def reader_of(
    running: AsyncCluster, *, patience: timedelta = timedelta(seconds=60)
) -> shoal.ModelReader:
    return shoal.ModelReader(
        ChannelSettings(address=running.coordinator.address), running.job_id, patience=patience
    )


def test_reader_returns_the_workers_parameters(cluster: Make) -> None:
    """The result includes frozen parameters and other dtypes, and tied parameters once. It has no
    buffers, because each worker has its own."""
    running = cluster()
    net = nn.ModuleDict({"first": nn.Linear(FEATURES, FEATURES), "norm": nn.BatchNorm1d(FEATURES)})
    net["short"], net["frozen"] = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)
    net["tied"] = nn.Linear(FEATURES, FEATURES)
    net["tied"].weight = net["first"].weight
    net["scalar"] = nn.ParameterDict(
        {"value": nn.Parameter(torch.tensor(2.0)), "empty": nn.Parameter(torch.empty(0, 3))}
    )
    net["frozen"].requires_grad_(False)
    with running.member() as session, reader_of(running) as reader:
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        model, optimizer = api.as_distributed(
            net, torch.optim.SGD(trained, 0.1), strategy="async_sgd"
        )
        for _ in range(2):
            session.lifecycle.ensure_step()
            (net["first"](torch.ones(1, FEATURES)).sum() * net["scalar"]["value"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = reader.state_dict()
        expected = {name: parameter.detach() for name, parameter in net.named_parameters()}
        assert state.keys() == expected.keys()
        assert all(
            torch.equal(state[name], value) and state[name].dtype is value.dtype
            for name, value in expected.items()
        )
        missing, unexpected = net.load_state_dict(state, strict=False)
        assert (set(missing), unexpected) == (
            {"norm.running_mean", "norm.running_var", "tied.weight"},
            [],
        )
        channel = ChannelSettings(address=running.coordinator.address)
        whole = shoal.ParameterServerClient.state_dict(channel, running.job_id)
        assert all(
            torch.equal(whole[name], value)
            for name, value in model.gather_full_parameters().items()
        )
        with shoal.Client(channel) as client:
            received = client.state_dict(running.job_id, timeout=timedelta(seconds=60))
            servers = client.servers(running.job_id)
        assert received.keys() == state.keys()
        assert all(torch.equal(received[name], value) for name, value in state.items())
        assert sum(server.value_bytes for server in servers) == sum(
            value.nbytes for value in state.values()
        )


def test_model_is_read_repeatedly_during_training_and_unchanged_values_are_reused(
    cluster: Make,
) -> None:
    running = cluster()
    worker = running.start_worker(epochs=1, hold_at=[3, 6])
    worker.wait_step(3)
    with reader_of(running) as reader:
        assert reader.versions == {}
        first = reader.state_dict()
        assert set(reader.versions.values()) == {4}
        again = reader.state_dict()
        assert all(again[name] is first[name] for name in first)
        kept = {name: value.clone() for name, value in first.items()}
        worker.go(3)
        worker.wait_step(6)
        newer = reader.state_dict()
        assert set(reader.versions.values()) == {7}
        assert all(torch.equal(first[name], kept[name]) for name in first), (
            "what was given out stays as it is"
        )
        assert not any(torch.equal(first[name], newer[name]) for name in first)
        worker.go(6)
        worker.result()


@pytest.mark.parametrize("keeps_data", [True, False], ids=["with its data", "without"])
def test_server_that_returns_at_another_address_is_followed(
    cluster: Make, keeps_data: bool
) -> None:
    """A server without a data directory comes back with an older version, and the reader accepts
    it."""
    running = cluster(keeps_data=keeps_data)
    worker = running.start_worker(epochs=1, hold_at=[3, 4])
    worker.wait_step(3)
    with reader_of(running) as reader:
        reader.state_dict()
        server = running.servers[0]
        before = server.address
        server.process.kill()
        server.process.wait()
        server.start()
        assert server.address != before
        worker.go(3)
        worker.wait_step(4)
        held = {
            p.partition_id: p.version for each in running.servers for p in each.look().partitions
        }
        state = reader.state_dict()
        assert reader.versions == held
        assert min(held.values()) == (5 if keeps_data else 2)
        worker.go(4)
        assert state.keys() == reader.state_dict().keys()
        worker.result()


def test_a_job_without_values_is_one_clear_error(cluster: Make) -> None:
    running = cluster()
    with reader_of(running, patience=timedelta(0)) as reader:
        with pytest.raises(
            DeadlineError,
            match=r"could not read the model .* within 0 s: .* before the workers' first step",
        ):
            reader.state_dict()
        worker = running.start_worker(epochs=1, hold_at=[0])
        worker.wait_step(0)
        assert (
            eventually(reader.state_dict, "the first values").keys()
            == network(0).state_dict().keys()
        )
    with pytest.raises(UnknownResourceError, match="nothing"):
        shoal.ParameterServerClient.state_dict(
            ChannelSettings(address=running.coordinator.address), "nothing"
        )
    worker.go(0)
    worker.result()


def test_empty_place_whose_server_is_away_does_not_prevent_reading(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = cluster(servers=1)
    worker = running.start_worker(epochs=1, hold_at=[2])
    worker.wait_step(2)
    with reader_of(running) as reader:
        answer = reader._coordinator.get_shard_map(running.job_id)
        answer.shard_map.servers.add(server_index=1)  # without an address
        monkeypatch.setattr(reader._coordinator, "get_shard_map", lambda job_id: answer)
        assert reader.state_dict().keys() == network(0).state_dict().keys()
    worker.go(2)
    worker.result()


def test_closing_a_reader_ends_its_waiting_call() -> None:
    reader = shoal.ModelReader(
        ChannelSettings(address="127.0.0.1:1"), "job", patience=timedelta(minutes=10)
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.state_dict)
        eventually(reader._reading.locked, "the call")
        reader.close()
        with pytest.raises(UnavailableError, match="this reader is closed"):
            waiting.result(timeout=30)
    with pytest.raises(UnavailableError, match="create a new one"):
        reader.state_dict()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="job_id=''"):
        shoal.ModelReader(ChannelSettings(address="127.0.0.1:1"), "")
    with pytest.raises(ConfigurationError, match="patience="):
        shoal.ModelReader(
            ChannelSettings(address="127.0.0.1:1"), "job", patience=timedelta(seconds=-1)
        )


@pytest.mark.slow
def test_the_example_serves_newer_weights_while_it_trains(cluster: Make, tmp_path: Path) -> None:
    running = cluster()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
    }
    member = {
        "SHOAL_COORDINATOR": running.coordinator.address,
        "SHOAL_JOB_ID": running.job_id,
        "SHOAL_MEMBER_ID": "trains",
    }
    serving = [
        sys.executable,
        str(EXAMPLE),
        "--serve",
        running.coordinator.address,
        "--job",
        running.job_id,
    ]
    with ExitStack() as stack:

        def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**environment, **variables},
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                )
            )
            stack.callback(process.kill)
            return process

        trains = start([sys.executable, str(EXAMPLE), "--epochs", "1000"], **member)
        serves = start(serving)
        assert serves.stdout is not None
        assert trains.stdout is not None
        url = serves.stdout.readline().strip()
        assert "--serve" in trains.stdout.readline()
        assert "epoch 0 is over" in trains.stdout.readline()

        def answer() -> dict[str, float]:
            with urllib.request.urlopen(url, timeout=60) as response:
                found: dict[str, float] = json.load(response)
                return found

        first = answer()
        newer = eventually(
            lambda: (
                (found := answer())["updates"] > first["updates"]
                and found["accuracy"] > 0.7
                and found
            ),
            "newer weights",
        )
        assert newer["accuracy"] <= 1.0
