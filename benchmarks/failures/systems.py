"""Starts the workers of T17 by each system.

Each system's settings are the best that were found for this task, and stand in its row's command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks import peers
from benchmarks.kill_recovery import TUNED
from benchmarks.peers import reconfiguring_python
from benchmarks.processes import Stage
from benchmarks.systems import (
    STORE_PER_START,
    System,
    WithLauncher,
    beside_python,
    free_port,
    lighthouse_of,
    listens,
)
from benchmarks.workers.failures.task import Task

Start = Callable[[Stage, Task], System]
_WORKERS: Final = "benchmarks.workers.failures"
_UNTIL_IT_ENDS_WELL: Final = 'until "$0" "$@"; do sleep 0.1; done'
_QUIET: Final = {"RUST_LOG": "error"}
"""An environment for torchft, which logs each step's quorum several times otherwise."""


def shoal_words(ranks: int, more: Sequence[str]) -> list[str]:
    """The words after `shoal` that train on it, without the task's."""
    return [
        *("run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"),
        *("-m", f"{_WORKERS}.train_shoal", *more),
    ]


def start_shoal(stage: Stage, task: Task, *, more: Sequence[str]) -> System:
    """One launcher, whose workers are forked from a warm process. `more`: of the worker's flags."""
    words = shoal_words(task.ranks, more)
    return WithLauncher(stage, [beside_python("shoal"), *words, *task.arguments()])


def torchrun_words(ranks: int, checkpoint_every: int) -> list[str]:
    """The words after `torchrun` that train on it, without the task's."""
    return [
        *("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"),
        *("--monitor-interval", "0.05", "-m", f"{_WORKERS}.train_ddp"),
        f"--checkpoint-every={checkpoint_every}",
    ]


def start_torchrun(stage: Stage, task: Task, *, checkpoint_every: int) -> System:
    """One agent, which restarts all workers after a death. T1 shows that an agent for each worker
    takes longer."""
    words = torchrun_words(task.ranks, checkpoint_every)
    return WithLauncher(
        stage, [beside_python("torchrun"), *words, *task.arguments()], STORE_PER_START
    )


def start_torchft(stage: Stage, task: Task) -> System:
    """The lighthouse, and each replica under a shell's loop that starts it again whenever it fails.
    The settings are those that are best in T1. Raises MeasurementError where torchft is not
    installed."""
    peers.torchft_version()
    port = free_port()
    stage.start("lighthouse", lighthouse_of(TUNED, port=port, min_replicas=task.ranks - 1))
    stage.wait_until("torchft's lighthouse", lambda: listens(port), timeout_s=10)
    replicas = [
        WithLauncher(
            stage,
            [
                *("bash", "-c", _UNTIL_IT_ENDS_WELL, str(peers.PYTHON), "-u"),
                *("-m", f"{_WORKERS}.train_torchft", *task.arguments()),
                *(f"--replica={replica}", f"--lighthouse=http://127.0.0.1:{port}"),
                *(f"--timeout-s={TUNED.timeout_s}", f"--heartbeat-ms={TUNED.heartbeat_ms}"),
            ],
            _QUIET,
        )
        for replica in range(task.ranks)
    ]
    return replicas[0]


def start_reconfigure(stage: Stage, task: Task) -> System:
    """The keeper of the membership, and each rank under a shell's loop that starts it again. Raises
    MeasurementError if no torch with `_reconfigure` is installed."""
    python, _ = reconfiguring_python()
    words = (str(python), "-m", f"{_WORKERS}.train_reconfigure", *task.arguments())
    stage.start("keeper", [*words, "--keeper"])
    ranks = [
        WithLauncher(stage, ["bash", "-c", _UNTIL_IT_ENDS_WELL, *words]) for _ in range(task.ranks)
    ]
    return ranks[0]
