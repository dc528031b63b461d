"""torch's own calls on a distributed model are correct, or raise an error that names the call to
use instead: runs the table in calls.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.strategies import registry
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.unit.torch_calls.calls import CALLS, KINDS, RIGHT, Call, world_of
from tests.unit.torch_calls.page import page

BATCH = 8
STEPS = len(CALLS) + 2
"""Number of steps. A round of local_sgd would end with the last one."""


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(len(x)) % 2)


class Plain:
    """A model trained by one process that makes the same calls."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        functional.cross_entropy(self.net(x), y).backward()

    def make(self, call: Call) -> Any:
        return call.do(self.net, self.optimizer, self.net)


def run(kind: str, options: dict[str, Any], *, micro: bool) -> list[str]:
    """Makes each call in a step of its own. Returns the calls that were neither correct nor refused
    as expected."""
    net, plain, wrong = network(), Plain(), list[str]()
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        minimum_parameter_group_size=1,
        consistency_check_every=4,
        **options,
    )
    loader = shoal.ElasticDataLoader(
        data(), global_batch_size=BATCH, micro_batch_size=2 if micro else None, shuffle=False
    )
    x, y = data().tensors
    local = options["strategy"] == "local_sgd"

    def made(call: Call) -> None:
        expected = call.expected(kind)
        try:
            found = call.do(model, optimizer, net)
        except (shoal.ShoalError, RuntimeError) as error:
            if expected not in str(error):
                wrong.append(f"{call.says}: {type(error).__name__}: {error}, instead of {expected}")
            if call.loops:
                model.load_full(plain.net.state_dict())
            return
        if expected is not RIGHT:
            wrong.append(f"{call.says}: it gave {found}, instead of naming {expected}")
        else:
            wrong.extend(f"{call.says}: {each}" for each in differences(found, plain.make(call)))

    for number, step in enumerate(loader.steps() if micro else ([batch] for batch in loader)):
        own = []
        for inputs, targets in step:
            model.train_step(inputs, targets, functional.cross_entropy)
            own.append((inputs, targets))
        batch = (
            (torch.cat([one for one, _ in own]), torch.cat([one for _, one in own]))
            if local
            else None
        )
        samples = slice(number * BATCH, (number + 1) * BATCH)
        plain.backward(*(batch or (x[samples], y[samples])))
        if number == len(CALLS):
            break
        call = CALLS[number]
        if call.gradients:
            made(call)
        optimizer.step()
        plain.optimizer.step()
        if not call.gradients:
            made(call)
        optimizer.zero_grad()
        plain.optimizer.zero_grad()
        state = net.state_dict() if local else model.full_state_dict()
        if differences(state, plain.net.state_dict()):
            wrong.append(f"{call.says}: the parameters are others afterwards")
            break
    return wrong


def differences(found: Any, expected: Any) -> list[str]:
    """Returns the differences that torch finds."""
    try:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    except AssertionError as error:
        return [str(error)]
    return []


def _cases() -> list[object]:
    """Returns all cases. `make test` runs each strategy on two ranks, every second one with
    micro-batches; `make parity` runs all."""
    rows = [(kind, row) for kind in KINDS for row in KINDS[kind].rows]
    return [
        pytest.param(
            kind,
            row,
            micro,
            id=f"{row}-micro-batches" if micro else row,
            marks=() if world_of(row) == 2 and micro is bool(number % 2) else pytest.mark.matrix,
        )
        for number, (kind, row) in enumerate(rows)
        for micro in (False, True)
    ]


@pytest.mark.parametrize(("kind", "row", "micro"), _cases())
def test_torchs_own_calls_are_correct_or_name_the_alternative(
    kind: str, row: str, micro: bool
) -> None:
    for rank, wrong in enumerate(
        shoal.launch(
            lambda: run(kind, dict(KINDS[kind].rows[row]), micro=micro), world_size=world_of(row)
        )
    ):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


def test_committed_table_matches_the_calls() -> None:
    expected = page()
    assert (Path(__file__).parents[3] / "docs" / "torch-calls.md").read_text() == expected, (
        "run python -m tests.unit.torch_calls.page docs/torch-calls.md"
    )


def test_every_strategy_is_in_the_table() -> None:
    assert {
        options["strategy"] for kind in KINDS.values() for options in kind.rows.values()
    } == set(registry.names()) - {"async_sgd"}


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_penalty_on_parameters_freed_between_passes_is_refused_instead_of_zero(
    strategy: str,
) -> None:
    def rank() -> None:
        net = network()
        model, _ = shoal.as_distributed(
            net,
            torch.optim.SGD(net.parameters(), 0.1),
            strategy=strategy,
            minimum_parameter_group_size=1,
        )
        for x, y in shoal.ElasticDataLoader(data(), global_batch_size=BATCH):
            loss = functional.cross_entropy(model(x), y)
            (loss + sum(p.square().sum() for p in model.parameters())).backward()

    with pytest.raises(shoal.PreconditionError, match=r"model\.gather_full_parameters\(\)"):
        shoal.launch(rank, world_size=2)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_ddp_reduces_gradients_moved_to_other_memory(micro_batch_size: int | None) -> None:
    """ddp still reduces gradients after torch's `model.float()` has moved them and the parameters
    to other memory, which loses the hooks of both."""

    def rank() -> list[torch.Tensor]:
        net = network()
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        loader = shoal.ElasticDataLoader(
            data(), global_batch_size=BATCH, micro_batch_size=micro_batch_size
        )
        for step in loader.steps() if micro_batch_size else ([batch] for batch in loader):
            for x, y in step:
                functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if loader.global_step % 2:
                model.float().double()
            else:
                for parameter in model.parameters():
                    parameter.grad.data = parameter.grad.data.clone()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    first, second = shoal.launch(rank, world_size=2)
    assert all(map(torch.equal, first, second))
