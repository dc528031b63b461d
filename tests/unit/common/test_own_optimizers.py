"""LAMB, row-wise Adagrad and delayed Nesterov equal plain implementations of their papers for all
shapes, types, groups and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_common.optimizers.for_torch import LAMB, DelayedNesterov, RowWiseAdagrad

Numbers = list[float]


class PlainLAMB:
    """Algorithm 2 of You et al., 2020, for one flat tensor in Python floats."""

    def __init__(
        self,
        values: Numbers,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        decay: float = 0.0,
    ) -> None:
        self.values, self.lr, self.beta1, self.beta2, self.eps, self.decay = (
            list(values),
            lr,
            beta1,
            beta2,
            eps,
            decay,
        )
        self.mean, self.square, self.steps = [0.0] * len(values), [0.0] * len(values), 0

    def step(self, gradient: Numbers) -> None:
        self.steps += 1
        update = []
        for i, g in enumerate(gradient):
            self.mean[i] = self.beta1 * self.mean[i] + (1 - self.beta1) * g
            self.square[i] = self.beta2 * self.square[i] + (1 - self.beta2) * g * g
            mean, square = (
                self.mean[i] / (1 - self.beta1**self.steps),
                self.square[i] / (1 - self.beta2**self.steps),
            )
            update.append(mean / (math.sqrt(square) + self.eps) + self.decay * self.values[i])
        own, length = math.hypot(*self.values), math.hypot(*update)
        ratio = own / length if own and length else 1.0
        self.values = [w - self.lr * ratio * u for w, u in zip(self.values, update, strict=True)]


class PlainRowWise:
    """Row-wise Adagrad of one table in Python floats."""

    def __init__(
        self,
        rows: list[Numbers],
        *,
        lr: float,
        eps: float = 1e-10,
        decay: float = 0.0,
        begin: float = 0.0,
    ) -> None:
        self.rows, self.lr, self.eps, self.decay, self.sums = (
            [list(row) for row in rows],
            lr,
            eps,
            decay,
            [begin] * len(rows),
        )

    def step(self, gradients: list[Numbers]) -> None:
        for place, (row, given) in enumerate(zip(self.rows, gradients, strict=True)):
            gradient = [g + self.decay * w for g, w in zip(given, row, strict=True)]
            self.sums[place] += sum(g * g for g in gradient) / len(gradient)
            self.rows[place] = [
                w - self.lr * g / (math.sqrt(self.sums[place]) + self.eps)
                for w, g in zip(row, gradient, strict=True)
            ]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 2, 2), ()], ids=str)
def test_lamb_matches_its_paper(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """LAMB computes what its paper says, even for a group without weight decay and under a
    schedule."""
    decayed, free = (torch.nn.Parameter(noise(*shape, seed=seed, dtype=dtype)) for seed in (1, 2))
    optimizer = LAMB(
        [{"params": [decayed]}, {"params": [free], "weight_decay": 0.0, "lr": 0.02}],
        0.1,
        (0.8, 0.99),
        1e-4,
        0.05,
    )
    settings = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-4}
    plain = [
        PlainLAMB(decayed.flatten().tolist(), lr=0.1, decay=0.05, **settings),
        PlainLAMB(free.flatten().tolist(), lr=0.02, **settings),
    ]
    for step in range(8):
        if step == 4:
            optimizer.param_groups[0]["lr"] = plain[0].lr = 0.01
        for seed, (parameter, one) in enumerate(zip((decayed, free), plain, strict=True)):
            parameter.grad = noise(*shape, seed=100 * step + seed, dtype=dtype)
            one.step(parameter.grad.flatten().tolist())
        optimizer.step()
    for parameter, one in zip((decayed, free), plain, strict=True):
        torch.testing.assert_close(
            parameter.detach().flatten().double(),
            torch.tensor(one.values).double(),
            rtol=1e-6,
            atol=1e-6,
        )


def test_lamb_uses_a_trust_ratio_of_one_where_a_norm_is_zero() -> None:
    zero, still = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    LAMB([zero, still], 0.5).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.5))
    assert torch.equal(still.detach(), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 2, 2), (1, 6)], ids=str)
def test_row_wise_adagrad_keeps_one_sum_per_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = torch.nn.Parameter(noise(*shape, dtype=dtype))
    optimizer = RowWiseAdagrad(
        [table], 0.1, weight_decay=0.05, initial_accumulator_value=0.2, eps=1e-4
    )
    plain = PlainRowWise(table.flatten(1).tolist(), lr=0.1, eps=1e-4, decay=0.05, begin=0.2)
    for step in range(8):
        if step == 4:
            optimizer.param_groups[0]["lr"] = plain.lr = 0.01
        table.grad = noise(*shape, seed=step + 1, dtype=dtype)
        plain.step(table.grad.flatten(1).tolist())
        optimizer.step()
    torch.testing.assert_close(
        table.detach().flatten(1).double(), torch.tensor(plain.rows).double(), rtol=1e-6, atol=1e-6
    )
    assert optimizer.state[table]["sum"].shape == (shape[0],)


def test_row_wise_adagrad_of_a_vector_is_adagrad() -> None:
    ours, theirs = (torch.nn.Parameter(noise(6)) for _ in range(2))
    optimizers = (
        RowWiseAdagrad([ours], 0.1, 0.01, 0.3),
        torch.optim.Adagrad([theirs], 0.1, weight_decay=0.01, initial_accumulator_value=0.3),
    )
    for step in range(5):
        ours.grad = theirs.grad = noise(6, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_delayed_nesterov_matches_its_paper(dtype: torch.dtype) -> None:
    """DelayedNesterov computes algorithm 3 of Liu et al., 2024, with c = 0, even under a
    schedule."""
    parameter = torch.nn.Parameter(noise(5, dtype=dtype))
    optimizer = DelayedNesterov([parameter], 0.1, 0.8, every=3)
    values, momentum, total, rate = parameter.tolist(), [0.0] * 5, [0.0] * 5, 0.1
    for t in range(10):
        if t == 4:
            optimizer.param_groups[0]["lr"] = rate = 0.03
        parameter.grad = noise(5, seed=t + 1, dtype=dtype)
        optimizer.step()
        for i, g in enumerate(parameter.grad.tolist()):
            total[i] += g
            if (t + 1) % 3 == 0:
                momentum[i] = 0.8 * momentum[i] + total[i] / 3
                values[i] -= rate * (0.8 * momentum[i] + g / 3)
                total[i] = 0.0
            else:
                values[i] -= rate * g / 3
    torch.testing.assert_close(
        parameter.detach().double(), torch.tensor(values, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("every", [1, 4])
def test_n_gradients_of_delayed_nesterov_equal_one_nesterov_step_with_their_mean(
    every: int,
) -> None:
    ours, theirs = (torch.nn.Parameter(noise(6)) for _ in range(2))
    delayed = DelayedNesterov([ours], 0.3, 0.9, every=every, weight_decay=0.0)
    nesterov = torch.optim.SGD([theirs], 0.3, momentum=0.9, nesterov=True)
    for step in range(5):
        gradients = [noise(6, seed=10 * step + each) for each in range(every)]
        for ours.grad in gradients:
            delayed.step()
        theirs.grad = torch.stack(gradients).mean(0)
        nesterov.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_delayed_nesterov_continues_after_a_restart_with_another_number_of_workers() -> None:
    ours, theirs = (torch.nn.Parameter(noise(6)) for _ in range(2))
    kept, again = DelayedNesterov([ours], every=4), DelayedNesterov([theirs], every=4)
    for step in range(10):
        if step == 3:
            restarted = DelayedNesterov([theirs])
            restarted.load_state_dict(again.state_dict())
            again = restarted
        if step == 6:
            for each in (kept, again):
                each.param_groups[0]["every"] = 2
        ours.grad = theirs.grad = noise(6, seed=step)
        kept.step()
        again.step()
    assert torch.equal(ours, theirs)
    assert kept.state[ours]["step"] == 1


@pytest.mark.parametrize("kind", [LAMB, RowWiseAdagrad, DelayedNesterov])
def test_maximize_ascends(kind: Callable[..., torch.optim.Optimizer]) -> None:
    down, up = (torch.nn.Parameter(noise(4, 3)) for _ in range(2))
    down.grad, up.grad = noise(4, 3, seed=1), -noise(4, 3, seed=1)
    kind([down], 0.1).step()
    kind([up], 0.1, maximize=True).step()
    assert torch.equal(down, up)


@pytest.mark.parametrize("kind", [LAMB, RowWiseAdagrad, DelayedNesterov])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_parameters_are_rounded_once_per_step(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    narrow = torch.nn.Parameter(noise(4, 3).to(dtype))
    wide = torch.nn.Parameter(narrow.detach().float())
    narrow.grad = noise(4, 3, seed=1).to(dtype)
    wide.grad = narrow.grad.float()
    kind([narrow], 0.1).step()
    kind([wide], 0.1).step()
    assert torch.equal(narrow, wide.to(dtype))


def test_row_sums_of_sixteen_bit_tables_keep_growing_even_after_a_restart() -> None:
    """A row's sum keeps growing when the table is in bfloat16, where 256 + 1 would be rounded to
    256."""
    table = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    optimizer = RowWiseAdagrad([table], 0.0, initial_accumulator_value=256.0)
    table.grad = torch.ones_like(table)
    for _ in range(3):
        optimizer.step()
        again = RowWiseAdagrad([table], 0.0)
        again.load_state_dict(optimizer.state_dict())
        optimizer = again
    assert optimizer.state[table]["sum"].tolist() == [259.0, 259.0]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", [LAMB, RowWiseAdagrad, DelayedNesterov])
@pytest.mark.parametrize("shape", [(1, 300_000), (3, 100_000), (300_000,)], ids=str)
def test_number_of_threads_changes_no_bit(
    kind: Callable[..., torch.optim.Optimizer], shape: tuple[int, ...]
) -> None:
    """The number of threads does not change the result, because a server that is restored on
    another machine must repeat the same updates."""
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        parameter = torch.nn.Parameter(noise(*shape, dtype=torch.float32))
        parameter.grad = noise(*shape, seed=1, dtype=torch.float32)
        kind([parameter], 0.1).step()
        found.append(parameter.detach())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda held: LAMB(held, lr=-1.0), "lr=-1.0"),
        (lambda held: LAMB(held, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda held: RowWiseAdagrad(held, eps=float("nan")), "eps=nan"),
        (lambda held: DelayedNesterov(held, momentum=1.0), "momentum=1.0"),
        (lambda held: DelayedNesterov(held, every=0), "every=0: expected a whole number"),
        (lambda held: DelayedNesterov(held, every=1.5), "every=1.5: expected a whole number"),
    ],
)
def test_impossible_settings_are_refused_by_name(
    make: Callable[..., torch.optim.Optimizer], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make([torch.nn.Parameter(torch.zeros(1))])


def test_sparse_gradients_are_refused_with_a_remedy() -> None:
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="sparse=False"):
        RowWiseAdagrad(table.parameters()).step()


def test_own_optimizers_are_exported_by_shoal() -> None:
    ours = (shoal.optim.LAMB, shoal.optim.RowWiseAdagrad, shoal.optim.DelayedNesterov)
    assert ours == (LAMB, RowWiseAdagrad, DelayedNesterov)
