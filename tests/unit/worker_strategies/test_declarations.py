"""A strategy is a declaration. All code that lists strategies reads the declarations, so a new
strategy needs one file and one line in the registry."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import shoal
import shoal_worker
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.replicated.engine import ReplicatedEngine
from shoal_worker.strategies import registry
from shoal_worker.strategies.declaration import Strategy
from torch import nn

_TABLE = Path(__file__).parents[3] / "docs/strategies/README.md"
_DEEPEST = 4
"""Maximum depth of an inheritance chain, including torch's class."""


class NewModel(shoal.ShardedModel):
    """A model class that a user adds for a strategy named `new`."""

    declaration: ClassVar[Strategy] = Strategy(
        name="new",
        engine=ReplicatedEngine,
        memory="P + G + O",
        sent="2P(N-1)/N",
        a_death="loses nothing",
        options=frozenset({"sparkle"}),
        settings=frozenset({"offload"}),
        compressor="bf16",
        complex_parameters=True,
    )


class NewOptimizer(shoal.ShardedOptimizer):
    """The optimizer class that belongs to `NewModel`."""


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the strategy `new` by adding its line to the registry."""
    monkeypatch.setitem(registry._STRATEGIES, "new", (__name__, "NewModel", "NewOptimizer"))


def trained(strategy: str, **options: Any) -> dict[str, torch.Tensor]:
    def body() -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 2)),
            global_batch_size=4,
        )
        for x, y in loader:
            model.train_step(x, y, nn.functional.mse_loss)
            optimizer.step()
        assert type(model).__name__.startswith("New" if strategy == "new" else "DDP")
        return model.full_state_dict()

    return shoal.launch(body, world_size=2)[0]


@pytest.mark.usefixtures("new")
def test_a_new_strategy_is_a_file_and_a_line() -> None:
    there = trained("new", sparkle=True)
    assert all(value.equal(there[name]) for name, value in trained("ddp").items())


@pytest.mark.usefixtures("new", "fresh_session")
def test_errors_and_presets_know_a_new_strategy() -> None:
    def refused(**options: Any) -> str:
        net = nn.Linear(2, 2, dtype=options.pop("dtype", None))
        with pytest.raises(ConfigurationError) as raised:
            shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), **options)
        return str(raised.value)

    assert "expected one of ddp, " in refused(strategy="none")
    assert "async_sgd, new" in refused(strategy="none")
    assert "async_sgd or new" in refused(strategy="hsdp", gradient_compression="topk")
    assert "hsdp or new, which shard the optimizer state" in refused(strategy="ddp", offload="cpu")
    assert "use ddp, local_sgd or new" in refused(strategy="zero1", dtype=torch.complex64)
    assert "its options are sparkle" in refused(strategy="new", glitter=True)
    assert registry.compressor_for("new") == "bf16"


def test_table_of_strategies_matches_their_declarations() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")]
        for line in _TABLE.read_text().splitlines()
        if line.startswith("| [")
    ]
    documented = {
        name: row[1:] for row in rows for name in re.findall(r"\[(\w+)\]\(\w+\.md\)", row[0])
    }
    assert documented == {
        one.name: [one.memory, one.sent, one.a_death] for one in registry.declarations()
    }


def test_a_declaration_has_the_name_of_its_line() -> None:
    assert [one.name for one in registry.declarations()] == list(registry.names())


def depth(kind: type) -> int:
    """Returns the length of the inheritance chain from `kind` up to the first class that is not the
    worker's."""
    plain = (
        object,
        *(base for base in kind.__mro__ if base.__module__ in ("abc", "typing", "builtins")),
    )
    return 1 + max(
        (depth(base) if is_workers(base) else 1 for base in kind.__bases__ if base not in plain),
        default=0,
    )


def is_workers(kind: type) -> bool:
    return kind.__module__.split(".")[0] == shoal_worker.__name__


def test_inheritance_is_at_most_three_levels_deep() -> None:
    modules = (
        one.name
        for one in pkgutil.walk_packages(shoal_worker.__path__, "shoal_worker.")
        if not one.name.endswith("__main__")
    )
    kinds = {
        kind
        for name in modules
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if is_workers(kind)
    }
    assert len(kinds) > 300
    assert {kind.__qualname__: depth(kind) for kind in kinds if depth(kind) > _DEEPEST} == {}
