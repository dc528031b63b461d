"""T5: the push and the pull of T4 over shared memory, compared with torch RPC's own choice of
transport and with a plain copy."""

from __future__ import annotations

from typing import Final

from benchmarks import plots
from benchmarks.ps_transfer import RATES, Side, method, row, speed, take_turns, verdict
from benchmarks.registry import Options
from benchmarks.report import Table

OF_MEMCPY: Final = 0.4
OF_TORCH_RPC: Final = 1.5


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about two minutes."""
    rounds = 10 if options.quick else 40
    memcpy = Side(key="memcpy", name="a copy in one process", system="memcpy")
    tcp = Side(key="tcp", name="raw TCP, no arithmetic", system="tcp")
    torch_rpc = Side(key="torch-rpc", name="torch RPC", system="torch-rpc", polls=True)
    by_memory = ("--transport", "memory")
    shoal = Side(key="shoal", name="shoal", client=by_memory)
    sides = (
        memcpy,
        tcp,
        torch_rpc,
        shoal,
        Side(key="many", name="shoal, 400 tensors", client=(*by_memory, "--tensors", "400")),
        Side(key="journal", name="shoal, with a journal", client=by_memory, journal=True),
        Side(key="by-tcp", name="shoal over TCP", client=("--transport", "tcp")),
        Side(key="by-grpc", name="shoal over gRPC", client=("--transport", "grpc")),
    )
    take_turns(sides, rounds)
    rows = [
        row(side, (("x memcpy", memcpy), ("x raw TCP", tcp), ("x torch RPC", torch_rpc)))
        for side in sides
    ]
    plots.samples(
        options.output / "t5.png",
        rows,
        sample="push_and_pull_s",
        label="push and pull of 64 MiB, s",
    )
    return Table(
        key="t5",
        title="Parameter server: push and pull of 64 MiB fp32 through shared memory, one server, "
        "one client, SGD applied",
        target=f">= {OF_MEMCPY} x memcpy and >= {OF_TORCH_RPC} x torch RPC",
        method=(
            f"{method(rounds)} torch RPC chooses its transports itself: between processes of one "
            "machine, shared memory and direct reads of the other process's memory. Because its "
            "two processes wait by polling, on one core each, they are stopped (SIGSTOP) while "
            "other systems are measured. The plain copy is numpy's copy of the gradients and the "
            f"values within the client, without another process and without arithmetic. {RATES}"
        ),
        columns=(
            "rounds",
            "push GB/s",
            "pull GB/s",
            "push+pull GB/s",
            "x memcpy",
            "x raw TCP",
            "x torch RPC",
        ),
        rows=tuple(rows),
        verdict=verdict(
            (
                ("memcpy", speed(shoal, memcpy), OF_MEMCPY),
                ("torch RPC", speed(shoal, torch_rpc), OF_TORCH_RPC),
            )
        ),
    )
