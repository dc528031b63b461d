"""The rows of a sparse table are found by id, updated as torch updates sparse gradients, and
evicted in the same way on every repetition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.optimizers.for_servers import TABLE_OPTIMIZERS
from shoal_common.optimizers.for_torch import RowWiseAdagrad
from shoal_common.tables.declaration import TableSpec, wrong_shape
from shoal_common.tables.rows import Rows, _SlotTable
from shoal_common.tables.values import hashed, initial_rows
from torch import nn

DIM = 8


def table(
    optimizer: str = "adagrad", hyperparameters: dict[str, float] | None = None, **others: Any
) -> TableSpec:
    begin = {"seed": 5, "initializer": "uniform", "scale": 0.5, **others}
    return TableSpec.with_defaults(
        optimizer=optimizer, hyperparameters=hyperparameters or {}, **begin
    )


def steps(
    count: int, most_ids: int = 12, of: int = 40
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yields distinct ids and their gradients for each step."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        ids = np.unique(generator.integers(0, of, most_ids))
        yield ids, generator.standard_normal((len(ids), DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters"),
    [
        ("sgd", {"lr": 0.1}),
        ("sgd", {"lr": 0.1, "maximize": 1.0}),
        ("adagrad", {"lr": 0.1}),
        ("adagrad", {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.3, "eps": 1e-3}),
        ("sparse_adam", {"lr": 0.01}),
        ("sparse_adam", {"lr": 0.01, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "maximize": 1.0}),
    ],
)
def test_rows_are_updated_like_an_embedding_with_sparse_gradients_in_torch(
    optimizer: str, hyperparameters: dict[str, float]
) -> None:
    spec = table(optimizer, hyperparameters)
    rows = Rows(spec, DIM)
    embedding = nn.Embedding(
        40, DIM, sparse=True, _weight=torch.from_numpy(rows.values(np.arange(40)))
    )
    reference = spec.declared.optimizer_class()(
        embedding.parameters(), **spec.declared.arguments(dict(spec.hyperparameters))
    )
    with warnings.catch_warnings():
        # a warning of torch's own sparse gradients
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        for step, (ids, gradients) in enumerate(steps(30), 1):
            reference.zero_grad()
            (embedding(torch.from_numpy(ids)) * torch.from_numpy(gradients)).sum().backward()
            reference.step()
            rows.update(ids, gradients, step)
    np.testing.assert_allclose(
        rows.values(np.arange(40)), embedding.weight.detach().numpy(), rtol=1e-6, atol=1e-6
    )
    assert not np.allclose(
        rows.values(np.arange(40)), Rows(spec, DIM).values(np.arange(40)), atol=1e-2
    )


def test_row_wise_adagrad_equals_a_dense_table_with_zero_gradients_elsewhere() -> None:
    spec = table("rowwise_adagrad", {"lr": 0.1, "initial_accumulator_value": 0.2})
    rows = Rows(spec, DIM)
    weight = nn.Parameter(torch.from_numpy(rows.values(np.arange(40))))
    reference = RowWiseAdagrad([weight], lr=0.1, initial_accumulator_value=0.2)
    for step, (ids, gradients) in enumerate(steps(30), 1):
        weight.grad = torch.zeros_like(weight)
        weight.grad[torch.from_numpy(ids)] = torch.from_numpy(gradients)
        reference.step()
        rows.update(ids, gradients, step)
    np.testing.assert_allclose(
        rows.values(np.arange(40)), weight.detach().numpy(), rtol=1e-6, atol=1e-6
    )
    assert rows.image().state["sum"].shape == (len(rows),)


def test_untouched_rows_take_no_memory_and_are_derived_from_their_ids() -> None:
    spec = table()
    rows = Rows(spec, DIM)
    before = rows.nbytes
    ids = np.array([7, -(2**63), 2**63 - 1, 7])
    assert (
        rows.values(ids) == initial_rows(ids, DIM, seed=5, initializer="uniform", scale=0.5)
    ).all()
    assert (len(rows), rows.nbytes) == (0, before)


def test_previewed_update_changes_nothing() -> None:
    rows = Rows(table("sparse_adam", {"lr": 0.1}), DIM)
    rows.update(np.array([1, 2]), np.ones((2, DIM), np.float32), 1)
    before = rows.image()
    made = rows.updated(np.array([2, 3]), np.ones((2, DIM), np.float32), 2)
    after = rows.image()
    assert (after.values == before.values).all()
    assert (after.ids == before.ids).all()
    assert all((after.state[name] == before.state[name]).all() for name in before.state)
    rows.update(np.array([2, 3]), np.ones((2, DIM), np.float32), 2)
    assert (rows.values(np.array([2, 3])) == made.values).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 60), unique=True, max_size=40),
        max_size=12,
    ),
    st.randoms(),
)
def test_rows_behave_like_a_dictionary(pushes: list[list[int]], random: Any) -> None:
    """A table behaves like a dictionary from ids to rows, with ids in any order, growth, eviction
    and restarts."""
    spec = table("sgd", {"lr": 1.0}, max_rows=50, buckets=1, initializer="zeros", scale=0.0)
    rows = Rows(spec, 2)
    kept: dict[int, tuple[float, int]] = {}
    for step, ids in enumerate(pushes, 1):
        chosen = np.array(sorted(ids), dtype=np.int64)
        rows.update(chosen, np.full((len(ids), 2), -1.0, np.float32), step)
        kept |= {each: (kept.get(each, (0.0, 0))[0] + 1, step) for each in ids}
        if len(kept) > 50:
            oldest = sorted(kept, key=lambda each: (kept[each][1], each))
            for each in oldest[: len(kept) - 50 + 50 // 16]:
                del kept[each]
        assert len(rows) == len(kept)
        asked = [*kept, *random.sample(range(60), 10)]
        expected = [[kept.get(each, (0.0, 0))[0]] * 2 for each in asked]
        assert rows.values(np.array(asked, dtype=np.int64)).tolist() == expected
        if random.random() < 0.3:
            rows = Rows(spec, 2, rows.image())


def test_of_rows_pushed_together_the_smallest_ids_are_evicted_first() -> None:
    rows = Rows(table("sgd", {"lr": 1.0}, max_rows=5, buckets=1), 1)
    for step, ids in enumerate(([10, 20, 30], [5, 15], [5, 10, 15, 20, 30], [40]), 1):
        rows.update(np.array(ids), np.ones((len(ids), 1), np.float32), step)
    assert rows.image().ids.tolist() == [10, 15, 20, 30, 40]


def test_rows_not_pushed_for_long_are_evicted() -> None:
    spec = table("sgd", {"lr": 1.0}, max_age=32)
    rows, early, late = Rows(spec, DIM), np.arange(5), np.arange(5, 8)
    rows.update(early, np.ones((5, DIM), np.float32), 1)
    moved = rows.values(early)
    for step in range(2, 33):
        rows.update(late, np.zeros((3, DIM), np.float32), step)
    assert (rows.values(early) == moved).all()
    rows.update(late[:0], np.zeros((0, DIM), np.float32), 33)
    rows.update(late[:0], np.zeros((0, DIM), np.float32), 34)
    assert len(rows) == 3
    assert (rows.values(early) == Rows(spec, DIM).values(early)).all()
    rows.update(early[:1], np.ones((1, DIM), np.float32), 35)
    assert (rows.values(early[:1]) == moved[:1]).all()  # as if they were new


@pytest.mark.parametrize(
    "limits",
    [{"max_age": 20}, {"max_rows": 24, "buckets": 1}, {"max_age": 5, "max_rows": 16, "buckets": 1}],
)
@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
def test_saved_rows_continue_bit_for_bit(optimizer: str, limits: dict[str, int]) -> None:
    spec = table(optimizer, {"lr": 0.1}, **limits)
    whole, restored = Rows(spec, DIM), Rows(spec, DIM)
    pushed: set[int] = set()
    for step, (ids, gradients) in enumerate(steps(60, of=200), 1):
        whole.update(ids, gradients, step)
        restored.update(ids, gradients, step)
        pushed |= set(ids.tolist())
        if step % 7 == 0:
            restored = Rows(spec, DIM, restored.image())
    one, other = whole.image(), restored.image()
    assert one.ids.tobytes() == other.ids.tobytes()
    assert one.values.tobytes() == other.values.tobytes()
    assert one.updated_at.tobytes() == other.updated_at.tobytes()
    assert {name: array.tobytes() for name, array in one.state.items()} == {
        name: array.tobytes() for name, array in other.state.items()
    }
    assert 0 < len(whole) < len(pushed)  # some rows were evicted


def test_chosen_ids_do_not_determine_hash_positions() -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1_000_000)
    alike = ids[(hashed(ids) >> np.uint64(32)) & np.uint64(8191) == 0]
    assert len(alike) > 50
    assert len(np.unique(_SlotTable(ids[:0], room=4096)._first(alike))) > len(alike) // 2


def test_many_rows_are_found_again() -> None:
    rows = Rows(table("sgd", {"lr": 1.0}, initializer="zeros", scale=0.0), 1)
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 30_000))
    for step, part in enumerate(np.array_split(ids, 11), 1):
        rows.update(part, -part.astype(np.float32)[:, None], step)
    assert len(rows) == len(ids)
    assert (rows.values(ids)[:, 0] == ids.astype(np.float32)).all()
    assert (rows.values(ids + 1)[:, 0] == 0).all() or len(np.intersect1d(ids, ids + 1))
    assert rows.nbytes < 3 * len(ids) * rows.row_bytes


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"buckets": 0}, "buckets=0: expected 1 to 1024"),
        ({"seed": -1}, "seed=-1"),
        ({"initializer": "xavier"}, "initializer='xavier': expected one of uniform, normal, zeros"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"initializer": "zeros"}, "scale=0.5 with initializer='zeros'"),
        ({"max_age": -1}, "max_age=-1"),
        ({"max_rows": 15}, "max_rows=15: expected at least 16"),
        (
            {"optimizer": "adamw"},
            "optimizer='adamw': expected one of sgd, adagrad, rowwise_adagrad, sparse_adam",
        ),
        (
            {"optimizer": "sgd", "hyperparameters": {"momentum": 0.9}},
            "momentum=0.9: expected 0 for a table",
        ),
        ({"hyperparameters": {"weight_decay": 0.1}}, "weight_decay=0.1: expected 0 for a table"),
        ({"hyperparameters": {"alpha": 0.1}}, "adagrad has no hyperparameter 'alpha'"),
        ({"hyperparameters": {"lr": float("nan")}}, "lr=nan"),
        ({"hyperparameters": {"maximize": 2.0}}, "maximize=2.0: expected 0 or 1"),
        ({"optimizer": "sparse_adam", "hyperparameters": {"beta1": 1.0}}, "beta1=1.0"),
        ({"optimizer": "sparse_adam", "hyperparameters": {"lr": 0.0}}, "lr and eps above 0"),
    ],
)
def test_invalid_specifications_are_named(change: dict[str, Any], problem: str) -> None:
    assert table().contradiction() == ""
    assert problem in table(**change).contradiction()


def test_table_shapes_are_rows_by_dim() -> None:
    assert wrong_shape((0, 16)) == wrong_shape((10**12, 1)) == ""
    for shape in ((16,), (-1, 16), (0, 0), (0, 16_385), (1, 2, 3)):
        assert "expected [rows, dim]" in wrong_shape(shape)


def test_specification_survives_a_round_trip_through_messages_and_json() -> None:
    spec = table("sparse_adam", {"lr": 0.3}, max_age=3, max_rows=64, seed=2**64 - 1)
    assert TableSpec.of_message(spec.message()) == spec
    assert TableSpec.from_json(spec.to_json()) == spec
