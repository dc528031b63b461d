"""Two ranks of plain torch share one GPU over NCCL. The benchmark shows whether they connect, which
collectives work, and how an abort behaves.

It uses none of Shoal's code, so a failure is caused by torch, NCCL or the machine. The first pair
of ranks uses non-blocking communicators, as Shoal does; the second uses blocking ones. At the end,
rank 1 is stopped or killed, and rank 0 aborts an all-reduce that is waiting for rank 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_worker.backends.nccl.device import WATCHDOG

from benchmarks.gpu.context import COMMAND, NO_TARGET, Context
from benchmarks.processes import Stage
from benchmarks.report import Row, Table
from benchmarks.systems import free_port
from benchmarks.workers.shared_gpu import first_visible, pass_for_a_machine

_MODULE: Final = "benchmarks.gpu.pair"
_LIMIT_S: Final = 45.0
"""Time limit of a pair, from start to end, on a device."""
_REHEARSAL_LIMIT_S: Final = 200.0
"""Time limit on a busy host."""
_PATIENCE_S: Final = 20.0
"""Time limit of one collective."""
_POLL_S: Final = 0.005
_CLASS: Final = {"TORCH_DIST_USE_NCCL2": os.environ.get("TORCH_DIST_USE_NCCL2", "0")}
"""Selects torch's class for "nccl" from torch 2.15 on; unless set to 1, the one that Shoal uses."""
_FAULTS: Final = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
_ELEMENTS: Final = 8
_RATE_BYTES: Final = 64 << 20
_ISSUED: Final = 50


def measure(context: Context) -> Table:
    """Runs two pairs, one after the other. Takes less than two minutes, even if a pair hangs."""
    rows: list[Row] = []
    for mode, fault in (("non-blocking", "stopped"), ("blocking", "killed")):
        rows += _pair(context, mode, fault)
    return Table(
        key="gpu-pair",
        title=f"Two ranks of plain torch that share {context.what}",
        target=NO_TARGET,
        method=(
            "Two processes with an NCCL_HOSTID each, over the loopback interface. ms: from the "
            "call until the device is at rest. stall ms: the longest time for which no Python "
            "thread of rank 0 could run meanwhile."
        ),
        columns=("ms", "stall ms", "result"),
        rows=tuple(rows),
        verdict="A row of all_to_all with equal parts may fail: torch 2.11 does not wait for a "
        "communicator that does not block.",
    )


def _pair(context: Context, mode: str, fault: str) -> list[Row]:
    """Runs one pair and returns its rows. If the pair hangs, returns the rows that it wrote before
    that."""
    os_device = "cpu" if context.rehearsal else "cuda"
    environment = {**WATCHDOG, "TORCH_NCCL_USE_COMM_NONBLOCKING": str(int(mode == "non-blocking"))}
    environment |= {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "30", "NCCL_DEBUG": "WARN", **_CLASS}
    if not context.rehearsal:
        environment["CUDA_VISIBLE_DEVICES"] = first_visible()
    with Stage() as stage:
        words = [
            "-m",
            _MODULE,
            "--device",
            os_device,
            "--port",
            str(free_port()),
            "--directory",
            str(stage.directory),
            "--fault",
            fault,
        ]
        command = [sys.executable, *words, "--rank"]
        ranks = [
            stage.start(f"rank{rank}", [*command, str(rank)], environment, expendable=True)
            for rank in range(2)
        ]
        limit_s = _REHEARSAL_LIMIT_S if context.rehearsal else _LIMIT_S
        deadline = time.monotonic() + limit_s
        asked, done = stage.directory / "fault-asked", stage.directory / "fault-done"
        while ranks[0].poll() is None and time.monotonic() < deadline:
            if asked.exists() and not done.exists():
                ranks[1].send_signal(_FAULTS[fault])
                done.touch()
            time.sleep(_POLL_S)
        stuck = ranks[0].poll() is None
        output = stage.outputs()
        written = (
            (stage.directory / "rows.jsonl").read_text()
            if (stage.directory / "rows.jsonl").exists()
            else ""
        )
    rows = []
    for line in written.splitlines():
        report = json.loads(line)
        row = Row(
            name=f"{mode}: {report['name']}",
            command=f"{COMMAND} pair",
            cells=report["cells"],
            failure=report["failure"],
        )
        rows.append(context.measured("pair", row.name, lambda row=row: row))
    if stuck or not rows:
        why = f"rank 0 did not end within {limit_s:g} s" if stuck else "rank 0 reported nothing"
        row = Row(
            name=f"{mode}: the pair",
            command=f"{COMMAND} pair",
            cells={},
            failure=f"{why}; {output[-1500:]}",
        )
        rows.append(context.measured("pair", row.name, lambda: row))
    return rows


# --- the ranks


class _Rank:
    """One of the two ranks. Both carry out the same steps of the benchmark in the same order. Rank
    0 writes the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank: int = options.rank
        self.directory: Path = options.directory
        self.fault: str = options.fault
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        self.store = dist.TCPStore(
            "127.0.0.1",
            options.port,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=_REHEARSAL_LIMIT_S),
        )
        self.values = [
            torch.arange(float(_ELEMENTS), device=self.device) + rank for rank in range(2)
        ]
        self._steps = 0

    def step(self, name: str, call: Callable[[], str]) -> bool:
        """Carries out one step of the benchmark by calling `call`. On rank 0, also writes its row.
        Returns whether the step succeeded on this rank."""
        failure = result = ""
        begun = time.perf_counter()
        with _longest_stall() as stall:
            try:
                result = call()
            except Exception as error:  # of one step: the next one may work
                failure = f"{type(error).__name__}: {error}"
        cells = {
            "ms": f"{1e3 * (time.perf_counter() - begun):.2f}",
            "stall ms": f"{1e3 * stall[0]:.2f}",
            "result": result,
        }
        if self.rank == 0:
            with (self.directory / "rows.jsonl").open("a") as file:
                file.write(
                    json.dumps(
                        {"name": name, "cells": {} if failure else cells, "failure": failure}
                    )
                    + "\n"
                )
        return not failure

    def meet(self) -> None:
        """Waits for the other rank, over the store."""
        self._steps += 1
        self.store.set(f"{self._steps}-{self.rank}", "")
        self.store.wait([f"{self._steps}-{1 - self.rank}"])

    def connect(self) -> str:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        bound: dict[str, Any] = {"device_id": self.device} if backend == "nccl" else {}
        limit = timedelta(days=365) if backend == "nccl" else timedelta(seconds=_REHEARSAL_LIMIT_S)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("pair", self.store),
            rank=self.rank,
            world_size=2,
            timeout=limit,
            **bound,
        )
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.come_to_rest()
        return backend

    def come_to_rest(self) -> None:
        """Blocks until the device has completed all work. Raises TimeoutError."""
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + _PATIENCE_S
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device is not at rest after {_PATIENCE_S:g} s")
            time.sleep(_POLL_S / 10)

    def collectives(self) -> Iterator[tuple[str, Callable[[], torch.Tensor], torch.Tensor]]:
        """Returns each collective's name, the function that runs it, and the expected result on
        this rank."""
        mine, both, half = (
            self.values[self.rank],
            self.values,
            slice(4 * self.rank, 4 * self.rank + 4),
        )
        summed, exchanged = both[0] + both[1], torch.cat([value[half] for value in both])

        def filled(size: int, call: Callable[[torch.Tensor], Any]) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                out = torch.zeros(size, device=self.device)
                call(out)
                return out

            return run

        def in_place(call: Callable[[torch.Tensor], Any]) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                tensor = mine.clone()
                call(tensor)
                return tensor

            return run

        def exchange(out: torch.Tensor) -> None:
            peer = 1 - self.rank
            for send in (self.rank == 0, self.rank == 1):
                (dist.send(mine, peer) if send else dist.recv(out, peer))

        def scatter(out: torch.Tensor) -> None:
            dist.scatter(out, list(mine.chunk(2)) if self.rank == 0 else None, 0)

        yield "all_reduce", in_place(dist.all_reduce), summed
        yield (
            "all_gather",
            filled(16, lambda out: dist.all_gather_into_tensor(out, mine)),
            torch.cat(both),
        )
        yield (
            "reduce_scatter",
            filled(4, lambda out: dist.reduce_scatter_tensor(out, mine.clone())),
            summed[half],
        )
        yield (
            "all_to_all, sizes given",
            filled(8, lambda out: dist.all_to_all_single(out, mine, [4, 4], [4, 4])),
            exchanged,
        )
        yield "broadcast", in_place(lambda tensor: dist.broadcast(tensor, 0)), both[0]
        yield "send and recv", filled(8, exchange), both[1 - self.rank]
        yield "scatter", filled(4, scatter), both[0][half]
        # Last: where it fails, the communicator may be of no use any more.
        yield (
            "all_to_all, equal parts",
            filled(8, lambda out: dist.all_to_all_single(out, mine)),
            exchanged,
        )

    def checked(self, call: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
        got = call()
        self.come_to_rest()
        if not torch.equal(got, expected):
            raise AssertionError(f"got {got.tolist()}, expected {expected.tolist()}")
        return "right"

    def rate(self) -> str:
        tensor = torch.ones(
            _RATE_BYTES // 4 if self.device.type == "cuda" else _ELEMENTS, device=self.device
        )
        dist.all_reduce(tensor)
        self.come_to_rest()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        self.come_to_rest()
        return f"{tensor.nbytes / (time.perf_counter() - begun) / 1e9:.3f} GB/s over loopback"

    def issue(self) -> str:
        tensor = torch.ones(1024, device=self.device)
        begun = time.perf_counter()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(_ISSUED)]
        issued = time.perf_counter() - begun
        for work in works:
            work.wait()
        self.come_to_rest()
        return f"{1e6 * issued / _ISSUED:.1f} us of the host for each"

    def abort_without_peer(self) -> str:
        """Starts an all-reduce in which the peer does not take part, and aborts it after a second.
        Runs on rank 0. Raises AssertionError if the tensor is written to after the abort."""
        (self.directory / "fault-asked").touch()
        while not (self.directory / "fault-done").exists():
            time.sleep(_POLL_S)
        tensor = torch.ones(1 << 20, device=self.device)
        dist.all_reduce(tensor, async_op=True)
        time.sleep(1.0)  # the kernel is to spin, which nothing says from outside
        begun = time.perf_counter()
        if self.device.type == "cuda":
            group = dist.group.WORLD
            assert group is not None
            group.abort()
        aborted = time.perf_counter() - begun
        self.come_to_rest()
        rested = time.perf_counter() - begun
        tensor.fill_(5)
        self.come_to_rest()
        time.sleep(0.2)  # for what an aborted kernel might still write
        if self.device.type == "cuda" and not bool((tensor == 5).all()):
            raise AssertionError("memory was written after the abort")
        return f"abort {aborted:.3f} s, device at rest after {rested:.3f} s"


@contextmanager
def _longest_stall() -> Iterator[list[float]]:
    """Measures the longest time, in seconds, for which no other Python thread could run within the
    block. Yields a list whose only element has this value at the end."""
    longest, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.wait(0.001):
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        yield longest
    finally:
        over.set()
        ticking.join()


def main() -> None:
    """Runs one of the two ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--fault", choices=tuple(_FAULTS), required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cuda":
        pass_for_a_machine()
        torch.cuda.set_device(0)
    rank = _Rank(options)
    if rank.step("connects", rank.connect):
        rank.meet()
        for name, call, expected in rank.collectives():
            rank.step(name, lambda call=call, expected=expected: rank.checked(call, expected))
            rank.meet()
        for name, figure in (
            ("all-reduce of 64 MiB", rank.rate),
            ("issuing an all-reduce of 4 KiB", rank.issue),
        ):
            rank.step(name, figure)
            rank.meet()
        if rank.rank == 1:
            signal.pause()  # until it is stopped, or killed
        rank.step(f"abort of an all-reduce whose peer is {options.fault}", rank.abort_without_peer)
    sys.stdout.flush()
    os._exit(0)  # destructors would wait for the peer


if __name__ == "__main__":
    main()
