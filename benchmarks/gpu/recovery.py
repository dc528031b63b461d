"""Measures the parts of a recovery from SIGKILL of one worker: noticing the death, aborting the
group, agreeing on the next one, connecting, and repeating the step.

All workers share one device over NCCL. The figures therefore show the order of magnitude of each
part, not the rate of a network.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Final

from benchmarks.gpu.context import COMMAND, NO_TARGET, Context
from benchmarks.processes import Stage
from benchmarks.recovery import Recovery
from benchmarks.report import Row, Table
from benchmarks.systems import start_shoal
from benchmarks.workers.phases import PARTS, parts_of, read
from benchmarks.workers.shared_gpu import first_visible
from benchmarks.workers.steplog import StepLogs
from benchmarks.workers.workload import SHARED, Workload

_WORKERS: Final = 3
_KILLS: Final = 3
_WIDTH: Final = 400
_BATCH: Final = 32
_START_TIMEOUT_S: Final = 60.0
_RECOVERY_TIMEOUT_S: Final = 45.0


def measure(context: Context) -> Table:
    """Kills each worker once under ddp, and once under zero2. Takes about a minute on a device."""
    rows = tuple(
        context.measured(
            "recovery", f"shoal {strategy}", functools.partial(_row, context, strategy)
        )
        for strategy in ("ddp", "zero2")
    )
    return Table(
        key="gpu-recovery",
        title=f"SIGKILL of one of {_WORKERS} workers that share {context.what}, in parts",
        target=NO_TARGET,
        method=(
            f"A {_WIDTH}-wide perceptron, {_BATCH} samples a rank; medians over {_KILLS} kills, of "
            "the survivor that commits last. notice: until its group is ended; abort: until "
            "nothing of it uses the device; agree: until it connects; connect: until it is "
            "connected; redo: until the step is committed."
        ),
        columns=("kills", "pause s", *(f"{part} s" for part in PARTS)),
        rows=rows,
        verdict="",
    )


def _row(context: Context, strategy: str) -> Row:
    samples: dict[str, list[float]] = {part: [] for part in ("pause", *PARTS)}
    kills, slack = (1, 4) if context.rehearsal else (_KILLS, 1)  # a host may have much else to do
    if not context.rehearsal:
        os.environ["CUDA_VISIBLE_DEVICES"] = first_visible()
    with Stage() as stage:
        device = "cpu" if context.rehearsal else SHARED
        workload = Workload(
            log=stage.directory, ranks=_WORKERS, width=_WIDTH, batch=_BATCH, device=device
        )
        start_shoal(
            stage,
            workload,
            restarts=True,
            more=("--strategy", strategy, "--phases", str(stage.directory)),
        )
        logs = StepLogs(stage.directory)
        for turn in range(kills):
            recovery = Recovery(logs, workers=_WORKERS, recovered=_WORKERS - 1, restarted=False)
            stage.wait_until(
                f"{_WORKERS} workers stepping together",
                recovery.settled,
                timeout_s=_START_TIMEOUT_S * slack,
            )
            victim = recovery.members[turn % _WORKERS]
            killed_ns = time.monotonic_ns()
            recovery.killed(victim, at_ns=killed_ns)
            os.kill(victim, signal.SIGKILL)
            stage.wait_until("recovery", recovery.over, timeout_s=_RECOVERY_TIMEOUT_S * slack)
            _add(samples, recovery, stage.directory, killed_ns)
    cells = {
        "kills": str(kills),
        **{f"{name} s": f"{statistics.median(seconds):.3f}" for name, seconds in samples.items()},
    }
    return Row(
        name=f"shoal {strategy}",
        command=f"{COMMAND} recovery",
        cells=cells,
        samples={f"{k}_s": v for k, v in samples.items()},
    )


def _add(
    samples: dict[str, list[float]], recovery: Recovery, directory: Path, killed_ns: int
) -> None:
    """Adds the duration of each part of a recovery, measured by the survivor that committed
    last, to `samples`."""
    pid, committed_ns = recovery.last_to_recover
    samples["pause"].append((committed_ns - killed_ns) / 1e9)
    for part, seconds in parts_of(
        read(directory / f"{pid}.phases"), killed_ns=killed_ns, committed_ns=committed_ns
    ).items():
        samples[part].append(seconds)
