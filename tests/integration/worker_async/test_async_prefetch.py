"""Prefetch: values are pulled while the next batch is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.data.record import audit
from shoal_worker.elastic.session.session import Session
from shoal_worker.parameter_servers.prefetch import Prefetch

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.in_process import backward, distributed, versions
from tests.integration.worker_async.test_async_leases import versions as versions_at_the_end
from tests.integration.worker_async.train import SAMPLES, network

Make = Callable[..., AsyncCluster]

STEPS = 6


def values(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def delayed(by: int) -> torch.Tensor:
    """Returns the result of SGD in which each gradient is computed on values that are `by` steps
    old."""
    net = network(0)
    history = [values(net)]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        torch.nn.utils.vector_to_parameters(history[max(0, step - by)].clone(), net.parameters())
        backward(net)
        torch.nn.utils.vector_to_parameters(history[-1].clone(), net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        history.append(values(net))
    return history[-1]


@pytest.mark.parametrize("late", [False, True])
def test_gradients_use_values_at_most_one_pull_old(
    session: Session, running: AsyncCluster, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """With `late`, pulled values never arrive before the next batch begins; otherwise they always
    do."""

    def is_there(self: Prefetch) -> bool:
        self.wait()
        return bool(self._pulls) and not late

    monkeypatch.setattr(Prefetch, "is_there", property(is_there))
    net = network(0)
    model, optimizer = distributed(net, prefetch=True)
    for step in range(STEPS):
        backward(model)
        before = values(net)
        assert optimizer.step()
        if not late or step == 0:
            torch.testing.assert_close(
                values(net), before, msg="values changed before the next step boundary"
            )
        optimizer.zero_grad()
        assert optimizer.last_staleness == (1 if late and step else 0)
    torch.testing.assert_close(
        torch.cat([each.flatten() for each in model.gather_full_parameters().values()]),
        delayed(int(late)),
    )
    assert versions(running) == {1 + STEPS}
    optimizer.synchronize_parameters()
    torch.testing.assert_close(values(net), delayed(int(late)))


def test_every_batch_counts_once_although_a_server_is_killed(cluster: Make) -> None:
    running = cluster(together=2)
    workers = [
        running.start_worker(epochs=2, hold_at=[9], options={"prefetch": True}) for _ in range(2)
    ]
    for worker in workers:
        worker.wait_step(9)
    server = running.servers[0]
    server.process.kill()
    server.process.wait()
    for worker in workers:
        worker.go(9)
    server.start()
    results = [worker.result() for worker in workers]
    assert sum(result["steps"] for result in results) == 2 * SAMPLES // 8
    assert results[0]["parameters"] == results[1]["parameters"]
    assert versions_at_the_end(running) == {1 + 2 * SAMPLES // 8}
    assert audit(running.records).exactly_once


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"consistency": "ssp", "staleness_bound": 2}, 'consistency="ssp"'),
        ({"consistency": "bsp"}, 'consistency="bsp"'),
        ({"delay_compensation": 0.04}, "delay_compensation=0.04"),
    ],
)
def test_prefetch_is_refused_where_values_must_be_awaited(
    session: Session, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"prefetch=True cannot be used with {named}"):
        distributed(prefetch=True, **options)
