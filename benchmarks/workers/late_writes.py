"""Measures whether an abandoned collective writes into tensors that are in use again. Writes a JSON
list of rounds.

In each round, three forked ranks form a group. Rank 2 is stopped (SIGSTOP). The others start
all-reduces that wait for rank 2, and abandon them. They form a group of two, perform an all-reduce
in it, and write new values to the tensors of the old all-reduces. Then rank 2 continues, and does
its part of the old all-reduces. Finally, the survivors check their tensors for changes.

A `Scheme` is one way to abandon a group and to form another. Each scheme imports what it needs,
because torchft runs in an environment in which Shoal is not installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

_DIST: Final[Any] = dist
_RANKS: Final = 3
_STOPPED: Final = 2
_SURVIVORS: Final = (0, 1)
_IN_FLIGHT_S: Final = 0.1
"""Time for which the collectives wait before they are abandoned."""
_AFTERWARDS_S: Final = 0.3
"""Time for which tensors are watched after rank 2 has done its part."""
_PATIENCE: Final = timedelta(seconds=120)
_POLL_S: Final = 0.01
_FILL: Final = 7.0


class Scheme(Protocol):
    """A way to abandon a group and to form another. It has one group of this rank at a time."""

    def form(self, number: int, members: Sequence[int]) -> None:
        """Abandons the current group, if any, and forms a group of the ranks `members`. `number`:
        number of the group, different for each group."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Starts an all-reduce in the current group and returns its `Work`."""
        ...


class ByHand:
    """torch's Gloo backend, with a new process group each time. Keeps a reference to the old group,
    because its destructor would wait for collectives in flight."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._groups: list[dist.ProcessGroupGloo] = []

    def form(self, number: int, members: Sequence[int]) -> None:
        """Implements `Scheme`."""
        self._groups.append(
            dist.ProcessGroupGloo(
                dist.PrefixStore(f"group/{number}", self._store),
                members.index(self._rank),
                len(members),
                self._timeout,
            )
        )

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Implements `Scheme`."""
        return self._groups[-1].allreduce([tensor])


class Reconfigured:
    """A single process group of torch, whose ranks are changed by `_reconfigure`."""

    def __init__(
        self, store: dist.Store, rank: int, timeout: timedelta, *, backend: str = "gloo"
    ) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        _DIST.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=_RANKS,
            timeout=timeout,
            enable_reconfigure=True,
        )

    def form(self, number: int, members: Sequence[int]) -> None:
        """Implements `Scheme`."""
        self._store.set(f"handle/{number}/{self._rank}", _DIST._get_reconfigure_handle())
        handles = [self._store.get(f"handle/{number}/{member}").decode() for member in members]
        _DIST._reconfigure(uuid=number, handles=handles, timeout=self._timeout).wait()

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Implements `Scheme`."""
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work


class ReconfiguredShoal(Reconfigured):
    """A single process group with the backend `shoal_gloo`, whose ranks are changed by
    `_reconfigure`."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        import shoal  # noqa: F401 - makes torch know shoal_gloo

        super().__init__(store, rank, timeout, backend="shoal_gloo")


class ShoalByHand:
    """The backend `shoal_gloo`, with a new process group each time. The old group is aborted and
    destroyed."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        import shoal  # noqa: F401 - makes torch know shoal_gloo

        self._store, self._rank, self._timeout = store, rank, timeout

    def form(self, number: int, members: Sequence[int]) -> None:
        """Implements `Scheme`."""
        if dist.is_initialized():
            _DIST.group.WORLD.abort()
            dist.destroy_process_group()
        dist.init_process_group(
            "shoal_gloo",
            store=dist.PrefixStore(f"group/{number}", self._store),
            rank=members.index(self._rank),
            world_size=len(members),
            timeout=self._timeout,
        )

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Implements `Scheme`."""
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work


class Torchft:
    """torchft's ProcessGroupGloo, reconfigured as its manager does."""

    def __init__(self, store: dist.TCPStore, rank: int, timeout: timedelta) -> None:
        from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

        self._address, self._rank = f"127.0.0.1:{store.port}", rank
        self._timeout, self._reconfigure = timeout, reconfigure_with_store
        self._group: Any = ProcessGroupGloo(timeout=timeout)

    def form(self, number: int, members: Sequence[int]) -> None:
        """Implements `Scheme`."""
        self._reconfigure(
            self._group,
            f"{self._address}/group/{number}",
            members.index(self._rank),
            len(members),
            self._timeout,
        )

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Implements `Scheme`."""
        work: dist.Work = self._group.allreduce([tensor], dist.AllreduceOptions())
        return work


SCHEMES: Final[dict[str, Callable[[dist.TCPStore, int, timedelta], Scheme]]] = {
    "gloo": ByHand,
    "reconfigure": Reconfigured,
    "torchft": Torchft,
    "shoal": ShoalByHand,
    "shoal-reconfigure": ReconfiguredShoal,
}


def main() -> None:
    """Runs the rounds, alternating between one and two all-reduces in flight."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--scheme", choices=SCHEMES, required=True)
    flags.add_argument("--rounds", type=int, required=True)
    flags.add_argument("--numel", type=int, required=True)
    flags.add_argument("--timeout-s", type=float, required=True)
    flags.add_argument("--output", type=Path, required=True)
    options = flags.parse_args()
    torch.set_num_threads(1)
    if options.scheme.startswith("shoal"):
        import shoal  # noqa: F401 - once, not in every rank
        import shoal_worker.backends.gloo.backend  # noqa: F401 - the same
    if options.scheme == "torchft":
        import torchft.process_group  # noqa: F401 - once, not in every rank
    rounds = []
    for number in range(options.rounds):
        rounds.append(
            _round(
                options.scheme,
                in_flight=1 + number % 2,
                numel=options.numel,
                timeout=timedelta(seconds=options.timeout_s),
            )
        )
        options.output.write_text(json.dumps(rounds))


def _round(scheme: str, *, in_flight: int, numel: int, timeout: timedelta) -> dict[str, Any]:
    # The store comes after the forks: its server's thread asks the resolver for names, and a rank
    # that is forked in that moment inherits the resolver's lock as held, for ever.
    ports: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    children = [_fork(rank, ports, scheme, in_flight, numel, timeout) for rank in range(_RANKS)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    try:
        for _ in children:
            ports.put(store.port)
        store.wait([f"ready/{rank}" for rank in range(_RANKS)])
        os.kill(children[_STOPPED], signal.SIGSTOP)
        os.waitpid(children[_STOPPED], os.WUNTRACED)
        store.set("stopped", "")
        store.wait([f"reused/{rank}" for rank in _SURVIVORS])
        store.set("continued", "")
        os.kill(children[_STOPPED], signal.SIGCONT)
        results = [json.loads(store.get(f"result/{rank}")) for rank in _SURVIVORS]
        return {
            "in_flight": in_flight,
            "changed": max(one["changed"] for one in results),
            "next_s": max(one["next_s"] for one in results),
            "failures": [one["failure"] for one in results if one["failure"]],
            "silent": any(one["changed"] and one["returned"] for one in results),
        }
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(
    rank: int,
    ports: multiprocessing.SimpleQueue[int],
    scheme: str,
    in_flight: int,
    numel: int,
    timeout: timedelta,
) -> int:
    child = os.fork()
    if child == 0:
        try:
            store = dist.TCPStore("127.0.0.1", ports.get(), is_master=False, timeout=_PATIENCE)
            groups = SCHEMES[scheme](store, rank, timeout)
            groups.form(1, range(_RANKS))
            groups.all_reduce(torch.ones(numel)).wait()
            tensors = [torch.ones(numel) for _ in range(in_flight)]
            store.set(f"ready/{rank}", "")
            if rank == _STOPPED:
                _be_stopped(store, groups, tensors, timeout)
            else:
                _survive(store, rank, groups, tensors, timeout)
            time.sleep(_PATIENCE.total_seconds())  # until it is killed
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def _be_stopped(
    store: dist.Store, groups: Scheme, tensors: Sequence[torch.Tensor], timeout: timedelta
) -> None:
    store.get("continued")  # the stop comes in here
    with suppress(RuntimeError):
        works = [groups.all_reduce(tensor) for tensor in tensors]
        for work in works:
            work.wait(timeout)
    store.set("late", "")


def _survive(
    store: dist.Store,
    rank: int,
    groups: Scheme,
    tensors: Sequence[torch.Tensor],
    timeout: timedelta,
) -> None:
    store.get("stopped")
    works = [groups.all_reduce(tensor) for tensor in tensors]
    time.sleep(_IN_FLIGHT_S)
    started = time.monotonic()
    failure = ""
    try:
        groups.form(2, _SURVIVORS)
        total = torch.ones(8)
        groups.all_reduce(total).wait()
        if total[0] != len(_SURVIVORS):
            failure = f"the next all-reduce gave {total[0]}"
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
    next_s = time.monotonic() - started
    for tensor in tensors:
        tensor.fill_(_FILL)
    store.set(f"reused/{rank}", "")
    store.get("late")
    changed = 0
    end = time.monotonic() + _AFTERWARDS_S
    while time.monotonic() < end:
        changed = max(changed, sum(int((tensor != _FILL).sum()) for tensor in tensors))
        time.sleep(_POLL_S)
    returned = True
    for work in works:
        try:
            work.wait(timeout)
        except RuntimeError:
            returned = False
    result = {"changed": changed, "next_s": next_s, "failure": failure, "returned": returned}
    store.set(f"result/{rank}", json.dumps(result))


if __name__ == "__main__":
    main()
