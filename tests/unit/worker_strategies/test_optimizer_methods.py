"""Methods that an optimizer has in addition to torch's."""

import pytest
import shoal
import torch
from shoal import ConfigurationError
from torch import nn


class Averaging(torch.optim.SGD):
    """An optimizer with an additional method that writes parameters, as schedule-free optimizers do
    in `eval()`."""

    def halve(self) -> float:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        return 0.5


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "pipeline", "hybrid"]
)
def test_a_method_that_could_write_parts_of_parameters_is_refused(strategy: str) -> None:
    def call() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        options = {} if strategy == "pipeline" else {"elementwise_optimizer": True}
        _, optimizer = shoal.as_distributed(
            net, Averaging(net.parameters(), 0.1), strategy=strategy, **options
        )
        assert hasattr(optimizer, "halve")
        with pytest.raises(ConfigurationError, match=r"optimizer\.halve\(\)"):
            optimizer.halve()

    shoal.launch(call, world_size=2)


def test_method_under_ddp_is_the_optimizers_own() -> None:
    def call() -> bool:
        net = nn.Linear(4, 4)
        before = net.weight.detach().clone()
        _, optimizer = shoal.as_distributed(net, Averaging(net.parameters(), 0.1), strategy="ddp")
        assert optimizer.halve() == 0.5
        return torch.equal(net.weight, before * 0.5)

    assert shoal.launch(call, world_size=1) == [True]


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer and lacks the attributes of torch's base class, like many
    implementations of Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults = base.defaults

    def step(self, closure: None = None) -> None:
        self.base.step(closure)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "tensor"])
def test_an_optimizer_without_torchs_constructor_is_refused_with_the_remedy(strategy: str) -> None:
    net = nn.Linear(4, 4)
    wrapper = Wrapper(torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ConfigurationError, match=r"Wrapper does not call torch.optim.Optimizer"):
        shoal.launch(lambda: shoal.as_distributed(net, wrapper, strategy=strategy), world_size=1)


def test_an_object_with_slots_is_registered() -> None:
    class Count:
        __slots__ = ("value",)

        def __init__(self) -> None:
            self.value = 0

        def step(self) -> None:
            self.value += 1

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def call() -> int:
        net = nn.Linear(4, 4)
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        count = Count()
        shoal.register_state(count=count)
        count.step()
        return count.value

    assert shoal.launch(call, world_size=1) == [1]
