"""T9: time to the same loss over a link of 100 Mbit/s: with uncompressed gradients, with each
compressor, and with the presets for links."""

from __future__ import annotations

import json
import statistics
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal_common.redis.embedded import find_server_binary

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.machines import INTERFACE, Machines
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table

MBIT_PER_S: Final = 100
RANKS: Final = 2
OF_BF16: Final = 5.0
OF_FP32: Final = 10.0
_BATCH: Final = 64
_LOSS: Final = 0.3
_MOST_STEPS: Final = 200
_PORT: Final = 6400
_TIMEOUT_S: Final = 120
_SERVICES: Final = "services"
_HOSTS: Final = [f"host-{rank}" for rank in range(RANKS)]
_WORKER: Final = "benchmarks.workers.train_link"


@dataclass(kw_only=True)
class System:
    """One way to send gradients, and the results of its runs."""

    name: str
    flags: tuple[str, ...]
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Records of the first rank, one per run."""
    failure: str = ""

    @property
    def times_s(self) -> list[float]:
        """Training times of the runs that reached the loss."""
        return [sum(run["seconds"]) for run in self.runs if run["reached"]]


def shoal(name: str, *, preset: str = "", **options: Any) -> System:
    """Returns Shoal as a system, with these options of `as_distributed`."""
    words = (
        "--system=shoal",
        f"--options={json.dumps(options)}",
        *([f"--preset={preset}"] if preset else []),
    )
    return System(name=name, flags=words)


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 4 minutes; with `quick`, which omits
    int8, sign and the presets, about 1."""
    width, rounds = (384, 1) if options.quick else (768, 2)
    torch_fp32 = System(name="torch DDP, fp32", flags=("--system=torch",))
    fp32, bf16 = shoal("fp32"), shoal("bf16", gradient_compression="bf16")
    systems = [
        torch_fp32,
        fp32,
        bf16,
        shoal("int8", gradient_compression="int8"),
        shoal("sign", gradient_compression="sign"),
        shoal("topk, 1 %", gradient_compression="topk"),
        shoal("powersgd, rank 4", gradient_compression="powersgd"),
        shoal("preset for low bandwidth", preset="low_bandwidth"),
        shoal("preset for high bandwidth", preset="high_bandwidth"),
    ]
    if options.quick:
        systems = [
            torch_fp32,
            fp32,
            bf16,
            *(system for system in systems if "topk" in system.name or "powersgd" in system.name),
        ]
    try:
        with Machines(_SERVICES, *_HOSTS) as machines, Stage() as services:
            for host in _HOSTS:
                machines.slow_down(host, mbit_per_s=MBIT_PER_S)
            endpoint = _start_coordinator(machines, services)
            for number in range(rounds):
                for system in systems if number % 2 == 0 else reversed(systems):
                    if not system.failure and (number == 0 or not _is_slow(system)):
                        _run(system, width, machines, endpoint)
    except MeasurementError as error:
        for system in systems:
            system.failure = system.failure or str(error)
    plots.samples(
        options.output / "t9.png",
        _rows(systems, fp32, bf16),
        sample="time_to_loss_s",
        label=f"s to a loss of {_LOSS}",
    )
    return Table(
        key="t9",
        title=f"Time to the same loss over a link of {MBIT_PER_S} Mbit/s",
        target=f"a compressor >= {OF_BF16:g} x faster than bf16 and >= {OF_FP32:g} x than fp32",
        method=(
            f"{RANKS} ranks in network namespaces of this machine; all data that each sends and "
            f"receives passes a token bucket of {MBIT_PER_S} Mbit/s at its port (tc tbf). The "
            "coordinator and Valkey are on a separate machine. All systems train a perceptron "
            f"with layers {width} wide on the same batches of scikit-learn's handwritten digits "
            f"({_BATCH} per rank) with plain SGD at the same learning rate, until the loss on a "
            f"fixed set of images, whose evaluation is not timed, is {_LOSS}. Because torch's own "
            "bf16 hook fails on the CPU, bf16 is Shoal's. Bytes are counted by the network "
            "interface of the first rank, including headers and step votes. They are compared "
            "with the formula of docs/strategies/compression.md and with the time that the "
            "formula's bytes take on the link. Gloo's all-to-all often sends in one direction "
            "after the other, so fp16, bf16, int8 and sign take up to twice that time "
            "(docs/explanation/compression.md#presets). Runs of less than 10 s are repeated; "
            "times are medians."
        ),
        columns=(
            "runs",
            "steps",
            "s to loss",
            "ms per step",
            "kB per step",
            "formula kB",
            "formula ms",
            "x fp32",
            "x bf16",
        ),
        rows=tuple(_rows(systems, fp32, bf16)),
        verdict=_verdict(systems, fp32, bf16),
    )


def _is_slow(system: System) -> bool:
    return not system.times_s or system.times_s[0] > 10


def _run(system: System, width: int, machines: Machines, endpoint: str) -> None:
    """Performs one training run. The services and the link stay up for later runs."""
    try:
        with Stage() as stage:
            output = stage.directory / "found"
            output.mkdir()
            workload = (
                f"--width={width}",
                f"--batch={_BATCH}",
                f"--target={_LOSS}",
                f"--steps={_MOST_STEPS}",
                f"--output={output}",
            )
            worker = ["-m", _WORKER, *system.flags, *workload]
            starts = (
                _torch(worker, machines)
                if "--system=torch" in system.flags
                else _shoal(worker, machines, endpoint)
            )
            ranks = [
                stage.start(f"rank-{rank}", machines.on(_HOSTS[rank], command), environment)
                for rank, (command, environment) in enumerate(starts)
            ]
            for process in ranks:
                stage.finish(process, timeout_s=_TIMEOUT_S)
            system.runs.append(json.loads((output / "0.json").read_text()))
    except MeasurementError as error:
        system.failure = str(error)


def _torch(worker: Sequence[str], machines: Machines) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the command to start on each machine for torch DDP, and its environment."""
    master = {"MASTER_ADDR": machines.address(_HOSTS[0]), "MASTER_PORT": str(_PORT)}
    common = {**master, "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": INTERFACE}
    return [([sys.executable, *worker], common | {"RANK": str(rank)}) for rank in range(RANKS)]


def _shoal(
    worker: Sequence[str], machines: Machines, endpoint: str
) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the command to start on each machine for Shoal (a launcher, as a user would start
    it), and its environment."""
    run = [
        str(Path(sys.executable).with_name("shoal")),
        "run",
        "--nnodes",
        str(RANKS),
        "--rdzv-endpoint",
        endpoint,
    ]
    job = ["--rdzv-id", f"t9-{uuid.uuid4().hex[:8]}"]
    return [([*run, *job, "--local-addr", machines.address(host), *worker], {}) for host in _HOSTS]


def _start_coordinator(machines: Machines, services: Stage) -> str:
    """Starts Valkey and a coordinator where all machines can reach them. Returns the coordinator's
    address."""
    host, ports = machines.address(_SERVICES), services.directory / "coordinator.json"
    valkey = [
        str(find_server_binary()),
        "--bind",
        host,
        "--port",
        str(_PORT),
        "--protected-mode",
        "no",
        "--save",
        "",
    ]
    services.start(
        "valkey",
        machines.on(_SERVICES, [*valkey, "--appendonly", "yes", "--dir", str(services.directory)]),
    )
    coordinator = [
        "--listen",
        f"{host}:0",
        "--insecure",
        "--redis",
        f"redis://{host}:{_PORT}",
        "--port-file",
        str(ports),
    ]
    services.start(
        "coordinator",
        machines.on(_SERVICES, [sys.executable, "-m", "shoal_coordinator", *coordinator]),
    )
    services.wait_until("the coordinator", ports.exists, timeout_s=_TIMEOUT_S)
    return str(json.loads(ports.read_text())["grpc"])


# ---------------------------------------------------------------------------------------- the table


def _rows(systems: Sequence[System], fp32: System, bf16: System) -> list[Row]:
    return [_row(system, {"x fp32": fp32, "x bf16": bf16}) for system in systems]


def _row(system: System, others: Mapping[str, System]) -> Row:
    cells = {"runs": str(len(system.runs))}
    if system.runs:
        seconds = [second for run in system.runs for second in run["seconds"][1:]]
        cells |= {
            "steps": str(len(system.runs[0]["seconds"])),
            "ms per step": f"{statistics.median(seconds) * 1e3:.1f}",
            "kB per step": f"{_median(system, lambda run: run['sent_bytes_per_step']) / 1e3:.1f}",
            "formula kB": f"{system.runs[0]['formula_bytes'] / 1e3:.1f}",
            "formula ms": f"{system.runs[0]['formula_bytes'] * 8e-3 / MBIT_PER_S:.1f}",
        }
    if system.times_s:
        cells["s to loss"] = f"{statistics.median(system.times_s):.2f}"
        cells |= {
            column: f"{speed:.1f}"
            for column, other in others.items()
            if (speed := _speed(system, other)) is not None
        }
    failure = system.failure or (
        ""
        if system.times_s or not system.runs
        else f"the loss was not reached in {_MOST_STEPS} steps"
    )
    command = f"python -m {_WORKER} {' '.join(system.flags)}"
    return Row(
        name=system.name,
        command=command,
        cells=cells,
        samples={"time_to_loss_s": system.times_s},
        failure=failure,
    )


def _median(system: System, of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(of(run) for run in system.runs)


def _speed(system: System, other: System) -> float | None:
    """Returns how many times as fast as `other` the system is. Returns None if they are the same
    system, or if either was not measured."""
    if system is other or not system.times_s or not other.times_s:
        return None
    return statistics.median(other.times_s) / statistics.median(system.times_s)


def _verdict(systems: Sequence[System], fp32: System, bf16: System) -> str:
    compared = [system for system in systems if system.times_s and system not in (fp32, bf16)]
    if not fp32.times_s or not bf16.times_s or not compared:
        return "Not measured."
    best = min(compared, key=lambda system: statistics.median(system.times_s))
    parts = []
    for name, other, target in (("bf16", bf16, OF_BF16), ("fp32", fp32, OF_FP32)):
        speed = _speed(best, other) or 0.0
        parts.append(f"{speed:.1f} x {name} ({'reached' if speed >= target else 'not reached'})")
    return f"Measured: {best.name}, {', '.join(parts)}."
