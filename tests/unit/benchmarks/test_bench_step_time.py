"""Table T2 (step time): the cost of elasticity per step, and that of comparing the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.config import ShardingConfiguration

from benchmarks import step_time
from benchmarks.report import Row
from benchmarks.step_time import ALWAYS, CHECKING, NEVER, SHOAL, SIDES_OF_RANKS
from benchmarks.workers.train_shoal import flags
from benchmarks.workers.workload import Workload


class Stage:
    """Records the command that it is asked to start."""

    command: Sequence[str]

    def start(self, name: str, command: Sequence[str], environment: object) -> None:
        self.command = command


def worker_flags(side: Any, tmp_path: Path) -> Any:
    """Returns the flags of the side's worker."""
    stage = Stage()
    side.start(stage, Workload(log=tmp_path, ranks=2, width=4, batch=8))
    words = list(stage.command)
    return flags().parse_args(words[words.index("benchmarks.workers.train_shoal") + 1 :])


def test_default_comparison_interval_is_measured_against_none_and_every_step_on_two_ranks(
    tmp_path: Path,
) -> None:
    sides = SIDES_OF_RANKS[2]
    assert {SHOAL, *CHECKING} <= set(sides)
    settings = [
        worker_flags(side, tmp_path).consistency_check_every for side in (SHOAL, NEVER, ALWAYS)
    ]
    assert settings == [None, 0, 1]
    assert [side.command.rpartition("=")[2] for side in CHECKING] == ["0", "1"]


def row(name: str, step_s: Sequence[float], ratio: float | None = None) -> Row:
    samples = {"step_s": list(step_s)} | (
        {"ratio": [ratio] * len(step_s)} if ratio is not None else {}
    )
    return Row(name=name, command="", cells={}, samples=samples)


def rows(always: Sequence[float]) -> list[Row]:
    return [
        row("torch DDP, 2 ranks", [0.005] * 4),
        row("shoal, 2 ranks", [0.00505] * 4, 1.01),
        row("torchft, 2 ranks", [0.006] * 4, 1.2),
        row(f"{NEVER.name}, 2 ranks", [0.005] * 4, 1.0),
        row(f"{ALWAYS.name}, 2 ranks", always, 1.5),
        row("torch DDP, 3 ranks", [0.005] * 4),
        row("shoal, 3 ranks", [0.0052] * 4, 1.04),
    ]


def test_verdict_judges_only_the_default_and_states_the_cost_of_comparing() -> None:
    text = step_time._verdict(rows([0.0075] * 4))
    assert text.startswith(
        "Measured: shoal, 2 ranks 1.010 x (reached), shoal, 3 ranks 1.040 x (not reached). "
    )
    assert "divided by the time without: 1.010" in text
    assert "1.500" in text


@pytest.mark.parametrize("always", [[], [0.0075] * 2])
def test_system_that_failed_midway_is_not_compared(always: Sequence[float]) -> None:
    assert "divided by the time" not in step_time._verdict(rows(always))


def test_the_default_on_the_page_is_shoals() -> None:
    assert (
        f"every {ShardingConfiguration().consistency_check_every} steps by default"
        in Path(step_time.__file__).read_text()
    )
