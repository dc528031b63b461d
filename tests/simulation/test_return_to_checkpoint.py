"""Ranks return to a checkpoint while others are on standby, join, or are left over. These tests do
not grant the oracle's general excuses."""

from __future__ import annotations

import itertools

from tests.simulation import oracle
from tests.simulation.loops import EPOCHS
from tests.simulation.processes import Process
from tests.simulation.scenario import parse

ALL = EPOCHS * 5
"""Number of steps of a run."""


def run(*lines: str) -> dict[str, Process]:
    """Runs a scenario without violations and returns the processes by name."""
    verdict = oracle.run(parse("\n".join(lines)))
    assert verdict.ok, f"\n{verdict.scenario}\n\n{verdict}"
    assert not verdict.world.timeouts
    return {process.name: process for process in verdict.world.processes}


def committed(process: Process) -> list[int]:
    """Returns the committed steps in the order in which the script received them, except calls that
    returned with a checkpoint's state."""
    return [
        step
        for at, (step, status) in enumerate(process.diary.statuses)
        if status == "committed" and at not in process.diary.returned
    ]


def went_back(process: Process) -> bool:
    steps = committed(process)
    return any(later <= earlier for earlier, later in itertools.pairwise(steps))


def check_finished(processes: dict[str, Process], names: str) -> None:
    for name in names.split():
        ended = processes[name].diary.ended_with
        assert processes[name].exit_code == 0, processes[name].failure
        assert ended is not None
        assert ended["steps"] == ALL


def test_ranks_go_back_while_only_some_standby_workers_get_a_place() -> None:
    joins = ["at point 20 of a: one more joins"] * 3
    processes = run(
        "zero2, loop save, 8 ranks, schedule 1",
        *joins,
        "c dies at point 192",
        "e dies at point 192",
    )
    assert all(went_back(processes[name]) for name in "abdfgh")
    check_finished(processes, "a b d f g h")
    late = [processes[name] for name in "ijk"]
    assert [process.exit_code for process in late] == [0, 0, 0]
    placed = [committed(process) for process in late if committed(process)]
    again = committed(processes["a"])
    # all steps since the checkpoint, which the others take for the second time
    assert placed == [again[ALL - 2 :]] * 2


def test_replacement_that_arrives_while_a_rank_goes_back_resumes_from_its_checkpoint() -> None:
    deaths = ["b dies at point 180", "c dies at point 180"]
    processes = run(
        "zero2, loop save, 3 ranks, schedule 2", *deaths, "at point 176 of a: one more joins"
    )
    assert went_back(processes["a"])
    check_finished(processes, "a d")
    assert committed(processes["d"]) == [7, 8, 9, 10]


def test_a_spare_goes_back_with_the_rank_that_holds_the_rest_of_its_replica() -> None:
    """c is left over once d has died. When a dies, the only other copy of a part is gone, and c
    takes a's place."""
    processes = run(
        "hybrid, loop save, 4 ranks, schedule 1", "d dies at point 70", "a dies at point 136"
    )
    assert went_back(processes["b"])
    check_finished(processes, "b c")
    # it was left over for a while
    assert len(committed(processes["c"])) < len(committed(processes["b"]))
