"""Sparse tables as modules in one process, as a user's model sees them."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.tables.values import initial_rows
from shoal_worker.elastic.session.worker_process import set_session
from shoal_worker.sparse_tables.embedding import SparseEmbedding, SparseEmbeddingBag, tables_of
from torch import nn


def table(num_embeddings: int | None = None, dim: int = 4, **options: Any) -> SparseEmbedding:
    return SparseEmbedding(
        num_embeddings,
        dim,
        **{"name": "users", "optimizer": partial(torch.optim.SGD, lr=0.5), **options},
    )


def values_of(module: SparseEmbedding, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor(ids))


def test_table_looks_up_rows_like_an_embedding() -> None:
    users = table(100, seed=3)
    weight = torch.from_numpy(
        initial_rows(np.arange(100), 4, seed=3, initializer="normal", scale=0.01)
    )
    ids = torch.tensor([[5, 5, 99], [0, 7, 5]])
    assert torch.equal(users(ids), nn.functional.embedding(ids, weight))
    assert users(ids.int()).shape == (2, 3, 4)
    assert users(ids[:0]).shape == (0, 3, 4)


def test_table_works_in_a_compiled_model() -> None:
    table = SparseEmbedding(10, 4, name="t", scale=1.0)
    compiled = torch.compile(nn.Sequential(table, nn.Linear(4, 1)), backend="eager")
    for ids in (torch.tensor([1, 2]), torch.tensor([1, 2, 3])):
        compiled(ids).sum().backward()
    gradients = table.gradients()
    assert gradients is not None
    assert gradients.ids.tolist() == [1, 2, 3]


def test_any_64_bit_number_is_an_id_unless_the_rows_are_counted() -> None:
    wide = values_of(table(), [2**63 - 1, -(2**63), 0])
    assert len(wide.unique(dim=0)) == 3
    for wrong in (-1, 100):
        with pytest.raises(ConfigurationError, match=f"id {wrong}; expected 0 to 99"):
            table(100)(torch.tensor([3, wrong]))
    with pytest.raises(ConfigurationError, match=r"ids have dtype torch\.float32"):
        table()(torch.tensor([1.0]))


def test_steps_match_torchs_embedding_with_sparse_gradients() -> None:
    users = table(50, optimizer=partial(torch.optim.Adagrad, lr=0.3))
    reference = nn.Embedding(50, 4, _weight=values_of(users, list(range(50))))
    plain = torch.optim.Adagrad(reference.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        plain.zero_grad()
        for _ in range(2):  # micro-batches with repeated ids
            ids = torch.randint(0, 50, (20,), generator=generator)
            for module in (users, reference):
                module(ids).square().sum().backward()
        users.apply_gradients()
        plain.step()
    torch.testing.assert_close(
        values_of(users, list(range(50))), reference.weight.detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_match_torchs(mode: str) -> None:
    bags = SparseEmbeddingBag(
        50, 4, name="items", mode=mode, optimizer=partial(torch.optim.SGD, lr=0.5), scale=1.0
    )
    reference = nn.EmbeddingBag(
        50, 4, mode=mode, _weight=values_of(table(50, scale=1.0), list(range(50)))
    )
    ids, offsets = torch.tensor([3, 4, 3, 9, 9, 1]), torch.tensor([0, 2, 2, 5])
    for given in ((ids, offsets), (ids.reshape(2, 3),)):
        torch.testing.assert_close(bags(*given), reference(*given))
    assert reference.weight.grad is None
    bags(ids, offsets).square().sum().backward()
    reference(ids, offsets).square().sum().backward()
    found = bags.gradients()
    assert found is not None
    assert found.ids.tolist() == [1, 3, 4, 9]
    assert reference.weight.grad is not None
    torch.testing.assert_close(torch.from_numpy(found.values), reference.weight.grad[[1, 3, 4, 9]])
    if mode == "sum":
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        torch.testing.assert_close(
            bags(ids, offsets, weights), reference(ids, offsets, per_sample_weights=weights)
        )


def test_gradients_come_only_from_completed_backward_passes_that_were_not_dropped() -> None:
    users = table()
    unused = users(torch.tensor([1, 2]))
    with torch.no_grad():
        users(torch.tensor([3]))
    assert users.gradients() is None
    users.apply_gradients()  # there is nothing to apply
    unused.sum().backward()
    users.zero_grad()
    assert users.gradients() is None
    output = users(torch.tensor([7, 7]))
    users.zero_grad()  # between the two passes, as in many loops
    output.sum().backward()
    found = users.gradients()
    assert found is not None
    assert (found.ids.tolist(), found.values.tolist()) == ([7], [[2.0] * 4])


def test_each_backward_pass_through_one_lookup_counts() -> None:
    users = table()
    output = users(torch.tensor([7]))
    for retained in (True, False):
        output.sum().backward(retain_graph=retained)
    found = users.gradients()
    assert found is not None
    assert found.values.tolist() == [[2.0] * 4]


def test_table_has_no_parameters_and_no_entries_in_the_state_dict() -> None:
    model = nn.Sequential(table(), nn.Linear(4, 1))
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert [each.name for each in tables_of(model)] == ["users"]
    assert repr(table(9)) == "SparseEmbedding(9, 4, name='users', optimizer=sgd)"


def test_copy_has_its_own_rows_and_pickling_is_refused() -> None:
    users = table()
    users(torch.tensor([1])).sum().backward()
    users.apply_gradients()
    users(torch.tensor([1])).sum().backward()
    copied = copy.deepcopy(users)
    assert copied.gradients() is None
    assert torch.equal(values_of(copied, [1, 2]), values_of(users, [1, 2]))
    users.apply_gradients()
    assert not torch.equal(values_of(copied, [1]), values_of(users, [1]))
    with pytest.raises(PreconditionError, match=r"cannot be pickled; save model\.state_dict"):
        pickle.dumps(nn.Sequential(users))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "name='': expected 1 to 512 characters"),
        ({"num_embeddings": 0}, r"num_embeddings=0: expected 1 to 2\*\*63, or None"),
        ({"dim": 0}, "expected .rows, dim."),
        ({"seed": -1}, "table 'users': seed=-1"),
        ({"initializer": "ones"}, "initializer='ones'"),
        ({"buckets": 5000}, "buckets=5000: expected 1 to 1024"),
        ({"num_embeddings": 2**64}, "num_embeddings=18446744073709551616"),
        ({"max_rows": 3, "buckets": 16}, "max_rows=3: expected at least 16"),
        ({"max_rows": 2**64}, "max_rows=18446744073709551616"),
        ({"max_age": 2**64}, "max_age=18446744073709551616"),
        ({"seed": 1.5}, "seed=1.5: expected a whole number"),
        (
            {"optimizer": torch.optim.AdamW},
            "optimizer=torch.optim.adamw.AdamW; expected a factory of torch.optim.SGD",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
            "momentum=0.9: expected 0 for a table",
        ),
    ],
)
def test_invalid_arguments_are_one_clear_error(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        table(**change)


def test_rows_of_zeros_need_no_scale() -> None:
    assert (values_of(table(initializer="zeros"), [1, 2]) == 0).all()
    with pytest.raises(ConfigurationError, match=r"scale=0\.5"):
        table(initializer="zeros", scale=0.5)


def test_local_table_keeps_all_permitted_rows() -> None:
    users = table(max_rows=1600, buckets=16)
    ids = list(range(1000))
    before = values_of(users, ids)
    users(torch.tensor(ids)).sum().backward()
    users.apply_gradients()
    for each in (users, copy.deepcopy(users)):
        assert (values_of(each, ids) != before).all()


def test_small_table_has_few_buckets() -> None:
    assert [table(max_rows=rows).spec.buckets for rows in (3, 1000, 100_000)] == [1, 3, 16]


def test_a_frozen_table_is_not_trained() -> None:
    users = table()
    users.requires_grad_(False)
    assert not users(torch.tensor([1])).requires_grad
    users.requires_grad_()
    users(torch.tensor([1])).sum().backward()
    assert users.gradients() is not None


def test_bags_have_modes() -> None:
    with pytest.raises(ConfigurationError, match="mode='median': expected one of sum, mean, max"):
        SparseEmbeddingBag(None, 4, name="items", mode="median")


def test_a_large_table_has_more_buckets() -> None:
    assert (table().spec.buckets, table(10**6).spec.buckets) == (16, 4)
    assert 64 < table(10**9, 16).spec.buckets <= 1024
    assert table(10**9, 16, buckets=4).spec.buckets == 4


@pytest.mark.parametrize("strategy", ["zero3", "local_sgd"])
def test_strategies_without_servers_refuse_tables_and_name_one_that_accepts_them(
    strategy: str,
) -> None:
    model = nn.Sequential(table(), nn.Linear(4, 1))
    try:
        with pytest.raises(
            ConfigurationError,
            match=f"sparse table 'users'.* strategy='{strategy}' does not support sparse tables; "
            "use ddp or async_sgd",
        ):
            shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
    finally:
        set_session(None)
