"""Writes to parameters and buffers between two steps are kept if all ranks write the same values.
Otherwise an error is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shoal
import torch
from shoal import ConfigurationError, PreconditionError
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
HERE = ["ddp", "zero1", "zero2", "tensor", "hybrid"]
"""Strategies under which each rank has the full values between steps, at least of layers that
`tensor` does not split."""
ELSEWHERE = ["zero3", "fsdp", "hsdp"]
Write = Callable[[int, nn.Module], None]


class Net(nn.Module):
    """Counts its batches and their samples in buffers."""

    samples: torch.Tensor
    gain: torch.Tensor

    def __init__(self, in_pass: Write | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("samples", torch.tensor(0))
        self.register_buffer("gain", torch.tensor(1.0))
        self.in_pass, self.passes = in_pass, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.samples += len(x)
            if self.in_pass is not None:
                self.in_pass(self.passes, self)
        output: torch.Tensor = self.norm(torch.tanh(self.first(x))) * self.gain + self.frozen(x)
        return output


def plain(write: Write) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    for step, x in enumerate(X.split(8), 1):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(step, net)
    return dict(net.state_dict())


def train(
    strategy: str,
    write: Write | None,
    in_pass: Write | None = None,
    micro: int | None = None,
    rate: float = 0.01,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(in_pass)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), rate), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        TensorDataset(X), global_batch_size=8, micro_batch_size=micro, shuffle=False
    )
    for step in loader.steps() if micro else ([batch] for batch in loader):
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if write is not None:
            write(loader.global_step, net)
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def on_rank_1(write: Callable[[Net], object]) -> Write:
    def written(step: int, net: nn.Module) -> None:
        if step == 3 and shoal.rank() == 1:
            with torch.no_grad():
                write(net)  # type: ignore[arg-type]

    return written


WRITES: dict[str, tuple[str, Callable[[Net], object]]] = {
    "in place": ("first.weight", lambda net: net.first.weight.mul_(2)),
    "data in place": ("first.weight", lambda net: net.first.weight.data.mul_(2)),
    "frozen": ("frozen.bias", lambda net: net.frozen.bias.data.fill_(1)),
    "load_state_dict": (
        "first.weight",
        lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    ),
    "a buffer": ("norm.running_var", lambda net: net.norm.running_var.fill_(9)),  # type: ignore[union-attr]
    "a counter": ("samples", lambda net: net.samples.zero_()),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("strategy", HERE)
def test_writes_on_one_rank_are_an_error_that_names_tensor_ranks_and_cause(
    strategy: str, how: str
) -> None:
    name, write = WRITES[how]
    with pytest.raises(PreconditionError, match=f"after step 3 .*'{name}'") as stopped:
        shoal.launch(train, strategy, on_rank_1(write), world_size=2)
    assert stopped.value.reason == "REPLICAS_DIVERGED"
    assert "ranks 0 and 1 hold different values" in str(stopped.value)
    assert "a script that changes values on only some ranks" in str(stopped.value)


@pytest.mark.parametrize("how", ["a buffer", "a counter"])
@pytest.mark.parametrize("strategy", ELSEWHERE)
def test_buffers_written_on_one_rank_are_an_error_under_sharding_too(
    strategy: str, how: str
) -> None:
    name, write = WRITES[how]
    with pytest.raises(PreconditionError, match=f"'{name}'") as stopped:
        shoal.launch(train, strategy, on_rank_1(write), world_size=2)
    assert stopped.value.reason == "REPLICAS_DIVERGED"


@pytest.mark.parametrize("how", ["in place", "data in place", "frozen", "load_state_dict"])
@pytest.mark.parametrize("strategy", ELSEWHERE)
def test_no_rank_can_write_sharded_parameters(strategy: str, how: str) -> None:
    with pytest.raises(PreconditionError, match=r"model\.with_parameters\(values\)"):
        shoal.launch(train, strategy, on_rank_1(WRITES[how][1]), world_size=2)


@pytest.mark.parametrize("how", ["in place", "data in place", "frozen"])
@pytest.mark.parametrize("strategy", [*HERE, *ELSEWHERE])
def test_writes_on_one_rank_in_a_later_pass_are_refused(strategy: str, how: str) -> None:
    with pytest.raises(ConfigurationError) as stopped:
        shoal.launch(train, strategy, None, on_rank_1(WRITES[how][1]), world_size=2)
    assert stopped.value.reason == "PARAMETERS_WRITTEN", stopped.value


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("strategy", [*HERE, *ELSEWHERE])
def test_writes_on_all_ranks_act_as_in_one_process(strategy: str, micro: int | None) -> None:
    def write(step: int, net: nn.Module) -> None:
        assert isinstance(net, Net)
        if step in (2, 4):
            net.samples.zero_()
            net.gain.fill_(0.5 / step)
            net.norm.reset_running_stats()
        if step == 5 and strategy in HERE:
            net.first.weight.data.mul_(0.5)

    wanted = plain(write)
    for found in shoal.launch(train, strategy, write, None, micro, 0.0, world_size=2):
        assert found["gain"] == wanted["gain"]
        assert found["samples"] == wanted["samples"] == 16
        assert found["norm.num_batches_tracked"] == wanted["norm.num_batches_tracked"] == 2
        if strategy in HERE:
            assert torch.equal(found["first.weight"], wanted["first.weight"])


@pytest.mark.parametrize("strategy", HERE)
def test_one_rank_may_swap_weights_for_an_evaluation_and_restore_them(strategy: str) -> None:
    def swap(step: int, net: nn.Module) -> None:
        if shoal.rank() == 0:
            own = {name: value.clone() for name, value in net.state_dict().items()}
            net.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
            net.load_state_dict(own)

    first, second = shoal.launch(train, strategy, swap, world_size=2)
    assert all(torch.equal(second[name], value) for name, value in first.items())


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("strategy", [*ELSEWHERE, "tensor", "hybrid"])
def test_values_that_a_joiner_loads_between_two_loops_are_an_error_in_the_next_step(
    strategy: str, factor: float
) -> None:
    steps: list[int] = []

    def joins() -> None:
        net = Net()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8)
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values = {name: value * factor for name, value in model.full_state_dict().items()}
            if loader.global_step == 3 and shoal.rank() == 1:
                phase = current_session()._held.phase
                phase.fall_behind()  # as in a joiner that has received the state
                model.load_full(values)
                phase.arrive()
            steps.append(loader.global_step)

    if factor == 1.0:  # the joiner has written the values that it had received
        shoal.launch(joins, world_size=2)
        return
    with pytest.raises(ConfigurationError, match="a worker that joined") as stopped:
        shoal.launch(joins, world_size=2)
    assert stopped.value.reason == "PARAMETERS_WRITTEN"
    assert max(steps) == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_frozen_parameters_may_have_any_dtype(strategy: str) -> None:
    """Frozen parameters may have dtypes for which torch has no common dtype."""
    dtypes = [torch.float8_e4m3fn, torch.uint8, torch.uint16, torch.bfloat16, torch.complex128]

    def trained(written: bool) -> bool:
        net = Net()
        for dtype in dtypes:
            frozen = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
            net.register_parameter("of_" + str(dtype).removeprefix("torch."), frozen)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.first.parameters(), 0.1), strategy=strategy
        )
        for x in X.split(8)[:3]:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if written and shoal.rank() == 0:
                net.get_parameter("of_float8_e4m3fn").data.fill_(2.0)
        return True

    assert shoal.launch(trained, False, world_size=2) == [True, True]
    with pytest.raises(PreconditionError, match="'of_float8_e4m3fn'"):
        shoal.launch(trained, True, world_size=2)
