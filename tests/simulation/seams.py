"""Where simulated parts take the place of real ones in the product's modules. Everything else is
the product's own code.

time.monotonic, time.sleep      virtual, in threads of simulated processes; real in all others
ProgressMeter                   has the virtual clock
backoff: _CHANCE                the scheduler's: a schedule is the same each time
link, writer: threading         their threads and conditions take turns (threads.py)
writer: ThreadPoolExecutor      reads files at once
membership: RedisStore          the stores over which ranks meet (transfers.py)
membership: backend_class       process groups of simulated ranks (rooms.py)
membership, stall_watch: unreachable    whom the simulated network cuts off
membership: StallWatch          begun only where some are cut off; its thread takes turns
transfer: take_state            state that travels (transfers.py)
loader: _sample_record          a file for each process
failpoints                      are points of the scenario
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from shoal_common import backoff, failpoints
from shoal_worker.backends import worlds
from shoal_worker.checkpoint import writer
from shoal_worker.data import loader
from shoal_worker.elastic.coordinator import link, membership, stall_watch
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.coordinator.stall_watch import StallWatch
from shoal_worker.elastic.group import transfer

from tests.simulation.processes import own_process
from tests.simulation.rooms import SimulatedBackend
from tests.simulation.scheduler import current_actor
from tests.simulation.threads import InlineExecutor, SimulatedThread, SimulatedThreading
from tests.simulation.transfers import SimulatedStore, take_state

_real_monotonic, _real_sleep = time.monotonic, time.sleep
_EPOCH_S = 1000.0
"""What a virtual clock shows at the beginning: times of zero are taken for none."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While open, threads of simulated processes find simulated parts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(worlds.installed())
        for module, name, value in (
            (time, "monotonic", _monotonic),
            (time, "sleep", _sleep),
            (backoff, "_CHANCE", _Random),
            (link, "threading", SimulatedThreading),
            (writer, "threading", _WriterThreading),
            (writer, "ThreadPoolExecutor", InlineExecutor),
            (membership, "RedisStore", SimulatedStore),
            (membership, "backend_class", lambda _: lambda: SimulatedBackend(own_process())),
            (membership, "unreachable", _unreachable),
            (membership, "StallWatch", _watch),
            (stall_watch, "unreachable", _unreachable),
            (stall_watch, "threading", SimulatedThreading),
            (ProgressMeter.__init__, "__kwdefaults__", {"clock": _monotonic}),
            (transfer, "take_state", take_state),
            (loader, "_sample_record", lambda: own_process().record_samples()),
            (failpoints, "_wanted", _Failpoints),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        quiet = logging.getLogger("shoal_worker")
        level, quiet.disabled = quiet.level, False
        quiet.setLevel(logging.CRITICAL)
        stack.callback(quiet.setLevel, level)
        yield


def _monotonic() -> float:
    actor = current_actor()
    return _real_monotonic() if actor is None else _EPOCH_S + actor.scheduler.now


def _sleep(seconds: float) -> None:
    actor = current_actor()
    if actor is None:
        _real_sleep(seconds)
    else:
        actor.scheduler.sleep(seconds)


class _Random:
    """The scheduler's random numbers, in threads of simulated processes."""

    @staticmethod
    def uniform(low: float, high: float) -> float:
        """Draws a number between `low` and `high`, as random.uniform does."""
        actor = current_actor()
        return (
            random.uniform(low, high)
            if actor is None
            else actor.scheduler.random.uniform(low, high)
        )


class _NoWatch:
    """Its thread would be a real one, beside those that take turns."""

    busy_link = None

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Nothing is watched."""

    def close(self) -> None:
        """Nothing to end."""


def _watch(*arguments: Any) -> Any:
    """Returns what watches a member: it has nothing to do where all reach each other."""
    return StallWatch(*arguments) if own_process().world.scenario.parted else _NoWatch()


def _unreachable(peers: Mapping[int, str], **_: object) -> list[int]:
    """In the place of `stall_watch.unreachable`."""
    process = own_process()
    donors = process.world.donors
    return sorted(
        rank
        for rank, address in peers.items()
        if not process.world.network.reaches(process.name, donors[address].name)
    )


_NO_POINTS = {"reduction.under_way"}
"""Failpoints between two of a rank's waits at which nothing else happens than at the next wait;
recorded scenarios count without them."""


class _Failpoints:
    """All failpoints are wanted, but for some: at each, the scenario says what happens."""

    def get(self, passed: tuple[str, int]) -> None:
        actor = current_actor()
        if actor is not None and actor.main and passed[0] not in _NO_POINTS:
            actor.host.comes_to(f"through {passed[0]}")


class _WritingThread(SimulatedThread):
    """Writes as fast as the scenario says."""

    def __init__(self, *, target: Any, args: Any, name: str) -> None:
        def write(*arguments: Any) -> None:
            process = own_process()
            seconds = process.world.faults.seconds_of_write(process)
            if seconds:
                time.sleep(seconds)
            target(*arguments)

        super().__init__(target=write, args=args, name=name)


class _WriterThreading(SimulatedThreading):
    Thread = _WritingThread
