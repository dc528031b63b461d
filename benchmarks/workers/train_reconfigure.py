"""The training loop with torch's own elasticity: a single Gloo group, whose ranks are changed by
`_reconfigure` after each death and each join. Needs torch 2.14 or newer.

torch itself does not detect deaths, agree on members or transfer state for `_reconfigure`. This
loop adds the best solutions that its author could find:

- A death is known within milliseconds, because the worker's connection to a watcher breaks
  (membership.py). All gradients are summed in one collective, which the survivors then abandon.
  Otherwise, a survivor whose neighbours are alive would wait until the group's timeout. An
  abandoned collective may still write into its tensor, so the next one uses a new tensor.
- A join needs no additional collective. In an extra element of the gradients, each rank reports
  whether it has heard of new members. All ranks form the new group after the same step.
- In a new group, the ranks compare their step counts, since one survivor may have finished the step
  in which another saw an error. If the counts differ, all take the state of a rank with the most
  steps.
- The samples of a step are determined by the number of samples that all ranks have trained so far,
  so that no sample is lost.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from benchmarks.workers import training
from benchmarks.workers.membership import Generation, Membership
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of

_DIST: Final[Any] = dist
_ATTEMPTS: Final = 10
_POLL_S: Final = 0.0002
_NEWS_S: Final = 1.0
"""Time that an error of a collective waits for the news of a death, before the group counts as
failed without one."""


class Ranks:
    """A process group whose ranks can be changed. Used by one thread."""

    def __init__(self, membership: Membership, *, timeout: timedelta) -> None:
        """`membership`: connection to the watcher. `timeout`: time limit of each collective, and of
        forming a group."""
        self._membership = membership
        self._timeout = timeout
        self._store = dist.TCPStore("127.0.0.1", membership.store_port, timeout=timeout)
        _DIST.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self._store),
            # The first _reconfigure replaces both. The rank becomes a part of the handle, which
            # must be this worker's alone.
            rank=membership.member,
            world_size=membership.member + 1,
            timeout=timeout,
            enable_reconfigure=True,
        )
        self.generation = Generation(number=0, members=())

    @property
    def rank(self) -> int:
        """Rank of this worker in the group formed last."""
        return self.generation.members.index(self._membership.member)

    @property
    def size(self) -> int:
        """Number of ranks in the group formed last."""
        return len(self.generation.members)

    def form(self) -> None:
        """Blocks until the group has been formed for a newer generation. Raises RuntimeError if
        that fails repeatedly."""
        wanted = self._membership.wait_for_newer(self.generation.number)
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._connect(wanted)
            except RuntimeError as error:
                if not left:
                    raise
                print(f"generation {wanted.number} failed: {error}", file=sys.stderr)
                self._membership.failed(wanted.number)
                wanted = self._membership.wait_for_newer(wanted.number)
            else:
                self.generation = wanted
                return

    def _connect(self, wanted: Generation) -> None:
        key = f"handle/{wanted.number}"
        self._store.set(
            f"{key}/{self._membership.member}", _DIST._get_reconfigure_handle().encode()
        )
        handles = [self._store.get(f"{key}/{member}").decode() for member in wanted.members]
        _DIST._reconfigure(uuid=wanted.number, handles=handles, timeout=self._timeout).wait()

    def sum(self, tensor: torch.Tensor) -> bool:
        """Sums a tensor across ranks, in place. Returns False if a rank died. In that case, the
        tensor must not be used again, because an abandoned collective may still write into it."""
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            if self._lost(self._membership.newest(within_s=_POLL_S)):
                return False
        try:
            work.wait()
        except RuntimeError:
            self._await_news()
            return False
        return True

    def has_news(self) -> bool:
        """Returns whether the watcher has announced a newer generation to this rank."""
        newest = self._membership.newest()
        return newest is not None and newest.number > self.generation.number

    def _lost(self, newest: Generation | None) -> bool:
        return newest is not None and not set(self.generation.members) <= set(newest.members)

    def _await_news(self) -> None:
        """Waits, after an error in a collective, until the watcher announces a newer generation. If
        it does not, no member has died; the current generation is then reported as failed."""
        try:
            self._membership.wait_for_newer(self.generation.number, within_s=_NEWS_S)
        except TimeoutError:
            self._membership.failed(self.generation.number)


class Trainer:
    """Model, optimizer and progress of one rank."""

    def __init__(
        self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
    ) -> None:
        self._net, self._optimizer, self._ranks = net, optimizer, ranks
        self._parameters = [p for p in net.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self._parameters]
        self._sum = self._new_sum()
        self.step = 0
        """Steps taken."""
        self.samples = 0
        """Samples trained by all ranks together, in all steps."""

    def regroup(self) -> None:
        """Forms a new group. All ranks in it then get the state of a rank that has taken the most
        steps."""
        while True:
            self._ranks.form()
            steps = torch.zeros(self._ranks.size)
            steps[self._ranks.rank] = self.step
            if self._ranks.sum(steps) and self._agree([int(step) for step in steps]):
                return

    def average(self) -> tuple[bool, bool]:
        """Averages the gradients across ranks. Returns whether this succeeded, and whether a new
        group must be formed, because it failed or a rank has heard of new members."""
        gradients = [p.grad.view(-1) for p in self._parameters if p.grad is not None]
        news = torch.tensor([float(self._ranks.has_news())])
        torch.cat([*gradients, news], out=self._sum)
        if not self._ranks.sum(self._sum):
            self._sum = self._new_sum()
            return False, True
        averages = self._sum[:-1].div_(self._ranks.size)
        for parameter, average in zip(self._parameters, averages.split(self._sizes), strict=True):
            parameter.grad = average.view_as(parameter)
        return True, bool(self._sum[-1])

    def _new_sum(self) -> torch.Tensor:
        return torch.empty(sum(self._sizes) + 1)

    def _agree(self, steps: list[int]) -> bool:
        if min(steps) == max(steps):
            return True
        source = steps.index(max(steps))
        state: list[Any] = [None]
        if self._ranks.rank == source:
            state = [
                {
                    "net": self._net.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "step": self.step,
                    "samples": self.samples,
                }
            ]
        try:
            dist.broadcast_object_list(state, src=source)
        except RuntimeError:
            return False
        self._net.load_state_dict(state[0]["net"])
        self._optimizer.load_state_dict(state[0]["optimizer"])
        self.step, self.samples = state[0]["step"], state[0]["samples"]
        return True


@lru_cache(maxsize=2)
def _order(epoch: int, count: int) -> list[int]:
    """Returns the order of the samples in an epoch, the same on all ranks."""
    order: list[int] = torch.randperm(
        count, generator=torch.Generator().manual_seed(epoch)
    ).tolist()
    return order


def main() -> None:
    """Trains until the harness ends the run."""
    flags = parser()
    flags.add_argument("--watcher", type=int, required=True, help="port of the watcher")
    flags.add_argument("--timeout-s", type=float, required=True, help="of collectives")
    options = flags.parse_args()
    workload = workload_of(options)
    membership = Membership(options.watcher, timeout_s=120)
    ranks = Ranks(membership, timeout=timedelta(seconds=options.timeout_s))
    net = training.network(workload)
    optimizer = training.optimizer_of(net)
    dataset = training.dataset(workload)
    trainer = Trainer(net, optimizer, ranks)
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    membership.ready()
    trainer.regroup()
    while not log.done:
        first = trainer.samples + ranks.rank * workload.batch
        indices = (
            _order(epoch, len(dataset))[place]
            for epoch, place in (
                divmod(number, len(dataset)) for number in range(first, first + workload.batch)
            )
        )
        inputs, labels = default_collate([dataset[index] for index in indices])
        training.loss_fn(net(inputs), labels).backward()
        averaged, regroup = trainer.average()
        if averaged:
            optimizer.step()
            trainer.step += 1
            trainer.samples += ranks.size * workload.batch
            log.committed(
                group=ranks.generation.number,
                world_size=ranks.size,
                rank=ranks.rank,
                step=trainer.step,
            )
        optimizer.zero_grad()
        if regroup and not log.done:
            trainer.regroup()


if __name__ == "__main__":
    main()
