"""T3: how long a join delays the other workers, and how fast the joiner receives the state,
compared with raw TCP in the same run.

One of three workers is killed, and its replacement joins. When all three have taken some steps
together, the next one is killed. The stall of a survivor is its longest step around the join minus
its median step there. The stall of a join is the larger stall of the two survivors. It does not
include the pause at the death: only steps after the survivors' first step without the dead worker
are considered.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.gates import Gate
from benchmarks.joining import STEPS_AROUND, members, stall_s, taken
from benchmarks.kill_recovery import TUNED, torchft_command
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import Start, Torchft, start_shoal
from benchmarks.workers.steplog import StepLogs
from benchmarks.workers.transfer import NBYTES
from benchmarks.workers.workload import Workload

WORKERS: Final = 3
BATCH: Final = 4
STATES_MB: Final = (80, 805)
QUICK_STATES_MB: Final = (20,)
CUDA_STATES_MB: Final = (1_000, 20_000)
QUICK_CUDA_STATES_MB: Final = (200,)
ALLOWED_S: Final = 0.2
OF_TCP: Final = 0.7
_JOINS: Final = 5
_QUICK_JOINS: Final = 2
_TCP_ROUNDS: Final = 8
_TIMEOUT_S: Final = 600
_TCP: Final = "benchmarks.workers.transfer"
_BYTES_PER_WEIGHT: Final = 8
"""Bytes of a weight and its momentum in float32."""
_SQUARE_LAYERS: Final = 3
_TORCHFT: Final = replace(TUNED, timeout_s=60)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system that replaces its workers."""

    name: str
    command: str
    start: Start


CANDIDATES: Final = (
    Candidate(
        name="shoal",
        command="shoal run --standalone --nproc-per-node 3 --max-restarts 1000000 -m "
        "benchmarks.workers.train_shoal --logs",
        start=partial(start_shoal, restarts=True, more=("--logs",)),
    ),
    Candidate(
        name="torchft, tuned",
        command=torchft_command(_TORCHFT),
        start=partial(Torchft, settings=_TORCHFT, min_replicas=WORKERS - 1),
    ),
)


@dataclass(kw_only=True)
class Joins:
    """Measurements of one system: lists with one entry per join."""

    stalls_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """Median duration of a survivor's steps around each join."""
    transfers: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and seconds of each transfer, if the system reports them."""
    failure: str = ""

    @property
    def rate(self) -> float | None:
        """Median rate of the transfers in bytes per second; None if none was reported."""
        return (
            statistics.median(nbytes / seconds for nbytes, seconds in self.transfers)
            if self.transfers
            else None
        )


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 8 minutes."""
    devices = options.devices
    sizes = (
        devices.size(QUICK_STATES_MB, QUICK_CUDA_STATES_MB)
        if options.quick
        else devices.size(STATES_MB, CUDA_STATES_MB)
    )
    states = [1e6 * megabytes for megabytes in sizes]
    # torchft has an environment of its own, with a torch for the host.
    candidates = CANDIDATES[:1] if devices.for_cuda else CANDIDATES
    tcp_s = _raw_tcp()
    measured = [
        (c, nbytes, _joins(c, nbytes, _QUICK_JOINS if options.quick else _JOINS, devices.flag))
        for nbytes in states
        for c in candidates
    ]
    tcp_s += _raw_tcp()
    tcp = NBYTES / statistics.median(tcp_s)
    rows = [
        *(
            row(candidate.name, candidate.command, nbytes, joins, tcp)
            for candidate, nbytes, joins in measured
        ),
        Row(
            name="raw TCP",
            command=f"python -m {_TCP} tcp",
            cells={"transfer GB/s": f"{tcp / 1e9:.2f}"},
            samples={"transfer_s": tcp_s},
        ),
    ]
    plots.samples(
        options.output / "t3.png",
        rows,
        sample="stall_s",
        label="stall of the survivors at a join, s",
    )
    return Table(
        key="t3",
        title="Joining: stall of the survivors, and transfer of the state against raw TCP",
        target=f"stall <= {ALLOWED_S} s + size / ({OF_TCP} x raw TCP)",
        method=(
            f"{WORKERS} workers train a perceptron under ddp, with {BATCH} samples per rank per "
            "step. All its weights are trained. Its weights and momentum together have the size "
            "that is named in the row. Workers are killed one at a time, cycling through the "
            "ranks, and a replacement joins after each kill. The stall is a survivor's longest "
            f"step minus its median step, among up to {STEPS_AROUND} steps before the join and "
            f"{STEPS_AROUND} after it; the larger value of both survivors counts. Steps before the "
            "first one without the dead worker do not count. The rate of the transfer is taken "
            "from the joiner's log, from its first request to the last checksum; torchft does not "
            "report one. Raw TCP is one connection over loopback that moves 64 MiB into existing "
            "memory, measured before and after everything else. Values are medians."
            + devices.describe("", " Each worker has a GPU, on which weights and momentum are.")
        ),
        columns=(
            "joins",
            "step s",
            "stall s",
            "longest stall s",
            "allowed s",
            "transfer GB/s",
            "x raw TCP",
        ),
        rows=devices.named(rows),
        verdict=_verdict(
            [(nbytes, joins) for candidate, nbytes, joins in measured if candidate.name == "shoal"],
            tcp,
        ),
    )


def allowed_s(nbytes: float, tcp: float) -> float:
    """Returns the target for the stall, in seconds, for a state of `nbytes` bytes. `tcp`: rate of
    raw TCP in bytes per second."""
    return ALLOWED_S + nbytes / (OF_TCP * tcp)


def row(name: str, command: str, nbytes: float, joins: Joins, tcp: float) -> Row:
    """Returns a system's row."""
    cells = {"joins": str(len(joins.stalls_s)), "allowed s": f"{allowed_s(nbytes, tcp):.2f}"}
    if joins.stalls_s:
        cells |= {
            "step s": f"{statistics.median(joins.steps_s):.3f}",
            "stall s": f"{statistics.median(joins.stalls_s):.2f}",
            "longest stall s": f"{max(joins.stalls_s):.2f}",
        }
    if joins.rate is not None:
        cells |= {
            "transfer GB/s": f"{joins.rate / 1e9:.2f}",
            "x raw TCP": f"{joins.rate / tcp:.2f}",
        }
    samples = {
        "stall_s": joins.stalls_s,
        "step_s": joins.steps_s,
        "transfer_s": [seconds for _, seconds in joins.transfers],
    }
    return Row(
        name=f"{name}, {nbytes / 1e6:.0f} MB",
        command=command,
        cells=cells,
        samples=samples,
        failure=joins.failure,
    )


def _joins(candidate: Candidate, nbytes: float, count: int, device: str) -> Joins:
    joins = Joins()
    try:
        _kill_and_replace(candidate, nbytes, count, joins, device)
    except MeasurementError as error:
        joins.failure = str(error)
    return joins


def _kill_and_replace(
    candidate: Candidate, nbytes: float, count: int, joins: Joins, device: str
) -> None:
    width = math.isqrt(round(nbytes / _BYTES_PER_WEIGHT / _SQUARE_LAYERS))
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        system = candidate.start(
            stage, Workload(log=directory, ranks=WORKERS, width=width, batch=BATCH, device=device)
        )
        logs = StepLogs(directory)
        since_ns = time.monotonic_ns()
        group = _whole(stage, logs, candidate, since_ns)
        already = len(taken("".join(stage.texts().values())))
        for turn in range(count):
            since_ns = time.monotonic_ns()
            survivors = [pid for rank, pid in enumerate(group) if rank != turn % WORKERS]
            system.kill(group[turn % WORKERS])
            system.replace()
            group = _whole(stage, logs, candidate, since_ns)
            late = (
                [commit for commit in logs.commits[pid] if commit.time_ns > since_ns]
                for pid in survivors
            )
            stall, step = max(stall_s(commits, workers=WORKERS) for commits in late)
            joins.stalls_s.append(stall)
            joins.steps_s.append(step)
        joins.transfers = taken("".join(stage.texts().values()))[already:]


def _whole(stage: Stage, logs: StepLogs, candidate: Candidate, since_ns: int) -> list[int]:
    def found() -> list[int]:
        logs.read()
        return members(logs.commits, workers=WORKERS, since_ns=since_ns)

    stage.wait_until(
        f"{candidate.name}: {WORKERS} workers stepping together",
        lambda: bool(found()),
        timeout_s=_TIMEOUT_S,
    )
    return found()


def _raw_tcp() -> list[float]:
    """Returns the durations, in seconds, of several transfers of 64 MiB over raw TCP."""
    with Stage() as stage:
        path = stage.directory / "gate"
        with Gate(path, ranks=1, timeout_s=_TIMEOUT_S) as gate:
            stage.start("tcp", [sys.executable, "-m", _TCP, "tcp", "--gate", str(path)])
            stage.wait_until("raw TCP", gate.complete, timeout_s=_TIMEOUT_S)
            gate.block(1)
            times = gate.block(_TCP_ROUNDS)[0]
            gate.dismiss()
            return times[1::2]  # of each round, its pull


def _verdict(measured: Sequence[tuple[float, Joins]], tcp: float) -> str:
    return f"Measured: {'; '.join(_judged(nbytes, joins, tcp) for nbytes, joins in measured)}."


def _judged(nbytes: float, joins: Joins, tcp: float) -> str:
    if not joins.stalls_s:
        return f"{nbytes / 1e6:.0f} MB not measured"
    stall, allowed = statistics.median(joins.stalls_s), allowed_s(nbytes, tcp)
    return (
        f"{nbytes / 1e6:.0f} MB {stall:.2f} s of {allowed:.2f} s "
        f"({'reached' if stall <= allowed else 'not reached'})"
    )
