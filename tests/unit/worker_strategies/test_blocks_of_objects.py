"""Models whose blocks take and return objects of user-defined classes train as in one process."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.engine.step.passes import tensors_in
from torch import nn

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


@dataclasses.dataclass
class State:
    x: torch.Tensor
    number: int = 0


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.inner = {"x": [x]}

    @property
    def x(self) -> torch.Tensor:
        return self.inner["x"][0]


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hiding:
    """Hides its tensor in a closure, so that only its property can return it."""

    def __init__(self, x: torch.Tensor) -> None:
        self._give = lambda: x

    @property
    def x(self) -> torch.Tensor:
        return self._give()


Named = namedtuple("Named", ["x"])
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": State,
    "object": Plain,
    "slots": Slotted,
    "hiding": Hiding,
    "named tuple": Named,
    "nested": lambda x: State(Plain(x)),  # type: ignore[arg-type]
}


def value(state: Any) -> torch.Tensor:
    return value(state.x) if not isinstance(state, torch.Tensor) else state


class Block(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, state: Any) -> Any:
        x = value(state)
        return self.kind(x + self.b(self.a(x).relu()))


class Writing(nn.Module):
    """Modifies its input in place and returns nothing."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, state: State) -> None:
        state.x = state.x + self.a(state.x).tanh()


class Appending(nn.Module):
    """Returns one tensor and appends another to its input."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = features[-1]
        output: torch.Tensor = self.b(x).tanh()
        features.append(self.a(x).tanh())  # computed last, so its gradient is computed first
        return output


class Keeping(nn.Module):
    """Returns one tensor and stores another in an attribute, as layers with an auxiliary loss
    do."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.auxiliary: torch.Tensor | None = None

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = features[-1]
        output: torch.Tensor = self.b(x).tanh()
        features.append(output)
        self.auxiliary = self.b(self.a(x).tanh())
        return output


class Collecting(nn.Module):
    """Adds up the blocks' returned tensors first and the tensors that they stored or appended last,
    so that the backward pass visits them in the opposite order."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.blocks, self.out = (
            nn.Linear(4, 8),
            nn.ModuleList([block(None) for _ in range(3)]),
            nn.Linear(8, 1),
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features, returned = [self.inp(x)], []
        for block in self.blocks:
            returned.append(block(features))
        beside = [block.auxiliary for block in self.blocks if isinstance(block, Keeping)]
        loss: torch.Tensor = self.out(sum(returned)) + sum(
            each.sum(1, keepdim=True) for each in [*features, *beside]
        )
        return loss


class Net(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any], block: Any = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.inp, self.blocks, self.out = (
            nn.Linear(4, 8),
            nn.ModuleList([block(kind) for _ in range(3)]),
            nn.Linear(8, 1),
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.kind(self.inp(x))
        for block in self.blocks:
            result = block(state)
            state = state if result is None else result
        output: torch.Tensor = self.out(value(state))
        return output


X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(strategy: str, net: Net) -> dict[str, torch.Tensor]:
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        strategy=strategy,
        minimum_parameter_group_size=1,
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
    )
    for _ in loader.epochs(2):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def plain(net: Net) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x in [*X.split(8)] * 2:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_take_and_return_objects(strategy: str, kind: str) -> None:
    expected = plain(Net(KINDS[kind]))
    for state in shoal.launch(lambda: train(strategy, Net(KINDS[kind])), world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_write_to_the_object_that_they_receive(strategy: str) -> None:
    expected = plain(Net(State, Writing))
    for state in shoal.launch(lambda: train(strategy, Net(State, Writing)), world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def test_tensors_are_found_once_wherever_they_are() -> None:
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    loop: list[Any] = [a]
    loop.append(loop)
    found = tensors_in(
        {
            "a": a,
            "b": (State(b), loop),
            "c": UserDict(c=Slotted(c)),
            "module": nn.Linear(2, 2),
            "n": None,
        }
    )
    assert [id(each) for each in found] == [id(a), id(b), id(c)]


class Dataset:
    def __init__(self, samples: int) -> None:
        self.samples = {number: (number, [number]) for number in range(samples)}


class Context:
    """Refers to a dataset and to a mapping that would read a file."""

    def __init__(self, x: torch.Tensor) -> None:
        self.dataset, self.file, self.x = Dataset(50_000), ReadFromFile(), [x]


class ReadFromFile(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_tensor_is_found_in_an_object_that_refers_to_a_dataset() -> None:
    x = torch.zeros(1)
    assert [id(each) for each in tensors_in(Context(x))] == [id(x)]


def test_all_tensors_of_large_containers_are_found() -> None:
    tensors = [[torch.zeros(1)] for _ in range(12_000)]
    assert len(tensors_in({"lists": tensors})) == 12_000


@pytest.mark.parametrize("block", [Appending, Keeping])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_side_outputs_of_a_block_take_part_in_the_backward_pass(strategy: str, block: Any) -> None:
    wanted = plain(Collecting(block))  # type: ignore[arg-type]
    for found in shoal.launch(lambda: train(strategy, Collecting(block)), world_size=2):  # type: ignore[arg-type]
        assert all(torch.allclose(found[name], value) for name, value in wanted.items())


class Private:
    __slots__ = ("__x", "y")

    def __init__(self, x: torch.Tensor) -> None:
        self.__x = x


def test_private_slots_are_searched() -> None:
    x = torch.ones(2)
    (found,) = tensors_in(Private(x))
    assert found is x
