"""Compressed pushes and pulls of one worker in the test process, against real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import ConfigurationError, InvalidRequestError, UnavailableError
from shoal_worker.compression.compressing_optimizer import GradientCompressionOptimizer
from shoal_worker.elastic.session.session import Session
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.in_process import backward, distributed, versions
from tests.integration.worker_async.train import FEATURES, network, problem

Make = Callable[..., AsyncCluster]


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        ("fp16", 1e-3),
        ("int8", 0.05),
        ("sign", 0.1),
        ({"name": "topk", "ratio": 0.2}, 0.25),
        ({"name": "powersgd", "rank": 2}, 0.25),
    ],
)
def test_compressed_pushes_eventually_apply_all_gradients(
    session: Session, compression: Any, tolerance: float
) -> None:
    # The gradient is the same in each step, so the residual at the end is a small part of the
    # total. powersgd starts with random values that differ between runs: its residual was 6 to 12
    # in each element, which is 0.04 to 0.08 per step.
    steps, gradient = (
        160,
        torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0)).sign() + 0.25,
    )
    net = nn.Linear(FEATURES, 16, bias=False)
    before = net.weight.detach().clone()
    optimizer = GradientCompressionOptimizer(torch.optim.SGD(net.parameters(), 0.01), compression)
    _, optimizer = shoal.as_distributed(net, optimizer, strategy="async_sgd")
    for _ in range(steps):
        session.lifecycle.ensure_step()
        net.weight.grad = gradient.clone()
        assert optimizer.step()
    moved = (before - net.weight.detach()) / 0.01 / steps
    torch.testing.assert_close(moved, gradient, rtol=0, atol=tolerance)


def test_powersgd_ranks_that_servers_do_not_support_are_refused(session: Session) -> None:
    with pytest.raises(
        ConfigurationError, match=r"powersgd with rank=65 .* support ranks up to 64"
    ):
        distributed(gradient_compression={"name": "powersgd", "rank": 65})


@pytest.mark.parametrize(
    ("compression", "error"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 0.5 / 127)]
)
def test_a_worker_has_rounded_values_and_the_servers_keep_full_precision(
    session: Session, compression: str, error: float
) -> None:
    """Frozen values and reads of the full model are never rounded."""
    net = nn.ModuleDict({"used": nn.Linear(20, 30), "frozen": nn.Linear(20, 30)})
    net["frozen"].requires_grad_(False)
    exact = {name: value.clone() for name, value in net.state_dict().items()}
    plain = torch.optim.SGD(net["used"].parameters(), 1.0)
    model, optimizer = shoal.as_distributed(
        net, plain, strategy="async_sgd", pull_compression=compression
    )
    for _ in range(3):
        session.lifecycle.ensure_step()
        for name, parameter in net["used"].named_parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
            exact[f"used.{name}"] -= 0.1
        optimizer.step()
    here, there = model.module.state_dict(), model.full_state_dict()
    for name, expected in exact.items():
        torch.testing.assert_close(there[name], expected, rtol=1e-6, atol=1e-7)
        if name.startswith("frozen"):
            assert torch.equal(here[name], expected)
        else:
            assert not torch.equal(here[name], expected)
            assert float((here[name] - expected).abs().max()) <= 1.001 * error * float(
                expected.abs().max()
            )


def test_all_workers_and_the_synchronized_model_have_the_same_rounded_values(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    model, optimizer = distributed(net, pull_compression="int8")
    for _ in range(3):
        backward(model)
        optimizer.step()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    optimizer.synchronize_parameters()
    assert all(
        torch.equal(before[name], value) for name, value in model.module.state_dict().items()
    )
    assert len(versions(running)) == 1


SPARSE: list[Any] = [{"name": "topk", "ratio": 0.1}, {"name": "powersgd", "rank": 1}]


class Pushed:
    """A worker that pushes compressed gradients of one sound matrix and of one whose gradient can
    be made to overflow, with a new batch in each step. The sound matrix has a learning rate of 1,
    so the change of its values is the sum of the gradients that were applied."""

    def __init__(self, compression: Any) -> None:
        self.net = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("sound", "wild")})
        self.net["wild"].bfloat16()
        with torch.no_grad():
            self.net["sound"].weight.zero_()
        groups = [
            {"params": self.net["sound"].parameters()},
            {"params": self.net["wild"].parameters(), "lr": 10.0},
        ]
        plain = torch.optim.SGD(groups, 1.0)
        _, self._optimizer = shoal.as_distributed(
            self.net, plain, strategy="async_sgd", gradient_compression=compression
        )
        self._random = torch.Generator().manual_seed(0)
        self.given = torch.zeros(8, 8)

    def step(
        self, *, wild: float = 0.0, counts: bool = True, gradient: torch.Tensor | None = None
    ) -> torch.Tensor:
        if gradient is None:
            gradient = torch.randint(-8, 9, (8, 8), generator=self._random).float()
        self.net["sound"].weight.grad = gradient.clone()
        self.net["wild"].weight.grad = torch.full((8, 8), wild, dtype=torch.bfloat16)
        if counts:
            self.given += gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        return gradient

    def check_that_all_was_applied(self, batches: Iterator[Any]) -> None:
        """Sends the remaining residual with gradients of zero, then compares the values with the
        sum of all gradients."""
        for _ in range(40):
            next(batches)
            self.step(gradient=torch.zeros(8, 8))
        torch.testing.assert_close(
            -self.net["sound"].weight.detach(), self.given, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("compression", SPARSE, ids=lambda compression: compression["name"])
def test_residuals_are_neither_lost_nor_doubled_when_answers_to_pushes_are_lost(
    cluster: Make, compression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pushes are applied, but their answers are lost. The worker sends them again with the
    same bytes."""
    running = cluster(keeps_data=False, servers=1)
    sent: list[list[bytes]] = []
    push = ParameterServerClient.push

    def lossy(client: ParameterServerClient, partitions: Any, **settings: Any) -> Any:
        outgoing = list(partitions)
        sent.append([bytes(payload) for _, payload in outgoing])
        results = push(client, outgoing, **settings)
        if len(sent) in (2, 5, 6):
            raise UnavailableError("the answer was lost")
        return results

    with running.member():
        worker = Pushed(compression)
        monkeypatch.setattr(ParameterServerClient, "push", lossy)
        batches = iter(shoal.ElasticDataLoader(problem(), batch_size=4, name="train"))
        for _ in range(7):
            next(batches)
            worker.step()
        assert [place for place, (one, two) in enumerate(pairwise(sent), 1) if one == two] == [
            2,
            5,
            6,
        ]
        worker.check_that_all_was_applied(batches)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("again", ["the same batch", "another batch"])
@pytest.mark.parametrize("compression", SPARSE, ids=lambda compression: compression["name"])
def test_residuals_are_neither_lost_nor_doubled_when_a_push_is_partly_refused(
    cluster: Make, compression: Any, again: str, servers: int
) -> None:
    """The script catches the error of a push that one partition accepted and another refused. For
    the partition that accepted it, the next step adds either the full gradient to the residual, or
    nothing."""
    running = cluster(keeps_data=False, servers=servers)
    with running.member():
        worker = Pushed(compression)
        batches = iter(shoal.ElasticDataLoader(problem(), batch_size=4, name="train"))
        for _ in range(3):
            next(batches)
            worker.step()
        next(batches)
        with pytest.raises(InvalidRequestError, match="NaN or infinite"):
            worker.step(wild=3e38)
        if again == "the same batch":
            worker.step(counts=False)  # another gradient: the servers applied the first one
        else:
            batches = iter(shoal.ElasticDataLoader(problem(), batch_size=4, name="other"))
            next(batches)
            worker.step()
        for _ in range(3):
            next(batches)
            worker.step()
        worker.check_that_all_was_applied(batches)
