"""Buffers that change during a step, even after its backward pass, and integer buffers with changes
of any size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal import ConfigurationError
from torch import nn
from torch.utils.data import TensorDataset

from tests.pairs import by_pairs

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
EXACT = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "hybrid"]
FAR = 123_456_789_013


class Counting(nn.Module):
    counted: torch.Tensor
    codes: torch.Tensor

    def __init__(self, by: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.inner, self.outer = by, nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("codes", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counted += self.by
        output: torch.Tensor = self.outer(torch.tanh(self.inner(x))).square().mean()
        return output


Change = Callable[[Counting, torch.Tensor], None]


def train(
    strategy: str,
    change: Change | None = None,
    *,
    by: int = 1,
    micro_batch_size: int | None = None,
    closed_before: bool = False,
    short: bool = False,
    **options: Any,
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Trains three steps of 8 samples and returns the two buffers and a weight.

    change: is called between backward() and step().
    closed_before: uses `train_step`, so that the ranks have closed the step before `change`.
    short: gives the last batch only one sample, so that one rank has none.
    """
    net = Counting(by)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
    )
    data = TensorDataset(X[:17] if short else X)
    loader = shoal.ElasticDataLoader(
        data, global_batch_size=8, micro_batch_size=micro_batch_size, shuffle=False
    )
    for step in loader.steps() if micro_batch_size else ([batch] for batch in loader):
        for (x,) in step:
            if closed_before:
                model.train_step(x, None, lambda output, _: output)
            else:
                model(x).backward()
        if change is not None:
            change(net, x)
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict()
    return int(state["counted"]), state["codes"].clone(), state["outer.weight"].clone()


def on_ranks(*args: Any, **options: Any) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    return shoal.launch(lambda: train(*args, **options), world_size=2)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("strategy", [*EXACT, "local_sgd"])
def test_integers_that_change_much_stay_exact(strategy: str, micro_batch_size: int | None) -> None:
    for counted, _, _ in on_ranks(strategy, by=FAR, micro_batch_size=micro_batch_size):
        assert counted == 3 * FAR


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_integer_that_changes_too_much_to_stay_exact_is_refused(
    strategy: str, micro_batch_size: int | None
) -> None:
    with pytest.raises(
        shoal.ConfigurationError, match=r"Counting\.counted.* changed by \d+ in a step"
    ):
        on_ranks(strategy, by=1 << 60, micro_batch_size=micro_batch_size)


def alike(net: Counting, x: torch.Tensor) -> None:
    net.codes.add_(1.0)
    net.counted.add_(10)


def by_data(net: Counting, x: torch.Tensor) -> None:
    net.codes.data.add_(1.0)
    net.counted.data.add_(10)


def assigned(net: Counting, x: torch.Tensor) -> None:
    net.codes = net.codes + 1.0
    net.counted = net.counted + 10


CHANGES = [
    *((strategy, alike) for strategy in EXACT),
    ("ddp", by_data),
    ("ddp", assigned),
    ("zero2", by_data),
]


@by_pairs(how=CHANGES, micro_batch_size=[None, 2], closed_before=[False, True])
def test_equal_changes_on_all_ranks_behind_the_backward_pass_are_kept(
    how: tuple[str, Change], micro_batch_size: int | None, closed_before: bool
) -> None:
    strategy, change = how
    for counted, codes, _ in on_ranks(
        strategy, change, micro_batch_size=micro_batch_size, closed_before=closed_before
    ):
        assert counted == 33
        assert codes.tolist() == [3.0] * 4


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_rank_without_samples_keeps_changes_made_behind_the_backward_pass(
    strategy: str,
) -> None:
    for counted, codes, _ in on_ranks(strategy, alike, short=True):
        assert counted == 33
        assert codes.tolist() == [3.0] * 4


def of_its_samples(net: Counting, x: torch.Tensor) -> None:
    net.codes.lerp_(x.mean(0), 0.5)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_sample_dependent_changes_behind_the_backward_pass_become_their_mean(
    strategy: str,
) -> None:
    expected = torch.zeros(4)
    for batch in X.split(8):
        expected.lerp_(batch.mean(0), 0.5)
    for _, codes, _ in on_ranks(strategy, of_its_samples):
        torch.testing.assert_close(codes, expected)


def on_one_rank(net: Counting, x: torch.Tensor) -> None:
    if shoal.rank() == 0:
        net.codes.add_(2.0)


def test_change_on_one_rank_behind_the_backward_pass_becomes_the_mean() -> None:
    for _, codes, _ in on_ranks("ddp", on_one_rank):
        assert codes.tolist() == [3.0] * 4


def test_buffers_are_summed_beside_compressed_gradients() -> None:
    for counted, codes, _ in on_ranks("ddp", alike, by=FAR, gradient_compression="powersgd"):
        assert counted == 3 * FAR + 30
        assert codes.tolist() == [3.0] * 4


class Features(nn.Module):
    """Random features: a table that is in no state dict and that each process draws at random."""

    def __init__(self, drawn_by: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)
        table = torch.randn(8, 8, generator=torch.Generator().manual_seed(drawn_by))
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("cache", torch.zeros(drawn_by), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outer(torch.cos(self.inner(x) @ self.table)).square().mean()
        return output


def with_features(strategy: str, directory: Path, drawn_by: int) -> torch.Tensor:
    net = Features(drawn_by + shoal.rank())
    first = Features(drawn_by).table
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8)
    shoal.resume(directory)
    for (x,) in loader:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(net.table, first)
        shoal.save_checkpoint(directory)
        break
    weight: torch.Tensor = model.full_state_dict()["inner.weight"]
    return weight


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "tensor", "hybrid"])
def test_buffers_outside_the_state_dict_are_those_of_the_first_rank(
    strategy: str, tmp_path: Path
) -> None:
    """All ranks use the unsaved table of rank 0, even after a resume, which uses the newly drawn
    table."""
    for drawn_by in (1, 5):
        first, second = shoal.launch(with_features, strategy, tmp_path, drawn_by, world_size=2)
        assert torch.equal(first, second)


class Masked(nn.Module):
    """A model with an expanded buffer: several elements share one memory location."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer(
            "mask", (torch.tril(torch.ones(4, 4)) * scale).expand(2, 4, 4), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = (self.linear(x) * self.mask[0].sum()).square().mean()
        return output


def with_masks(strategy: str, directory: Path, *, apart: bool) -> float:
    net = Masked(1.0 + shoal.rank() * apart)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.001), strategy=strategy
    )
    shoal.resume(directory)
    for (x,) in shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    shoal.save_checkpoint(directory)
    return float(net.mask[1].sum())


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hybrid"])
@pytest.mark.parametrize("apart", [False, True])
def test_expanded_buffers_are_resumed(strategy: str, apart: bool, tmp_path: Path) -> None:
    for _ in range(2):
        assert shoal.launch(lambda: with_masks(strategy, tmp_path, apart=apart), world_size=2) == [
            10.0,
            10.0,
        ]


class Seen(nn.Module):
    """Records in a buffer which classes occurred, how often each did, or the number of samples.
    Each rank counts its own samples."""

    seen: torch.Tensor

    def __init__(self, kind: torch.dtype, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.linear = how, nn.Linear(4, 1)
        begins = {
            "least": torch.full((3,), torch.inf),
            "partly infinite": torch.tensor([torch.inf, 9.0, 9.0]),
        }
        self.register_buffer("seen", begins.get(how, torch.zeros(16, dtype=kind)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            classes = torch.bincount((x > 0).long() @ torch.tensor([1, 2, 4, 8]), minlength=16)
            if self.how == "mark":
                self.seen[classes > 0] = 1
            elif self.how in ("least", "partly infinite"):
                self.seen.copy_(torch.minimum(self.seen, x[:, :3].amin(0)))
            else:
                self.seen += {"classes": classes, "samples": len(x), "steps": 1}[self.how]
        output: torch.Tensor = self.linear(x).square().mean()
        return output


def seen_by(
    strategy: str, kind: torch.dtype, how: str, micro_batch_size: int | None
) -> list[float]:
    net = Seen(kind, how)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        TensorDataset(X), global_batch_size=8, micro_batch_size=micro_batch_size, shuffle=False
    )
    for step in loader.steps() if micro_batch_size else ([batch] for batch in loader):
        for (x,) in step:
            model.train_step(x, None, lambda output, _: output)
        optimizer.step()
        optimizer.zero_grad()
    found: list[float] = model.full_state_dict()["seen"].tolist()
    return found


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("how", ["classes", "samples", "steps"])
@pytest.mark.parametrize("strategy", EXACT)
def test_integer_counts_match_one_process(
    strategy: str, how: str, micro_batch_size: int | None
) -> None:
    net = Seen(torch.int64, how)
    for x in X.split(8):
        net(x)
    results = shoal.launch(seen_by, strategy, torch.int64, how, micro_batch_size, world_size=2)
    assert results == [net.seen.tolist()] * 2


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.bool, "mark"),
        (torch.int32, "classes"),
        (torch.uint8, "classes"),
        (torch.int16, "mark"),
        (torch.float32, "partly infinite"),
    ],
)
@pytest.mark.parametrize("strategy", EXACT)
def test_sample_dependent_buffers_without_mean_or_sum_are_refused(
    strategy: str, kind: torch.dtype, how: str, micro_batch_size: int | None
) -> None:
    if strategy == "tensor" and micro_batch_size is None:
        pytest.skip("both ranks have the same samples")
    with pytest.raises(ConfigurationError, match="'seen'") as refused:
        shoal.launch(seen_by, strategy, kind, how, micro_batch_size, world_size=2)
    assert refused.value.reason == "BUFFERS_DIFFER"


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.int32, "steps"),
        (torch.uint8, "steps"),
        (torch.float32, "least"),
        (torch.bool, "mark"),
    ],
)
@pytest.mark.parametrize("strategy", EXACT)
def test_buffers_that_change_identically_may_have_any_type(
    strategy: str, kind: torch.dtype, how: str
) -> None:
    net = Seen(kind, how)
    for x in X.split(8):
        net(x)
    ranks = 1 if how == "mark" else 2
    assert (
        shoal.launch(seen_by, strategy, kind, how, None, world_size=ranks)
        == [net.seen.tolist()] * ranks
    )


class Late(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("positions", torch.arange(4).expand(3, -1))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late is None and self.training:
            self.late = torch.ones(3)
        return super().forward(x + self.positions[0])


@pytest.mark.parametrize("strategy", EXACT)
def test_a_buffer_that_was_none_is_named(strategy: str) -> None:
    def train() -> None:
        net = nn.Sequential(Late(), nn.Linear(1, 1))
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
        )
        for (x,) in shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8):
            model.train_step(x, None, lambda output, _: output.square().mean())
            optimizer.step()

    with pytest.raises(ConfigurationError, match=r"0\.late"):
        shoal.launch(train, world_size=2)
