"""Replaces parts of the product's modules by simulated ones. Everything else is the product's own
code.

    time.monotonic, time.sleep      virtual in threads of simulated processes, real in all others
    ProgressMeter                   uses the virtual clock
    backoff: _CHANCE                uses the scheduler's random numbers, so schedules are repeatable
    link, writer: threading         threads and conditions take turns (threads.py)
    writer: ThreadPoolExecutor      reads files at once
    membership: RedisStore          simulated stores for the rendezvous of ranks (transfers.py)
    membership: backend_class       simulated process groups (rooms.py)
    membership, stall_watch: unreachable    reports the peers that the simulated network cuts off
    membership: StallWatch          runs only with partitions; its thread takes turns
    transfer: take_state            simulated transfer of state (transfers.py)
    loader: _sample_record          one file per process
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
"""Initial time of the virtual clock, since the product takes a time of 0 for none."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Installs the simulated parts for threads of simulated processes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(worlds.installed())
        for module, name, value in (
            (time, "monotonic", _monotonic),
            (time, "sleep", _sleep),
            (backoff, "_CHANCE", _Random),
            (link, "threading", SimulatedThreading),
            (writer, "threading", _WriterThreading),
            (writer, "_NICENESS", 0),  # all simulated threads have to run
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
    """Random numbers: the scheduler's in threads of simulated processes, real ones elsewhere."""

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
    """A stall watch that does nothing: no process is cut off, and a real thread would not take
    turns."""

    busy_link = None

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _watch(*arguments: Any) -> Any:
    """Returns a member's stall watch, which does nothing unless the scenario has partitions."""
    return StallWatch(*arguments) if own_process().world.scenario.parted else _NoWatch()


def _unreachable(peers: Mapping[int, str], **_: object) -> list[int]:
    """Replaces `stall_watch.unreachable`: asks the simulated network."""
    process = own_process()
    donors = process.world.donors
    return sorted(
        rank
        for rank, address in peers.items()
        if not process.world.network.reaches(process.name, donors[address].name)
    )


_NO_POINTS = {"reduction.under_way"}
"""Failpoints that are not counted as points. Between the surrounding waits nothing else can happen,
and recorded scenarios were numbered without them."""


class _Failpoints:
    """Enables all failpoints except `_NO_POINTS`. Each is a point of its process."""

    def get(self, passed: tuple[str, int]) -> None:
        actor = current_actor()
        if actor is not None and actor.main and passed[0] not in _NO_POINTS:
            actor.host.comes_to(f"through {passed[0]}")


class _WritingThread(SimulatedThread):
    """A checkpoint writer's thread that is as slow as the scenario says."""

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
