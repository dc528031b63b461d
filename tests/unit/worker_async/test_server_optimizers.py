"""An optimizer on the parameter servers is a declaration that servers, workers and error messages
read."""

from __future__ import annotations

import inspect

import pytest
import torch
from shoal_common.errors import ConfigurationError, InvalidRequestError
from shoal_common.optimizers.for_servers import SERVER_OPTIMIZERS, OptimizerDeclaration
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.shard.run_optimizer import PartitionOptimizer
from shoal_worker.parameter_servers.options import ServerOptimizer

NADAM = OptimizerDeclaration(
    name="nadam",
    torch_class="NAdam",
    defaults={
        "lr": 2e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum_decay": 4e-3,
    }
    | {"decoupled_weight_decay": 0.0, "maximize": 0.0},
    switches=frozenset({"decoupled_weight_decay", "maximize"}),
    structural=frozenset({"momentum_decay"}),
    below_one=frozenset({"beta1", "beta2"}),
    pairs={"betas": ("beta1", "beta2")},
    state=frozenset({"step", "mu_product", "exp_avg", "exp_avg_sq"}),
    state_tensors=lambda _: 2,
)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a declaration named nadam."""
    monkeypatch.setitem(SERVER_OPTIMIZERS, "nadam", NADAM)


@pytest.mark.usefixtures("new")
def test_a_new_optimizer_is_a_declaration() -> None:
    torch.manual_seed(1)
    own, there = torch.nn.Parameter(torch.arange(4.0)), torch.arange(4.0)
    optimizer = torch.optim.NAdam([own], lr=0.1, momentum_decay=0.01)
    spec = ServerOptimizer(optimizer, {id(own): "w"}).spec
    settings = optimizer_settings(name=spec.name, hyperparameters=dict(spec.hyperparameters))
    spec = PartitionSpec(
        partition_id=0, pieces=(Piece(tensor="w", offset=0, length=4),), element=BY_NAME["float32"]
    )
    built = PartitionOptimizer(there, spec, settings)
    for _ in range(3):
        own.grad = torch.randn(4)
        optimizer.step()
        built.step(own.grad)
    assert there.equal(own.detach())
    assert {name for name, *_ in built.state()} <= settings.state_names
    with pytest.raises(InvalidRequestError, match="momentum_decay determines the state of nadam"):
        settings.changed({"momentum_decay": 0.0}, [])


@pytest.mark.usefixtures("new")
def test_errors_know_a_new_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"torch\.optim\.SGD, .* and torch\.optim\.NAdam"):
        ServerOptimizer(torch.optim.Adamax([parameter]), {id(parameter): "w"})
    expected = (
        "expected one of adagrad, adam, adamw, delayed_nesterov, lamb, nadam, rmsprop, "
        "rowwise_adagrad, sgd"
    )
    with pytest.raises(InvalidRequestError, match=expected):
        optimizer_settings(name="adamax", hyperparameters={})


@pytest.mark.parametrize("declared", [*SERVER_OPTIMIZERS.values(), NADAM], ids=lambda one: one.name)
def test_a_declaration_has_torchs_names_and_defaults(declared: OptimizerDeclaration) -> None:
    signature = inspect.signature(declared.optimizer_class()).parameters
    arguments = declared.arguments(declared.defaults)
    assert {name: signature[name].default for name in arguments} == arguments
    assert declared.read(arguments) == dict(declared.defaults)
