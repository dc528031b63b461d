"""T4: a push and a pull of 64 MiB against one parameter server, beside a raw TCP connection, torch RPC and plain gRPC, in turns."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import Ratio, paired_ratio
from benchmarks.gates import Gate
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.workers.transfer import NBYTES

OF_TCP: Final = 0.6
OF_TORCH_RPC: Final = 1.5
_WARM_UP: Final = 4
_TIMEOUT_S: Final = 120
_CLIENT: Final = "benchmarks.workers.transfer"


@dataclass(kw_only=True)
class Side:
    """One system and its times, one of each per round."""

    key: str
    name: str
    push_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)
    gate: Gate | None = None
    failure: str = ""

    @property
    def both_s(self) -> list[float]:
        return [push + pull for push, pull in zip(self.push_s, self.pull_s, strict=True)]


def measure(options: Options) -> Table:
    """See the module. About a minute."""
    rounds = 10 if options.quick else 40
    tcp, _, torch_rpc, _, shoal, *_ = sides = (
        Side(key="tcp", name="raw TCP, no arithmetic"),
        Side(key="unary", name="gRPC, one unary message"),
        Side(key="torch-rpc", name="torch RPC"),
        Side(key="torch-rpc-tcp", name="torch RPC over TCP"),
        Side(key="shoal", name="shoal"),
        Side(key="shoal-many", name="shoal, 400 tensors"),
        Side(key="shoal-checksums", name="shoal, with checksums"),
        Side(key="shoal-journal", name="shoal, with a journal"),
        Side(key="shoal-journal-never", name="shoal, with a journal that the kernel syncs"),
    )
    with ExitStack() as stack:
        stage = stack.enter_context(Stage())
        coordinator = _start_coordinator(stage)
        for side in sides:
            _start(side, stage, stack, coordinator)
        for number in range(-_WARM_UP, rounds):
            for side in sides if number % 2 else reversed(sides):
                _round(side, counted=number >= 0)
        for side in sides:
            if side.gate is not None and not side.failure:
                side.gate.dismiss()
    rows = [_row(side, tcp, torch_rpc) for side in sides]
    plots.samples(options.output / "t4.png", rows, sample="push_and_pull_s", label="push and pull of 64 MiB, s")
    return Table(
        key="t4",
        title="Parameter server: push and pull of 64 MiB fp32 over gRPC, one server, one client, SGD applied",
        target=f">= {OF_TCP} x raw TCP and >= {OF_TORCH_RPC} x torch RPC",
        method=(
            f"Each system has a client and a server process on this machine; {rounds} rounds in turns whose order alternates, after "
            f"{_WARM_UP} that are not counted. A round is one push, acknowledged, and one pull into memory that is there already. Raw TCP "
            "(loopback, 1 MiB reads) moves the bytes and computes nothing; the others apply plain SGD. torch RPC chooses its transports "
            "by itself, which the target is about, and in a row of its own has sockets alone. Shoal runs with its coordinator, metrics, "
            "sequence numbers and checks for finite values; checksums (xxh3-64 both ways) are the caller's choice and have a row of their "
            "own. With a journal (`--data-dir`), a push is on this machine's disk when it is acknowledged (`--fsync group`), or with the "
            "kernel (`--fsync never`). In the row of 400 tensors the client gathers them into partitions and takes them apart, as workers "
            "do. Rates are medians; ratios are the medians of the rounds' ratios of push and pull together, with their 95 % confidence "
            "intervals."
        ),
        columns=("rounds", "push GB/s", "pull GB/s", "push+pull GB/s", "x raw TCP", "x torch RPC"),
        rows=tuple(rows),
        verdict=_verdict(shoal, tcp, torch_rpc),
    )


def _start_coordinator(stage: Stage) -> str:
    ports = stage.directory / "coordinator.json"
    stage.start("coordinator", [sys.executable, "-m", "shoal_coordinator", "--redis", "embedded://", "--port-file", str(ports)])
    stage.wait_until("the coordinator", ports.exists, timeout_s=_TIMEOUT_S)
    return str(json.loads(ports.read_text())["grpc"])


def _start(side: Side, stage: Stage, stack: ExitStack, coordinator: str) -> None:
    """Starts a system and waits until its client has come to the gate; the next one starts on a quiet machine."""
    path = stage.directory / f"{side.key}.gate"
    gate = side.gate = stack.enter_context(Gate(path, ranks=1, timeout_s=_TIMEOUT_S))
    more = []
    if side.key.startswith("shoal"):
        more = ["--coordinator", coordinator, "--job", side.key]
        journal = ["--data-dir", str(stage.directory / side.key)] if "journal" in side.key else []
        journal += ["--fsync", "never"] if side.key.endswith("never") else []
        stage.start(f"{side.key}-server", [sys.executable, "-m", "shoal_ps_server", "--server-id", side.key, *more, *journal])
    stage.start(side.key, [sys.executable, "-m", _CLIENT, side.key, "--gate", str(path), *more])
    try:
        stage.wait_until(side.name, gate.complete, timeout_s=_TIMEOUT_S)
    except MeasurementError as error:
        side.failure = str(error)


def _round(side: Side, *, counted: bool) -> None:
    if side.failure or side.gate is None:
        return
    try:
        push, pull = side.gate.block(1)[0]
    except MeasurementError as error:
        side.failure = str(error)
        return
    if counted:
        side.push_s.append(push)
        side.pull_s.append(pull)


def _row(side: Side, tcp: Side, torch_rpc: Side) -> Row:
    samples = {"push_s": side.push_s, "pull_s": side.pull_s, "push_and_pull_s": side.both_s}
    cells = {"rounds": str(len(side.push_s))}
    if side.push_s:
        cells |= {"push GB/s": _rate(side.push_s), "pull GB/s": _rate(side.pull_s), "push+pull GB/s": _rate(side.both_s, of=2 * NBYTES)}
    for column, other in (("x raw TCP", tcp), ("x torch RPC", torch_rpc)):
        ratio = _speed(side, other)
        if ratio is not None and other is not side:
            cells[column] = str(ratio)
    return Row(name=side.name, command=f"python -m {_CLIENT} {side.key}", cells=cells, samples=samples, failure=side.failure)


def _speed(side: Side, other: Side) -> Ratio | None:
    """How many times as fast as the other, round by round."""
    if not side.push_s or len(side.push_s) != len(other.push_s):
        return None
    return paired_ratio(other.both_s, side.both_s)


def _rate(times_s: Sequence[float], of: int = NBYTES) -> str:
    return f"{of / statistics.median(times_s) / 1e9:.2f}"


def _verdict(shoal: Side, tcp: Side, torch_rpc: Side) -> str:
    parts = []
    for name, other, target in (("raw TCP", tcp, OF_TCP), ("torch RPC", torch_rpc, OF_TORCH_RPC)):
        ratio = _speed(shoal, other)
        reached = "not measured" if ratio is None else f"{ratio.value:.2f} x, {'reached' if ratio.value >= target else 'not reached'}"
        parts.append(f"{name}: {reached}")
    return f"Measured: {'; '.join(parts)}."
