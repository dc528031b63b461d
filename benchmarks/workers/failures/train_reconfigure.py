"""T17's training loop with a process group of torch that is reconfigured after a death
(`_reconfigure`, torch 2.14 or newer), and the code that a user would have to write around it.

With `--keeper`, the program instead keeps track of the members, which torch does not do. It detects
deaths within milliseconds by checking the processes' ids, and writes the list of members to a file.

A worker whose collective fails waits for a newer membership. A worker that notices a newer
membership reports this in the sum of the next gradients, so that all workers switch to it after the
same step. Ranks that have taken fewer steps than others then receive the state of a rank that has
taken the most. The global batch is divided among the current ranks.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.workers.failures import models
from benchmarks.workers.failures.ledger import Ledger
from benchmarks.workers.failures.task import Task, parser, task_of

_DIST: Final[Any] = dist
_TIMEOUT: Final = timedelta(seconds=2)
"""Timeout of collectives. A survivor waits this long for another survivor that has given up."""
_PATIENCE_S: Final = 60
_NEWS_S: Final = 1.0
"""Time that a failed rank waits for a newer membership before it reports that the current one has
failed."""
_POLL_S: Final = 0.002


class Members(NamedTuple):
    """One membership: its number, and the process ids of its workers by rank."""

    number: int
    pids: list[int]


class Outdated(Exception):
    """Raised if there is a newer membership."""


def keep(task: Task) -> None:
    """Hosts the store of the group, and writes a new membership whenever the set of living workers
    changes or a group could not be formed. The first membership has `task.ranks` workers. Runs
    forever."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    partial = task.ledgers / "store.partial"
    partial.write_text(str(store.port))
    partial.rename(_port_file(task))
    number, pids = 0, list[int]()
    while True:
        alive = sorted(
            pid for pid in (int(file.stem) for file in task.ledgers.glob("*.member")) if _lives(pid)
        )
        changed = alive != pids or _failed_file(task, number).exists()
        if changed and (number or len(alive) == task.ranks):
            number, pids = number + 1, alive
            partial = task.ledgers / "members.partial"
            partial.write_text(json.dumps(Members(number, pids)))
            partial.rename(_file(task))
        time.sleep(_POLL_S)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _file(task: Task) -> Path:
    return task.ledgers / "members.json"


def _failed_file(task: Task, number: int) -> Path:
    """Returns the path of the file by which workers request a new membership, because those of
    membership `number` could not form a group."""
    return task.ledgers / f"{number}.failed"


def _port_file(task: Task) -> Path:
    return task.ledgers / "store.port"


class Group:
    """The process group of one worker, which is reconfigured for each new membership."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._members = Members(0, [])
        _until(_port_file(task).exists)
        # Ranks connect through this store, whose address is in their handles. So is the rank given
        # here, which tells them apart until the first _reconfigure.
        self._store = dist.TCPStore("127.0.0.1", int(_port_file(task).read_text()))
        _DIST.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=os.getpid(),
            world_size=os.getpid() + 1,
            timeout=_TIMEOUT,
            enable_reconfigure=True,
        )
        (task.ledgers / f"{os.getpid()}.member").touch()

    @property
    def number(self) -> int:
        """Number of the current membership."""
        return self._members.number

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._members.pids)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._members.pids.index(os.getpid())

    def newest(self) -> Members:
        """Returns the newest membership, which may still be the current one."""
        try:
            return Members(*json.loads(_file(self._task).read_text()))
        except FileNotFoundError:
            return self._members

    def form(self) -> None:
        """Waits for a newer membership that includes this process, and reconfigures the group for
        it."""
        newest = self._await_newer()
        self._members = newest
        directory = self._task.ledgers
        partial = directory / f"{os.getpid()}.partial"
        partial.write_text(_DIST._get_reconfigure_handle())
        partial.rename(directory / f"{os.getpid()}.handle-{newest.number}")
        files = [directory / f"{pid}.handle-{newest.number}" for pid in newest.pids]

        def complete() -> bool:
            if self.newest().number > newest.number:
                raise Outdated
            return all(file.exists() for file in files)

        _until(complete)
        handles = [file.read_text() for file in files]
        _DIST._reconfigure(uuid=newest.number, handles=handles, timeout=_TIMEOUT).wait()

    def _await_newer(self) -> Members:
        newest = self._members

        def is_newer() -> bool:
            nonlocal newest
            newest = self.newest()
            return newest.number > self.number and os.getpid() in newest.pids

        if self.number:
            try:
                _until(is_newer, within_s=_NEWS_S)
            except TimeoutError:
                _failed_file(self._task, self.number).touch()
        _until(is_newer)
        return newest


def _until(condition: Callable[[], bool], *, within_s: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no membership of process {os.getpid()} within {within_s} s")
        time.sleep(_POLL_S)


class Training:
    """The training state of one worker, and its steps."""

    def __init__(self, task: Task, ledger: Ledger, group: Group) -> None:
        self._task, self._ledger, self._group = task, ledger, group
        self.net = models.network(task)
        self._parameters = list(self.net.parameters())
        self._optimizer = models.optimizer_of(self.net)
        self._dataset, self._loss_fn = models.dataset(task), models.loss_of(task)
        self._batches = models.order(task).view(task.steps, task.global_batch)
        self.step = 0

    def synchronize(self) -> None:
        """Sends the state of the rank with the most steps (the first, if there are several) to all
        ranks that have taken fewer steps."""
        steps = [torch.zeros(1, dtype=torch.long) for _ in range(self._group.size)]
        dist.all_gather(steps, torch.tensor([self.step]))
        ahead = max(int(step) for step in steps)
        if all(int(step) == ahead for step in steps):
            return
        source = next(rank for rank, step in enumerate(steps) if int(step) == ahead)
        stream = io.BytesIO()
        state: dict[str, Any] = {
            "model": self.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, stream)
        size = torch.tensor([stream.tell()])
        dist.broadcast(size, source)
        content = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        if self._group.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, source)
        if self.step < ahead:
            state = torch.load(io.BytesIO(content.numpy().tobytes()))
            self.net.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = ahead

    def take_step(self) -> bool:
        """Takes a step. Returns whether any rank has noticed a newer membership."""
        group = self._group
        share = self._batches[self.step].tensor_split(group.size)[group.rank]
        indices, inputs, targets = self._dataset[share]
        self._ledger.tried(
            group=group.number, world_size=group.size, step=self.step + 1, samples=indices.tolist()
        )
        self._optimizer.zero_grad()
        loss = self._loss_fn(self.net(inputs), targets) * (len(share) / self._task.global_batch)
        loss.backward()
        newer = float(group.newest().number > group.number)
        # a tensor of its own: collectives that were left behind may still write into older ones
        flat = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None])
        flat = torch.cat([flat, torch.tensor([newer])])
        dist.all_reduce(flat)
        position = 0
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(flat[position : position + parameter.numel()].view_as(parameter))
            position += parameter.numel()
        self._optimizer.step()
        self.step += 1
        self._ledger.committed()
        return bool(flat[-1] > 0)


def main() -> None:
    """Keeps track of the members (`--keeper`), or trains to the last step."""
    flags = parser()
    flags.add_argument("--keeper", action="store_true", help="keep the membership")
    options = flags.parse_args()
    task = task_of(options)
    if options.keeper:
        keep(task)
    task.wait_for_place()
    ledger = Ledger(task.ledgers)
    group = Group(task)
    training = Training(task, ledger, group)
    outdated = True
    while training.step < task.steps:
        try:
            if outdated:
                group.form()
                training.synchronize()
                outdated = False
            else:
                outdated = training.take_step()
        except (RuntimeError, Outdated):  # a rank has died, or there is a newer membership
            outdated = True
    ledger.finished(digest=models.digest_of(training.net.state_dict()))


if __name__ == "__main__":
    main()
