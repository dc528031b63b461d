"""The consistency check stops a run when values change only on one rank, for example because of a
memory fault, and names that rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, ShoalError
from shoal_worker.elastic.state import replicas_compared
from shoal_worker.elastic.state.replicas_compared import differing, disagreement
from shoal_worker.engine.state.hidden_parameters import inside
from torch import nn

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (3, {}),
    "zero1": (3, {}),
    "zero2": (3, {}),
    "zero3": (3, {}),
    "hsdp": (4, {"shard_size": 2}),
    "hybrid": (4, {"tensor_parallel_size": 2}),
    "local_sgd": (3, {"sync_every": 2}),
}


def train(strategy: str, options: dict[str, Any], broken: int | None) -> int:
    """Trains eight steps and returns their number. After the third step, one bit of the state of
    rank `broken` is flipped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.Adam(net.parameters(), 1e-2),
        strategy=strategy,
        consistency_check_every=4,
        **options,
    )
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x), global_batch_size=12)
    for (batch,) in loader:
        model.train_step(batch, loss_fn=lambda output, _: output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if shoal.rank() == broken and loader.global_step == 3:
            piece = next(
                p
                for group in optimizer.optimizer.param_groups
                for p in group["params"]
                if p.numel()
            )
            state = (
                optimizer.optimizer.state[piece]["exp_avg"]
                if strategy != "local_sgd"
                else piece.data
            )
            state.view(-1)[0] += 1e-3
    return loader.global_step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_whose_values_change_by_themselves_is_named_and_the_run_stops(strategy: str) -> None:
    world, options = STRATEGIES[strategy]
    if strategy == "local_sgd":  # its average gives all ranks the same damaged values
        assert shoal.launch(train, strategy, options, 1, world_size=world) == [8] * world
        return
    with pytest.raises(ShoalError, match="after step 4") as stopped:
        shoal.launch(train, strategy, options, 1, world_size=world)
    assert "rank 1 holds" in str(stopped.value) or "hold different values" in str(stopped.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_consistent_ranks_agree(strategy: str) -> None:
    world, options = STRATEGIES[strategy]
    assert shoal.launch(train, strategy, options, None, world_size=world) == [8] * world


def test_the_rank_that_differs_from_the_rest_is_named() -> None:
    assert (
        disagreement({0: 1, 1: 1, 2: 2}, "'a'", "g")
        == "rank 2 holds different values of 'a' (g) than ranks 0 and 1"
    )
    assert (
        disagreement({0: 1, 2: 2}, "'a'", "g") == "ranks 0 and 2 hold different values of 'a' (g)"
    )


def test_only_values_held_by_several_ranks_can_differ() -> None:
    assert differing([{"a": 1, "b": 7}, {"a": 1}, {"b": 7}]) == []
    assert differing([{"a": 1, "b": 7}, {"a": 2}, {"b": 7}]) == ["a"]
    assert differing([{"a": 1}, {}, {}], all_have=[0, 1]) == ["a"]


def shift_on_rank_1(net: nn.Sequential) -> None:
    """Changes all parameters on one rank, like a script's code under `if rank == 0:`.

    The change covers every element because a rank may own only part of a parameter.
    """
    if shoal.rank() == 1:
        with inside():
            for parameter in net.parameters():
                parameter.data.add_(1.0)


def train_until(strategy: str, every: int, steps: int, shift_after: int) -> None:
    """Trains `steps` steps. Rank 1 changes its weights after step `shift_after`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 1e-2),
        strategy=strategy,
        consistency_check_every=every,
        minimum_parameter_group_size=1,
    )
    x = torch.randn(12 * steps, 8, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x), global_batch_size=12)
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.global_step == shift_after:
            shift_on_rank_1(net)


def test_error_about_weights_changed_on_one_rank_names_them_the_step_and_the_cause() -> None:
    with pytest.raises(ShoalError) as stopped:
        shoal.launch(train_until, "ddp", 4, 12, 5, world_size=3)
    message = str(stopped.value)
    assert message.startswith(
        "after step 5 rank 1 holds different values of '0.weight' (the parameters) than ranks 0 "
        "and 2 (4 of 4 tensors there differ)"
    )
    assert "a script that changes values on only some ranks" in message
    assert "All ranks agreed after step 4" in message
    assert "memory" not in message


def test_a_rank_with_one_wrong_element_is_warned_that_its_memory_may_have_failed() -> None:
    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Linear(32, 32, bias=False)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 1e-2), consistency_check_every=4
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(96, 32)), global_batch_size=12
        )
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if shoal.rank() == 2 and loader.global_step == 2:
                net.weight.data[3, 3] += 0.5

    with pytest.raises(
        ShoalError, match="after step 4 rank 2 holds different values of 'weight'"
    ) as stopped:
        shoal.launch(rank, world_size=3)
    assert "the likely cause is a memory or arithmetic fault" in str(stopped.value)


def test_invalid_number_of_steps_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="consistency_check_every=-1: expected a whole number of steps"
    ):
        shoal.ShardingConfiguration(consistency_check_every=-1)


def test_no_step_counts_after_a_verdict_that_the_script_has_caught() -> None:
    errors: list[str] = []

    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Linear(8, 4)
        plain = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
        model, optimizer = shoal.as_distributed(net, plain, consistency_check_every=4)
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(96, 8)), global_batch_size=12
        )
        for (batch,) in loader:
            model(batch).square().mean().backward()
            if shoal.rank() == 1 and loader.global_step == 2:
                plain.state[net.weight]["momentum_buffer"] += 1
            try:
                optimizer.step()
            except ShoalError as error:
                errors.append(f"{error.reason} in step {loader.global_step}")

    with pytest.raises(ShoalError, match="after step 4") as stopped:
        shoal.launch(rank, world_size=2)
    assert stopped.value.reason == "REPLICAS_DIVERGED"
    assert set(errors) == {"REPLICAS_DIVERGED in step 4"}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("what", ["groups", "frozen"])
def test_ranks_that_train_other_parameters_are_reported_before_a_step_is_applied(
    strategy: str, what: str
) -> None:
    steps: list[int] = []

    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        first, second = net[0].parameters(), net[1].parameters()
        if shoal.rank() == 1 and what == "frozen":
            net[0].requires_grad_(False)
        elif what == "frozen":
            net[1].requires_grad_(False)
        elif shoal.rank() == 1:
            first, second = second, first
        groups = [{"params": list(first), "lr": 0.1}, {"params": list(second), "lr": 0.01}]
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(groups), strategy=strategy)
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(96, 8)), global_batch_size=12
        )
        try:
            for (batch,) in loader:
                model(batch).square().mean().backward()
                optimizer.step()
        finally:
            steps.append(loader.global_step)

    with pytest.raises(
        ShoalError, match=r"different settings|blocks in different orders"
    ) as stopped:
        shoal.launch(rank, world_size=2)
    assert stopped.value.reason == "RANKS_DIVERGED"
    assert steps == [0, 0]


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize(("setting", "other"), [("lr", 0.25), ("weight_decay", 0.125)])
def test_ranks_that_train_with_different_hyper_parameters_are_reported_in_the_next_step(
    strategy: str, setting: str, other: float
) -> None:
    """Ranks with different hyperparameters raise the same error in the next step, which names the
    setting and its values, and no rank applies the step."""
    errors: dict[int, str] = {}
    weights: dict[int, list[torch.Tensor]] = {}

    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Linear(8, 4)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.5), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(96, 8)), global_batch_size=12
        )
        for (batch,) in loader:
            if loader.global_step == 2 and shoal.rank() == 1:
                optimizer.param_groups[0][setting] = other
            model(batch).square().mean().backward()
            before = [parameter.detach().clone() for parameter in net.parameters()]
            try:
                optimizer.step()
            except ShoalError as error:
                errors[shoal.rank()] = f"{error.reason} in step {loader.global_step}: {error}"
                weights[shoal.rank()] = [
                    parameter.detach() - old
                    for parameter, old in zip(net.parameters(), before, strict=True)
                ]
                raise
            optimizer.zero_grad()

    with pytest.raises(
        ShoalError, match="the ranks' optimizers have different settings"
    ) as stopped:
        shoal.launch(rank, world_size=2)
    assert stopped.value.reason == "RANKS_DIVERGED"
    assert {number: text.partition(":")[0] for number, text in errors.items()} == dict.fromkeys(
        (0, 1), "RANKS_DIVERGED in step 2"
    )
    before = {"lr": 0.5, "weight_decay": 0}[setting]
    difference = f"('{setting}' of group 0: rank 0 has {before}, rank 1 has {other})"
    assert difference in errors[0]
    assert errors[1] == errors[0]
    assert not any(change.any() for changes in weights.values() for change in changes)


class LostAfterTheFirst:
    """The exchanges of a group of two ranks; the second exchange fails because the peer has
    left."""

    def __init__(self) -> None:
        self.exchanges = 0

    def __call__(self, payload: bytes) -> list[bytes]:
        self.exchanges += 1
        if self.exchanges > 1:
            raise MembershipChanged("a peer has left")
        mine = json.loads(payload)
        other = mine | {"digests": {group: digest + 1 for group, digest in mine["digests"].items()}}
        return [payload, json.dumps(other).encode()]


def test_a_difference_counts_although_a_peer_leaves_before_the_tensor_is_known() -> None:
    held = SimpleNamespace(agreed=2, steps=4)
    in_common = {"the model": {"'weight'": torch.zeros(2)}}
    message = replicas_compared._compare(held, in_common, LostAfterTheFirst())  # type: ignore[arg-type]
    assert message is not None
    assert message.startswith(
        "after step 4 ranks 0 and 1 hold different values of a tensor (the model). All ranks "
        "agreed after step 2"
    )


@pytest.mark.parametrize(
    ("elements", "parts"), [(1, 1), (10, 10), (64, 64), (65, 64), (1000, 64), (1 << 16, 64)]
)
def test_a_tensor_is_compared_in_64_parts_if_it_has_as_many_elements(
    elements: int, parts: int
) -> None:
    assert len(replicas_compared._parts_of(torch.zeros(elements))) == parts


# --------------------------------------------------------------------------------- the end of a run

Script = Callable[[nn.Sequential, Any, Callable[[torch.Tensor], None]], None]
"""A training loop that runs to its end. Takes the module, a loader of seven steps and a function
that trains one step."""


def take_all(net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]) -> None:
    for (batch,) in loader:
        step(batch)


def take_epochs(net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]) -> None:
    for _ in loader.epochs(1):
        for (batch,) in loader:
            step(batch)


def break_behind_a_step(
    net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]
) -> None:
    for (batch,) in loader:
        step(batch)
        if loader.global_step == 6:
            break


def break_before_a_step(
    net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]
) -> None:
    for _, (batch,) in enumerate(loader):
        if loader.global_step == 6:
            break
        step(batch)


def return_from_the_loop(
    net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]
) -> None:
    for (batch,) in loader:
        step(batch)
        if loader.global_step == 6:
            return


LOOPS = [take_all, take_epochs, break_behind_a_step, break_before_a_step, return_from_the_loop]


def run_to_the_end(
    strategy: str,
    every: int,
    loop: Script,
    wrong_after: int = 0,
    afterwards: Callable[[nn.Sequential], None] | None = None,
) -> None:
    """Runs a training script on one rank. Rank 1 changes its values after step `wrong_after`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 1e-2),
        strategy=strategy,
        consistency_check_every=every,
        minimum_parameter_group_size=1,
    )
    x = torch.randn(12 * 7, 8, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x), global_batch_size=12)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.global_step == wrong_after:
            shift_on_rank_1(net)

    loop(net, loader, step)
    if afterwards is not None:
        afterwards(net)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("loop", LOOPS)
def test_values_that_differ_after_the_last_comparison_fail_the_run_at_its_end(
    loop: Script, strategy: str
) -> None:
    last = 7 if loop in (take_all, take_epochs) else 6
    # changes before the last step are found by that step
    with pytest.raises(ShoalError) as stopped:
        shoal.launch(run_to_the_end, strategy, 4, loop, last, world_size=2)
    assert str(stopped.value).startswith(f"after step {last}, the last one, ranks ")
    assert "all ranks agreed after step 4" in str(stopped.value)


def test_run_too_short_for_a_comparison_is_compared_at_its_end() -> None:
    with pytest.raises(ShoalError, match="the ranks had not been compared before"):
        shoal.launch(run_to_the_end, "ddp", 100, take_all, 7, world_size=3)


@pytest.mark.parametrize("every", [0, 7])
def test_end_compares_nothing_already_compared_or_exempt(every: int) -> None:
    shoal.launch(run_to_the_end, "ddp", every, take_all, 7 if every == 7 else 5, world_size=2)


def load_weights_on_rank_0(net: nn.Sequential) -> None:
    """Loads weights on rank 0 only, like a script that restores its best weights there."""
    if shoal.rank() == 0:
        with inside():
            net.load_state_dict(
                {name: torch.full_like(value, 3) for name, value in net.state_dict().items()}
            )
            for parameter in net.parameters():
                parameter.data.fill_(2.0)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("loop", LOOPS)
def test_rank_may_change_its_model_after_the_loop(loop: Script, strategy: str) -> None:
    shoal.launch(run_to_the_end, strategy, 100, loop, 0, load_weights_on_rank_0, world_size=2)


@pytest.mark.parametrize("strategy", ["local_sgd", "hsdp", "zero2", "zero3"])
@pytest.mark.parametrize("loop", LOOPS)
def test_consistent_ranks_end_well_however_their_loop_ends(loop: Script, strategy: str) -> None:
    shoal.launch(run_to_the_end, strategy, 100, loop, world_size=2)


def test_iterator_dropped_late_by_the_script_reports_nothing_of_the_last_step() -> None:
    """Closing the iterator after the script has changed the model does not compare the last
    step."""

    def loop(net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]) -> None:
        batches = iter(loader)
        for _ in range(6):
            step(next(batches)[0])
        load_weights_on_rank_0(net)

    shoal.launch(run_to_the_end, "ddp", 100, loop, world_size=2)


def test_pass_before_the_loop_is_left_is_not_a_difference_between_ranks() -> None:
    """A forward pass without a step before the loop is left, in which batch normalization updates
    its statistics, is not reported as a difference."""

    def loop(net: nn.Sequential, loader: Any, step: Callable[[torch.Tensor], None]) -> None:
        for (batch,) in loader:
            if loader.global_step == 6:
                net(batch + shoal.rank())
                break
            step(batch)

    shoal.launch(run_to_the_end, "ddp", 100, loop, world_size=2)
