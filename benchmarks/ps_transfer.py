"""T4: a push and a pull of 64 MiB against one parameter server, compared with a raw TCP connection,
torch RPC and plain gRPC, in alternation.

T5 (ps_shared_memory.py) uses the same code.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import psutil

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import Ratio, paired_ratio
from benchmarks.gates import Gate
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.workers.transfer import ELEMENTS

OF_TCP: Final = 0.75
OF_TORCH_RPC: Final = 2.0
WITH_A_JOURNAL: Final = 0.5
OF_MANY_TENSORS: Final = 1.2
WARM_UP: Final = 4
_TIMEOUT_S: Final = 120
_CLIENT: Final = "benchmarks.workers.transfer"


@dataclass(kw_only=True)
class Side:
    """One system, and the durations of its pushes and pulls: one of each per round."""

    key: str
    name: str
    system: str = "shoal"
    """Value of `--system` of `benchmarks.workers.transfer`."""
    client: tuple[str, ...] = ()
    """Additional flags of the system's client."""
    server: tuple[str, ...] = ()
    """Additional flags of Shoal's server."""
    journal: bool = False
    """True if Shoal's server has a data directory."""
    elements: int = ELEMENTS
    """Number of floats that each client pushes and pulls."""
    clients: int = 1
    servers: int = 1
    polls: bool = False
    """True if this system's processes poll while they wait, so that each of them occupies a core
    even when idle. They are stopped (SIGSTOP) while another system is measured."""
    processes: list[psutil.Process] = field(default_factory=list)
    """Processes of client and server if the system polls; empty for others."""
    push_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)
    gate: Gate | None = None
    failure: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the client that determine what is measured."""
        more: list[str] = [*self.client]
        for name, value, default in (
            ("elements", self.elements, ELEMENTS),
            ("clients", self.clients, 1),
            ("servers", self.servers, 1),
        ):
            if value != default:
                more += [f"--{name}", str(value)]
        return tuple(more)

    @property
    def nbytes(self) -> int:
        """Number of bytes that all clients together send, or receive, in one round."""
        return 4 * self.elements * self.clients

    def stand_still(self) -> None:
        """Suspends the processes of a system that polls (SIGSTOP)."""
        for process in self.processes:
            process.suspend()

    def go_on(self) -> None:
        """Resumes the suspended processes."""
        for process in self.processes:
            process.resume()

    @property
    def both_s(self) -> list[float]:
        """Duration of push and pull together, in seconds, by round."""
        return [push + pull for push, pull in zip(self.push_s, self.pull_s, strict=True)]


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about two minutes."""
    rounds = 10 if options.quick else 40
    tcp = Side(key="tcp", name="raw TCP, no arithmetic", system="tcp")
    torch_rpc = Side(key="torch-rpc-tcp", name="torch RPC over TCP", system="torch-rpc-tcp")
    by_tcp = ("--transport", "tcp")
    shoal = Side(key="shoal", name="shoal", client=by_tcp)
    many = Side(key="many", name="shoal, 400 tensors", client=(*by_tcp, "--tensors", "400"))
    journal = Side(key="journal", name="shoal, with a journal", client=by_tcp, journal=True)
    sides = (
        tcp,
        Side(key="unary", name="gRPC, one unary message", system="unary"),
        torch_rpc,
        shoal,
        Side(key="grpc", name="shoal over gRPC", client=("--transport", "grpc")),
        many,
        Side(key="checksums", name="shoal, with checksums", client=(*by_tcp, "--checksums")),
        journal,
        Side(
            key="never",
            name="shoal, with a journal that the kernel syncs",
            client=by_tcp,
            server=("--fsync", "never"),
            journal=True,
        ),
    )
    take_turns(sides, rounds)
    rows = [row(side, (("x raw TCP", tcp), ("x torch RPC", torch_rpc))) for side in sides]
    plots.samples(
        options.output / "t4.png",
        rows,
        sample="push_and_pull_s",
        label="push and pull of 64 MiB, s",
    )
    return Table(
        key="t4",
        title="Parameter server: push and pull of 64 MiB fp32 over sockets, one server, one "
        "client, SGD applied",
        target=(
            f">= {OF_TCP} x raw TCP and >= {OF_TORCH_RPC:g} x torch RPC over TCP; with a journal "
            f">= {WITH_A_JOURNAL} x raw TCP; 400 tensors <= {OF_MANY_TENSORS} x the time of one"
        ),
        method=(
            f"{method(rounds)} Raw TCP (loopback, 1 MiB reads) only moves the bytes; the others "
            "also apply plain SGD. torch RPC is restricted to sockets. Shoal sends tensors over "
            "the TCP connection of its bulk channel, except in the row that names gRPC. Checksums "
            "(xxh3-64 in both directions) are optional and are measured in a separate row. With a "
            "journal (`--data-dir`), an acknowledged push is on disk (`--fsync group`) or in the "
            "kernel's cache (`--fsync never`). In the row of 400 tensors, the client packs the "
            f"tensors into partitions and unpacks them, as workers do. {RATES}"
        ),
        columns=("rounds", "push GB/s", "pull GB/s", "push+pull GB/s", "x raw TCP", "x torch RPC"),
        rows=tuple(rows),
        verdict=verdict(
            (
                ("raw TCP", speed(shoal, tcp), OF_TCP),
                ("torch RPC over TCP", speed(shoal, torch_rpc), OF_TORCH_RPC),
                ("raw TCP, with a journal", speed(journal, tcp), WITH_A_JOURNAL),
                ("one tensor, of 400", speed(many, shoal), 1 / OF_MANY_TENSORS),
            )
        ),
    )


# ------------------------------------------------------------------------------- parts of T4 and T5


RATES: Final = (
    "Rates are medians; ratios are the medians of the rounds' ratios of push and pull "
    "together, with their 95% confidence intervals."
)


def method(rounds: int) -> str:
    """Returns the description of the measurement that T4 and T5 share."""
    return (
        f"Each system has a client and a server process on this machine; {rounds} rounds in "
        f"alternating order after {WARM_UP} uncounted ones. A round is one acknowledged push, and "
        "one pull into existing memory. Shoal runs with its coordinator, metrics, sequence "
        "numbers and checks for finite values."
    )


def take_turns(sides: Sequence[Side], rounds: int) -> None:
    """Starts all sides, and measures `rounds` rounds of each, in alternation. If a side fails, its
    `failure` is set."""
    with ExitStack() as stack:
        stage = stack.enter_context(Stage())
        coordinator = _start_coordinator(stage)
        for side in sides:
            _start(side, stage, stack, coordinator)
        for number in range(-WARM_UP, rounds):
            for side in sides if number % 2 else reversed(sides):
                _round(side, counted=number >= 0)
        for side in sides:
            if side.gate is not None and not side.failure:
                side.go_on()
                side.gate.dismiss()


def _start_coordinator(stage: Stage) -> str:
    ports = stage.directory / "coordinator.json"
    stage.start(
        "coordinator",
        [
            sys.executable,
            "-m",
            "shoal_coordinator",
            "--redis",
            "embedded://",
            "--port-file",
            str(ports),
        ],
    )
    stage.wait_until("the coordinator", ports.exists, timeout_s=_TIMEOUT_S)
    return str(json.loads(ports.read_text())["grpc"])


def _start(side: Side, stage: Stage, stack: ExitStack, coordinator: str) -> None:
    """Starts a system and waits until its client has reached the gate, so that the next system
    starts on a quiet machine."""
    path = stage.directory / f"{side.key}.gate"
    before = stage.processes()
    gate = side.gate = stack.enter_context(Gate(path, ranks=side.clients, timeout_s=_TIMEOUT_S))
    job: tuple[str, ...] = ()
    if side.system == "shoal":
        job = ("--coordinator", coordinator, "--job", side.key)
        data = ("--data-dir", str(stage.directory / side.key)) if side.journal else ()
        for number in range(side.servers):
            name = f"{side.key}-server-{number}"
            stage.start(
                name,
                [
                    sys.executable,
                    "-m",
                    "shoal_ps_server",
                    "--server-id",
                    name,
                    *job,
                    *data,
                    *side.server,
                ],
            )
    for rank in range(side.clients):
        stage.start(
            f"{side.key}-{rank}",
            [
                sys.executable,
                "-m",
                _CLIENT,
                side.system,
                "--gate",
                str(path),
                *job,
                *side.flags,
                "--rank",
                str(rank),
            ],
        )
    try:
        stage.wait_until(side.name, gate.complete, timeout_s=_TIMEOUT_S)
    except MeasurementError as error:
        side.failure = str(error)
    if side.polls:
        side.processes = [process for process in stage.processes() if process not in before]
        side.stand_still()


def _round(side: Side, *, counted: bool) -> None:
    if side.failure or side.gate is None:
        return
    try:
        side.go_on()
        times = side.gate.block(1)
        side.stand_still()
    except (MeasurementError, psutil.Error) as error:
        side.failure = str(error)
        return
    if counted:
        push = max(each[0] for each in times)
        side.push_s.append(push)
        side.pull_s.append(max(map(sum, times)) - push)


def row(side: Side, others: Sequence[tuple[str, Side]]) -> Row:
    """Returns a row with a side's rates and, for each pair in `others` (column, side), how many
    times as fast as that side it is."""
    samples = {"push_s": side.push_s, "pull_s": side.pull_s, "push_and_pull_s": side.both_s}
    cells = {"rounds": str(len(side.push_s))}
    if side.push_s:
        cells |= {
            "push GB/s": _rate(side.push_s, side.nbytes),
            "pull GB/s": _rate(side.pull_s, side.nbytes),
            "push+pull GB/s": _rate(side.both_s, 2 * side.nbytes),
        }
    for column, other in others:
        ratio = speed(side, other)
        if ratio is not None and other is not side:
            cells[column] = str(ratio)
    command = " ".join(("python -m", _CLIENT, side.system, *side.flags))
    return Row(name=side.name, command=command, cells=cells, samples=samples, failure=side.failure)


def speed(side: Side, other: Side) -> Ratio | None:
    """Returns how many times as fast as `other` the system `side` is, computed round by round; None
    if either was not measured."""
    if not side.push_s or len(side.push_s) != len(other.push_s):
        return None
    return paired_ratio(other.both_s, side.both_s)


def verdict(comparisons: Sequence[tuple[str, Ratio | None, float]]) -> str:
    """Returns a sentence that summarizes a table. `comparisons`: for each of the other systems, its
    name, the measured ratio to it (None: not measured), and the target."""
    parts = []
    for name, ratio, target in comparisons:
        reached = (
            "not measured"
            if ratio is None
            else f"{ratio.value:.2f} x, {'reached' if ratio.value >= target else 'not reached'}"
        )
        parts.append(f"{name}: {reached}")
    return f"Measured: {'; '.join(parts)}."


def _rate(times_s: Sequence[float], nbytes: int) -> str:
    return f"{nbytes / statistics.median(times_s) / 1e9:.2f}"
