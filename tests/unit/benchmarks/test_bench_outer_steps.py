"""Table T16 (outer steps): its rows, each of which is a valid way to train."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.outer_steps import RANKS, System, row, systems, verdict
from benchmarks.workers.train_outer import OUTER, flags


def measured(name: str, *megabytes: float) -> System:
    return System(
        name=name,
        flags=(),
        learning_rate=0.01,
        losses={0.003: [0.5], 0.01: [0.25, 0.35]},
        megabytes=list(megabytes),
    )


def test_row_is_compared_with_unmodified_async_sgd() -> None:
    plain, rounds = measured("async_sgd", 80.0, 90.0, 80.0), measured("inner_steps=8", 10.0)
    cells = row(rounds, plain).cells
    assert cells == {
        "learning rate": "0.01",
        "MB moved": "10.0",
        "of async_sgd": "12.5 %",
        "loss": "0.300",
    }
    assert "of async_sgd" not in row(plain, plain).cells
    assert (
        verdict([plain, rounds]) == "Measured: bytes divided by async_sgd's: inner_steps=8 12.5 %."
    )


def test_unmeasured_row_says_so() -> None:
    plain, failed = (
        measured("async_sgd", 80.0),
        System(name="inner_steps=8", flags=(), failure="no"),
    )
    assert row(failed, plain).cells == {}
    assert row(failed, plain).failure == "no"
    assert (
        verdict([plain, failed])
        == "Measured: bytes divided by async_sgd's: inner_steps=8 not measured."
    )


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_every_row_is_a_training_configuration(system: System) -> None:
    options = flags().parse_args([*system.words(0.003), "--output=."])
    outer = OUTER[options.outer](nn.Linear(2, 1).parameters(), RANKS)
    assert outer.param_groups[0]["lr"] in (0.7, 1 / RANKS)
