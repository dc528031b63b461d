"""A script unfreezes, replaces or adds parameters during training. They are trained as in one
process or refused, but never trained by one rank only."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

X = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH = 8
REDUCED = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "hybrid", "tensor", "local_sgd"]


class Towers(nn.Module):
    """Two towers. The second one is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)
        )
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x) + self.second(x)

    def encode(self, x: torch.Tensor) -> Any:
        """Computes the output without calling `forward`, so no wrapper notices the pass."""
        return self.first(x) + self.second(x)


Loop = Callable[[Any, Towers, Any, Iterable[Any]], None]


def make() -> tuple[Towers, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Towers().double()
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def on_ranks(loop: Loop, world_size: int = 2, **options: Any) -> list[dict[str, torch.Tensor]]:
    def one() -> dict[str, torch.Tensor]:
        net, plain = make()
        model, optimizer = shoal.as_distributed(net, plain, **options)
        loop(
            model,
            net,
            optimizer,
            shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=BATCH, shuffle=False),
        )
        # as_distributed is declared to return any model
        return model.full_state_dict()  # type: ignore[no-any-return]

    return shoal.launch(one, world_size=world_size)


def in_one_process(loop: Loop) -> dict[str, torch.Tensor]:
    net, optimizer = make()
    loop(
        net, net, optimizer, [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, len(X), BATCH)]
    )
    return net.state_dict()


def unfrozen(*, second_alone: bool = False, clipped: bool = False, passes: int = 1) -> Loop:
    def loop(model: Any, net: Towers, optimizer: Any, batches: Iterable[Any]) -> None:
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            for number in range(passes):
                if i == 2 and number == passes - 1:
                    net.second.requires_grad_(True)
                    net.first.requires_grad_(not second_alone)
                (functional.mse_loss(net.encode(x), y, reduction="sum") / len(X)).backward()
            if clipped:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()

    return loop


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "loop",
    [
        unfrozen(),
        unfrozen(second_alone=True),
        unfrozen(clipped=True),
        unfrozen(second_alone=True, clipped=True),
        unfrozen(passes=2),
    ],
    ids=["both", "in-turn", "clipped", "in-turn-clipped", "between-passes"],
)
def test_ddp_trains_unfrozen_parameters_even_if_no_pass_uses_the_models_forward(
    loop: Loop, world_size: int
) -> None:
    expected = in_one_process(loop)
    for state in on_ranks(loop, world_size, loss_reduction="sum"):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def test_ddp_trains_unfrozen_parameters_by_means_over_samples() -> None:
    def loop(model: Any, net: Towers, optimizer: Any, batches: Iterable[Any]) -> None:
        for i, (x, y) in enumerate(batches):
            if i == 2:
                net.second.requires_grad_(True)
            optimizer.zero_grad()
            functional.mse_loss(net.encode(x), y).backward()
            optimizer.step()

    expected = in_one_process(loop)
    for state in on_ranks(loop, world_size=3):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def test_a_parameter_unfrozen_between_the_micro_batches_of_a_step_is_refused() -> None:
    def one() -> None:
        net, plain = make()
        _, optimizer = shoal.as_distributed(net, plain)
        loader = shoal.ElasticDataLoader(
            TensorDataset(X, Y), global_batch_size=BATCH, micro_batch_size=2
        )
        for step in loader.steps():
            for number, (x, y) in enumerate(step):
                net.second.requires_grad_(number > 0)
                functional.mse_loss(net.encode(x), y).backward()
            optimizer.step()

    with pytest.raises(shoal.ConfigurationError, match="before the step's first micro-batch"):
        shoal.launch(one, world_size=2)


def replaced(model: Any, net: Towers, optimizer: Any) -> None:
    net.first[2].weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
    optimizer.param_groups[0]["params"] = list(net.parameters())


def replaced_in_the_module(model: Any, net: Towers, optimizer: Any) -> None:
    net.first[2].weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))


def added_to_the_module(model: Any, net: Towers, optimizer: Any) -> None:
    net.first.append(nn.Linear(3, 3, dtype=torch.float64))


def added_to_the_group(model: Any, net: Towers, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1, dtype=torch.float64)))


def removed_from_the_group(model: Any, net: Towers, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][0]


def in_step_two(change: Callable[[Any, Towers, Any], None]) -> Loop:
    def loop(model: Any, net: Towers, optimizer: Any, batches: Iterable[Any]) -> None:
        for i, (x, y) in enumerate(batches):
            if i == 2:
                change(model, net, optimizer)
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("change", [replaced, added_to_the_group, removed_from_the_group])
@pytest.mark.parametrize("strategy", REDUCED)
def test_changed_members_of_a_parameter_group_are_refused_and_named(
    strategy: str, change: Callable[..., None]
) -> None:
    with pytest.raises(
        shoal.ConfigurationError,
        match=r"parameter group 0 no longer|'first\.2\.weight' was added to the model",
    ):
        on_ranks(in_step_two(change), strategy=strategy)


@pytest.mark.parametrize("change", [replaced_in_the_module, added_to_the_module])
def test_ddp_refuses_a_parameter_added_to_the_module(change: Callable[..., None]) -> None:
    with pytest.raises(
        shoal.ConfigurationError,
        match=re.escape("was added to the model or replaced after as_distributed"),
    ):
        on_ranks(in_step_two(change))


def moved_within_the_module(model: Any, net: Towers, optimizer: Any) -> None:
    """Moves a parameter to another name within the module, as torch.nn.utils.prune does."""
    weight = net.first[0].weight
    del net.first[0].weight
    net.first[0].register_parameter("weight_orig", weight)
    net.first[0].weight = weight.detach()
    net.first[0].register_forward_pre_hook(
        lambda module, _: setattr(module, "weight", module.weight_orig * 0.5)
    )


def a_frozen_parameter_is_added(model: Any, net: Towers, optimizer: Any) -> None:
    net.first.append(nn.Linear(3, 3, bias=False, dtype=torch.float64).requires_grad_(False))
    nn.init.eye_(net.first[3].weight)


def the_same_list_again(model: Any, net: Towers, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = list(net.parameters())


@pytest.mark.parametrize(
    "change", [moved_within_the_module, a_frozen_parameter_is_added, the_same_list_again]
)
def test_ddp_trains_on_if_it_knows_all_trained_parameters(
    change: Callable[..., None],
) -> None:
    expected = in_one_process(in_step_two(change))
    for state in on_ranks(in_step_two(change)):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
