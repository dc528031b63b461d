"""List of all benchmarks. The module of a benchmark is imported only when it is run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from benchmarks.devices import HOST, Devices
from benchmarks.report import Table


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a benchmark: its extent, its devices, and the directory for plots."""

    quick: bool
    """True for few repetitions, which show that the benchmark works; the figures are rough."""
    output: Path
    """Existing directory to which plots are written."""
    devices: Devices = HOST
    """Devices on which the workers compute."""


class Measure(Protocol):
    """Interface of a benchmark module."""

    def measure(self, options: Options) -> Table:
        """Runs the benchmark, writes plots to `options.output`, and returns the table. If a single
        system fails, its row shows the reason."""
        ...


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Entry of the list of benchmarks."""

    key: str
    title: str
    module: str
    on_devices: int | None = None
    """Minimum number of CUDA devices for this table; None: it is measured only on the host."""

    def measure(self, options: Options) -> Table:
        """Runs the benchmark, which takes minutes."""
        return cast(Measure, importlib.import_module(self.module)).measure(options)


BENCHMARKS: Final = (
    Benchmark(
        key="t1",
        title="SIGKILL of 1 worker to the next committed step",
        module="benchmarks.kill_recovery",
        on_devices=3,
    ),
    Benchmark(
        key="t2",
        title="Step time against bare torch DDP",
        module="benchmarks.step_time",
        on_devices=2,
    ),
    Benchmark(
        key="t3",
        title="Joining: stall of the survivors, transfer of the state",
        module="benchmarks.join_stall",
        on_devices=3,
    ),
    Benchmark(
        key="t4",
        title="Parameter server: push and pull over sockets",
        module="benchmarks.ps_transfer",
    ),
    Benchmark(
        key="t5",
        title="Parameter server: push and pull through shared memory",
        module="benchmarks.ps_shared_memory",
    ),
    Benchmark(
        key="t4c",
        title="Parameter server: curves over size, tensors, clients and servers",
        module="benchmarks.ps_curves",
    ),
    Benchmark(
        key="t6",
        title="Sharded steps against FSDP2, ZeroRedundancyOptimizer and DeepSpeed",
        module="benchmarks.sharded_step",
        on_devices=2,
    ),
    Benchmark(
        key="t7",
        title="Steps of ddp, tensor, pipeline and hybrid against torch's own",
        module="benchmarks.parallel_step",
        on_devices=2,
    ),
    Benchmark(
        key="t8",
        title="Memory and bytes on the wire of each strategy",
        module="benchmarks.memory_and_wire",
    ),
    Benchmark(
        key="t9",
        title="Compressed gradients over a slow link",
        module="benchmarks.compression_link",
    ),
    Benchmark(
        key="t10",
        title="One slow worker: time to the same loss",
        module="benchmarks.straggler_loss",
    ),
    Benchmark(
        key="t11",
        title="A parameter server's primary killed: pause, and pushes lost",
        module="benchmarks.server_failover",
    ),
    Benchmark(
        key="t12",
        title="Thousands of members: joins, and until all know of a death",
        module="benchmarks.announcing",
    ),
    Benchmark(
        key="t13",
        title="Faulty runs against fault-free runs, simulated",
        module="benchmarks.faulty_runs",
    ),
    Benchmark(
        key="t14", title="From the command to the first step", module="benchmarks.launch_time"
    ),
    Benchmark(
        key="t16",
        title="Outer steps: bytes moved, and the loss after the same samples",
        module="benchmarks.outer_steps",
    ),
    Benchmark(
        key="t17",
        title="Time to the same steps while workers are killed and return",
        module="benchmarks.failures.table",
    ),
    Benchmark(
        key="t18",
        title="Plans against runs: memory and bytes on the wire",
        module="benchmarks.planned",
    ),
    Benchmark(
        key="t19",
        title="A checkpoint while training continues: pause, write, load, upload",
        module="benchmarks.checkpoint_pause",
    ),
    Benchmark(
        key="t20",
        title="SIGKILL of 1 worker to a step at full strength",
        module="benchmarks.replacement",
    ),
    Benchmark(
        key="late-writes",
        title="Collectives in flight when a group is abandoned",
        module="benchmarks.late_writes",
    ),
)
