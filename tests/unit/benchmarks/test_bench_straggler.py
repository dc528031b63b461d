"""Table T10 (slow workers): when a loss counts as reached, which learning rate a row uses, and its
verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import straggler_loss
from benchmarks.plots import curves
from benchmarks.straggler_loss import LEARNING_RATES, SLOW, System, find_learning_rate, row, verdict
from benchmarks.workers.train_straggler import STAYS_STEPS, Looks, digits, flags


def run(reached_s: float | None) -> dict[str, Any]:
    times_s = [0.0, 60.0 if reached_s is None else reached_s]
    return {"reached_s": reached_s, "steps": 100, "times_s": times_s, "losses": [2.3, 0.2]}


def system(
    strategy: str, times_s: Sequence[float | None], *, slow: int = SLOW, **options: Any
) -> System:
    return System(
        strategy=strategy,
        options=options,
        slow=slow,
        learning_rate=0.4,
        runs=[run(time) for time in times_s],
    )


@pytest.mark.parametrize("every", [1, 4])
def test_loss_is_reached_at_the_first_evaluation_from_which_it_stays_low(
    every: int,
) -> None:
    looks = Looks(0.2, every=every)
    for second, loss in enumerate([0.3, 0.19, 0.21, *[0.2] * (STAYS_STEPS // every)]):
        looks.look(loss, 100.0 + second)  # the first look starts the clock
        assert looks.reached_s is None
    looks.look(0.1, 150.0)
    assert looks.reached_s == 3.0


def test_all_processes_train_on_the_same_images_disjoint_from_the_validation_set() -> None:
    (train, (images, labels)), (again, _) = digits(), digits()
    assert train.tensors[0].equal(again.tensors[0])
    assert (len(train), len(images), len(labels)) == (1408, 389, 389)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[float, float | None], list[float]]:
    """Durations of runs by learning rate (None: endless), and the time limits that the runs were
    given."""
    takes: dict[float, float | None] = dict.fromkeys(LEARNING_RATES)
    allowed: list[float] = []

    def one(system: System, learning_rate: float, *, within_s: float) -> dict[str, Any]:
        allowed.append(within_s)
        reached_s = takes[learning_rate]
        return run(reached_s if reached_s is not None and reached_s <= within_s else None)

    monkeypatch.setattr(straggler_loss, "_run", one)
    return takes, allowed


def test_row_has_the_learning_rate_that_reached_the_loss_first(
    seconds: tuple[dict[float, float | None], list[float]],
) -> None:
    takes, allowed = seconds
    takes.update({LEARNING_RATES[0]: 8.0, LEARNING_RATES[2]: 5.0, LEARNING_RATES[3]: 11.0})
    found = System(strategy="ddp", slow=1)
    find_learning_rate(found, LEARNING_RATES)
    assert found.learning_rate == LEARNING_RATES[2]
    assert allowed == [60.0, 16.0, 16.0, 10.0, 10.0]  # at most twice the best so far
    assert found.runs == []  # the best of several runs is not a fair sample


def test_a_row_that_reaches_the_loss_at_no_learning_rate_says_so(
    seconds: tuple[dict[float, float | None], list[float]],
) -> None:
    found = System(strategy="ddp", slow=1)
    find_learning_rate(found, LEARNING_RATES)
    assert found.learning_rate is None
    assert row(found, found, found).failure == "a loss of 0.3 was not reached within 60 s"


def test_a_row_is_compared_with_ddp_with_the_slow_worker_and_with_itself_without_it() -> None:
    ddp, even = system("ddp", [16.0] * 3), system("async_sgd", [4.0] * 3, slow=1)
    cells = row(system("async_sgd", [5.0, 6.0, 4.0]), ddp, even).cells
    assert cells["s to loss"] == "5.00"
    assert cells["of ddp, one slow"].startswith("0.312 [")
    assert cells["of itself, none slow"].startswith("1.250 [")
    assert "of ddp, one slow" not in row(ddp, ddp, even).cells


def test_system_with_a_run_that_missed_the_loss_has_no_time() -> None:
    ddp, failing = system("ddp", [16.0] * 2), system("async_sgd", [5.0, None])
    assert "s to loss" not in row(failing, ddp, failing).cells
    assert row(failing, ddp, failing).failure


def test_a_row_whose_runs_failed_shows_why() -> None:
    failed = system("ddp", [])
    failed.failure = "the worker ended with 1"
    shown = row(failed, failed, system("ddp", [3.0]))
    assert shown.failure == "the worker ended with 1"
    assert shown.cells == {"runs": "0", "learning rate": "0.4"}


def test_the_verdict_judges_asp_and_reports_the_others() -> None:
    rows = [
        *(system("ddp", [16.0]), system("local_sgd", [16.0], sync_every=4)),
        *(
            system("async_sgd", [4.0], consistency="asp"),
            system("async_sgd", [None], consistency="ssp"),
        ),
        by_speed := system("ddp", [6.0]),
        system("ddp", [4.0], slow=1),
        undisturbed := system("ddp", [4.0], slow=1),
    ]
    by_speed.micro_batch = undisturbed.micro_batch = 4
    assert verdict(rows) == (
        "Measured: time divided by ddp's: local_sgd (sync_every 4) 1.00 x; async_sgd (consistency "
        "asp) 0.25 x (reached); async_sgd (consistency ssp) not measured; ddp (micro-batches of 4, "
        "dealt by speed) 0.38 x. A step of ddp with micro-batches dealt by speed takes 1.22 x as "
        "long as with the ideal division (reached)."
    )


def test_workers_accept_the_command_of_each_row() -> None:
    shown = system("async_sgd", [4.0], consistency="asp")
    assert shown.command.startswith(
        "shoal run --standalone --nproc-per-node 4 --servers 1 -m "
        "benchmarks.workers.train_straggler --strategy"
    )
    taken = flags().parse_args([*shown.words(0.4, within_s=60), "--output=seen.json"])
    assert (taken.strategy, taken.options, taken.slow) == (
        "async_sgd",
        {"consistency": "asp"},
        SLOW,
    )


def test_curves_are_drawn_for_rows_with_data(tmp_path: Path) -> None:
    ddp, failed = (
        system("ddp", [16.0]),
        System(strategy="local_sgd", slow=1, failure="no coordinator"),
    )
    rows = [row(each, ddp, ddp) for each in (ddp, failed)]
    curves(
        tmp_path / "t10.png",
        {"one slow": rows, "none": []},
        x="time_s",
        y="loss",
        labels=("s", "loss"),
        target=0.2,
    )
    assert (tmp_path / "t10.png").stat().st_size > 1000
