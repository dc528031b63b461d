"""T1: from SIGKILL of one of three workers until all survivors have committed their next step.

One run gives many samples: kill, wait until the survivors step again, wait until a replacement has joined and all three step together,
kill the next one. The kill comes at a random moment of a step, and each rank gets its turn. Where a failure restarts all workers
(torchrun), it is over when all that take part have done a step.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.processes import Stage
from benchmarks.recovery import Recovery
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import ElasticTorchrun, Start, Torchft, TorchftSettings, start_shoal, start_torchrun
from benchmarks.workers.steplog import StepLogs
from benchmarks.workers.workload import Workload

WORKERS: Final = 3
WIDTH: Final = 400
BATCH: Final = 32
P50_TARGET_S: Final = 0.10
P99_TARGET_S: Final = 0.30
_LONGEST_PHASE_S: Final = 0.1
_START_TIMEOUT_S: Final = 120
_RECOVERY_TIMEOUT_S: Final = 180
_TUNED: Final = TorchftSettings(heartbeat_timeout_ms=200, heartbeat_ms=20, join_timeout_ms=100, quorum_tick_ms=10, timeout_s=5)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system under one set of settings."""

    name: str
    command: str
    start: Start
    kills: int
    quick_kills: int
    recovered: int = WORKERS - 1
    """Workers that must step again."""
    restarted: bool = False
    """They are other processes than before."""


CANDIDATES: Final = (
    Candidate(
        name="shoal",
        command="shoal run --standalone --nproc-per-node 3 --max-restarts 1000000 -m benchmarks.workers.train_shoal",
        start=partial(start_shoal, restarts=True),
        kills=30,
        quick_kills=5,
    ),
    Candidate(
        name="torchft, tuned",
        command=(
            f"torchft_lighthouse --heartbeat_timeout_ms {_TUNED.heartbeat_timeout_ms} --join_timeout_ms {_TUNED.join_timeout_ms} "
            f"--quorum_tick_ms {_TUNED.quorum_tick_ms}; per replica python -m benchmarks.workers.train_torchft "
            f"--heartbeat-ms {_TUNED.heartbeat_ms} --timeout-s {_TUNED.timeout_s:g}"
        ),
        start=partial(Torchft, settings=_TUNED, min_replicas=WORKERS - 1),
        kills=12,
        quick_kills=3,
    ),
    Candidate(
        name="torchft, defaults",
        command="torchft_lighthouse; per replica python -m benchmarks.workers.train_torchft",
        start=partial(Torchft, settings=TorchftSettings(), min_replicas=WORKERS - 1),
        kills=3,
        quick_kills=1,
    ),
    Candidate(
        name="torchrun, restart of all",
        command="torchrun --standalone --nproc-per-node 3 --max-restarts 1000000 -m benchmarks.workers.train_ddp",
        start=partial(start_torchrun, restarts=True),
        kills=3,
        quick_kills=1,
        recovered=WORKERS,
        restarted=True,
    ),
    Candidate(
        name="torchrun, elastic agents",
        command="3 x torchrun --nnodes 2:3 --nproc-per-node 1 --rdzv-backend c10d -m benchmarks.workers.train_ddp",
        start=partial(ElasticTorchrun, last_call_s=None),
        kills=1,
        quick_kills=0,
        restarted=True,
    ),
    Candidate(
        name="torchrun, elastic agents, last_call_timeout=1",
        command="3 x torchrun --nnodes 2:3 --nproc-per-node 1 --rdzv-conf last_call_timeout=1 -m benchmarks.workers.train_ddp",
        start=partial(ElasticTorchrun, last_call_s=1),
        kills=1,
        quick_kills=0,
        restarted=True,
    ),
)


def measure(options: Options) -> Table:
    """See the module. About 6 minutes."""
    rows = [_row(candidate, options) for candidate in CANDIDATES if not options.quick or candidate.quick_kills]
    rows.append(_floor(options))
    plots.samples(options.output / "t1.png", rows, sample="pause_s", label="kill to next committed step, s", target=P50_TARGET_S)
    return Table(
        key="t1",
        title="SIGKILL of 1 of 3 workers to the next committed step of all survivors",
        target=f"p50 <= {P50_TARGET_S:.2f} s, p99 <= {P99_TARGET_S:.2f} s",
        method=(
            f"Three workers train a {WIDTH}-wide perceptron, {BATCH} samples per rank and step. One is killed at a random moment, each "
            "rank in turn; the time ends when the last survivor has committed a step in a newer group. Then a replacement joins, and when "
            "all three have done 20 steps together, the next one is killed. Shoal's launcher starts the replacement a quarter of a second "
            "after the death, on the same cores; torchft's starts after the measurement. torchrun restarts all workers, which load no "
            "checkpoint here; its elastic agents die with their worker, as a machine does. torchrun runs with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it a restarted Gloo group cannot connect. The bare floor is three forked "
            "processes with a Gloo group and nothing else, which know what happened. With few samples p99 is close to the largest one."
        ),
        columns=("kills", "p50 s", "p99 s", "max s"),
        rows=tuple(rows),
        verdict=_verdict(rows[0].samples.get("pause_s", ())),
    )


def _row(candidate: Candidate, options: Options) -> Row:
    pauses: list[float] = []
    failure = ""
    try:
        _kill_and_time(candidate, candidate.quick_kills if options.quick else candidate.kills, pauses)
    except MeasurementError as error:
        failure = str(error)
    return _described(candidate.name, candidate.command, pauses, failure)


def _kill_and_time(candidate: Candidate, kills: int, pauses: list[float]) -> None:
    generator = random.Random(0)
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        system = candidate.start(stage, Workload(log=directory, ranks=WORKERS, width=WIDTH, batch=BATCH))
        logs = StepLogs(directory)
        for turn in range(kills):
            recovery = Recovery(logs, workers=WORKERS, recovered=candidate.recovered, restarted=candidate.restarted)
            stage.wait_until(f"{candidate.name}: three workers stepping together", recovery.settled, timeout_s=_START_TIMEOUT_S)
            victims = [pid for pid in recovery.members if system.may_kill(pid)]
            time.sleep(generator.uniform(0, _LONGEST_PHASE_S))
            victim = victims[turn % len(victims)]
            recovery.killed(victim, at_ns=time.monotonic_ns())
            system.kill(victim)
            stage.wait_until(f"{candidate.name}: recovery", recovery.over, timeout_s=_RECOVERY_TIMEOUT_S)
            pauses.append(recovery.pause_s)
            system.replace()


def _floor(options: Options) -> Row:
    words = ["-m", "benchmarks.workers.bare_floor", f"--kills={5 if options.quick else 30}", f"--width={WIDTH}", f"--batch={BATCH}"]
    pauses: list[float] = []
    failure = ""
    with Stage() as stage:
        output = stage.directory / "pauses.json"
        process = stage.start("floor", [sys.executable, *words, f"--output={output}"])
        try:
            stage.finish(process, timeout_s=300)
            pauses = json.loads(output.read_text())
        except MeasurementError as error:
            failure = str(error)
    return _described("bare Gloo floor", " ".join(["python", *words]), pauses, failure)


def _described(name: str, command: str, pauses: Sequence[float], failure: str) -> Row:
    cells = {"kills": str(len(pauses))}
    if pauses:
        cells |= {"p50 s": _seconds(quantile(pauses, 0.5)), "p99 s": _seconds(quantile(pauses, 0.99)), "max s": _seconds(max(pauses))}
    return Row(name=name, command=command, cells=cells, samples={"pause_s": list(pauses)}, failure=failure)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _verdict(pauses: Sequence[float]) -> str:
    if not pauses:
        return "Not measured."
    p50, p99 = quantile(pauses, 0.5), quantile(pauses, 0.99)
    reached = [f"p50 {_judged(p50, P50_TARGET_S)}", f"p99 {_judged(p99, P99_TARGET_S)}"]
    return f"Measured: {', '.join(reached)}."


def _judged(value: float, target: float) -> str:
    return f"{value:.3f} s ({'reached' if value <= target else 'not reached'})"
