"""T1: the time from SIGKILL of one worker until all survivors have committed their next step.

One run gives many samples. A worker is killed; when the survivors take steps again, a replacement
has joined and all take steps together, the next worker is killed. Each kill occurs at a random time
within a step, and the ranks are killed in turn. If a failure restarts all workers (torchrun), the
recovery ends when all of them have taken a step.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from benchmarks import plots
from benchmarks.devices import Devices
from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.peers import reconfiguring_python
from benchmarks.processes import Stage
from benchmarks.recovery import Recovery
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import (
    ElasticTorchrun,
    Reconfiguring,
    Start,
    Torchft,
    TorchftSettings,
    start_bare,
    start_shoal,
    start_torchrun,
)
from benchmarks.workers.steplog import StepLogs
from benchmarks.workers.workload import Workload

WORKERS: Final = 3
MANY_WORKERS: Final = 8
WIDTH: Final = 400
BATCH: Final = 32
OF_FLOOR: Final = 1.4
OF_FLOOR_OTHERS: Final = 2.0
"""Target for 8 ranks, zero2 and fsdp, as a multiple of the floor. OF_FLOOR is the target for ddp
with few ranks."""
CUDA_WIDTH: Final = 4096
CUDA_BATCH: Final = 256
CUDA_OF_FLOOR: Final = 2.0
NOTICED_S: Final = 0.25
"""Time from the end of a connection until a Gloo group's watch aborts the group
(shoal_worker.backends.gloo.sockets.GRACE_S)."""
_FLOOR: Final = (
    "The floor is the time of the same number of forked processes that have only a Gloo group. "
    "They need not detect what happened: they form a new group and take one step, whose only "
    "collective sums all gradients of the same model."
)
_FLOOR_OF_DEVICES: Final = (
    f"The floor is a quarter of a second ({NOTICED_S:g} s), in which a death is noticed, and what "
    "as many processes that are warm take to connect a new NCCL group and sum one number over it; "
    "an abort, the state's agreement and the step are not in it. The device has done all it was "
    "told before a step counts as committed. torchft and elastic agents are not here: they have "
    "no CUDA in this environment, or no device of their own for each agent."
)
_LONGEST_PHASE_S: Final = 0.1
_START_TIMEOUT_S: Final = 120
_RECOVERY_TIMEOUT_S: Final = 180
TUNED: Final = TorchftSettings(
    heartbeat_timeout_ms=200, heartbeat_ms=20, join_timeout_ms=100, quorum_tick_ms=10, timeout_s=5
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system under one set of settings."""

    name: str
    command: str
    start: Start
    kills: int
    quick_kills: int
    ranks: int = WORKERS
    restarts_all: bool = False
    """True if recovery ends when as many workers as before the kill take steps again; False if it
    ends when the survivors take steps again."""
    restarted: bool = False
    """True if the workers that take steps again are new processes."""
    of_floor: float | None = None
    """Target for the p50, as a multiple of the lower bound's p50; None: no target."""
    torch: Callable[[], str] | None = None
    """Returns the version of torch that this system uses, if it may differ from that of the other
    rows. Raises MeasurementError if no suitable version is installed."""

    @property
    def recovered(self) -> int:
        """Number of workers that must take steps again before the recovery ends."""
        return self.ranks if self.restarts_all else self.ranks - 1


def _shoal(
    name: str,
    *,
    kills: int,
    ranks: int = WORKERS,
    of_floor: float = OF_FLOOR_OTHERS,
    more: tuple[str, ...] = (),
) -> Candidate:
    words = (
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "1000000",
        "-m",
        "benchmarks.workers.train_shoal",
        *more,
    )
    return Candidate(
        name=name,
        command=" ".join(("shoal run --standalone", *words)),
        start=partial(start_shoal, restarts=True, more=more),
        kills=kills,
        quick_kills=3,
        ranks=ranks,
        of_floor=of_floor,
    )


def torchft_command(settings: TorchftSettings) -> str:
    """Returns the command that starts torchft with these settings."""
    return (
        f"torchft_lighthouse --heartbeat_timeout_ms {settings.heartbeat_timeout_ms} "
        f"--join_timeout_ms {settings.join_timeout_ms} --quorum_tick_ms {settings.quorum_tick_ms}; "
        "per replica python -m benchmarks.workers.train_torchft --heartbeat-ms "
        f"{settings.heartbeat_ms} --timeout-s {settings.timeout_s:g}"
    )


def _torchft_tuned(name: str, *, kills: int, ranks: int = WORKERS) -> Candidate:
    return Candidate(
        name=name,
        command=torchft_command(TUNED),
        start=partial(Torchft, settings=TUNED, min_replicas=ranks - 1),
        kills=kills,
        quick_kills=1,
        ranks=ranks,
    )


def _reconfigure(name: str, *, kills: int, ranks: int = WORKERS) -> Candidate:
    return Candidate(
        name=name,
        command="python -m benchmarks.workers.membership; per rank python -m "
        f"benchmarks.workers.train_reconfigure --timeout-s {TUNED.timeout_s:g}",
        start=partial(Reconfiguring, timeout_s=TUNED.timeout_s),
        kills=kills,
        quick_kills=3,
        ranks=ranks,
        torch=lambda: reconfiguring_python()[1],
    )


CANDIDATES: Final = (
    _shoal("shoal", kills=30, of_floor=OF_FLOOR),
    _shoal("shoal, zero2", kills=15, more=("--strategy", "zero2")),
    _shoal("shoal, fsdp", kills=15, more=("--strategy", "fsdp")),
    _shoal("shoal, 8 ranks", kills=15, ranks=MANY_WORKERS),
    _torchft_tuned("torchft, tuned", kills=12),
    _torchft_tuned("torchft, tuned, 8 ranks", kills=6, ranks=MANY_WORKERS),
    Candidate(
        name="torchft, defaults",
        command="torchft_lighthouse; per replica python -m benchmarks.workers.train_torchft",
        start=partial(Torchft, settings=TorchftSettings(), min_replicas=WORKERS - 1),
        kills=3,
        quick_kills=1,
    ),
    _reconfigure("torch, _reconfigure (Gloo)", kills=12),
    _reconfigure("torch, _reconfigure (Gloo), 8 ranks", kills=6, ranks=MANY_WORKERS),
    Candidate(
        name="torchrun, restart of all",
        command="torchrun --standalone --nproc-per-node 3 --max-restarts 1000000 -m "
        "benchmarks.workers.train_ddp",
        start=partial(start_torchrun, restarts=True),
        kills=3,
        quick_kills=1,
        restarts_all=True,
        restarted=True,
    ),
    Candidate(
        name="torchrun, elastic agents",
        command="3 x torchrun --nnodes 2:3 --nproc-per-node 1 --rdzv-backend c10d -m "
        "benchmarks.workers.train_ddp",
        start=partial(ElasticTorchrun, last_call_s=None),
        kills=1,
        quick_kills=0,
        restarted=True,
    ),
    Candidate(
        name="torchrun, elastic agents, last_call_timeout=1",
        command="3 x torchrun --nnodes 2:3 --nproc-per-node 1 --rdzv-conf last_call_timeout=1 -m "
        "benchmarks.workers.train_ddp",
        start=partial(ElasticTorchrun, last_call_s=1),
        kills=1,
        quick_kills=0,
        restarted=True,
    ),
)


CUDA_CANDIDATES: Final = (
    *(
        replace(candidate, of_floor=CUDA_OF_FLOOR)
        for candidate in CANDIDATES
        if candidate.name.startswith("shoal")
    ),
    *(candidate for candidate in CANDIDATES if candidate.name == "torchrun, restart of all"),
)
"""Systems that have CUDA in this environment. All workers are under one launcher, which assigns a
device to each."""


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 12 minutes."""
    devices = options.devices
    candidates = CUDA_CANDIDATES if devices.for_cuda else CANDIDATES
    chosen = [candidate for candidate in candidates if not options.quick or candidate.quick_kills]
    measured = [(candidate, _row(candidate, options)) for candidate in chosen]
    floors = {
        ranks: (_floor_of_devices if devices.for_cuda else _floor)(options, ranks)
        for ranks in (WORKERS, MANY_WORKERS)
    }
    shares = [of_floor(row, floors[candidate.ranks]) for candidate, row in measured]
    rows = [
        *(with_share(row, share) for (_, row), share in zip(measured, shares, strict=True)),
        *floors.values(),
    ]
    plots.samples(
        options.output / "t1.png", rows, sample="pause_s", label="kill to next committed step, s"
    )
    return Table(
        key="t1",
        title="SIGKILL of 1 worker to the next committed step of all survivors",
        target=devices.describe(
            f"p50 <= {OF_FLOOR} x the floor of bare Gloo in the same run; for 8 ranks, zero2 and "
            f"fsdp, <= {OF_FLOOR_OTHERS} x the floor with the same number of ranks",
            f"p50 <= {CUDA_OF_FLOOR} x the floor of the same run: a quarter of a second, and "
            "connecting NCCL anew",
        ),
        method=(
            "The workers (three unless the row gives a different number) train a "
            f"{devices.size(WIDTH, CUDA_WIDTH)}-wide perceptron with "
            f"{devices.size(BATCH, CUDA_BATCH)} samples per rank per step, under ddp unless the "
            "row says otherwise. One worker is killed at a random moment, and the time ends when "
            "the last survivor has committed a step in a newer group. Then a replacement joins, "
            "and when all have taken 20 steps together, the next rank is killed. Shoal's launcher "
            "starts the replacement a quarter of a second after the death, on the same cores; "
            "torchft's starts after the measurement. torchrun restarts all workers, which load no "
            "checkpoint here; an elastic agent dies with its worker, as if their machine had "
            "failed. torch's _reconfigure has no detector: its workers have connections to a "
            "watcher, which end with them, and sum all gradients in one collective, which they "
            "abandon on such news. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
            "without it, a restarted Gloo group cannot connect. "
            f"{devices.describe(_FLOOR, _FLOOR_OF_DEVICES)} Each row is compared with the floor of "
            "its number of ranks. With few samples, p99 is close to the largest one."
        ),
        columns=("kills", "p50 s", "p99 s", "max s", "p50, of floor"),
        rows=devices.named(rows),
        verdict=verdict(
            (row.name, share, candidate.of_floor)
            for (candidate, row), share in zip(measured, shares, strict=True)
        ),
    )


def _row(candidate: Candidate, options: Options) -> Row:
    pauses: list[float] = []
    name = candidate.name
    failure = options.devices.lacking(name, candidate.ranks) or ""
    try:
        if not failure:
            if candidate.torch is not None:
                name += f", torch {candidate.torch()}"
            _kill_and_time(
                candidate,
                candidate.quick_kills if options.quick else candidate.kills,
                pauses,
                options.devices,
            )
    except MeasurementError as error:
        failure = str(error)
    return _described(name, candidate.command, pauses, failure)


def _kill_and_time(candidate: Candidate, kills: int, pauses: list[float], devices: Devices) -> None:
    generator = random.Random(0)
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        width, batch = devices.size(WIDTH, CUDA_WIDTH), devices.size(BATCH, CUDA_BATCH)
        system = candidate.start(
            stage,
            Workload(
                log=directory, ranks=candidate.ranks, width=width, batch=batch, device=devices.flag
            ),
        )
        logs = StepLogs(directory)
        for turn in range(kills):
            recovery = Recovery(
                logs,
                workers=candidate.ranks,
                recovered=candidate.recovered,
                restarted=candidate.restarted,
            )
            stage.wait_until(
                f"{candidate.name}: {candidate.ranks} workers stepping together",
                recovery.settled,
                timeout_s=_START_TIMEOUT_S,
            )
            victims = [pid for pid in recovery.members if system.may_kill(pid)]
            time.sleep(generator.uniform(0, _LONGEST_PHASE_S))
            victim = victims[turn % len(victims)]
            recovery.killed(victim, at_ns=time.monotonic_ns())
            system.kill(victim)
            stage.wait_until(
                f"{candidate.name}: recovery", recovery.over, timeout_s=_RECOVERY_TIMEOUT_S
            )
            pauses.append(recovery.pause_s)
            system.replace()


def _floor(options: Options, ranks: int) -> Row:
    flags = {"ranks": ranks, "kills": 5 if options.quick else 30, "width": WIDTH, "batch": BATCH}
    words = [
        "-m",
        "benchmarks.workers.bare_floor",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
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
    return _described(
        f"bare Gloo floor, {ranks} ranks", " ".join(["python", *words]), pauses, failure
    )


def _floor_of_devices(options: Options, ranks: int) -> Row:
    """Returns a row with the lower bound of any recovery over NCCL (see `_FLOOR_OF_DEVICES`)."""
    devices, pauses = options.devices, []
    words = [
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "benchmarks.workers.bare_connect",
        "--device",
        devices.flag,
    ]
    words += ["--times", "3" if options.quick else "10"]
    failure = devices.lacking("the floor", ranks) or ""
    with Stage() as stage:
        output = stage.directory / "connecting.json"
        try:
            if not failure:
                stage.finish(
                    start_bare(stage, [*words, "--output", str(output)]).process, timeout_s=600
                )
                pauses = [NOTICED_S + seconds for seconds in json.loads(output.read_text())]
        except MeasurementError as error:
            failure = str(error)
    return _described(
        f"noticed, and connected anew, {ranks} ranks",
        " ".join(["torchrun", *words]),
        pauses,
        failure,
    )


def _described(name: str, command: str, pauses: Sequence[float], failure: str) -> Row:
    cells = {"kills": str(len(pauses))}
    if pauses:
        cells |= {
            "p50 s": _seconds(quantile(pauses, 0.5)),
            "p99 s": _seconds(quantile(pauses, 0.99)),
            "max s": _seconds(max(pauses)),
        }
    return Row(
        name=name, command=command, cells=cells, samples={"pause_s": list(pauses)}, failure=failure
    )


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def of_floor(row: Row, floor: Row) -> float | None:
    """Returns the row's p50 divided by that of the lower bound, `floor`; None if either was not
    measured."""
    ours, least = row.samples["pause_s"], floor.samples["pause_s"]
    return quantile(ours, 0.5) / quantile(least, 0.5) if ours and least else None


def with_share(row: Row, share: float | None) -> Row:
    """Returns the row with `share`, its ratio to the lower bound, as a cell. If `share` is None,
    returns the row unchanged."""
    return (
        row if share is None else replace(row, cells={**row.cells, "p50, of floor": f"{share:.2f}"})
    )


def verdict(shares: Iterable[tuple[str, float | None, float | None]]) -> str:
    """Returns a sentence that compares the rows with their targets. `shares`: for each row, its
    name, its ratio to its lower bound, and the target for this ratio. Rows without a target are
    omitted."""
    judged = [
        f"{name} {_judged(share, target)}" for name, share, target in shares if target is not None
    ]
    return f"Measured: p50 divided by the floor's p50: {'; '.join(judged)}."


def _judged(share: float | None, target: float) -> str:
    return (
        "not measured"
        if share is None
        else f"{share:.2f} x ({'reached' if share <= target else 'not reached'})"
    )
