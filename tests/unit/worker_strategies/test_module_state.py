"""Modules whose `state_dict()` differs from their `named_parameters()`: renamed entries, extra
state, and layers that depend on the training mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal import ConfigurationError
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset

from tests.unit.worker_strategies.stateful_modules import KINDS, Counter, Switched

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
STRATEGIES = ["ddp", "local_sgd", "zero1", "zero3", "fsdp", "hsdp", "tensor", "pipeline", "hybrid"]
CUT = [name for name in STRATEGIES if name not in ("ddp", "local_sgd")]


def counting(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), Counter(kind), nn.Linear(8, 8), nn.Tanh(), Counter(kind), nn.Linear(8, 1)
    )


def wrapped() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(
        checkpoint_wrapper(blocks[0]), checkpoint_wrapper(blocks[1]), nn.Linear(8, 1)
    )


def renamed() -> nn.Sequential:
    """Returns a network with state dict hooks that rename the first layer's parameters and omit the
    frozen second layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    net[1].requires_grad_(False)

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in list(state):
            if key.startswith(f"{prefix}0."):
                state[f"{prefix}first.{key.rpartition('.')[2]}"] = state.pop(key)
            elif key.startswith(f"{prefix}1."):
                del state[key]

    def back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            if key.startswith(f"{prefix}first."):
                state[f"{prefix}0.{key.rpartition('.')[2]}"] = state.pop(key)

    net._register_state_dict_hook(rename)  # as torch's wrappers do
    net.register_load_state_dict_pre_hook(back)
    return net


def steps(
    model: Any, optimizer: Any, *, epochs: int = 1, after_epoch: Callable[[], object] = lambda: None
) -> None:
    loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8, shuffle=False)
    for _ in loader.epochs(epochs):
        for (x,) in loader:
            model.train_step(x, x.sum(1, keepdim=True), nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        after_epoch()


def plain(make: Callable[[], nn.Module], epochs: int = 1) -> dict[str, Any]:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(epochs):
        for x in X.split(8):
            nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(net.state_dict())


def distributed(make: Callable[[], nn.Module], strategy: str) -> tuple[Any, Any]:
    net = make()
    return shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), strategy=strategy
    )


def alike(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(found) == list(wanted) and all(
        torch.allclose(found[key], value, atol=1e-5) for key, value in wanted.items()
    )


@pytest.mark.parametrize("make", [wrapped, renamed])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "local_sgd"])
def test_state_with_other_names_than_the_parameters_is_saved_and_loaded(
    tmp_path: Path, strategy: str, make: Callable[[], nn.Module]
) -> None:
    if make is wrapped and strategy in ("pipeline", "hybrid"):
        pytest.skip(
            "a pipeline recomputes activations itself and finds no blocks in wrapped layers"
        )
    wanted, after = plain(make), plain(make, 2)

    def train() -> list[bool]:
        model, optimizer = distributed(make, strategy)
        steps(model, optimizer)
        shoal.save_checkpoint(tmp_path / strategy)
        first, data = model.full_state_dict(), model.serialize()
        clone = model.clone()
        kept = dict(getattr(clone, "module", clone).state_dict())
        steps(model, optimizer)
        second = model.full_state_dict()
        model.deserialize(data)
        return [
            alike(found, what)
            for found, what in (
                (first, wanted),
                (kept, wanted),
                (second, after),
                (model.full_state_dict(), wanted),
            )
        ]

    assert all(all(each) for each in shoal.launch(train, world_size=2))
    saved = shoal.load_full_state(tmp_path / strategy)
    assert all(torch.allclose(saved[key], value, atol=1e-5) for key, value in wanted.items())

    def resume() -> bool:
        model, _ = distributed(
            lambda: make().requires_grad_(True) if make is wrapped else make(), strategy
        )
        assert shoal.resume(tmp_path / strategy)
        return alike(model.full_state_dict(), wanted)

    assert all(shoal.launch(resume, world_size=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extra_state_is_included_wherever_the_state_is_sent(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    def train() -> tuple[Any, Any]:
        model, optimizer = distributed(lambda: counting(kind), strategy)
        steps(model, optimizer, after_epoch=lambda: shoal.save_checkpoint(tmp_path / strategy))
        model.deserialize(model.serialize())
        model.save_model(tmp_path / "model")
        model.load_model(tmp_path / "model")
        clone = model.clone()
        return model.full_state_dict()["1._extra_state"], getattr(
            clone, "module", clone
        ).state_dict()["4._extra_state"]

    passes = 12 if strategy == "pipeline" else 3  # pipeline splits each batch itself
    seen = {
        "dict": {"seen": passes},
        "number": passes,
        "tensor": torch.tensor(float(passes)),
        "none": None,
    }[kind]
    results = shoal.launch(train, world_size=2)
    assert results == [(seen, seen)] * 2

    def resume() -> list[int]:
        model, optimizer = distributed(lambda: counting(kind), strategy)
        assert shoal.resume(tmp_path / strategy)
        steps(model, optimizer, epochs=2)
        state = model.full_state_dict()
        return [state["1._extra_state"], state["4._extra_state"]]

    seen = {
        "dict": {"seen": 2 * passes},
        "number": 2 * passes,
        "tensor": torch.tensor(2.0 * passes),
        "none": None,
    }[kind]
    assert shoal.launch(resume, world_size=2) == [[seen, seen]] * 2


AROUND = ["ddp", "zero3", "tensor", "zero1", "pipeline", "fsdp", "local_sgd", "hsdp", "hybrid"]


@pytest.mark.parametrize(
    ("saves", "loads"), list(zip(AROUND, [*AROUND[1:], AROUND[0]], strict=True)), ids=str
)
def test_extra_state_is_loaded_under_another_strategy(
    tmp_path: Path, saves: str, loads: str
) -> None:
    def save() -> None:
        model, optimizer = distributed(lambda: counting("dict"), saves)
        steps(model, optimizer)
        shoal.save_checkpoint(tmp_path)

    def load() -> list[Any]:
        model, _ = distributed(lambda: counting("dict"), loads)
        assert shoal.resume(tmp_path)
        state = model.full_state_dict()
        return [state["1._extra_state"], state["4._extra_state"]]

    shoal.launch(save, world_size=2)
    seen = {"seen": 12 if saves == "pipeline" else 3}  # pipeline splits each batch itself
    assert shoal.launch(load, world_size=2) == [[seen, seen]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_unserializable_extra_state_is_refused_at_once(strategy: str) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {"made": object()}

        def set_extra_state(self, state: object) -> None:
            """Ignores the state."""

    with pytest.raises(ConfigurationError, match=r"0\._extra_state"):
        distributed(lambda: nn.Sequential(Odd(4, 8), nn.Linear(8, 1)), strategy)


@pytest.mark.parametrize("strategy", CUT)
def test_entry_computed_from_parameters_by_a_hook_is_refused_where_they_are_sharded(
    strategy: str,
) -> None:
    def halved() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        def halve(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[f"{prefix}half"] = state[f"{prefix}0.weight"].half()

        net._register_state_dict_hook(halve)
        return net

    with pytest.raises(ConfigurationError, match="'half'"):
        distributed(halved, strategy)


def transposed(width: int) -> nn.Sequential:
    """Returns a network whose first weight is transposed by hooks when it is saved and when it is
    loaded."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    net[0].register_state_dict_post_hook(save)
    net[0].register_load_state_dict_pre_hook(load)
    return net


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_load_hook_reverses_the_conversion_of_the_save_hook(
    tmp_path: Path, strategy: str, width: int
) -> None:
    def train() -> list[bool]:
        model, optimizer = distributed(lambda: transposed(width), strategy)
        steps(model, optimizer)
        shoal.save_checkpoint(tmp_path / "checkpoints")
        model.save_model(tmp_path / "model")
        weight = model.module[0].weight.detach().clone()
        state = model.full_state_dict()
        same = [torch.equal(state["0.weight"], weight.t())]
        for load in (
            lambda: model.load_full(state),
            lambda: model.load_model(tmp_path / "model"),
            lambda: model.deserialize(model.serialize()),
        ):
            load()
            same.append(torch.equal(model.module[0].weight, weight))
        return [*same, torch.equal(model.clone().module[0].weight, weight)]

    assert all(all(each) for each in shoal.launch(train, world_size=2))

    def resume() -> dict[str, Any]:
        model, _ = distributed(lambda: transposed(width), strategy)
        assert shoal.resume(tmp_path / "checkpoints")
        return dict(model.full_state_dict())

    first, second = shoal.launch(resume, world_size=2)
    assert alike(first, second)
    assert torch.equal(
        first["0.weight"].t(), shoal.load_full_state(tmp_path / "checkpoints")["0.weight"]
    )


class LoRA(nn.Linear):
    """A layer that merges its update into the weight in `eval()` and removes it in `train()`, as in
    loralib."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = (
            nn.Parameter(torch.randn(2, inputs) * 0.3),
            nn.Parameter(torch.zeros(outputs, 2)),
        )
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> LoRA:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output if self.merged else output + x @ self.a.T @ self.b.T


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(LoRA(4, 8), nn.Tanh(), LoRA(8, 8), nn.Linear(8, 1))
    net[2].eval()
    return net


@pytest.mark.parametrize(
    "strategy", ["ddp", "local_sgd", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
)
def test_evaluation_calls_the_modules_own_train_and_eval(strategy: str) -> None:
    def total(model: nn.Module, batch: Any) -> dict[str, float]:
        net = getattr(model, "module", model)
        return {
            "loss": float(model(batch[0]).square().sum()),
            "merged": float(net[0].merged and net[2].merged),
        }

    def train() -> tuple[bool, list[bool], dict[str, float]]:
        model, optimizer = distributed(adapted, strategy)
        data = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8, train=False)
        found = []
        steps(
            model,
            optimizer,
            epochs=2,
            after_epoch=lambda: found.append(shoal.evaluate(model, data, total)),
        )
        net = model.module
        return net[0].merged, [part.training for part in net], found[-1]

    for merged, modes, found in shoal.launch(train, world_size=2):
        assert not merged
        assert modes == [True, True, False, True]
        assert found["merged"] == 3


def switched() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(Switched(), nn.Linear(4, 8), nn.Tanh(), Switched(), nn.Linear(8, 1))
    net[2].eval()
    return net


def evaluate(model: Any, optimizer: Any) -> None:
    data = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8, train=False)
    shoal.evaluate(model, data, lambda model, batch: {"rows": float(len(model(batch[0])))})


def predict(model: Any, optimizer: Any) -> None:
    model.predict(X[:8])


def fit(model: Any, optimizer: Any) -> None:
    data = (X, X.sum(1, keepdim=True))
    optimizer.optimize(
        shoal.OptimizationInputData(
            training=data,
            validation=data,
            loss_fn=nn.functional.mse_loss,
            epochs=1,
            global_batch_size=8,
        )
    )


@pytest.mark.parametrize("call", [evaluate, predict, fit])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "zero2"])
def test_every_evaluation_sets_the_mode_by_the_modules_own_methods(
    strategy: str, call: Callable[[Any, Any], None]
) -> None:
    def train() -> tuple[list[bool], int]:
        net = switched()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )
        steps(model, optimizer)
        before = Switched.evaluated
        call(model, optimizer)
        evaluated = Switched.evaluated - before
        steps(model, optimizer)
        return [part.training for part in net], evaluated

    results = shoal.launch(train, world_size=2)
    assert [modes for modes, _ in results] == [[True, True, False, True, True]] * 2
    assert any(evaluated for _, evaluated in results)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "zero1", "zero2"])
def test_full_state_dict_loads_with_load_state_dict(strategy: str) -> None:
    def train() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )
        steps(model, optimizer)
        best = {name: value.clone() for name, value in model.full_state_dict().items()}
        steps(model, optimizer)
        assert not torch.equal(best["0.weight"], model.full_state_dict()["0.weight"])
        model.load_state_dict(best, strict=False)
        after = model.full_state_dict()
        assert all(torch.equal(best[name], after[name]) for name in best)
        steps(model, optimizer)

    shoal.launch(train, world_size=2)
