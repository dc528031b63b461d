"""Loops with unusual passes or unusual handling of gradients train as in one process, or raise an
error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.utils.data import TensorDataset

CUT = ["zero1", "zero2", "zero3", "fsdp", "hsdp"]
SPLIT = ["tensor", "hybrid"]
SAMPLES, BATCH = 28, 14
"""Samples in total and per batch. A batch is split into micro-batches of 4, 4, 4 and 2."""

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Loop = Callable[[Any, Any, Batches], None]


class Net(nn.Module):
    """A model whose additional method `loss` trains part of it without `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(x))
        return output

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.body(x)), y)

    def loss_of_forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self(x), y)


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].square())


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def plain(loop: Loop) -> dict[str, torch.Tensor]:
    net = Net()
    x, y = data().tensors
    loop(
        net,
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        list(zip(x.split(BATCH), y.split(BATCH), strict=True)) * 3,
    )
    return net.state_dict()


def prepared(strategy: str, *, micro: int | None = None) -> tuple[Any, Any, Any]:
    net = Net()
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        strategy=strategy,
        minimum_parameter_group_size=1,
    )
    return (
        model,
        optimizer,
        shoal.ElasticDataLoader(
            data(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=False
        ),
    )


def train(strategy: str, loop: Loop) -> dict[str, torch.Tensor]:
    model, optimizer, loader = prepared(strategy)
    loop(model, optimizer, (batch for _ in loader.epochs(3) for batch in loader))
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def assert_as_in_one_process(strategy: str, loop: Loop, *, world_size: int = 2) -> None:
    expected = plain(loop)
    for state in shoal.launch(functools.partial(train, strategy, loop), world_size=world_size):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------- retained gradients


def clears_every_second_step(model: Any, optimizer: Any, batches: Batches) -> None:
    for number, (x, y) in enumerate(batches):
        loss_of(model, x, y).backward()
        optimizer.step()
        if number % 2:
            optimizer.zero_grad()


def clears_behind_the_forward_pass(model: Any, optimizer: Any, batches: Batches) -> None:
    for x, y in batches:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clears_by_hand(model: Any, optimizer: Any, batches: Batches) -> None:
    for x, y in batches:
        for parameter in model.parameters():
            parameter.grad = None
        loss_of(model, x, y).backward()
        optimizer.step()


def clears_what_another_pass_has_left(model: Any, optimizer: Any, batches: Batches) -> None:
    """Clears gradients that another pass has left, as a GAN's generator leaves some in the
    discriminator."""
    for x, y in batches:
        loss_of(model, x, y).backward()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def clears_what_the_same_pass_has_left(model: Any, optimizer: Any, batches: Batches) -> None:
    """Computes two losses of one forward pass and discards the gradients of the first."""
    for x, y in batches:
        output = model(x)
        nn.functional.mse_loss(output, y).backward(retain_graph=True)
        optimizer.zero_grad()
        nn.functional.l1_loss(output, 2 * y).backward()
        optimizer.step()
        optimizer.zero_grad()


def clears_between_passes_that_were_built_before(
    model: Any, optimizer: Any, batches: Batches
) -> None:
    for x, y in batches:
        first, second = loss_of(model, x, y), loss_of(model, x.flip(1), 2 * y)
        first.backward()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("strategy", [*CUT, *SPLIT])
def test_gradients_of_the_previous_step_are_not_accumulated_silently(strategy: str) -> None:
    with pytest.raises(
        PreconditionError,
        match=r"gradients of the last step were not cleared.*zero_grad\(\) in every "
        r"step.*micro_batch_size=",
    ):
        shoal.launch(functools.partial(train, strategy, clears_every_second_step), world_size=2)


def test_ddp_accumulates_gradients_as_in_one_process() -> None:
    assert_as_in_one_process("ddp", clears_every_second_step)


@pytest.mark.parametrize(
    "loop", [clears_what_the_same_pass_has_left, clears_between_passes_that_were_built_before]
)
@pytest.mark.parametrize("strategy", ["ddp", *CUT, *SPLIT])
def test_gradients_are_cleared_between_backward_passes_with_earlier_graphs(
    strategy: str, loop: Loop
) -> None:
    assert_as_in_one_process(strategy, loop)


@pytest.mark.parametrize(
    "loop", [clears_behind_the_forward_pass, clears_by_hand, clears_what_another_pass_has_left]
)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "tensor"])
def test_gradients_may_be_cleared_anywhere_before_they_are_needed(
    strategy: str, loop: Loop
) -> None:
    assert_as_in_one_process(strategy, loop)


def skips_the_second_step(strategy: str) -> dict[str, torch.Tensor]:
    """Discards the second step's gradients, as a script does after a spike of the norm."""
    model, optimizer, loader = prepared(strategy, micro=7)
    for step in loader.steps():
        for x, y in step:
            loss_of(model, x, y).backward()
        model.clip_grad_norm_(1.0)
        if loader.global_step == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("strategy", ["ddp", *CUT, *SPLIT])
def test_a_rank_without_micro_batches_discards_gradients_like_the_others(strategy: str) -> None:
    expected = shoal.launch(functools.partial(skips_the_second_step, "ddp"), world_size=1)[0]
    for state in shoal.launch(functools.partial(skips_the_second_step, strategy), world_size=3):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def accumulates(strategy: str, *, clears: bool) -> dict[str, torch.Tensor]:
    model, optimizer, loader = prepared(strategy, micro=7)
    for step in loader.steps():
        for x, y in step:
            loss_of(model, x, y).backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("strategy", ["ddp", *CUT, *SPLIT])
def test_each_step_of_micro_batches_starts_without_gradients(strategy: str) -> None:
    cleared, kept = (
        shoal.launch(functools.partial(accumulates, strategy, clears=clears), world_size=3)[0]
        for clears in (True, False)
    )
    torch.testing.assert_close(kept, cleared, rtol=0, atol=1e-12)


class Alternating(Net):
    """Uses its body only in every second training pass."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        output: torch.Tensor = self.head(self.body(x) if self.passes % 2 else x)
        return output


def clears_to_zero(strategy: str, *, micro: int | None = None) -> dict[str, torch.Tensor]:
    net = Alternating()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    if strategy == "plain":
        for x, y in zip(*(each.split(BATCH) for each in data().tensors), strict=True):
            loss_of(net, x, y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return net.state_dict()
    model, optimizer = shoal.as_distributed(
        net, optimizer, strategy=strategy, minimum_parameter_group_size=1
    )
    loader = shoal.ElasticDataLoader(
        data(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=False
    )
    for step in loader.steps() if micro else ([batch] for batch in loader):
        for x, y in step:
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def test_ddp_updates_unused_parameters_with_gradients_of_zero_as_in_one_process() -> None:
    expected = clears_to_zero("plain")
    for state in shoal.launch(functools.partial(clears_to_zero, "ddp"), world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "micro"), [("ddp", 7), *((strategy, None) for strategy in (*CUT, *SPLIT))]
)
def test_gradients_of_zero_are_refused_where_they_are_not_kept(
    strategy: str, micro: int | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"call zero_grad\(\) without set_to_none"):
        shoal.launch(functools.partial(clears_to_zero, strategy, micro=micro), world_size=2)


@pytest.mark.usefixtures("fresh_session")
def test_gradients_of_zero_are_refused_with_several_models() -> None:
    nets = Net(), Net()
    optimizers = tuple(torch.optim.SGD(net.parameters(), 0.1) for net in nets)
    _, (first, _) = shoal.as_distributed(nets, optimizers)
    with pytest.raises(ConfigurationError, match=r"call zero_grad\(\) without set_to_none"):
        first.zero_grad(set_to_none=False)


# ----------------------------------------------------------------------------------- unusual passes


def trains_by_a_method(model: Any, optimizer: Any, batches: Batches) -> None:
    """Trains without calling `model(...)`."""
    for x, y in batches:
        model.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_pass_through_a_method_of_the_module_counts_like_forward(
    strategy: str,
) -> None:
    assert_as_in_one_process(strategy, trains_by_a_method)


def registered(model: Any, *names: str) -> Any:
    for name in names:
        if isinstance(model, shoal.ShardedModel):
            model.register_forward_method(name)
    return model


def trains_by_a_registered_method(model: Any, optimizer: Any, batches: Batches) -> None:
    trains_by_a_method(registered(model, "loss"), optimizer, batches)


def mixes_a_registered_method_with_forward(model: Any, optimizer: Any, batches: Batches) -> None:
    """Uses both in each step, after a pass in evaluation mode."""
    registered(model, "loss")
    for x, y in batches:
        model.eval()
        with torch.no_grad():
            assert model.loss(x, y).item() == pytest.approx(loss_of(model, x, y).item())
        model.train()
        (model.loss(x, y) + 0.5 * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trains_by_one_that_calls_forward(model: Any, optimizer: Any, batches: Batches) -> None:
    registered(model, "loss_of_forward")
    for x, y in batches:
        model.loss_of_forward(x, y=y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [
        trains_by_a_registered_method,
        mixes_a_registered_method_with_forward,
        trains_by_one_that_calls_forward,
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", *CUT])
def test_pass_through_a_registered_method_counts_like_forward(strategy: str, loop: Loop) -> None:
    assert_as_in_one_process(strategy, loop)


def in_micro_batches(strategy: str) -> dict[str, torch.Tensor]:
    model, optimizer, loader = prepared(strategy, micro=4)
    registered(model, "loss")
    for _ in loader.epochs(3):
        for step in loader.steps():
            for x, y in step:
                model.loss(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_registered_method_accepts_micro_batches_of_which_ranks_have_different_numbers(
    strategy: str,
) -> None:
    expected = plain(train_plainly)
    for state in shoal.launch(functools.partial(in_micro_batches, strategy), world_size=3):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_unregistered_method_is_reported_with_how_to_register_it(strategy: str) -> None:
    with pytest.raises(
        PreconditionError,
        match=r"model\.register_forward_method\('NAME'\) once, and then model\.NAME\(\.\.\.\)",
    ):
        shoal.launch(functools.partial(train, strategy, trains_by_a_method), world_size=2)


def test_a_method_that_cannot_be_a_pass_is_refused() -> None:
    def rank(strategy: str, name: str) -> None:
        prepared(strategy)[0].register_forward_method(name)

    for strategy, name, message in [
        ("zero3", "encode", "Net has no method of that name"),
        ("zero3", "body", "Net has no method of that name"),
        ("zero3", "predict", "ShardedModel already has a method of that name"),
        ("tensor", "loss", "layers and stages are split along the module's forward pass"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            shoal.launch(rank, strategy, name, world_size=2)


def by_turns(strategy: str) -> dict[str, torch.Tensor]:
    """Trains with `model(...)` for the first micro-batch of a step and with a method of the module
    for the others."""
    model, optimizer, loader = prepared(strategy, micro=4)
    for _ in loader.epochs(3):
        for step in loader.steps():
            for number, (x, y) in enumerate(step):
                (loss_of(model, x, y) if number == 0 else model.loss(x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def train_plainly(model: Any, optimizer: Any, batches: Batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_each_micro_batch_has_its_own_weight_whatever_methods_it_passes_through(
    strategy: str, world_size: int
) -> None:
    expected = plain(train_plainly)
    for state in shoal.launch(functools.partial(by_turns, strategy), world_size=world_size):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def penalizes(model: Any, optimizer: Any, batches: Batches) -> None:
    """Adds a penalty on the gradient with respect to the input, as a Wasserstein GAN does. The
    backward pass goes through another backward pass."""
    for x, y in batches:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (nn.functional.mse_loss(output, y) + 0.1 * slope.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["ddp", *CUT, "hybrid"])
def test_second_order_gradients_match_one_process(strategy: str) -> None:
    assert_as_in_one_process(strategy, penalizes)


def test_second_order_backward_pass_through_split_layers_is_refused() -> None:
    with pytest.raises(
        PreconditionError,
        match=r"create_graph=True cannot be used with strategy='tensor'.*use zero2 or fsdp",
    ):
        shoal.launch(functools.partial(train, "tensor", penalizes), world_size=2)


def penalizes_in_parts(strategy: str, parts: int | None) -> dict[str, torch.Tensor]:
    model, optimizer, loader = prepared(strategy, micro=parts)
    for _ in loader.epochs(3):
        for step in loader.steps():
            for x, y in step:
                penalizes_once(model, x, y)
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def penalizes_once(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x.detach())  # the result of this pass is not used
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (nn.functional.mse_loss(output, y) + 0.1 * slope.square().sum(1).mean()).backward()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_ranks_with_fewer_micro_batches_take_part_in_all_passes_of_one(strategy: str) -> None:
    """Ranks with one micro-batch take part in all passes of the rank with two, including the second
    backward pass for the gradient penalty."""
    expected = plain(penalizes)
    for state in shoal.launch(functools.partial(penalizes_in_parts, strategy, 4), world_size=3):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------- errors and hooks


class Raising(torch.autograd.Function):
    """A function whose backward pass raises once."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if Raising.armed:
            Raising.armed = False
            raise ArithmeticError("in the middle of a backward pass")
        return gradients[0]


def begins_again(model: Any, optimizer: Any, batches: Batches) -> None:
    for x, y in batches:
        for _ in range(2):
            try:
                loss_of(model, x, y).backward()
                break
            except ArithmeticError:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["ddp", *CUT])
def test_backward_pass_interrupted_by_a_caught_error_is_reported(strategy: str) -> None:
    def rank() -> None:
        model, optimizer, loader = prepared(strategy)
        model.module.body[0].register_forward_hook(
            lambda module, args, output: Raising.apply(output)
        )
        Raising.armed = True
        begins_again(model, optimizer, loader)

    with pytest.raises(PreconditionError, match="failed midway") as raised:
        shoal.launch(rank, world_size=1)
    assert raised.value.reason == "BACKWARD_INCOMPLETE"


def hook(*_: Any) -> None:
    """A hook for optimizer steps that does nothing."""


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "tensor"])
@pytest.mark.usefixtures("fresh_session")
def test_step_hooks_are_refused_where_the_optimizer_has_shards(strategy: str) -> None:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = shoal.as_distributed(net, inner, strategy=strategy)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        with pytest.raises(
            ConfigurationError,
            match=r"register_step_p\w+_hook of SGD with strategy='\w+'.*in the loop",
        ):
            register(hook)
    inner.register_step_pre_hook(hook)
    loss_of(model, *data()[:4]).backward()
    with pytest.raises(ConfigurationError, match="a step hook of SGD"):
        optimizer.step()


@pytest.mark.usefixtures("fresh_session")
def test_existing_step_hooks_are_refused_at_once() -> None:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), 0.1)
    inner.register_step_post_hook(hook)
    with pytest.raises(ConfigurationError, match="a step hook of SGD"):
        shoal.as_distributed(net, inner, strategy="zero2")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp", "tensor", "local_sgd"])
@pytest.mark.usefixtures("fresh_session")
def test_a_pass_inside_a_transform_of_torch_func_is_refused(strategy: str) -> None:
    net = Net()
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    x, y = data()[:4]
    with pytest.raises(ConfigurationError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda scale: loss_of(model, x * scale, y))(torch.ones((), dtype=x.dtype))


@pytest.mark.usefixtures("fresh_session")
def test_a_module_may_use_transforms_of_torch_func_itself() -> None:
    class Penalized(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def total(x: torch.Tensor) -> torch.Tensor:
                return self.body(x).square().sum()

            return self.head(self.body(x) - torch.func.grad(total)(x))

    net = Penalized()
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    before = net.head.weight.clone()
    loss_of(model, *data()[:4]).backward()
    assert optimizer.step()
    assert not torch.equal(net.head.weight, before)
