"""Wrong arguments to the public API raise one error that states what was expected."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


def make(**options: Any) -> tuple[Any, Any]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), **options)
    return model, optimizer


def given(model: Any, optimizer: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: shoal.as_distributed(model, optimizer, **options)


def train_with(loss_fn: Any) -> None:
    model, _ = make()
    for x, y in shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=4):
        model.train_step(x, y, loss_fn)


def evaluate_with(result: Any) -> None:
    model, _ = make()
    shoal.evaluate(
        model,
        shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=4, train=False),
        lambda model, batch: result,
    )


def epochs(n: Any) -> Any:
    return shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=4).epochs(n)


def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    prune.random_unstructured(net[1], "weight", amount=0.5)
    return net


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            given(torch.optim.SGD(LINEAR.parameters(), 0.1), LINEAR),
            "model has type SGD; expected an nn.Module as the first argument",
        ),
        (
            given(LINEAR, "adamw"),
            "optimizer='adamw'; expected an optimizer made from model.parameters()",
        ),
        (given(LINEAR, torch.optim.SGD), "expected an optimizer made from model.parameters()"),
        (
            given(LINEAR, config={"deterministic": True}),
            "config={'deterministic': True}; expected a ShardingConfiguration",
        ),
        (given(LINEAR, strategy=["ddp"]), "strategy=['ddp']: expected one of ddp"),
        (
            given(LINEAR, bucket_cap_mb="25"),
            "bucket_cap_mb='25': expected a whole number of MiB, at least 1",
        ),
        (given(LINEAR, deterministic="no"), "deterministic='no': expected True or False"),
        (
            lambda: make(strategy="tensor", dropout="same"),
            "dropout='same': expected one of per_shard, as_one_process",
        ),
        (
            lambda: make(strategy="pipeline", micro_batches="4"),
            "micro_batches='4': expected a whole number, at least 1",
        ),
        (
            given(pruned(), strategy="tensor"),
            "attribute '1.weight' is computed from parameters (as by torch.nn.utils.weight_norm, "
            "spectral_norm or prune): use torch.nn.utils.parametrizations or parametrize, or call "
            "prune.remove",
        ),
        (
            lambda: train_with(lambda out, y: functional.cross_entropy(out, y, reduction="none")),
            "the loss is a tensor of shape (4,)",
        ),
        (
            lambda: train_with(lambda out, y: 0.5),
            "the loss is 0.5; expected a tensor of one element",
        ),
        (lambda: evaluate_with(3), "evaluate: fn returned 3; expected a dict of sums"),
        (lambda: evaluate_with({"right": X}), "expected a dict of sums"),
        (
            lambda: make()[1].optimize({"epochs": 3}),
            "optimize(dict): expected a shoal.OptimizationInputData",
        ),
        (lambda: list(epochs("3")), "epochs('3'): expected a whole number"),
    ],
)
def test_error_states_the_given_and_the_expected_value(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(shoal.ConfigurationError, match=re.escape(says)):
        shoal.launch(call, world_size=1)


def test_split_points_are_a_list() -> None:
    with pytest.raises(shoal.ConfigurationError, match="cut_points='1': expected a list"):
        shoal.launch(lambda: make(strategy="pipeline", cut_points="1"), world_size=2)


def test_a_model_in_torchs_ddp_is_refused() -> None:
    with pytest.raises(shoal.ConfigurationError, match=r"pass its \.module"):
        shoal.launch(
            lambda: shoal.as_distributed(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
            world_size=1,
        )


def test_single_checkpoint_is_not_mistaken_for_a_directory_of_them(tmp_path: Path) -> None:
    """Resuming from a single checkpoint instead of its directory raises an error. Otherwise the run
    would silently start from the beginning."""

    def save() -> None:
        make()
        shoal.save_checkpoint(tmp_path)

    def resume() -> bool:
        make()
        return shoal.resume(tmp_path / "step-0")

    shoal.launch(save, world_size=2)
    with pytest.raises(
        shoal.ConfigurationError, match="expected the directory passed to save_checkpoint"
    ):
        shoal.launch(resume, world_size=2)


@pytest.mark.parametrize(
    ("differing", "named"), [("seed", "seed"), ("global_batch_size", "batch size")]
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_ranks_whose_loaders_deal_differently_are_stopped_by_the_first_step(
    strategy: str, differing: str, named: str
) -> None:
    """Ranks whose loaders differ are stopped by the first step. Otherwise they would silently train
    some samples twice and skip others."""

    def rank() -> None:
        model, optimizer = make(strategy=strategy)
        loader = shoal.ElasticDataLoader(
            TensorDataset(X, Y), **{"global_batch_size": 2, "seed": 0, differing: 2 + shoal.rank()}
        )
        for x, y in loader:
            model.train_step(x, y, functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        shoal.PreconditionError,
        match=rf"in different ways \({named}: rank 0 has 2, rank 1 has 3\)",
    ) as failure:
        shoal.launch(rank, world_size=2)
    assert failure.value.reason == "RANKS_DIVERGED"


@pytest.mark.usefixtures("fresh_session")
def test_a_second_optimizer_of_the_models_parameters_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    other = torch.optim.Adam(net[1].parameters(), 0.1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net[0].parameters(), 0.1))
    outside = nn.Parameter(torch.ones(2))
    model(X).sum().backward()
    outside.sum().backward()
    with pytest.raises(
        ConfigurationError, match=r"a second optimizer \(Adam\) stepped parameters of the model"
    ):
        other.step()
    torch.optim.Adam([outside], 0.1).step()
    assert optimizer.step()


@pytest.mark.usefixtures("fresh_session")
def test_parameter_group_added_after_as_distributed_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    raw = torch.optim.SGD(net[0].parameters(), 0.1)
    net[1].requires_grad_(False)
    model, optimizer = shoal.as_distributed(net, raw)
    raw.add_param_group({"params": net[1].parameters()})
    model(X).sum().backward()
    with pytest.raises(ConfigurationError, match="have 2 parameter groups instead of 1"):
        optimizer.step()


@pytest.mark.usefixtures("fresh_session")
def test_optimizer_composed_of_others_steps_them() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    net = nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(net, Lookahead(torch.optim.SGD(net.parameters(), 0.1)))
    before = net.weight.detach().clone()
    model(X).sum().backward()
    assert optimizer.step()
    assert not torch.equal(net.weight, before)
    shoal.shutdown()
    torch.optim.Adam(net.parameters(), 0.1).step()
