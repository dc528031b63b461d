"""Measures a lower bound for every recovery: processes with a plain Gloo group form a new group on
their own when a peer dies.

There is no launcher, no coordinator, no model state to agree on and no replacement. Every process
is notified of the death, and gets its new rank from the order of arrival at a store that the parent
hosts. The measured time therefore consists of noticing the death, connecting the remaining
processes and taking one step.

Each trial forks new members, which have already imported torch, and creates the store only then.
The store's server thread looks up the name of every client. If a member were forked during a
lookup, it would inherit libc's resolver lock in the locked state, and could never acquire it.

Writes the pauses in seconds as a JSON list.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.recovery import Recovery
from benchmarks.workers import training
from benchmarks.workers.steplog import StepLog, StepLogs
from benchmarks.workers.workload import Workload

_TIMEOUT = timedelta(seconds=20)
_POLL_S = 0.02


def main() -> None:
    """Runs the trials."""
    flags = argparse.ArgumentParser()
    for name in ("ranks", "kills", "width", "batch"):
        flags.add_argument(f"--{name}", type=int, required=True)
    flags.add_argument("--output", type=Path, required=True)
    options = flags.parse_args()
    generator = random.Random(0)
    pauses = []
    for trial in range(options.kills):
        with tempfile.TemporaryDirectory(prefix="shoal-bench-floor-") as directory:
            workload = Workload(
                log=Path(directory), ranks=options.ranks, width=options.width, batch=options.batch
            )
            if not trial:
                # the first optimizer imports half of torch: once, not in every member
                training.optimizer_of(training.network(workload))
            pauses.append(
                _trial(workload, victim=trial % options.ranks, delay_s=generator.uniform(0.0, 0.1))
            )
    options.output.write_text(json.dumps(pauses))


def _trial(workload: Workload, *, victim: int, delay_s: float) -> float:
    ports: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    children = [_fork(rank, ports, workload) for rank in range(workload.ranks)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        for _ in children:
            ports.put(store.port)
        recovery = Recovery(
            StepLogs(workload.log),
            workers=workload.ranks,
            recovered=workload.ranks - 1,
            restarted=False,
        )
        _wait("the members did not step together", recovery.settled)
        time.sleep(delay_s)
        recovery.killed(children[victim], at_ns=time.monotonic_ns())
        os.kill(children[victim], signal.SIGKILL)
        _wait("the survivors did not make a new group", recovery.over)
        return recovery.pause_s
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _wait(otherwise: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * _TIMEOUT.total_seconds()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(_POLL_S)


def _fork(rank: int, ports: multiprocessing.SimpleQueue[int], workload: Workload) -> int:
    child = os.fork()
    if child == 0:
        try:
            _Member(
                dist.TCPStore("127.0.0.1", ports.get(), is_master=False), rank, workload.ranks
            ).train(workload)
        finally:
            os._exit(1)  # trains until it is killed
    return child


class _Member:
    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._number, self._rank, self._world_size = 0, rank, world_size
        self._group: dist.ProcessGroupGloo | None = None
        self._connect()

    def train(self, workload: Workload) -> None:
        net = training.network(workload)
        optimizer = training.optimizer_of(net)
        inputs, labels = training.dataset(workload)[: workload.batch]
        log = StepLog(workload.log, steps=0, gate=None)
        gradients = torch.zeros(sum(p.numel() for p in net.parameters()))
        step = 0
        while True:
            training.loss_fn(net(inputs), labels).backward()
            torch.cat(
                [p.grad.view(-1) for p in net.parameters() if p.grad is not None], out=gradients
            )
            while not self._average(gradients):
                self._shrink()
            for parameter, gradient in zip(
                net.parameters(),
                gradients.split([p.numel() for p in net.parameters()]),
                strict=True,
            ):
                parameter.grad = gradient.view_as(parameter)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.committed(
                group=self._number, world_size=self._world_size, rank=self._rank, step=step
            )

    def _average(self, tensor: torch.Tensor) -> bool:
        assert self._group is not None
        try:
            self._group.allreduce([tensor.div_(self._world_size)]).wait()
        except RuntimeError:
            return False
        return True

    def _shrink(self) -> None:
        # Without references its sockets close, which frees a peer that waits for this process.
        self._group = None
        self._number += 1
        self._world_size -= 1
        self._rank = self._store.add(f"arrived-{self._number}", 1) - 1
        self._connect()

    def _connect(self) -> None:
        prefix = dist.PrefixStore(str(self._number), self._store)
        self._group = dist.ProcessGroupGloo(prefix, self._rank, self._world_size, _TIMEOUT)


if __name__ == "__main__":
    main()
