"""Extra state of modules, and modules that depend on the training mode, under async_sgd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal_worker.api as shoal
import torch
from shoal_worker.elastic.session.session import Session
from shoal_worker.strategies.fitting import OptimizationInputData
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.in_process import backward, distributed
from tests.integration.worker_async.train import (
    FEATURES,
    counting,
    extra_state,
    network,
    problem,
    squared_error,
)
from tests.unit.worker_strategies.stateful_modules import Switched

Make = Callable[..., AsyncCluster]


@pytest.mark.parametrize("together", [2, 1], ids=["from the start", "joiner"])
def test_worker_starts_with_a_peers_extra_state(cluster: Make, together: int) -> None:
    """The scripts count passes from different numbers. A joiner arrives after three passes of its
    peer, which offers its state as of one of its last step boundaries."""
    running = cluster(together=together, keeps_data=False)
    at = 3 if together == 1 else 0
    first = running.start_worker(seen=100, hold_at=[at])
    if together == 1:
        first.wait_step(at)
    second = running.start_worker(seen=500, hold_at=[0])
    for worker, step in ((first, at), (second, 0)):
        worker.wait_step(step)
    rank_0 = int(running.job().generation.ranks[0].member_id.split("-")[1])
    for worker, step in ((first, at), (second, 0)):
        worker.go(step)
    counts = [worker.result()["first_seen"] for worker in (first, second)]
    own = [100, 500]
    assert counts[rank_0] == [own[rank_0]] * 4
    *received, none = counts[1 - rank_0]
    assert len(set(received)) == 1
    assert own[rank_0] <= received[0] <= own[rank_0] + at
    assert none == own[1 - rank_0]  # the state None contains no count


def test_extra_state_is_in_checkpoints_and_in_every_transferred_state(
    cluster: Make, tmp_path: Path
) -> None:
    def train(name: str, resumes: bool) -> list[list[Any]]:
        (tmp_path / name).mkdir()
        running = cluster(directory=tmp_path / name, servers=1, keeps_data=False)
        with running.member():
            model, optimizer = distributed(counting(0, network(0)))
            if resumes:
                assert shoal.resume(tmp_path / "checkpoints")
            for _ in range(3):
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
            shoal.save_checkpoint(tmp_path / "checkpoints")
            return [
                extra_state(state)
                for state in (model.full_state_dict(), model.clone().state_dict())
            ]

    def seen(passes: int) -> list[Any]:
        return [{"seen": passes}, passes, torch.tensor(float(passes)), None]

    assert train("first", resumes=False) == [seen(3)] * 2
    assert extra_state(shoal.load_full_state(tmp_path / "checkpoints")) == seen(3)
    assert train("second", resumes=True) == [seen(6)] * 2


def test_extra_state_is_serialized_and_loaded(session: Session, tmp_path: Path) -> None:
    net = counting(7, network(0))
    model, _ = distributed(net)
    data = model.serialize()
    model.save_model(tmp_path / "model")
    for load in (lambda: model.deserialize(data), lambda: model.load_model(tmp_path / "model")):
        for part in net[:4]:
            part.seen = 0
        load()
        assert [part.seen for part in net[:3]] == [7, 7, 7]


def evaluate(model: Any, optimizer: Any) -> None:
    data = shoal.ElasticDataLoader(problem(), batch_size=64, train=False)
    shoal.evaluate(model, data, squared_error)


def predict(model: Any, optimizer: Any) -> None:
    model.predict(torch.ones(4, FEATURES))


def fit(model: Any, optimizer: Any) -> None:
    optimizer.optimize(
        OptimizationInputData(
            training=problem(),
            validation=problem(),
            loss_fn=nn.functional.mse_loss,
            epochs=1,
            global_batch_size=64,
        )
    )


@pytest.mark.parametrize("call", [evaluate, predict, fit])
def test_every_evaluation_sets_the_mode_by_the_modules_own_methods(
    session: Session, call: Callable[[Any, Any], None]
) -> None:
    net = nn.Sequential(Switched(), network(0), nn.Tanh(), Switched())
    net[2].eval()
    model, optimizer = distributed(net)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    before = Switched.evaluated
    call(model, optimizer)
    assert Switched.evaluated > before
    assert [part.training for part in net] == [True, True, False, True]
    backward(model)
    optimizer.step()
