"""Values computed from ids alone are the same on every machine and in every release."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_common.tables.values import buckets_of, hashed, initial_rows
from shoal_common.tables.wire import by_bucket, combined

IDS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 1234567890123], dtype=np.int64)


def test_hashes_and_buckets_of_ids_never_change() -> None:
    assert [hex(int(each)) for each in hashed(IDS)] == GOLDEN_HASHES
    assert buckets_of(IDS, 16).tolist() == [int(each, 16) % 16 for each in GOLDEN_HASHES]
    assert buckets_of(IDS, 7).tolist() == [int(each, 16) % 7 for each in GOLDEN_HASHES]


@pytest.mark.parametrize("initializer", ["uniform", "normal"])
def test_initial_rows_never_change(initializer: str) -> None:
    made = initial_rows(IDS[[0, 2, 5]], 3, seed=42, initializer=initializer, scale=0.5)
    assert made.dtype == np.float32
    assert [[each.hex() for each in row] for row in made.tolist()] == GOLDEN_ROWS[initializer]


def test_the_hash_is_splitmix64() -> None:
    """The hash of id 0 is the first output of splitmix64 for seed 0 as published by its authors."""
    assert int(hashed(np.array([0]))[0]) == 0xE220A8397B1DCDAF


def test_row_does_not_depend_on_the_other_requested_ones() -> None:
    ids = np.arange(-500, 500)
    # more rows than are computed at once
    whole = initial_rows(ids, 300, seed=3, initializer="normal", scale=1.0)
    for place in (0, 499, 873, 999):
        assert (
            initial_rows(ids[[place]], 300, seed=3, initializer="normal", scale=1.0) == whole[place]
        ).all()


def test_normal_and_uniform_rows_have_the_stated_distribution() -> None:
    ids = np.arange(20_000)
    normal = initial_rows(ids, 16, seed=1, initializer="normal", scale=2.0).astype(np.float64) / 2
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert 2.85 < (normal**4).mean() < 2.95  # 2.9, where a normal distribution has 3
    assert np.abs(normal).max() < 6
    uniform = initial_rows(ids, 16, seed=1, initializer="uniform", scale=2.0).astype(np.float64) / 2
    assert abs(uniform.mean()) < 0.01
    assert abs((uniform**2).mean() - 1 / 3) < 0.01
    assert -1 <= uniform.min() < -0.999 < 0.999 < uniform.max() < 1
    assert not initial_rows(ids, 2, seed=1, initializer="zeros", scale=0.0).any()


def test_rows_differ_by_seed_id_and_position() -> None:
    rows = initial_rows(np.arange(1000), 8, seed=1, initializer="uniform", scale=1.0)
    other = initial_rows(np.arange(1000), 8, seed=2, initializer="uniform", scale=1.0)
    assert len(np.unique(rows)) > 0.999 * rows.size
    assert (rows != other).mean() > 0.999
    assert abs(np.corrcoef(rows.ravel(), other.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.05


def test_ids_spread_evenly_over_buckets() -> None:
    for ids in (np.arange(32_000), np.arange(32_000) * 1024, -np.arange(32_000)):
        assert np.bincount(buckets_of(ids, 16), minlength=16).min() > 1800


def test_gradients_of_one_id_are_added() -> None:
    ids = np.array([5, -3, 5, 9, -3, 5])
    gradients = np.arange(12, dtype=np.float32).reshape(6, 2)
    found, summed = combined(ids, gradients)
    assert found.tolist() == [-3, 5, 9]
    assert summed.tolist() == [[10.0, 12.0], [14.0, 17.0], [6.0, 7.0]]
    assert summed.dtype == np.float32
    found, summed = combined(ids[:0], gradients[:0])
    assert (found.tolist(), summed.shape) == ([], (0, 2))


def test_ids_are_grouped_by_bucket_in_their_order() -> None:
    ids = np.arange(100) * 17
    places = by_bucket(ids, 8)
    assert len(places) == 8
    for number, chosen in enumerate(places):
        assert (buckets_of(ids[chosen], 8) == number).all()
        assert (np.diff(chosen) > 0).all()
    assert sorted(np.concatenate(places)) == list(range(100))
    assert [len(each) for each in by_bucket(ids[:0], 3)] == [0, 0, 0]


GOLDEN_HASHES = [
    "0xe220a8397b1dcdaf",
    "0x910a2dec89025cc1",
    "0xe4d971771b652c20",
    "0x2a67d7552e039ea7",
    "0x481ec0a212a9f3db",
    "0x9a253c9557cd08d8",
]
GOLDEN_ROWS = {
    "uniform": [
        ["-0x1.3894a00000000p-4", "-0x1.e997c00000000p-4", "-0x1.1536780000000p-3"],
        ["-0x1.0710940000000p-2", "-0x1.1c34a80000000p-3", "0x1.4fc8dc0000000p-2"],
        ["0x1.5b15980000000p-3", "0x1.6598100000000p-4", "-0x1.f83ae00000000p-2"],
    ],
    "normal": [
        ["-0x1.c3b8000000000p-2", "0x1.75c8000000000p-4", "-0x1.2bb4000000000p-3"],
        ["-0x1.b1d0000000000p-5", "0x1.7a3b000000000p-1", "0x1.5520000000000p-5"],
        ["-0x1.0a1d000000000p-1", "0x1.c710000000000p-3", "-0x1.3343000000000p-1"],
    ],
}
