"""Tests of `gradient_compression=` through the public API: training on in-memory ranks with every
compressor, compressor state in checkpoints, and settings that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError
from shoal_worker.compression import compressor_names
from torch import nn

Flat = torch.Tensor

COMPRESSORS: dict[str, Any] = {name: name for name in compressor_names()} | {
    "topk": {"name": "topk", "ratio": 0.1},
    "randomk": {"name": "randomk", "ratio": 0.25},
    "powersgd": {"name": "powersgd", "rank": 2},
}
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]
CASES = [
    (strategy, name, micro)
    for strategy, name, micro in itertools.product(STRATEGIES, COMPRESSORS, (False, True))
    if name != "powersgd" or strategy == "ddp"
]
QUICK = {
    *(("ddp", name, bool(number % 2)) for number, name in enumerate(COMPRESSORS)),
    *(
        ("zero1", "bf16", True),
        ("zero2", "sign", False),
        ("zero3", "topk", True),
        ("fsdp", "int8", False),
    ),
}


def network() -> nn.Module:
    """Returns the same network on every rank, although the ranks' threads share torch's
    generator."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 12, generator=generator)
    return torch.utils.data.TensorDataset(
        x, (x @ torch.randn(12, 3, generator=generator)).argmax(1)
    )


def flat(model: Any) -> Flat:
    return torch.cat([p.flatten() for p in model.gather_full_parameters().values()])


def train(
    strategy: str,
    compression: Any,
    *,
    micro: bool = False,
    epochs: int = 6,
    lr: float = 0.2,
    **options: Any,
) -> tuple[float, float, Flat]:
    """Trains one rank. Returns the loss on all samples before and after, and the parameters."""
    net, dataset = network(), data()
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), lr),
        strategy=strategy,
        gradient_compression=compression,
        **options,
    )
    loader = shoal.ElasticDataLoader(
        dataset, global_batch_size=24, micro_batch_size=6 if micro else None
    )
    for _ in loader.epochs(epochs):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            assert optimizer.step()
            optimizer.zero_grad()
    trained = network()
    after = flat(model)
    before = loss_of(trained, dataset)
    nn.utils.vector_to_parameters(after, trained.parameters())
    return before, loss_of(trained, dataset), after


@torch.no_grad()
def loss_of(net: nn.Module, dataset: torch.utils.data.TensorDataset) -> float:
    return float(F.cross_entropy(net(dataset.tensors[0]), dataset.tensors[1]))


def launch(*arguments: Any, world_size: int = 2, **options: Any) -> list[Any]:
    return shoal.launch(
        lambda: train(*arguments, **options), world_size=world_size, backend="inmemory"
    )


@pytest.mark.parametrize(
    ("strategy", "name", "micro"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES],
)
def test_ranks_end_with_one_trained_model(strategy: str, name: str, micro: bool) -> None:
    results = launch(
        strategy, COMPRESSORS[name], micro=micro, world_size=3 if strategy == "ddp" else 2
    )
    before, after, parameters = results[0]
    assert all(torch.equal(parameters, other) for _, _, other in results)
    assert after < 0.6 * before


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3), ("int8", 5e-2)])
def test_rounding_compressors_end_close_to_uncompressed_training(
    name: str, tolerance: float
) -> None:
    plain, rounded = launch("ddp", None)[0][2], launch("ddp", name)[0][2]
    assert not torch.equal(plain, rounded)
    assert float((plain - rounded).norm() / plain.norm()) < tolerance


def test_pair_of_optimizer_and_compressor_sets_the_compression() -> None:
    def pair() -> Flat:
        net = network()
        optimizer = shoal.GradientCompressionOptimizer(
            torch.optim.SGD(net.parameters(), 0.2), COMPRESSORS["topk"]
        )
        model, wrapped = shoal.as_distributed(net, optimizer)
        return run(model, wrapped, 4)

    def setting() -> Flat:
        net = network()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.2), gradient_compression=COMPRESSORS["topk"]
        )
        return run(model, optimizer, 4)

    assert torch.equal(shoal.launch(pair, world_size=2)[1], shoal.launch(setting, world_size=2)[0])


def run(
    model: Any, optimizer: Any, steps: int, *, scaler: Any = None, overflow_at: int = -1
) -> Flat:
    """Trains in a loop without a loader. In step `overflow_at` the gradients are infinite."""
    x, y = data().tensors
    rank, size = shoal.rank(), 96 // shoal.world_size()
    for step in range(steps):
        loss = F.cross_entropy(
            model(x[rank * size : rank * size + size]), y[rank * size : rank * size + size]
        )
        if step == overflow_at:
            loss = loss * float("inf")
        if scaler is None:
            loss.backward()
            assert optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "sign"), ("ddp", "powersgd"), ("zero2", "topk")]
)
def test_residuals_follow_a_gradient_scaler(strategy: str, name: str) -> None:
    """A gradient scaler does not change the result of compressed training, because scales are
    powers of two. A skipped step leaves no residuals behind."""

    def scaled(growth: int, overflow_at: int, steps: int) -> Flat:
        net = network()
        model, optimizer = shoal.as_distributed(
            net,
            torch.optim.SGD(net.parameters(), 0.2),
            strategy=strategy,
            gradient_compression=COMPRESSORS[name],
        )
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth) if growth else None
        )
        if scaler is not None:
            shoal.register_state(scaler=scaler)
        return run(model, optimizer, steps, scaler=scaler, overflow_at=overflow_at)

    plain = shoal.launch(scaled, 0, -1, 7, world_size=2)[0]
    growing = shoal.launch(scaled, 2, -1, 7, world_size=2)[0]
    skipping = shoal.launch(scaled, 2, 3, 8, world_size=2)[0]
    if name == "powersgd":  # a QR decomposition may round differently at another scale
        torch.testing.assert_close(growing, plain)
        torch.testing.assert_close(skipping, plain)
    else:
        assert torch.equal(growing, plain)
        assert torch.equal(skipping, plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("both", [False, True])
def test_residuals_of_several_models_follow_their_own_scaler(strategy: str, both: bool) -> None:
    """Each of several models may have its own scaler without a change of the result, because scales
    are powers of two."""

    def scaled(growth: int) -> Flat:
        torch.manual_seed(0)
        nets = [torch.nn.Linear(8, 4) for _ in range(2)]
        plain = [torch.optim.SGD(net.parameters(), 0.2) for net in nets]
        models = list(
            zip(
                *shoal.as_distributed(
                    nets, plain, strategy=strategy, gradient_compression=COMPRESSORS["sign"]
                ),
                strict=True,
            )
        )
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=8.0 * 4**n, growth_interval=growth + n)
            for n in range(1 + both)
        ]
        if growth:
            shoal.register_state(
                **{f"scaler{number}": scaler for number, scaler in enumerate(scalers)}
            )
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        for (part,) in shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(x), global_batch_size=12, shuffle=False
        ):
            for number, (model, optimizer) in enumerate(models):
                loss = model(part).square().mean()
                if growth and number < len(scalers):
                    scalers[number].scale(loss).backward()
                    scalers[number].step(optimizer)
                else:
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            for scaler in scalers if growth else ():
                scaler.update()
        return torch.cat([flat(model) for model, _ in models])

    plain, growing = (
        shoal.launch(scaled, 0, world_size=2)[0],
        shoal.launch(scaled, 2, world_size=2)[0],
    )
    assert torch.equal(growing, plain)


@pytest.mark.parametrize(
    ("strategy", "name", "micro", "shards"),
    [
        ("ddp", "sign", False, 0),
        ("ddp", "powersgd", True, 0),
        ("zero2", "topk", False, 4),  # the residual of each rank as well
        ("zero2", "int8", False, 2),
    ],
)
def test_resumed_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, strategy: str, name: str, micro: bool, shards: int
) -> None:
    def half(epochs: int, resume: bool) -> Flat:
        net = network()
        model, optimizer = shoal.as_distributed(
            net,
            torch.optim.SGD(net.parameters(), 0.2),
            strategy=strategy,
            gradient_compression=COMPRESSORS[name],
        )
        loader = shoal.ElasticDataLoader(
            data(), global_batch_size=24, micro_batch_size=6 if micro else None
        )
        assert shoal.resume(tmp_path) is resume
        for epoch in loader.epochs(epochs):
            for step in loader.steps() if micro else ([batch] for batch in loader):
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                assert optimizer.step()
                optimizer.zero_grad()
            if epoch == 0 and not resume:
                shoal.save_checkpoint(tmp_path)
        return flat(model)

    went_on = shoal.launch(half, 3, False, world_size=2)[0]
    assert len(list(tmp_path.glob("step-*/shard-*"))) == shards
    assert torch.equal(shoal.launch(half, 3, True, world_size=2)[0], went_on)
    for world_size in (1, 3) if name == "topk" else ():
        elsewhere = shoal.launch(half, 3, True, world_size=world_size)[0]
        assert float((elsewhere - went_on).norm() / went_on.norm()) < 0.3


def test_trained_parameters_may_change_between_steps() -> None:
    def phases() -> Flat:
        net = network()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.2), gradient_compression=COMPRESSORS["topk"]
        )
        run(model, optimizer, 3)
        frozen = net[2].weight.clone()
        net[2].requires_grad_(False)
        run(model, optimizer, 3)
        assert torch.equal(net[2].weight, frozen)
        net[2].requires_grad_(True)
        return run(model, optimizer, 3)

    first, second = shoal.launch(phases, world_size=2)
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_compression": "zip"}, "expected one of fp16, bf16, int8"),
        ({"gradient_compression": 8}, "expected a name, a name with settings"),
        (
            {"gradient_compression": "bf16", "deterministic": True},
            "cannot be bitwise equal for every world size",
        ),
        (
            {"gradient_compression": "bf16", "strategy": "local_sgd"},
            "strategy='local_sgd' does not support gradient_compression='bf16'",
        ),
        (
            {"gradient_compression": "powersgd", "strategy": "zero1"},
            "the compressor needs whole matrices on every rank",
        ),
        (
            {"gradient_compression": "powersgd", "strategy": "fsdp"},
            "use another compressor, such as topk or int8, or use ddp",
        ),
    ],
)
def test_incompatible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    def refused() -> None:
        net = network()
        with pytest.raises(ConfigurationError, match=message):
            shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), **options)

    shoal.launch(refused, world_size=1)


def test_two_compressors_for_one_model_are_refused() -> None:
    net = network()
    pair = shoal.GradientCompressionOptimizer(torch.optim.SGD(net.parameters(), 0.1), "topk")

    def refused() -> None:
        with pytest.raises(
            ConfigurationError, match="both specify a compressor for the same model"
        ):
            shoal.as_distributed(net, pair, gradient_compression="int8")

    shoal.launch(refused, world_size=1)
    with pytest.raises(ConfigurationError, match=r"expected a torch\.optim\.Optimizer"):
        # type: ignore[arg-type]  # the wrong type is the test
        shoal.GradientCompressionOptimizer(net, "topk")
    with pytest.raises(ConfigurationError, match="expected a compressor"):
        # the wrong type is the test
        shoal.GradientCompressionOptimizer(torch.optim.SGD(net.parameters(), 0.1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [("ddp", "powersgd"), ("zero1", "topk"), ("fsdp", "topk"), ("local_sgd", None)],
)
def test_presets_choose_a_compressor_for_the_strategy(strategy: str, chosen: str | None) -> None:
    def low(**options: Any) -> Any:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        compressor = shoal.as_distributed_for_low_bandwidth(
            net, optimizer, strategy=strategy, **options
        )[0].sharding_config.compressor
        return compressor and compressor.name

    def high() -> Any:
        net = network()
        config = shoal.as_distributed_for_high_bandwidth(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )[0].sharding_config
        return config.compressor, config.bucket_cap_mb

    assert shoal.launch(low, world_size=1) == [chosen]
    assert shoal.launch(high, world_size=1) == [(None, 100)]
    if chosen:
        assert shoal.launch(lambda: low(gradient_compression="int8"), world_size=1) == ["int8"]
