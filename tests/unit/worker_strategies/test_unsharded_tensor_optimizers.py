"""Optimizers that need unsharded tensors or rows work under strategies that do not split tensors,
and are refused under the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import ConfigurationError
from shoal_worker.sharding.layout import UnitLayout
from torch import nn

from tests.muon_and_adamw import MuonAndAdamW

Make = Callable[[nn.Module], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "lamb": lambda net: shoal.optim.LAMB(net.parameters(), 0.05, weight_decay=0.1),
    "rowwise": lambda net: shoal.optim.RowWiseAdagrad(net.parameters(), 0.05),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), 0.05),
    "own": lambda net: MuonAndAdamW(list(net.parameters())),
}
DEALT = ["zero1", "zero2", "zero3", "fsdp", "hsdp"]
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error in float32, regardless of the dtype of the passes, because
    torch 2.11 accepts no other dtype."""
    return nn.functional.mse_loss(output.float(), targets)


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=bias),
        nn.Tanh(),
        nn.Linear(8, 8, bias=bias),
        nn.Linear(8, 2, bias=bias),
    )


def alone(
    kind: Make, *, bias: bool = True, clip: float = 0.1
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Trains in one process and returns the model's and the optimizer's state."""
    net = network(bias=bias)
    optimizer = kind(net)
    for batch in X.split(8):
        net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict(), optimizer.state_dict()


def train(
    kind: Make, strategy: str, *, bias: bool = True, clip: float = 0.1, **options: Any
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Trains one rank. Returns the full state of the model and the optimizer, and the number of
    elements of optimizer state on this rank."""
    net = network(bias=bias)
    model, optimizer = shoal.as_distributed(net, kind(net), strategy=strategy, **options)
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
    )
    for (x,) in loader:
        model.train_step(x, torch.zeros(len(x), 2), mean_square)
        model.clip_grad_norm_(clip)
        assert optimizer.step()
        optimizer.zero_grad()
    held = sum(
        v.numel()
        for own in optimizer.state.values()
        for v in own.values()
        if isinstance(v, torch.Tensor) and v.dim()
    )
    return model.full_state_dict(), optimizer.state_dict(), held


@pytest.mark.parametrize(
    ("strategy", "kind"), [*itertools.product(["ddp", "pipeline"], [*KINDS][:3]), ("ddp", "own")]
)
def test_unsharded_tensors_take_the_steps_of_one_process(strategy: str, kind: str) -> None:
    for state, _, _ in shoal.launch(lambda: train(KINDS[kind], strategy, clip=100.0), world_size=2):
        torch.testing.assert_close(
            dict(state), dict(alone(KINDS[kind], clip=100.0)[0]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "world_size"), [*itertools.product(DEALT[:4], [2, 3]), ("hsdp", 4)]
)
def test_tensors_assigned_to_ranks_take_the_steps_of_one_process(
    kind: str, strategy: str, world_size: int
) -> None:
    options = {"whole_tensors": True} if kind == "own" else {}
    options |= {"shard_size": 2} if strategy == "hsdp" else {}
    model, optimizer = alone(KINDS[kind])
    ranks = shoal.launch(lambda: train(KINDS[kind], strategy, **options), world_size=world_size)
    for state, saved, _ in ranks:
        torch.testing.assert_close(dict(state), dict(model), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(saved["state"], optimizer["state"], rtol=1e-4, atol=1e-6)
    whole = sum(
        v.numel()
        for own in optimizer["state"].values()
        for v in own.values()
        if isinstance(v, torch.Tensor) and v.dim()
    )
    # each tensor is also mirrored, or there are two replicas
    assert sum(held for _, _, held in ranks) == 2 * whole


def train_with_a_scaler(kind: Make, strategy: str) -> dict[str, Any]:
    net = network()
    model, optimizer = shoal.as_distributed(net, kind(net), strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for (x,) in shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
    ):
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state: dict[str, Any] = model.full_state_dict()
    return state


@pytest.mark.parametrize("kind", ["adafactor", "lamb"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_scaler_and_offloaded_state_change_nothing(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    expected, _ = alone(KINDS[kind])
    for state in shoal.launch(lambda: train_with_a_scaler(KINDS[kind], strategy), world_size=2):
        torch.testing.assert_close(dict(state), dict(expected), rtol=1e-5, atol=1e-6)
    for offload in ("cpu", tmp_path):
        for state, _, _ in shoal.launch(
            lambda offload=offload: train(KINDS[kind], strategy, offload=offload), world_size=2
        ):
            torch.testing.assert_close(dict(state), dict(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_passes_in_another_dtype_end_near_those_in_the_parameters_own(strategy: str) -> None:
    expected, _ = alone(KINDS["adafactor"])
    for state, _, _ in shoal.launch(
        lambda: train(KINDS["adafactor"], strategy, param_dtype=torch.bfloat16), world_size=2
    ):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("strategy", DEALT[:4])
def test_muon_takes_the_steps_of_one_process(strategy: str) -> None:
    def muon(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(net.parameters(), 0.05)

    model, optimizer = alone(muon, bias=False)
    for state, saved, _ in shoal.launch(lambda: train(muon, strategy, bias=False), world_size=3):
        torch.testing.assert_close(
            dict(state), dict(model), rtol=0, atol=2e-3
        )  # Muon computes in bfloat16, and the gradients are summed in another order
        torch.testing.assert_close(saved["state"], optimizer["state"], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("zero1", "zero3"), ("fsdp", "zero2"), ("zero2", "ddp"), ("ddp", "zero1")],
)
def test_checkpoint_continues_with_other_ranks_and_another_strategy(
    kind: str, saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    def part(strategy: str, first: int, last: int) -> Any:
        net = network()
        options = {"whole_tensors": True} if kind == "own" and strategy != "ddp" else {}
        model, optimizer = shoal.as_distributed(net, KINDS[kind](net), strategy=strategy, **options)
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
        )
        if first:
            assert shoal.resume(tmp_path)
        for (x,) in loader:
            model.train_step(x, torch.zeros(len(x), 2), mean_square)
            model.clip_grad_norm_(0.1)
            assert optimizer.step()
            optimizer.zero_grad()
            if loader.global_step == last:
                shoal.save_checkpoint(tmp_path)
                break
        return model.full_state_dict(), optimizer.state_dict()

    shoal.launch(lambda: part(saved_by, 0, 2), world_size=3)
    model, optimizer = alone(KINDS[kind])
    for state, saved in shoal.launch(lambda: part(loaded_by, 2, 3), world_size=2):
        torch.testing.assert_close(dict(state), dict(model), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(saved["state"], optimizer["state"], rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12),
    world_size=st.integers(1, 6),
)
def test_tensors_are_assigned_unsharded_and_evenly(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    layout = UnitLayout(
        shapes=tuple(torch.Size(shape) for shape in shapes),
        world_size=world_size,
        whole_tensors=True,
    )
    pieces = [layout.pieces(rank) for rank in range(world_size)]
    for index, numel in enumerate(layout.numels):
        assert sorted(own[index].length for own in pieces)[-2:] in ([0, numel], [numel])
    loads = [sum(piece.length for piece in own) for own in pieces]
    # the last tensor of the fullest rank was assigned when that rank had the least
    assert max(loads) - min(loads) <= max(layout.numels)
    elements = torch.arange(layout.numel)
    shards = [layout.shard_of(elements, rank) for rank in range(world_size)]
    assert layout.in_order(torch.cat(shards)).equal(elements)
    for own, shard in zip(pieces, shards, strict=True):
        for index, piece in enumerate(own):
            if piece.length:
                assert layout.piece(shard, piece).equal(layout.over(1).views(elements)[index])


@pytest.mark.parametrize("strategy", ["tensor"])
def test_strategies_that_shard_tensors_refuse_them(strategy: str) -> None:
    net = network()
    with pytest.raises(
        ConfigurationError, match="is not known to update each element independently"
    ):
        shoal.as_distributed(net, KINDS["lamb"](net), strategy=strategy)


class Own(torch.optim.SGD):
    """An optimizer that Shoal has no information about."""


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (
            Own,
            {},
            "Own is unknown to Shoal: pass elementwise_optimizer=True .* whole_tensors=True",
        ),
        (Own, {"whole_tensors": False}, "Own is unknown to Shoal"),
        (Own, {"whole_tensors": "yes"}, "whole_tensors='yes': expected True, False or None"),
        (
            Own,
            {"whole_tensors": True, "elementwise_optimizer": True},
            "whole_tensors=True declares that it updates whole tensors",
        ),
        (
            torch.optim.Adafactor,
            {"elementwise_optimizer": True},
            "Adafactor: it updates whole tensors; leave elementwise_optimizer out",
        ),
        (
            torch.optim.Adafactor,
            {"whole_tensors": False},
            "whole_tensors=False is wrong for Adafactor",
        ),
        (
            torch.optim.Adafactor,
            {"gradient_compression": "topk"},
            "gradient_compression='topk' with Adafactor",
        ),
        (torch.optim.LBFGS, {"whole_tensors": True}, "LBFGS updates all parameters together"),
    ],
)
def test_invalid_settings_are_refused(make: Any, options: dict[str, Any], says: str) -> None:
    net = network()
    with pytest.raises(ConfigurationError, match=says):
        shoal.as_distributed(net, make(net.parameters(), 0.1), strategy="zero2", **options)
