"""Starts the workers of T17 under each system.

Each system runs with the best settings that were found for this task. The command in its row of the
table shows them.
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
"""Environment that keeps torchft from logging each step's quorum several times."""


def shoal_words(ranks: int, more: Sequence[str]) -> list[str]:
    """Returns the arguments of `shoal` that start the training script, without the arguments that
    describe the task. `more`: additional flags of the script."""
    return [
        *("run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"),
        *("-m", f"{_WORKERS}.train_shoal", *more),
    ]


def start_shoal(stage: Stage, task: Task, *, more: Sequence[str]) -> System:
    """Starts one launcher, whose workers are forked from a warm process. `more`: additional flags
    of the worker."""
    words = shoal_words(task.ranks, more)
    return WithLauncher(stage, [beside_python("shoal"), *words, *task.arguments()])


def torchrun_words(ranks: int, checkpoint_every: int) -> list[str]:
    """Returns the arguments of `torchrun` that start the training script, without the arguments
    that describe the task. `checkpoint_every`: steps between two checkpoints."""
    return [
        *("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"),
        *("--monitor-interval", "0.05", "-m", f"{_WORKERS}.train_ddp"),
        f"--checkpoint-every={checkpoint_every}",
    ]


def start_torchrun(stage: Stage, task: Task, *, checkpoint_every: int) -> System:
    """Starts a single torchrun agent, which restarts all workers after a death. T1 shows that
    recovery takes longer with one agent per worker."""
    words = torchrun_words(task.ranks, checkpoint_every)
    return WithLauncher(
        stage, [beside_python("torchrun"), *words, *task.arguments()], STORE_PER_START
    )


def start_torchft(stage: Stage, task: Task) -> System:
    """Starts torchft's lighthouse, and each replica in a shell loop that restarts it whenever it
    fails. Uses the settings that were best in T1. Raises MeasurementError if torchft is not
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
    """Starts the process that keeps the list of members, and each rank in a shell loop that
    restarts it. Raises MeasurementError if no torch with `_reconfigure` is installed."""
    python, _ = reconfiguring_python()
    words = (str(python), "-m", f"{_WORKERS}.train_reconfigure", *task.arguments())
    stage.start("keeper", [*words, "--keeper"])
    ranks = [
        WithLauncher(stage, ["bash", "-c", _UNTIL_IT_ENDS_WELL, *words]) for _ in range(task.ranks)
    ]
    return ranks[0]
