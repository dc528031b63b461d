"""One rule for buffers of every dtype under every strategy: ranks combine them by mean, sum or
extreme value. Other buffers must be equal on all ranks, or an error is raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal import ConfigurationError
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
STRATEGIES = [
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "hsdp",
    "tensor",
    "hybrid",
    "pipeline",
    "local_sgd",
]
FLAGS = [torch.bool, torch.uint8, torch.int32, torch.complex64]


class Watch(nn.Module):
    """Keeps one buffer of each kind, computed from the samples that pass through the layer."""

    mean: torch.Tensor
    steps: torch.Tensor
    samples: torch.Tensor
    histogram: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self, flag: torch.dtype = torch.bool, *, own: bool = False) -> None:
        super().__init__()
        self.own = own
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("samples", torch.tensor(0))
        self.register_buffer("histogram", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("least", torch.full((4,), torch.inf))
        self.register_buffer("largest", torch.tensor(-torch.inf))
        self.register_buffer("flag", torch.zeros(2, dtype=flag))
        self.register_buffer("table", torch.arange(3).expand(2, -1))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.add_(x.mean(0))
                self.steps += 1
                self.samples += len(x)
                self.histogram += torch.bincount((x[:, 0] > 0).long(), minlength=2)
                self.least = torch.minimum(self.least, x.amin(0))
                self.largest.copy_(torch.maximum(self.largest, x.max()))
                flag = self.flag
                assert isinstance(flag, torch.Tensor)
                flag[0 if not self.own else shoal.rank()] = 1
        return x


def make(flag: torch.dtype = torch.bool, *, own: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Watch(flag, own=own), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def train(
    strategy: str,
    net: nn.Module,
    micro: int | None = None,
    *,
    samples: int = 48,
    weight_fn: Callable[[Any], float] | None = None,
) -> dict[str, torch.Tensor]:
    options = {"sync_every": 3} if strategy == "local_sgd" else {}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.0), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(
        TensorDataset(X[:samples]),
        global_batch_size=8,
        micro_batch_size=micro,
        shuffle=False,
        weight_fn=weight_fn,
    )
    for _ in loader.epochs(1):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for (x,) in step:
                model.train_step(x, None, lambda output, _: output.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def plain(net: nn.Module, samples: int = 48) -> dict[str, torch.Tensor]:
    for x in X[:samples].split(8):
        net(x)
    return dict(net.state_dict())


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_follow_one_rule_for_every_dtype_and_strategy(
    strategy: str, micro: int | None
) -> None:
    if strategy == "pipeline" and micro is not None:
        # pipeline splits each micro-batch in two; with passes of one sample, a count of samples
        # would equal a count of steps
        micro = 8
    for flag in FLAGS if micro is None else FLAGS[:1]:
        wanted = plain(make(flag))
        for found in shoal.launch(
            lambda flag=flag: train(strategy, make(flag), micro), world_size=2
        ):
            for name in (
                "steps",
                "samples",
                "histogram",
                "least",
                "largest",
                "flag",
                "table",
                "mask",
            ):
                assert found[f"0.{name}"].tolist() == wanted[f"0.{name}"].tolist(), name
            assert torch.allclose(found["0.mean"], wanted["0.mean"], atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_samples_changes_nothing(strategy: str) -> None:
    wanted = plain(make(), 41)
    for found in shoal.launch(lambda: train(strategy, make(), samples=41), world_size=2):
        for name in ("steps", "samples", "histogram", "least", "largest"):
            assert found[f"0.{name}"].tolist() == wanted[f"0.{name}"].tolist(), name


def tokens(batch: Any) -> float:
    """Returns the weight of a batch whose samples have five tokens each."""
    return 5.0 * len(batch[0] if isinstance(batch, list | tuple) else batch)


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_are_of_samples_even_if_batches_have_other_weights(
    strategy: str, micro: int | None
) -> None:
    if strategy == "pipeline" and micro is not None:
        micro = 8  # for the same reason as above
    wanted = plain(make())
    for found in shoal.launch(
        lambda: train(strategy, make(), micro, weight_fn=tokens), world_size=2
    ):
        for name in ("steps", "samples", "histogram"):
            assert found[f"0.{name}"].tolist() == wanted[f"0.{name}"].tolist(), name


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "hybrid", "local_sgd"])
def test_a_count_of_passes_may_equal_the_samples_of_some_micro_batches(strategy: str) -> None:
    """Each micro-batch passes through the model twice, and the last one has two samples."""

    def count() -> int:
        model, optimizer = shoal.as_distributed(
            net := make(), torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(
            TensorDataset(X), global_batch_size=8, micro_batch_size=3, shuffle=False
        )
        for step in loader.steps():
            for (x,) in step:
                (model(x) - model(-x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(model.full_state_dict()["0.steps"])

    assert shoal.launch(count, world_size=2) == [12, 12]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    "strategy", [each for each in STRATEGIES if each not in ("tensor", "pipeline")]
)
def test_differing_buffer_without_a_rule_is_an_error_that_names_it(
    strategy: str, flag: torch.dtype
) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.flag") as stopped:
        shoal.launch(lambda: train(strategy, make(flag, own=True)), world_size=2)
    assert stopped.value.reason == "BUFFERS_DIFFER"


def quantized(configuration: str) -> nn.Module:
    from torch.ao.quantization import QuantStub, get_default_qat_qconfig, prepare_qat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        net = nn.Sequential(QuantStub(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        net.qconfig = get_default_qat_qconfig(configuration)
        prepared: nn.Module = prepare_qat(net.train())
    return prepared


@pytest.mark.parametrize("configuration", ["qnnpack", "x86"])
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "pipeline"])
def test_observers_of_quantization_aware_training_match_one_process(
    strategy: str, configuration: str
) -> None:
    """Observers have the values of one process. Those of later layers are not compared, because in
    the first pass each rank quantizes by its own samples."""
    if strategy in ("tensor", "hybrid") and configuration == "x86":
        with pytest.raises(
            ConfigurationError,
            match=r"weight_fake_quant.*min_val.* pass a batch through the model before "
            r"as_distributed",
        ):
            shoal.launch(lambda: train(strategy, quantized(configuration)), world_size=2)
        return
    wanted = plain(quantized(configuration))
    for found in shoal.launch(lambda: train(strategy, quantized(configuration)), world_size=2):
        assert not any(
            value.is_floating_point() and bool((value.isnan() | value.isinf()).any())
            for value in found.values()
        )
        own = [name for name in wanted if name.startswith("0.") or "weight_fake_quant" in name]
        assert len(own) >= 15
        if strategy == "local_sgd":
            # its moving averages follow the batches of each rank within a round
            own = [name for name in own if "weight_fake_quant" in name]
        for name in own:
            assert torch.allclose(found[name].double(), wanted[name].double(), atol=1e-6), name


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "local_sgd"])
def test_ranks_quantize_identically(strategy: str) -> None:
    first, second = shoal.launch(lambda: train(strategy, quantized("x86")), world_size=2)
    assert all(torch.equal(second[name], value) for name, value in first.items())


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_observers_are_resumed(strategy: str, tmp_path: Path) -> None:
    def begin() -> dict[str, torch.Tensor]:
        found = train(strategy, quantized("x86"))
        shoal.save_checkpoint(tmp_path)
        shoal.shutdown()
        return found

    def go_on() -> dict[str, torch.Tensor]:
        net = quantized("x86")
        model, _ = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy=strategy
        )
        assert shoal.resume(tmp_path)
        state: dict[str, torch.Tensor] = model.full_state_dict()
        return state

    saved, resumed = shoal.launch(begin, world_size=2)[0], shoal.launch(go_on, world_size=2)[0]
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())


class RegistersLate(nn.Linear):
    """A layer that registers a buffer in its first forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.tensor(0))
        self.seen += len(x)
        return super().forward(x)


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "pipeline"])
def test_a_buffer_that_a_pass_registers_is_refused(strategy: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"1\.seen.* was registered after as_distributed"
    ) as stopped:
        shoal.launch(
            lambda: train(strategy, nn.Sequential(nn.Linear(4, 4), RegistersLate(4, 1))),
            world_size=2,
        )
    assert stopped.value.reason == "BUFFERS_DIFFER"


class Largest(nn.Module):
    """Keeps the largest sample as an integer, outside of the state dict, and counts positive values
    in a buffer."""

    def __init__(self, *, positives: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.positives = positives
        self.register_buffer("top", torch.tensor(0), persistent=positives)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.top = torch.maximum(self.top, (100 * x).long().max())
            if self.positives:
                self.count += (x > 0).sum()
            else:
                self.count += len(x)
        return self.linear(x)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_integers_that_may_not_be_counts_are_summed_with_a_warning_and_kept_if_not_persistent(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(*, positives: bool) -> int:
        net = Largest(positives=positives)
        assert train(strategy, net)["count"] == ((X > 0).sum() if positives else len(X))
        return int(net.top)

    largest = int((100 * X).long().max())
    assert max(shoal.launch(lambda: rank(positives=False), world_size=2)) == largest
    assert "int64" not in caplog.text
    shoal.launch(lambda: rank(positives=True), world_size=2)
    # each rank logs the warning once
    assert caplog.text.count("int64 buffers ['top', 'count'] changed by different amounts") == 2


class Tokens(nn.Module):
    """Counts the tokens of its batches. All ranks have the same number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.tokens += x.numel()
        return self.linear(x)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_counter_that_may_depend_on_the_samples_is_warned_of(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    shoal.launch(lambda: train(strategy, Tokens()), world_size=2)
    assert (
        caplog.text.count("int64 buffers ['tokens'] changed by the same amount on all ranks") == 2
    )
