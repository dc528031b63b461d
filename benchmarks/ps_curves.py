"""Pushes and pulls as in T4 and T5, for different sizes of the values and different numbers of
tensors, clients and servers."""

from __future__ import annotations

from typing import Final

from benchmarks import plots
from benchmarks.ps_transfer import RATES, WARM_UP, Side, row, take_turns
from benchmarks.registry import Options
from benchmarks.report import Row, Table

_TRANSPORTS: Final = {"memory": "shared memory", "tcp": "TCP", "grpc": "gRPC"}
_SIZES_KIB: Final = (64, 1024, 8 << 10, 64 << 10)
_TENSORS: Final = (40, 400, 1600)
_CLIENTS: Final = (1, 2, 4, 8, 16)
_SERVERS: Final = (2, 4)
_ELEMENTS_OF_A_CLIENT: Final = 2 << 20
"""8 MiB, so that sixteen clients push 128 MiB at the same time."""


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes several minutes."""
    rounds = 5 if options.quick else 20
    rows: list[Row] = []
    for sides in _curves():
        take_turns(sides, rounds)
        first = sides[0]
        rows += [row(side, (("x the first of its curve", first),)) for side in sides]
    plots.samples(
        options.output / "t4c.png", rows, sample="push_and_pull_s", label="push and pull, s"
    )
    return Table(
        key="t4c",
        title="Parameter server: curves over size, tensors, clients and servers",
        target="none: how the figures of T4 and T5 change",
        method=(
            f"As in T4 and T5, there are {rounds} rounds after {WARM_UP} that are not counted. "
            "They alternate between the configurations that form one curve. With several clients, "
            "a round ends when the last client has pulled, and rates are totals over all clients. "
            "With several servers, each server has a part of the values, and the client uses one "
            "thread per server. If there are more processes than cores, they share the cores, so "
            f"these figures do not show how the systems scale with more cores. {RATES}"
        ),
        columns=("rounds", "push GB/s", "pull GB/s", "push+pull GB/s", "x the first of its curve"),
        rows=tuple(rows),
        verdict="No target.",
    )


def _curves() -> list[list[Side]]:
    sizes = [
        [
            Side(
                key=f"size-{kib}-raw",
                name=f"{_size(kib)}, raw TCP",
                system="tcp",
                elements=kib << 8,
            ),
            *(
                Side(
                    key=f"size-{kib}-{key}",
                    name=f"{_size(kib)}, {name}",
                    client=("--transport", key),
                    elements=kib << 8,
                )
                for key, name in _TRANSPORTS.items()
            ),
        ]
        for kib in _SIZES_KIB
    ]
    tensors = [
        Side(
            key=f"tensors-{count}",
            name=f"64 MiB in {count} tensors, TCP",
            client=("--transport", "tcp", "--tensors", str(count)),
        )
        for count in (1, *_TENSORS)
    ]
    clients = [
        Side(
            key=f"clients-{count}",
            name=f"{count} clients, 8 MiB each, TCP",
            client=("--transport", "tcp"),
            clients=count,
            elements=_ELEMENTS_OF_A_CLIENT,
        )
        for count in _CLIENTS
    ]
    servers = [
        Side(
            key=f"servers-{count}",
            name=f"64 MiB on {count} servers, TCP",
            client=("--transport", "tcp"),
            servers=count,
        )
        for count in (1, *_SERVERS)
    ]
    return [*sizes, tensors, clients, servers]


def _size(kib: int) -> str:
    return f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"
