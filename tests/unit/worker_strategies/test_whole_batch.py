"""`shoal.whole_batch`: with a loss that compares all samples of a batch, several ranks train the
same model as one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.strategies import registry
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.worker_strategies.alike import assert_alike

SAMPLES, BATCH, EPOCHS = 26, 7, 2
"""The last batch of an epoch has 5 samples. With three ranks, one has fewer samples than the
others. With seven, two have none and use a placeholder."""
MEETING = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


class Encoder(nn.Module):
    """Maps two views to one space and has a learned temperature for their similarity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layers(x), self.layers(y), self.scale.exp()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    views = torch.randn(2, SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(*views, torch.arange(SAMPLES))


def contrast(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the contrastive loss of a batch of pairs (van den Oord et al., 2018, equation 4)."""
    likeness = scale * nn.functional.normalize(x, dim=1) @ nn.functional.normalize(y, dim=1).T
    same = torch.arange(len(x))
    return nn.functional.cross_entropy(likeness, same) + nn.functional.cross_entropy(
        likeness.T, same
    )


def trained_alone() -> dict[str, torch.Tensor]:
    net = Encoder()
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    one, other, _ = data().tensors
    for _ in range(EPOCHS):
        for begin in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            contrast(*net(one[begin : begin + BATCH], other[begin : begin + BATCH])).backward()
            optimizer.step()
    return net.state_dict()


def train(**options: Any) -> dict[str, torch.Tensor]:
    net = Encoder()
    weigh = options.pop("weight_fn", None)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.9), **options
    )
    loader = shoal.ElasticDataLoader(
        data(), global_batch_size=BATCH, shuffle=False, weight_fn=weigh
    )
    for _ in loader.epochs(EPOCHS):
        for number, (x, y, names) in enumerate(loader):
            optimizer.zero_grad()
            of_x, of_y, scale = model(x, y)
            whole_x, whole_y = shoal.whole_batch(of_x, of_y)
            whole_names = shoal.whole_batch(names)
            assert whole_names.tolist() == list(
                range(number * BATCH, min(SAMPLES, (number + 1) * BATCH))
            )
            contrast(whole_x, whole_y, scale).backward()
            assert optimizer.step()
    whole: dict[str, torch.Tensor] = model.full_state_dict()
    return whole


@pytest.mark.parametrize("strategy", MEETING)
def test_two_ranks_train_as_one_process_does(strategy: str) -> None:
    expected = trained_alone()
    for found in shoal.launch(functools.partial(train, strategy=strategy), world_size=2):
        assert_alike(found, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": "zero3"}, {"weight_fn": lambda batch: 3.0 * len(batch[0])}],
    ids=["ddp", "zero3", "weighed"],
)
def test_ranks_with_few_or_no_samples_train_like_one_process(options: dict[str, Any]) -> None:
    expected = trained_alone()
    for found in shoal.launch(functools.partial(train, **options), world_size=6):
        assert_alike(found, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str
)
def test_rows_of_any_dtype_arrive_unchanged(dtype: torch.dtype) -> None:
    def rank() -> None:
        net = nn.Linear(1, 1)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        loader = shoal.ElasticDataLoader(
            TensorDataset(torch.arange(8.0)[:, None]), global_batch_size=8, shuffle=False
        )
        for (x,) in loader:
            model(x)
            found = shoal.whole_batch((x % 3).to(dtype).expand(-1, 5).T.contiguous().T)
            assert found.dtype is dtype
            assert (
                found.tolist() == (torch.arange(8.0)[:, None] % 3).to(dtype).expand(-1, 5).tolist()
            )
            break

    shoal.launch(rank, world_size=2)


def test_gather_outside_a_step_or_on_one_rank_returns_the_ranks_own_rows() -> None:
    def rank() -> None:
        with pytest.raises(shoal.PreconditionError, match="before as_distributed"):
            shoal.whole_batch(torch.ones(2))
        shoal.as_distributed(nn.Linear(1, 1))
        own = torch.full((2,), float(shoal.rank()))
        assert shoal.whole_batch(own).tolist() == own.tolist()
        assert isinstance(shoal.whole_batch(own, own), tuple)

    shoal.launch(rank, world_size=2)


def in_a_step(call: Any, *, loader: dict[str, Any] | None = None, **options: Any) -> None:
    net = nn.Linear(1, 1)
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), **options)
    batches = shoal.ElasticDataLoader(
        TensorDataset(torch.ones(8, 1)), global_batch_size=4, **loader or {}
    )
    (x,) = next(iter(next(iter(batches.steps())) if loader else batches))
    model(x)
    call(x)


@pytest.mark.parametrize("strategy", sorted({*registry.names()} - {*MEETING, "async_sgd"}))
def test_other_strategies_refuse_it_and_name_those_that_support_it(strategy: str) -> None:
    def rank() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
        with pytest.raises(
            shoal.ConfigurationError,
            match=r"ranks cannot communicate during a forward or backward pass; use ddp, zero1, ",
        ):
            shoal.whole_batch(torch.ones(2))

    shoal.launch(rank, world_size=1)


def test_async_sgd_refuses_it_too() -> None:
    # declared, because shoal.launch starts no parameter servers
    declared = registry.find("async_sgd")[0].declaration
    assert "use ddp, zero1, " in str(
        registry.why_no_whole_batch(declared, shoal.ShardingConfiguration())
    )


# raised by torch.compile when it inspects tensors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_checkpointed_and_compiled_blocks_gather_again_in_their_backward_pass() -> None:
    def rank(*, how: str) -> torch.Tensor:
        net = Encoder()
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.5))
        loader = shoal.ElasticDataLoader(data(), global_batch_size=BATCH, shuffle=False)
        for x, y, _ in loader:
            of_x, of_y, scale = model(x, y)

            def loss(of_x: torch.Tensor, of_y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
                return contrast(*shoal.whole_batch(of_x, of_y), scale)

            if how == "checkpointed":
                torch.utils.checkpoint.checkpoint(
                    loss, of_x, of_y, scale, use_reentrant=False
                ).backward()
            elif how == "compiled":
                torch.compile(loss, backend="eager")(of_x, of_y, scale).backward()
            else:
                loss(of_x, of_y, scale).backward()
            assert optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    plain, *others = (
        shoal.launch(functools.partial(rank, how=each), world_size=2)[0]
        for each in ("plain", "checkpointed", "compiled")
    )
    for other in others:
        torch.testing.assert_close(other, plain)


@pytest.mark.parametrize(
    ("settings", "tensors", "expected"),
    [
        ({"loader": {"micro_batch_size": 2}}, [torch.ones(2)], "Leave out micro_batch_size="),
        ({"loss_reduction": "sum"}, [torch.ones(2)], "would be counted once per rank"),
        ({}, [torch.ones(2), torch.ones(3)], r"tensors with \[2, 3\] rows"),
        ({}, [torch.tensor(1.0)], r"whole_batch of torch\.strided \(\)"),
        ({}, [], r"tensors with \[\] rows"),
    ],
    ids=["micro-batches", "sums", "rows", "scalar", "nothing"],
)
def test_incompatible_tensors_are_refused(
    settings: dict[str, Any], tensors: list[torch.Tensor], expected: str
) -> None:
    def call(x: torch.Tensor) -> None:
        with pytest.raises(shoal.ConfigurationError, match=expected):
            shoal.whole_batch(*tensors)

    shoal.launch(lambda: in_a_step(call, **settings), world_size=1)


def test_ranks_with_mismatched_tensors_all_receive_the_error() -> None:
    def call(x: torch.Tensor) -> None:
        with pytest.raises(
            shoal.PreconditionError, match=r"This rank passed torch\.float32"
        ) as refused:
            shoal.whole_batch(torch.ones(2, 3 + shoal.rank()))
        assert refused.value.reason == "RANKS_DIVERGED"

    shoal.launch(lambda: in_a_step(call), world_size=2)
