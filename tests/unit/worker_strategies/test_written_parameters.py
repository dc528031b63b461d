"""Parameters that a forward pass writes are kept if ranks have them unsharded and write the same
values. Elsewhere such writes are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shoal
import torch
from shoal import ConfigurationError, PreconditionError
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.engine.step import pass_writes
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
CARRY = ["ddp", "zero1", "zero2"]
REFUSE = ["zero3", "fsdp", "hsdp", "tensor", "pipeline", "hybrid"]


class Momentum(nn.Module):
    """A momentum encoder, as in MoCo: its parameters are frozen and written in the forward pass."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.query, self.key, self.how = (
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 4, bias=False),
            how,
        )
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                key, query = self.key.weight, self.query.weight
                if self.how == "in place":
                    key.mul_(0.9).add_(query, alpha=0.1)
                elif self.how == "data in place":
                    key.data.mul_(0.9).add_(query.data, alpha=0.1)
                else:
                    key.data = key.data * 0.9 + query.data * 0.1
        q: torch.Tensor = self.query(x)
        return q - self.key(x) - 1


class ActNorm(nn.Module):
    """A layer that initializes itself from the statistics of its first batch."""

    done: torch.Tensor

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.shift, self.scale, self.how = (
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(torch.ones(4)),
            how,
        )
        self.register_buffer("done", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.done:
            with torch.no_grad():
                into = self.shift.data if self.how == "data in place" else self.shift
                into.copy_(-x.mean(0))
                self.done.fill_(1)
        return (x + self.shift) * self.scale


def momentum(how: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Momentum(how), nn.Linear(4, 4))


def act_norm(how: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(ActNorm(how), nn.Linear(4, 4))


def plain(make: Callable[[str], nn.Module]) -> dict[str, torch.Tensor]:
    net = make("in place")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x in X.split(8):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def train(
    make: Callable[[str], nn.Module], how: str, strategy: str, micro: int | None = None
) -> dict[str, torch.Tensor]:
    net = make(how)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        TensorDataset(X), global_batch_size=8, micro_batch_size=micro, shuffle=False
    )
    for step in loader.steps() if micro else ([batch] for batch in loader):
        for (x,) in step:
            model.train_step(x, None, lambda output, _: output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
@pytest.mark.parametrize("strategy", CARRY)
def test_equal_writes_on_all_ranks_act_as_in_one_process(
    strategy: str, how: str, micro: int | None
) -> None:
    if how == "data" and strategy != "ddp":
        with pytest.raises(ConfigurationError, match=r"0\.key\.weight"):
            shoal.launch(train, momentum, how, strategy, micro, world_size=2)
        return
    wanted = plain(momentum)
    for found in shoal.launch(train, momentum, how, strategy, micro, world_size=2):
        assert all(torch.allclose(found[key], value, atol=1e-5) for key, value in wanted.items())


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("how", ["in place", "data in place"])
@pytest.mark.parametrize("strategy", CARRY)
def test_writes_that_depend_on_a_ranks_own_samples_are_refused(
    strategy: str, how: str, micro: int | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.shift.*if not shoal\.is_joining") as refused:
        shoal.launch(train, act_norm, how, strategy, micro, world_size=2)
    assert refused.value.reason == "PARAMETERS_WRITTEN"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
@pytest.mark.parametrize("strategy", REFUSE)
def test_writes_to_sharded_parameters_are_refused(strategy: str, how: str, world_size: int) -> None:
    with pytest.raises(shoal.ShoalError, match=r"0\.key\.weight"):
        shoal.launch(train, momentum, how, strategy, world_size=world_size)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
def test_writes_to_untrained_parameters_are_refused_where_only_trained_ones_are_averaged(
    how: str, micro: int | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.key\.weight.*only trained") as refused:
        shoal.launch(train, momentum, how, "local_sgd", micro, world_size=2)
    assert refused.value.reason == "PARAMETERS_WRITTEN"


class Counting(nn.Module):
    """Counts its training passes in every way that a module can: in a buffer, in extra state, in
    plain attributes and, from pass `writes_from` on, in a frozen parameter."""

    buffer: torch.Tensor

    def __init__(self, writes_from: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("buffer", torch.tensor(0))
        self.writes_from, self.number, self.tensor, self.extra = writes_from, 0, torch.zeros(()), 0

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.number >= self.writes_from:
                self.frozen.add_(1)
            self.buffer += 1
            self.number += 1
            self.tensor += 1
            self.extra += 1
        return x

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def counted(
    strategy: str, lost: int | None, writes_from: float, micro: int | None = 2
) -> tuple[dict[str, torch.Tensor], float, float]:
    """Trains for 6 steps. After the passes of step `lost`, all ranks abort it, as they do when a
    rank is lost. Returns the final state, and the module's attributes."""
    torch.manual_seed(1)
    counting = Counting(writes_from)
    net = nn.Sequential(counting, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8, micro_batch_size=micro)
    committed = []

    def loss(output: torch.Tensor, _: object) -> torch.Tensor:
        if micro is None:
            abort()  # before backward(), which commits the step
        return output.square().mean()

    def abort() -> None:
        if len(committed) == lost:
            current_session().lifecycle.abort_step("a rank was lost")

    for step in loader.steps() if micro else ([batch] for batch in loader):
        for (x,) in step:
            model.train_step(x, None, loss)
        if micro is not None:
            abort()
        committed.append(bool(optimizer.step()))
        optimizer.zero_grad()
    assert loader.global_step == 6
    assert committed.count(False) == (lost is not None)
    return model.full_state_dict(), counting.number, counting.tensor.item()


@pytest.mark.parametrize("strategy", ["local_sgd", *CARRY, *REFUSE])
def test_lost_step_undoes_the_changes_of_its_passes(strategy: str) -> None:
    writes_from = 0 if strategy in CARRY else float("inf")
    wanted = shoal.launch(counted, strategy, None, writes_from, world_size=2)
    found = shoal.launch(counted, strategy, 2, writes_from, world_size=2)
    for (state, number, tensor), (state_then, number_then, tensor_then) in zip(
        wanted, found, strict=True
    ):
        assert state.keys() == state_then.keys()
        assert all(
            torch.equal(torch.as_tensor(state_then[name]), torch.as_tensor(value))
            for name, value in state.items()
        )
        assert tensor_then == tensor
        if strategy not in ("tensor", "pipeline", "hybrid"):  # as docs/torch-calls.md says
            assert number_then == number


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("strategy", CARRY)
def test_the_first_write_to_a_large_model_cannot_be_undone_and_says_so(
    strategy: str, micro: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_writes, "_SMALL", 0)
    why = "a step with micro-batches" if micro else "a step that was lost"
    with pytest.raises(
        PreconditionError, match=rf"'0\.frozen' was written for the first time .* {why}"
    ) as refused:
        shoal.launch(counted, strategy, 2, 2, micro, world_size=2)
    assert refused.value.reason == "PARAMETERS_WRITTEN"
    if micro is None:  # a later step can be undone
        for state, _, _ in shoal.launch(counted, strategy, 3, 2, micro, world_size=2):
            assert state["0.frozen"].item() == 4


class WritesWithoutEffect(nn.Module):
    """A buffer's writes depend on the rank but never change its value."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if not self.seen.all():
                self.seen.fill_(True)
            if shoal.rank() == 0:
                self.seen[0] = True
        output: torch.Tensor = self.linear(x)
        return output


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_ranks_may_differ_in_writes_without_effect(strategy: str) -> None:
    def rank() -> int:
        net = WritesWithoutEffect()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8)
        for _ in loader.epochs(1):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return loader.global_step

    assert shoal.launch(rank, world_size=2) == [6, 6]


@pytest.mark.parametrize("begun", ["a forward pass", "a loop that was left"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_values_set_by_a_script_after_an_unfinished_step_are_kept(
    strategy: str, begun: str
) -> None:
    def rank() -> tuple[torch.Tensor, float]:
        net = Momentum()
        net.how, net.rate = "in place", 1.0
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.query.parameters(), 0.0), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8)
        for _ in loader.epochs(2):
            if begun == "a forward pass" and loader.global_step == 0:
                model(X[:2])
            else:
                for _ in loader:
                    break
            net.rate = 0.5
            net.load_state_dict(
                {name: torch.full_like(value, 7.0) for name, value in net.state_dict().items()}
            )
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            break
        return model.full_state_dict()["query.weight"], net.rate

    for values, rate in shoal.launch(rank, world_size=2):
        assert torch.equal(values, torch.full_like(values, 7.0))
        assert rate == 0.5
