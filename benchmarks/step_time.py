"""T2: the step time of elastic training against bare torch DDP on the same model, with torchft beside it.

All systems are started and kept; then they take turns, a block of steps each, in rounds whose order alternates. The ratio is taken round
by round. A step is one iteration of the user's loop with each system's own loader: batch, forward, backward, optimizer, zero_grad.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import paired_ratio, quantile
from benchmarks.gates import Gate
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import Start, Torchft, TorchftSettings, start_shoal, start_torchrun
from benchmarks.workers.steplog import WARM_UP_STEPS
from benchmarks.workers.workload import Workload

TARGET: Final = 1.02
WIDTH: Final = 400
BATCH_OF_RANKS: Final = {2: 64, 3: 32}
"""For steps of about 5 ms on two cores."""
STEPS_PER_BLOCK: Final = 100
WARM_UP_BLOCKS: Final = 3
_TIMEOUT_S: Final = 120


@dataclass(kw_only=True)
class Started:
    """One system's workers, waiting at their gate, and what was measured of them."""

    gate: Gate
    processes: Sequence[psutil.Process]
    """Workers, launcher and services."""
    blocks: list[list[list[float]]] = field(default_factory=list)
    """Step times in seconds, by block and rank."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all processes together, by block."""

    def run_block(self) -> None:
        """Raises MeasurementError."""
        before = self._cpu_s()
        self.blocks.append(self.gate.block(STEPS_PER_BLOCK))
        self.cpu_s.append(self._cpu_s() - before)

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(t.user + t.system for t in times)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One system."""

    name: str
    command: str
    start: Start


def _start_torchft(stage: Stage, workload: Workload) -> Torchft:
    return Torchft(stage, workload, settings=TorchftSettings(), min_replicas=workload.ranks)


BASELINE: Final = Side(name="torch DDP", command="torchrun --standalone -m benchmarks.workers.train_ddp", start=start_torchrun)
SIDES: Final = (
    BASELINE,
    Side(name="shoal", command="shoal run --standalone -m benchmarks.workers.train_shoal", start=start_shoal),
    Side(
        name="torchft",
        command="torchft_lighthouse; per replica python -m benchmarks.workers.train_torchft",
        start=_start_torchft,
    ),
)


def measure(options: Options) -> Table:
    """See the module. About 5 minutes."""
    rounds = 8 if options.quick else 60
    rows = [row for ranks in BATCH_OF_RANKS for row in _rows(ranks, rounds)]
    workloads = ", ".join(f"{batch} samples per rank on {ranks} ranks" for ranks, batch in BATCH_OF_RANKS.items())
    plots.samples(options.output / "t2.png", rows, sample="ratio", label="mean step time of a block over torch DDP's", target=TARGET)
    return Table(
        key="t2",
        title="Step time with elasticity, metrics and the coordinator on, against bare torch DDP",
        target=f"<= {TARGET} x at 5 ms steps",
        method=(
            f"All systems train a {WIDTH}-wide perceptron with their own data loaders ({workloads}). They take turns in blocks of "
            f"{STEPS_PER_BLOCK} steps, {rounds} rounds. A block's figure is the mean step of its ranks; the ratio is the median of the "
            "ratios to torch DDP's block of the same round, with its 95 % confidence interval (bootstrap over rounds). The other ratio "
            "compares the blocks' median steps, which single hiccups do not move. CPU ms is the processor time of a step and rank, that of "
            "launcher and services included; other users of the machine move it least. Systems that wait for their turn keep their "
            "background work (heartbeats). Three ranks share two cores."
        ),
        columns=("step ms", "p99 ms", "CPU ms", "ratio of means", "ratio of medians"),
        rows=tuple(rows),
        verdict=_verdict(rows),
    )


def _rows(ranks: int, rounds: int) -> list[Row]:
    started: dict[str, Started] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        for side in SIDES:
            try:
                started[side.name] = stack.enter_context(_started(side, ranks))
            except MeasurementError as error:
                failures[side.name] = str(error)
        for number in range(WARM_UP_BLOCKS + rounds):
            running = [name for name in started if name not in failures]
            for name in running if number % 2 else reversed(running):
                try:
                    started[name].run_block()
                except MeasurementError as error:
                    failures[name] = str(error)
    base = _Figures.of(started.get(BASELINE.name))
    return [_row(side, ranks, _Figures.of(started.get(side.name)), base, failures.get(side.name, "")) for side in SIDES]


@contextmanager
def _started(side: Side, ranks: int) -> Iterator[Started]:
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        socket = stage.directory / "gate"
        with Gate(socket, ranks=ranks, timeout_s=_TIMEOUT_S) as gate:
            side.start(stage, Workload(log=directory, ranks=ranks, width=WIDTH, batch=BATCH_OF_RANKS[ranks], gate=socket))
            stage.wait_until(f"{side.name}: first steps of {ranks} workers", gate.complete, timeout_s=_TIMEOUT_S)
            yield Started(gate=gate, processes=stage.processes())
            gate.dismiss()


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Of one system, by block; the first blocks, which warm it up, are left out."""

    means_s: list[float]
    medians_s: list[float]
    cpu_s: list[float]
    """Per step of one rank."""
    steps_s: list[float]
    """Every step of every rank."""

    @classmethod
    def of(cls, started: Started | None) -> _Figures:
        blocks = started.blocks[WARM_UP_BLOCKS:] if started is not None else []
        cpu_s = started.cpu_s[WARM_UP_BLOCKS:] if started is not None else []
        flat = [list(itertools.chain(*block)) for block in blocks]
        return cls(
            means_s=[statistics.fmean(steps) for steps in flat],
            medians_s=[statistics.median(steps) for steps in flat],
            cpu_s=[total / (len(block) * (STEPS_PER_BLOCK + WARM_UP_STEPS)) for total, block in zip(cpu_s, blocks, strict=True)],
            steps_s=list(itertools.chain(*flat)),
        )


def _row(side: Side, ranks: int, figures: _Figures, base: _Figures, failure: str) -> Row:
    name = f"{side.name}, {ranks} ranks"
    command = side.command.replace("--standalone", f"--standalone --nproc-per-node {ranks}")
    if not figures.means_s:
        return Row(name=name, command=command, cells={}, failure=failure)
    cells = {
        "step ms": f"{statistics.median(figures.means_s) * 1e3:.2f}",
        "p99 ms": f"{quantile(figures.steps_s, 0.99) * 1e3:.2f}",
        "CPU ms": f"{statistics.fmean(figures.cpu_s) * 1e3:.2f}",
    }
    samples = {"step_s": figures.means_s, "cpu_s": figures.cpu_s}
    if side is not BASELINE and len(base.means_s) == len(figures.means_s):
        cells["ratio of means"] = str(paired_ratio(figures.means_s, base.means_s))
        cells["ratio of medians"] = str(paired_ratio(figures.medians_s, base.medians_s))
        samples["ratio"] = [a / b for a, b in zip(figures.means_s, base.means_s, strict=True)]
    return Row(name=name, command=command, cells=cells, samples=samples, failure=failure)


def _verdict(rows: Sequence[Row]) -> str:
    ratios = {row.name: statistics.median(row.samples["ratio"]) for row in rows if row.name.startswith("shoal") and "ratio" in row.samples}
    if not ratios:
        return "Not measured."
    return "Measured: " + ", ".join(f"{name} {r:.3f} x ({'reached' if r <= TARGET else 'not reached'})" for name, r in ratios.items()) + "."
