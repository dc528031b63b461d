"""Parameters with unusual shapes or memory layouts train as in one process, even from a checkpoint
of a different strategy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.engine.state.optimizer_state import as_made_by
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

SAMPLES, BATCH, STEPS, SAVED_AT = 28, 14, 4, 2
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.05, t0=2, lambd=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(
        parameters, 0.05, initial_accumulator_value=0.3
    ),
}


class Net(nn.Module):
    """A model with a scalar parameter, a parameter of one element, an empty parameter, and two
    parameters that are not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten()).to(
            memory_format=torch.channels_last
        )
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.one = nn.Parameter(torch.tensor([0.7]))
        self.none = nn.Parameter(torch.zeros(0, 5))
        self.columns = nn.Parameter(torch.randn(4, 12).t())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x) @ self.columns * self.scale * self.one + self.none.sum()
        return output


def data() -> TensorDataset:
    x = torch.randn(
        SAMPLES, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return TensorDataset(x, x[:, :, 0, :2].flatten(1).square())


@functools.cache
def plain(optimizer: str) -> dict[str, torch.Tensor]:
    net = Net()
    updates = OPTIMIZERS[optimizer](net.parameters())
    x, y = data().tensors
    for number in range(STEPS):
        part = slice(number * BATCH % SAMPLES, number * BATCH % SAMPLES + BATCH)
        nn.functional.mse_loss(net(x[part]), y[part]).backward()
        updates.step()
        updates.zero_grad()
    return net.state_dict()


def train(
    strategy: str, optimizer: str, directory: Path | None, stop_at: int | None, micro: int | None
) -> dict[str, torch.Tensor]:
    """Resumes from `directory` and trains. At step `stop_at`, saves a checkpoint there and
    returns."""
    net = Net()
    options: dict[str, Any] = {"tensor_parallel_size": 1} if strategy == "hybrid" else {}
    if strategy == "tensor":
        options["plan"] = dict.fromkeys(["body.0", "scale", "one", "none", "columns"], "replicate")
    model, updates = shoal.as_distributed(
        net, OPTIMIZERS[optimizer](net.parameters()), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(
        data(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=False
    )
    if directory is not None:
        shoal.resume(directory)
    for _ in loader.epochs(STEPS * BATCH // SAMPLES):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for x, y in step:
                nn.functional.mse_loss(model(x), y).backward()
            updates.step()
            updates.zero_grad()
            if loader.global_step == stop_at and directory is not None:
                shoal.save_checkpoint(directory)
                return {}
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def assert_as_in_one_process(states: list[dict[str, torch.Tensor]], optimizer: str) -> None:
    for state in states:
        torch.testing.assert_close(state, plain(optimizer), rtol=0, atol=1e-11)


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "hybrid"])
def test_a_fused_optimizer_finds_gradients_in_the_order_of_its_parameters(
    strategy: str, micro: int | None
) -> None:
    assert_as_in_one_process(
        shoal.launch(train, strategy, "fused AdamW", None, None, micro, world_size=2), "fused AdamW"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("saved_by", "strategy"),
    [
        ("ddp", "ddp"),
        ("ddp", "zero3"),
        ("zero1", "hybrid"),
        ("hybrid", "zero1"),
        ("zero3", "tensor"),
    ],
)
def test_moments_of_odd_parameters_are_resumed(
    saved_by: str, strategy: str, optimizer: str, tmp_path: Path
) -> None:
    shoal.launch(train, saved_by, optimizer, tmp_path, SAVED_AT, None, world_size=2)
    assert_as_in_one_process(
        shoal.launch(train, strategy, optimizer, tmp_path, None, None, world_size=3), optimizer
    )


class Wide(torch.optim.Optimizer):
    """An optimizer that keeps a sum in float64 and a count in int64, regardless of the parameter's
    dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"], state["sum"] = (
                    torch.tensor(0),
                    torch.zeros_like(parameter, dtype=torch.float64),
                )
            state["count"] += 1
            state["sum"].mul_(0.9).add_(parameter.grad)
            parameter.sub_((0.1 / int(state["count"]) * state["sum"]).to(parameter.dtype))


def in_another_dtype(
    strategy: str, dtype: torch.dtype, make: Any, directory: Path, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3).to(dtype)
    model, updates = shoal.as_distributed(net, make(net.parameters()), strategy=strategy)
    loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(16, 4)), global_batch_size=4)
    shoal.resume(directory)
    for (x,) in loader:
        model(x.to(dtype)).square().mean().backward()
        updates.step()
        updates.zero_grad()
        if loader.global_step == steps:
            shoal.save_checkpoint(directory)
            break
    return model.full_state_dict(), updates.state_dict()["state"][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "tensor", "hybrid"])
def test_run_resumes_in_another_dtype_with_moments_of_that_dtype(
    strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    shoal.launch(
        in_another_dtype, "zero1", torch.float32, torch.optim.AdamW, tmp_path, 2, world_size=2
    )
    for _, state in shoal.launch(
        in_another_dtype, strategy, dtype, torch.optim.AdamW, tmp_path, 4, world_size=2
    ):
        assert (state["exp_avg"].dtype, float(state["step"])) == (dtype, 4.0)


def test_optimizer_state_in_other_dtypes_is_kept_for_peers(tmp_path: Path) -> None:
    """Optimizer state whose dtype differs from the parameter's keeps its dtype after a resume.
    torch would convert it, and a joiner would have less precision than its peers."""
    ((expected, _),) = shoal.launch(
        in_another_dtype, "ddp", torch.bfloat16, Wide, tmp_path / "whole", 4, world_size=1
    )
    shoal.launch(
        in_another_dtype, "ddp", torch.bfloat16, Wide, tmp_path / "resumed", 2, world_size=1
    )
    ((found, state),) = shoal.launch(
        in_another_dtype, "ddp", torch.bfloat16, Wide, tmp_path / "resumed", 4, world_size=1
    )
    assert (state["sum"].dtype, state["count"].dtype) == (torch.float64, torch.int64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def average(strategy: str, directory: Path, steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    model, updates = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(8, 4)), global_batch_size=4)
    shoal.resume(directory)
    for (x,) in loader:
        model(x).square().mean().backward()
        updates.step()
        updates.zero_grad()
        averaged.update_parameters(nn.ParameterList(model.gather_full_parameters().values()))
        if loader.global_step == steps:
            shoal.save_checkpoint(directory)
            break
    return {name.rpartition(".")[2]: value for name, value in averaged.state_dict().items()}


@pytest.mark.parametrize(
    ("saved_by", "strategy"), [("ddp", "zero3"), ("tensor", "ddp"), ("zero3", "zero1")]
)
def test_an_averaged_model_is_resumed_under_another_strategy(
    saved_by: str, strategy: str, tmp_path: Path
) -> None:
    """An averaged model is resumed under another strategy, although the parameters that it copies
    have other names there."""
    (expected,) = shoal.launch(average, "ddp", tmp_path / "whole", 2, world_size=1)
    shoal.launch(average, saved_by, tmp_path / "resumed", 1, world_size=2)
    for found in shoal.launch(average, strategy, tmp_path / "resumed", 2, world_size=2):
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_layer_that_changes_its_weight_in_the_forward_pass_is_refused(kind: Any) -> None:
    net = nn.Sequential(kind(8, 4, max_norm=1.0))
    with pytest.raises(
        ConfigurationError,
        match=rf"0 is an {kind.__name__} with max_norm=1.0.*scale the looked-up rows",
    ):
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))


@pytest.mark.usefixtures("fresh_session")
def test_gradients_that_depend_on_how_a_batch_is_dealt_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Embedding(8, 4, scale_grad_by_freq=True)
    shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    assert [
        record.message
        for record in caplog.records
        if "scale_grad_by_freq=True: each rank counts" in record.message
    ] != []


class AdamW(torch.optim.SGD):
    """A third-party optimizer with the name of one of torch's, which chooses the dtype of its
    moments."""


def test_moments_of_third_party_optimizers_are_left_unchanged() -> None:
    moment, parameter = torch.ones(3), nn.Parameter(torch.ones(3))
    assert (
        as_made_by(torch.optim.AdamW([parameter]), moment, "exp_avg", torch.bfloat16).dtype
        == torch.bfloat16
    )
    assert as_made_by(AdamW([parameter]), moment, "exp_avg", torch.bfloat16) is moment


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "async_sgd"]
)
def test_a_parameter_quantized_by_bitsandbytes_is_refused(strategy: str) -> None:
    """The class is recognized by its module, so a class of that module's name stands for those of
    bitsandbytes, which takes 125 MB."""
    quantized = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight = quantized(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        ConfigurationError,
        match=r"parameter '0.weight' is a bitsandbytes.nn.modules.Params4bit, .*strategy='zero3'",
    ) as raised:
        shoal.as_distributed(net, torch.optim.SGD(net[1].parameters(), 0.1), strategy=strategy)
    assert raised.value.reason == "QUANTIZED_BY_BITSANDBYTES"
