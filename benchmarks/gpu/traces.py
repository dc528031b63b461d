"""Counts kernel launches, copies, and waits of the host for the device in a few steps, from a trace
recorded by torch's profiler.

Events are recognized by CUDA's own names, which the profiler writes into a Chrome trace (categories
cuda_runtime, cuda_driver and gpu_memcpy).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_LAUNCH: Final = re.compile(r"(cuda|cu)(Launch\w*Kernel\w*|GraphLaunch)")
_WAIT: Final = re.compile(r"(cuda|cu)\w*Synchronize\w*")
_TO_HOST: Final = re.compile(r"Memcpy DtoH.*-> (?P<memory>\w+)")
_TO_DEVICE: Final = re.compile(r"Memcpy HtoD \((?P<memory>\w+)")
_STEPS: Final = "shoal-steps"
_CALLS: Final = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Average counts per step."""

    operators: float
    """Number of torch operators on the host."""
    launches: float
    waits: float
    """Number of calls in which the host blocks until the device, a stream or an event has
    completed."""
    to_host: Mapping[str, float]
    """Number of copies to the host, by the kind of host memory: "Pinned" or "Pageable"."""
    to_device: Mapping[str, float]


def count(events: Sequence[Mapping[str, Any]], *, steps: int) -> Counts:
    """Counts the events in a Chrome trace of `steps` steps, and returns averages per step. Events
    on the host are counted only up to the end of the last step."""
    end = _end_of_steps(events)
    operators = launches = waits = 0
    to_host: Counter[str] = Counter()
    to_device: Counter[str] = Counter()
    for event in events:
        category, name = event.get("cat", ""), str(event.get("name", ""))
        if event.get("ph") != "X" or (category != "gpu_memcpy" and event.get("ts", 0.0) > end):
            continue
        if category == "cpu_op":
            operators += 1
        elif category in _CALLS:
            launches += _LAUNCH.fullmatch(name) is not None
            waits += _WAIT.fullmatch(name) is not None
        elif category == "gpu_memcpy":
            if (found := _TO_HOST.match(name)) is not None:
                to_host[found["memory"]] += 1
            elif (found := _TO_DEVICE.match(name)) is not None:
                to_device[found["memory"]] += 1
    return Counts(
        operators=operators / steps,
        launches=launches / steps,
        waits=waits / steps,
        to_host={memory: number / steps for memory, number in to_host.items()},
        to_device={memory: number / steps for memory, number in to_device.items()},
    )


def counted(step: Callable[[], object], *, steps: int) -> Counts:
    """Takes `steps` steps under the profiler, on the calling thread, and counts their events. The
    profiler's own wait for the device at the end is not counted."""
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with tempfile.TemporaryDirectory(prefix="shoal-trace-") as directory:
        file = Path(directory) / "trace.json"
        with profile(activities=activities) as profiler, record_function(_STEPS):
            for _ in range(steps):
                step()
        profiler.export_chrome_trace(str(file))
        return count(json.loads(file.read_text())["traceEvents"], steps=steps)


def _end_of_steps(events: Sequence[Mapping[str, Any]]) -> float:
    """Returns the time in the trace at which the host finished the last step; infinity if the trace
    does not contain that time."""
    ends = [
        event["ts"] + event["dur"]
        for event in events
        if event.get("name") == _STEPS and event.get("cat") == "user_annotation"
    ]
    return max(ends, default=math.inf)
