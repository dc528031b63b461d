"""`torch.compile(model)` and `model.compile()` on a distributed model: the results equal those
without compilation, and graphs are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from shoal import ConfigurationError
from torch import nn
from torch.utils.data import TensorDataset

# raised by torch.compile when it inspects tensors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].cumsum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(4, 16, dtype=torch.float64),
            nn.Linear(16, 4, dtype=torch.float64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(way: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Returns the losses, the trained values and the number of compiled graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    net = Net()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), minimum_parameter_group_size=1, **options
    )
    called = torch.compile(model, backend=backend) if way == "torch.compile" else model
    if way == "model.compile":
        model.compile(backend=backend)
    losses = []
    for x, y in shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=8, shuffle=False):
        loss = nn.functional.mse_loss(called(x), y)
        loss.backward()
        assert optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    called.eval()
    with torch.no_grad():
        losses.append(float(nn.functional.mse_loss(called(X), Y)))
    return losses, model.full_state_dict(), len(graphs)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("torch.compile", {"strategy": "ddp"}),
        ("torch.compile", {"strategy": "zero2"}),
        ("torch.compile", {"strategy": "zero3", "shard_modules": [Block]}),
        ("torch.compile", {"strategy": "hybrid", "data_parallel_strategy": "zero2"}),
        ("torch.compile", {"strategy": "tensor"}),
        ("model.compile", {"strategy": "zero3", "shard_modules": [Block]}),
        *(
            pytest.param(way, options, marks=pytest.mark.matrix)
            for way in ("torch.compile", "model.compile")
            for options in (
                {"strategy": "zero1"},
                {"strategy": "fsdp"},
                {"strategy": "hsdp", "shard_size": 1},
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["strategy"],
)
def test_compiled_model_trains_like_an_uncompiled_one(way: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    plain, compiled = (shoal.launch(trained, each, options, world_size=2) for each in ("", way))
    for (losses, values, _), (its_losses, its_values, _) in zip(compiled, plain, strict=True):
        assert losses == pytest.approx(its_losses, abs=1e-12)
        torch.testing.assert_close(values, its_values)
    if options["strategy"] != "tensor":  # tensor does not compile its layers
        assert sum(graphs for _, _, graphs in compiled) > 0


def with_compiled_blocks() -> nn.Module:
    net = Net()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend="eager")
    return net


def with_a_forward_of_its_own() -> nn.Module:
    """Returns a network whose first layer has a patched `forward` that computes something different
    from its class, as some libraries do."""
    net = Net()
    first = net.blocks[0].up
    plain = first.forward
    first.forward = lambda x: 3 * plain(x)
    return net


def trained_by_steps(make: Callable[[], nn.Module], strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = make()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    for x, y in shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=8, shuffle=False):
        model.train_step(x, y, nn.functional.mse_loss)
        assert optimizer.step()
        optimizer.zero_grad()
    return dict(model.full_state_dict())


def alone(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor", "hybrid"])
def test_previously_compiled_blocks_are_trained_under_every_strategy(strategy: str) -> None:
    torch.compiler.reset()
    expected = alone(with_compiled_blocks)
    for state in shoal.launch(trained_by_steps, with_compiled_blocks, strategy, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_modules_own_forward_is_called_where_no_layers_are_split(strategy: str) -> None:
    expected = alone(with_a_forward_of_its_own)
    for state in shoal.launch(trained_by_steps, with_a_forward_of_its_own, strategy, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "hybrid"])
def test_modules_own_forward_is_refused_where_layers_are_split(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'blocks\.0\.up' \(Linear\) has its own forward"):
        shoal.launch(trained_by_steps, with_a_forward_of_its_own, strategy, world_size=2)
