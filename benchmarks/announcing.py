"""T12: one coordinator on one core, with thousands of simulated members. Measures the time until
all members are in one generation, and the time until all have been notified of a death.

The members are simulated in this process (`simulated_members`), on a different core from the
coordinator's. For comparison, a server that only keeps the same number of streams open
(`workers.bare_sessions`) is measured in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import statistics
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
import psutil
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1.coordinator_pb2_grpc import CoordinatorStub

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.simulated_members import Crowd, Member
from benchmarks.workers.bare_sessions import GOODBYE

SIZES: Final = (100, 1000, 2000, 10_000)
QUICK_SIZES: Final = (100, 1000)
DEATHS: Final = 10
BEATS: Final = 5
"""Heartbeats of each member, sent one after another as quickly as the coordinator accepts them."""
JOIN_TARGET_S: Final = 5.0
BARE_JOINED_S: Final = 2.9
"""Seconds that bare grpcio took on the machine for which the target was set."""
DEATH_TARGET_S: Final = 0.1
BYTES_TARGET: Final = 200
_MOST_ANNOUNCEMENTS: Final = 50_000
"""Most messages about deaths that one server may have to send; limits the number of deaths among
ten thousand members."""
_TIMEOUT_S: Final = 300.0
_HEARD: Final = re.compile(
    r'^shoal_coordinator_heartbeats_total\{kind="member"\} ([\d.e+]+)$', re.MULTILINE
)


@dataclass(kw_only=True)
class Measured:
    """Measurements of one server with a given number of members."""

    name: str
    members: int
    command: str
    joined_s: float = 0.0
    joined_cpu_s: float = 0.0
    """CPU time of the server in seconds until all members had joined."""
    delays_s: list[float] = field(default_factory=list)
    """Seconds from a death until a member was notified, for each death and member."""
    last_s: list[float] = field(default_factory=list)
    """Seconds from each death until the last member was notified."""
    message_bytes: float = 0.0
    """Size in bytes of the messages that each member receives because of a death."""
    beats_per_s: float = 0.0
    table_bytes: int = 0
    failure: str = ""


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 3 minutes."""
    measured = []
    with _beside_the_server():
        for size in QUICK_SIZES if options.quick else SIZES:
            deaths = 3 if options.quick else min(DEATHS, _MOST_ANNOUNCEMENTS // size)
            measured += [_attempt(size, deaths, bare=True), _attempt(size, deaths, bare=False)]
    rows = tuple(_row(each) for each in measured)
    of = {
        kind: [row for row in rows if row.name.startswith(kind)]
        for kind in ("coordinator", "bare grpcio")
    }
    curves = [
        Row(
            name=kind,
            command="",
            cells={},
            samples={
                "members": [row.samples["members"][0] for row in found if not row.failure],
                "last_s": [max(row.samples["last_s"]) for row in found if not row.failure],
            },
        )
        for kind, found in of.items()
    ]
    plots.curves(
        options.output / "t12.png",
        {"until the last member knows of a death": curves},
        x="members",
        y="last_s",
        labels=("members", "s, the longest of all deaths"),
        target=DEATH_TARGET_S,
    )
    return Table(
        key="t12",
        title="Thousands of members: joins to one generation, and until all know of a death",
        target=(
            f"10 000 paced joins to one generation <= {JOIN_TARGET_S:g} s on one core, set where "
            f"bare grpcio took {BARE_JOINED_S:g} s, so <= {JOIN_TARGET_S / BARE_JOINED_S:.2f} x; "
            f"2000 members: all informed of a death in {DEATH_TARGET_S:g} s; <= {BYTES_TARGET} "
            "bytes per member per change"
        ),
        method=(
            "The coordinator and its embedded Valkey run on one core, and all members in a single "
            "process on another core, with eight members per host and 16 connections in total. "
            "The members open their sessions and report that they are ready, one after another. "
            "Joined: time from the first member until the last one has received the first "
            f"generation, which contains all members. Then {DEATHS} members die (5 with 10 000 "
            "members), each reported by its launcher. For each death, the time is measured until "
            "each of the other members has received the generation without the dead one; all "
            "adopt it before the next death. The bytes of a change are those of its message, "
            f"without HTTP/2 headers. Heartbeats: each member sends {BEATS}, and the "
            "coordinator's counter shows when all have arrived. Table: the full response of "
            "GetRanks, which a member requests at most once. Bare grpcio: a server with the same "
            "streams answers the first message of each, and forwards one message of about the "
            "same size to all. Python's garbage collector has the same settings as in the "
            "coordinator, and is off in the process of the members."
        ),
        columns=(
            "joined, s",
            "server's processor, s",
            "death p50, ms",
            "p99, ms",
            "last, ms",
            "bytes",
            "heartbeats/s",
            "table, kB",
        ),
        rows=rows,
        verdict=_verdict(measured),
    )


def _attempt(size: int, deaths: int, *, bare: bool) -> Measured:
    module = "benchmarks.workers.bare_sessions" if bare else "shoal_coordinator"
    measured = Measured(
        name=f"{'bare grpcio' if bare else 'coordinator'}, {size} members",
        members=size,
        command=f"taskset -c 0 python -m {module}",
    )
    try:
        with Stage() as stage:
            asyncio.run(_measure(stage, measured, deaths, bare=bare))
    except (MeasurementError, TimeoutError, grpc.aio.AioRpcError, OSError) as error:
        measured.failure = f"{type(error).__name__}: {error}"
    return measured


async def _measure(stage: Stage, measured: Measured, deaths: int, *, bare: bool) -> None:
    ports_file = stage.directory / "ports.json"
    arguments = (
        [str(ports_file), str(measured.members)]
        if bare
        else ["--port-file", str(ports_file), "--log-level", "ERROR"]
    )
    module = "benchmarks.workers.bare_sessions" if bare else "shoal_coordinator"
    server = psutil.Process(
        stage.start("server", [*_on_first_core(), sys.executable, "-m", module, *arguments]).pid
    )
    stage.wait_until(
        "the server serves",
        lambda: ports_file.exists() and bool(ports_file.read_text()),
        timeout_s=30,
    )
    ports = json.loads(ports_file.read_text())
    async with _crowd(ports["grpc"]) as crowd, grpc.aio.insecure_channel(ports["grpc"]) as channel:
        stub = None if bare else CoordinatorStub(channel)
        if stub is not None:
            spec = pb.JobSpec(
                job_id="crowd",
                min_workers=measured.members // 2,
                max_workers=measured.members,
                join_grace_ms=600_000,
            )
            spec.lease_ms = spec.stall_timeout_ms = 600_000
            await stub.CreateJob(pb.CreateJobRequest(spec=spec))
        await _join(crowd, server, measured)
        await crowd.enter(1)
        for number in range(2, 2 + deaths):
            await _death(crowd, stub, measured, number)
        if stub is not None:
            await _beats(crowd, measured, ports["http"], 1 + deaths)
            newest = crowd.members[0].newest
            assert newest is not None
            asked = pb.GetRanksRequest(job_id="crowd", generation=newest.number, nonce=newest.nonce)
            measured.table_bytes = (await stub.GetRanks(asked)).ByteSize()


async def _join(crowd: Crowd, server: psutil.Process, measured: Measured) -> None:
    members = [
        Member(number=number, member_id=str(uuid.uuid4())) for number in range(measured.members)
    ]
    used_s, began = _cpu_s(server), time.perf_counter()
    for member in members:
        await crowd.join(member)
    await crowd.until(lambda: crowd.informed(1) == len(members), timeout_s=_TIMEOUT_S)
    measured.joined_s = max(member.informed[1] for member in members) - began
    measured.joined_cpu_s = _cpu_s(server) - used_s


async def _death(
    crowd: Crowd, stub: CoordinatorStub | None, measured: Measured, number: int
) -> None:
    victim = crowd.members[len(crowd.members) * 3 // 5]
    crowd.members.remove(victim)
    before = sum(member.announced_bytes for member in crowd.members)
    began = time.perf_counter()
    if stub is None:
        await victim.call.write(GOODBYE)
    else:
        await stub.ReportExit(
            pb.ReportExitRequest(
                job_id="crowd", member_id=victim.member_id, exit_code=137, signal=9
            )
        )
    await crowd.until(lambda: crowd.informed(number) >= len(crowd.members), timeout_s=_TIMEOUT_S)
    delays_s = [member.informed[number] - began for member in crowd.members]
    measured.delays_s += delays_s
    measured.last_s.append(max(delays_s))
    measured.message_bytes = (
        sum(member.announced_bytes for member in crowd.members) - before
    ) / len(crowd.members)
    victim.call.cancel()
    await crowd.enter(number)
    await asyncio.sleep(0.5)  # the heartbeats are taken, and the next death is measured at rest


async def _beats(crowd: Crowd, measured: Measured, http: str, generation: int) -> None:
    before, began = await _heard(http), time.perf_counter()
    for _ in range(BEATS):
        await crowd.enter(generation)
    expected = before + BEATS * len(crowd.members)
    async with asyncio.timeout(_TIMEOUT_S):
        while await _heard(http) < expected:
            await asyncio.sleep(0.02)
    measured.beats_per_s = BEATS * len(crowd.members) / (time.perf_counter() - began)


async def _heard(http: str) -> float:
    def read() -> str:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    found = _HEARD.search(await asyncio.to_thread(read))
    return float(found[1]) if found is not None else 0.0


@contextlib.asynccontextmanager
async def _crowd(address: str) -> AsyncIterator[Crowd]:
    crowd = Crowd(address)
    try:
        yield crowd
    finally:
        await crowd.close()


@contextlib.contextmanager
def _beside_the_server() -> Iterator[None]:
    """Keeps this process off the server's core if there are at least two cores. Also disables
    garbage collection, which would delay the simulated members by about 30 ms."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)


def _on_first_core() -> Sequence[str]:
    return ("taskset", "-c", "0")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _row(measured: Measured) -> Row:
    if measured.failure:
        return Row(name=measured.name, command=measured.command, cells={}, failure=measured.failure)
    cells = {
        "joined, s": f"{measured.joined_s:.2f}",
        "server's processor, s": f"{measured.joined_cpu_s:.2f}",
        "death p50, ms": f"{1000 * statistics.median(measured.delays_s):.0f}",
        "p99, ms": f"{1000 * quantile(measured.delays_s, 0.99):.0f}",
        "last, ms": f"{1000 * statistics.median(measured.last_s):.0f} (at most "
        f"{1000 * max(measured.last_s):.0f})",
        "bytes": f"{measured.message_bytes:.0f}",
    }
    if measured.beats_per_s:
        cells["heartbeats/s"] = f"{measured.beats_per_s:.0f}"
        cells["table, kB"] = f"{measured.table_bytes / 1000:.0f}"
    samples = {
        "members": [float(measured.members)],
        "joined_s": [measured.joined_s],
        "joined_cpu_s": [measured.joined_cpu_s],
        "last_s": measured.last_s,
        "bytes": [measured.message_bytes],
        "beats_per_s": [measured.beats_per_s],
    }
    return Row(name=measured.name, command=measured.command, cells=cells, samples=samples)


def _verdict(measured: Sequence[Measured]) -> str:
    found = {
        (each.name.partition(",")[0], each.members): each for each in measured if not each.failure
    }
    parts = []
    if (largest := found.get(("coordinator", 10_000))) is not None:
        bare = found.get(("bare grpcio", 10_000))
        parts.append(
            f"10 000 joins {largest.joined_s:.1f} s ({_reached(largest.joined_s <= JOIN_TARGET_S)})"
        )
        if bare is not None:
            ratio = largest.joined_s / bare.joined_s
            parts.append(
                f"{ratio:.2f} x bare grpcio's {bare.joined_s:.1f} s "
                f"({_reached(ratio <= JOIN_TARGET_S / BARE_JOINED_S)})"
            )
    if (many := found.get(("coordinator", 2000))) is not None:
        last_s = statistics.median(many.last_s)
        bare = found.get(("bare grpcio", 2000))
        beside = (
            f", bare grpcio {1000 * statistics.median(bare.last_s):.0f} ms"
            if bare is not None
            else ""
        )
        parts.append(
            f"the last of 2000 informed after {1000 * last_s:.0f} ms{beside} "
            f"({_reached(last_s <= DEATH_TARGET_S)})"
        )
    most = max(
        (
            each.message_bytes
            for (kind, size), each in found.items()
            if kind == "coordinator" and size > 64
        ),
        default=0.0,
    )
    if most:
        parts.append(f"{most:.0f} bytes per member per change ({_reached(most <= BYTES_TARGET)})")
    return ("; ".join(parts) or "Not measured at the target's sizes") + "."


def _reached(reached: bool) -> str:
    return "reached" if reached else "not reached"
