"""The statistics behind the benchmarks' tables."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.figures import paired_ratio, quantile, ratio_of_medians


def test_a_quantile_lies_between_its_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert quantile(values, 0.0) == 1.0
    assert quantile(values, 0.5) == 2.5
    assert quantile(values, 0.99) == pytest.approx(3.97)
    assert quantile(values, 1.0) == 4.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5)])
def test_quantile_of_an_empty_list_or_out_of_range_is_refused(
    values: list[float], share: float
) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, share)


def test_slowdowns_of_both_sides_of_a_pair_cancel_out() -> None:
    generator = random.Random(1)
    theirs = [generator.uniform(1.0, 10.0) for _ in range(40)]
    ratio = paired_ratio([1.02 * t for t in theirs], theirs)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.02, 1.02, 1.02))


def test_interval_contains_the_true_ratio_about_as_often_as_stated() -> None:
    generator = random.Random(2)
    hits = 0
    for seed in range(200):
        theirs = [generator.gauss(5.0, 0.2) for _ in range(40)]
        ours = [1.1 * generator.gauss(5.0, 0.2) for _ in range(40)]
        ratio = paired_ratio(ours, theirs, seed=seed, resamples=200)
        hits += ratio.low <= 1.1 <= ratio.high
    assert 180 <= hits <= 198  # 190 expected


def test_one_outlier_does_not_move_the_ratio() -> None:
    theirs = [1.0] * 21
    ours = [1.1] * 20 + [50.0]
    assert paired_ratio(ours, theirs).high == pytest.approx(1.1)
    assert ratio_of_medians(ours, theirs).value == pytest.approx(1.1)


def test_ratio_of_medians_lies_within_its_interval() -> None:
    generator = random.Random(3)
    theirs = [generator.uniform(2.0, 3.0) for _ in range(20)]
    ours = [generator.uniform(2.0, 3.0) for _ in range(20)]
    ratio = ratio_of_medians(ours, theirs)
    assert ratio.value == statistics.median(ours) / statistics.median(theirs)
    assert ratio.low < ratio.value < ratio.high


@pytest.mark.parametrize("function", [paired_ratio, ratio_of_medians])
def test_unequal_numbers_of_runs_cannot_be_paired(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="2 and 1 values"):
        function([1.0, 2.0], [1.0])
