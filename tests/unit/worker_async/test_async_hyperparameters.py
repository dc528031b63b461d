"""The user's torch optimizer as the servers run it, and the changes that schedulers make to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_common.optimizers.for_torch import LAMB, RowWiseAdagrad
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker.parameter_servers.options import ServerOptimizer
from torch import nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def server_optimizer(optimizer: torch.optim.Optimizer) -> ServerOptimizer:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return ServerOptimizer(optimizer, {id(p): f"p{number}" for number, p in enumerate(held)})


def test_sgd_is_sent_with_all_its_settings() -> None:
    spec = server_optimizer(
        torch.optim.SGD(
            parameters(),
            lr=0.1,
            momentum=0.9,
            weight_decay=0.01,
            nesterov=True,
            maximize=True,
            dampening=0,
        )
    ).spec
    assert spec.name == "sgd"
    assert dict(spec.hyperparameters) == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.01,
        "nesterov": 1.0,
        "maximize": 1.0,
    }
    assert not spec.groups


def test_adamw_is_sent_with_all_its_settings() -> None:
    spec = server_optimizer(
        torch.optim.AdamW(
            parameters(), lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, amsgrad=True
        )
    ).spec
    assert spec.name == "adamw"
    assert dict(spec.hyperparameters) == {
        "lr": 0.1,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.2,
        "amsgrad": 1.0,
        "maximize": 0.0,
    }


def test_learning_rate_in_a_tensor_is_sent_as_its_value() -> None:
    spec = server_optimizer(torch.optim.SGD(parameters(), lr=torch.tensor(0.25))).spec
    assert spec.hyperparameters["lr"] == 0.25


def test_parameter_groups_name_their_tensors() -> None:
    first, second = parameters()
    optimizer = torch.optim.SGD(
        [
            {"params": [first], "lr": 0.1},
            {"params": [], "lr": 0.7},
            {"params": [second], "lr": 0.2},
        ],
        lr=0.5,
    )
    spec = server_optimizer(optimizer).spec
    assert [(list(group.tensors), group.hyperparameters["lr"]) for group in spec.groups] == [
        (["p0"], 0.1),
        (["p1"], 0.2),
    ]


class Halving(torch.optim.SGD):
    """A user's own optimizer, whose `step` is arbitrary."""


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adamax, lambda held: Halving(held, lr=0.1), torch.optim.LBFGS],
    ids=["adamax", "subclass", "lbfgs"],
)
def test_an_optimizer_that_servers_do_not_have_is_refused_by_name(make: Make) -> None:
    with pytest.raises(
        ConfigurationError, match=r"torch\.optim\.SGD, .* and shoal\.optim\.DelayedNesterov;"
    ):
        server_optimizer(make(parameters()))


@pytest.mark.parametrize(
    "make",
    [lambda held: torch.optim.SGD(held, 0.1, momentum=0.9), torch.optim.Adagrad],
    ids=["sgd", "adagrad"],
)
def test_an_optimizer_with_momentum_that_servers_would_lose_is_refused(make: Make) -> None:
    held = parameters()
    optimizer = make(held)
    server_optimizer(optimizer)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"has already taken steps.*pass a new one"):
        server_optimizer(optimizer)


def test_optimizer_with_empty_momentum_counts_as_unstepped() -> None:
    held = parameters()
    optimizer = torch.optim.SGD(held, 0.1, momentum=0.9)
    optimizer.state[held[0]]["momentum_buffer"] = None
    server_optimizer(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop])
def test_dtype_that_gives_nan_in_an_optimizer_is_refused_by_name(
    kind: type[torch.optim.Optimizer],
) -> None:
    half = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))]
    with pytest.raises(
        ConfigurationError, match=f"is float16, for which {kind.__name__} computes NaN"
    ):
        server_optimizer(kind(half))
    server_optimizer(kind([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]))


def test_weight_decay_that_servers_would_apply_differently_is_refused() -> None:
    optimizer = torch.optim.AdamW([{"params": parameters(), "decoupled_weight_decay": False}])
    with pytest.raises(
        ConfigurationError, match="decoupled_weight_decay=False in a parameter group of AdamW"
    ):
        server_optimizer(optimizer)


def test_change_is_one_revision_and_a_second_look_is_none() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    servers = server_optimizer(optimizer)
    assert servers.look().number == 0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert servers.look().number == 1
    assert servers.look().number == 1
    hyperparameters, groups = servers.change(servers.look())
    assert hyperparameters["lr"] == 0.5
    assert groups == []
    assert servers.spec.hyperparameters["lr"] == 1.0


def test_change_is_sent_to_each_group() -> None:
    first, second = parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    servers = server_optimizer(optimizer)
    optimizer.param_groups[1]["lr"] = 0.4
    hyperparameters, groups = servers.change(servers.look())
    assert hyperparameters["lr"] == 0.1
    assert [(list(group.tensors), group.hyperparameters["lr"]) for group in groups] == [
        (["p0"], 0.1),
        (["p1"], 0.4),
    ]
    # The setting decides which state is kept, so servers refuse to receive it again.
    assert all("amsgrad" not in group.hyperparameters for group in groups)
    assert isinstance(groups[0], pb.ParameterGroup)


def test_amsgrad_cannot_change() -> None:
    optimizer = torch.optim.AdamW(parameters())
    servers = server_optimizer(optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigurationError, match="amsgrad was changed to True"):
        servers.look()


def test_lamb_reports_tensors_with_several_trust_ratios(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard_map = coordinator_pb.ShardMap(
        tensors=[
            coordinator_pb.TensorSpec(name=name, shape=shape)
            for name, shape in (("p0", [4, 2]), ("p1", [2]))
        ],
        partitions=[
            coordinator_pb.Partition(
                pieces=[coordinator_pb.Piece(tensor_index=index, offset=offset, length=length)]
            )
            for index, offset, length in ((0, 0, 6), (0, 6, 2), (1, 0, 2))
        ],
    )
    server_optimizer(torch.optim.SGD(parameters())).check_layout(shard_map)
    server_optimizer(RowWiseAdagrad(parameters())).check_layout(shard_map)
    assert not caplog.text
    server_optimizer(LAMB(parameters())).check_layout(shard_map)
    assert "LAMB computes a separate trust ratio for each piece: p0" in caplog.text
    shard_map.partitions[1].pieces[0].length = 1
    with pytest.raises(ConfigurationError, match="parameter 'p0' has rows of 2 elements"):
        server_optimizer(RowWiseAdagrad(parameters())).check_layout(shard_map)


def test_delay_compensation_is_sent_with_the_optimizer_and_refused_with_maximize() -> None:
    held = parameters()
    names = {id(p): f"p{number}" for number, p in enumerate(held)}
    assert (
        ServerOptimizer(
            torch.optim.SGD(held), names, delay_compensation=0.04
        ).spec.delay_compensation
        == 0.04
    )
    with pytest.raises(ConfigurationError, match="negate the loss"):
        ServerOptimizer(torch.optim.SGD(held, maximize=True), names, delay_compensation=0.04)
