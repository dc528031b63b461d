"""Starts the workers of the training loop under each system: Shoal, torchrun in two ways, torchft
with its lighthouse, torch's `_reconfigure`, and DeepSpeed.

Other systems are started as their own documentation describes. Settings that differ from their
defaults are defined here and shown in the table. A system belongs to the `Stage` on which it was
started, which stops its processes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil

from benchmarks import peers
from benchmarks.processes import Stage
from benchmarks.workers.workload import Workload

_MANY_RESTARTS: Final = ("--max-restarts", "1000000")
STORE_PER_START: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment for torchrun. By default, agent and workers share one store, and a restarted Gloo
group reads the addresses of the previous group there and cannot connect (torch 2.13)."""


class System(Protocol):
    """The running workers of one system."""

    def may_kill(self, pid: int) -> bool:
        """Returns whether the benchmark may kill the worker `pid`."""
        ...

    def kill(self, pid: int) -> None:
        """Sends SIGKILL to the worker `pid`."""
        ...

    def replace(self) -> None:
        """Starts a new worker after a kill, unless the system's own launcher does so."""
        ...


Start = Callable[[Stage, Workload], System]


class WithLauncher:
    """Workers under a single launcher, which replaces dead workers itself."""

    def __init__(
        self, stage: Stage, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = stage.start(Path(command[0]).name, command, environment)

    def may_kill(self, pid: int) -> bool:
        return True

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def replace(self) -> None:
        """Does nothing, because the launcher replaces the worker."""


def start_shoal(
    stage: Stage,
    workload: Workload,
    *,
    restarts: bool = False,
    warm: bool = True,
    more: Sequence[str] = (),
) -> WithLauncher:
    """Starts a launcher of Shoal with a coordinator, an embedded Valkey server, and workers that
    serve metrics.

    `restarts`: True to replace workers any number of times. `warm`: True to fork workers from a
    warm process. `more`: additional flags of the worker.
    """
    flags = ("--standalone", "--nproc-per-node", str(workload.ranks))
    flags += (*(_MANY_RESTARTS if restarts else ()), *(() if warm else ("--no-warm",)))
    command = [
        beside_python("shoal"),
        "run",
        *flags,
        "-m",
        "benchmarks.workers.train_shoal",
        *more,
        *workload.arguments(),
    ]
    return WithLauncher(stage, command)


def start_strategy(
    stage: Stage, workload: Workload, *, strategy: str, more: Sequence[str] = ()
) -> WithLauncher:
    """Starts the training of the decoder under a strategy of Shoal, with all services. `more`:
    additional flags of the worker."""
    flags = ("--standalone", "--nproc-per-node", str(workload.ranks))
    worker = ("-m", "benchmarks.workers.train_strategy", "--strategy", strategy, *more)
    return WithLauncher(
        stage, [beside_python("shoal"), "run", *flags, *worker, *workload.arguments()]
    )


def start_account(stage: Stage, *, ranks: int, servers: int, words: Sequence[str]) -> WithLauncher:
    """Starts ranks that measure their memory and the bytes that they send, and then exit.
    `servers`: number of parameter servers. `words`: flags of the worker."""
    flags = ("--standalone", "--nproc-per-node", str(ranks), "--servers", str(servers))
    return WithLauncher(
        stage, [beside_python("shoal"), "run", *flags, "-m", "benchmarks.workers.account", *words]
    )


def start_with_servers(
    stage: Stage, workload: Workload, *, job_id: str, backups: int
) -> WithLauncher:
    """Starts workers under async_sgd, in a job with the id `job_id`. The job has one parameter
    server and `backups` backups (0 or 1). The launcher restarts a server that dies."""
    flags = (
        "--standalone",
        "--rdzv-id",
        job_id,
        "--nproc-per-node",
        str(workload.ranks),
        "--servers",
        "1",
    )
    backed = ("--server-backups", str(backups)) if backups else ()
    return WithLauncher(
        stage,
        [
            beside_python("shoal"),
            "run",
            *flags,
            *backed,
            "-m",
            "benchmarks.workers.train_async",
            *workload.arguments(),
        ],
    )


def start_straggler(
    stage: Stage, *, ranks: int, servers: int, words: Sequence[str]
) -> WithLauncher:
    """Starts ranks that train until the stage ends; one of them may be slow. `servers`: number of
    parameter servers. `words`: flags of the worker."""
    flags = ("--standalone", "--nproc-per-node", str(ranks), "--servers", str(servers))
    return WithLauncher(
        stage,
        [
            beside_python("shoal"),
            "run",
            *flags,
            "-m",
            "benchmarks.workers.train_straggler",
            *words,
        ],
    )


def start_outer(stage: Stage, *, ranks: int, words: Sequence[str]) -> WithLauncher:
    """Starts ranks and one parameter server, connected by TCP. The ranks train with or without
    outer steps, and then exit. `words`: flags of the worker."""
    flags = ("--standalone", "--nproc-per-node", str(ranks), "--servers", "1")
    command = [
        beside_python("shoal"),
        "run",
        *flags,
        "-m",
        "benchmarks.workers.train_outer",
        *words,
    ]
    return WithLauncher(stage, command, {"SHOAL_SERVER_TRANSPORT": "tcp"})


def start_module(
    stage: Stage, workload: Workload, *, module: str, more: Sequence[str] = ()
) -> WithLauncher:
    """Starts one of the benchmarks' worker modules under torchrun."""
    flags = ("--standalone", "--nproc-per-node", str(workload.ranks))
    return WithLauncher(
        stage, [beside_python("torchrun"), *flags, "-m", module, *more, *workload.arguments()]
    )


def start_bare(stage: Stage, words: Sequence[str]) -> WithLauncher:
    """Starts torchrun with the arguments `words`; its workers exit on their own."""
    return WithLauncher(stage, [beside_python("torchrun"), *words])


def start_deepspeed(stage: Stage, workload: Workload, *, zero_stage: int) -> WithLauncher:
    """Starts DeepSpeed in the peers' environment. Raises MeasurementError if it is not
    installed."""
    peers.deepspeed_version()
    flags = ("--standalone", "--nproc-per-node", str(workload.ranks))
    worker = ("-m", "benchmarks.workers.train_deepspeed", "--stage", str(zero_stage))
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(peers.EXTENSIONS)}
    return WithLauncher(
        stage, [str(peers.TORCHRUN), *flags, *worker, *workload.arguments()], environment
    )


def start_torchrun(stage: Stage, workload: Workload, *, restarts: bool = False) -> WithLauncher:
    """Starts a single torchrun agent. `restarts`: True to restart all workers after each death, any
    number of times."""
    flags = (
        "--standalone",
        "--nproc-per-node",
        str(workload.ranks),
        *(_MANY_RESTARTS if restarts else ()),
    )
    command = [
        beside_python("torchrun"),
        *flags,
        "-m",
        "benchmarks.workers.train_ddp",
        *workload.arguments(),
    ]
    return WithLauncher(stage, command, STORE_PER_START if restarts else None)


class ElasticTorchrun:
    """Workers under `torchrun --nnodes MIN:MAX`, with one agent per worker, as on separate
    machines. Like the loss of a machine, a kill hits a worker and its agent. The other agents wait
    for them, and then continue without them. The agent that hosts the rendezvous store is never
    killed, because its death would end the run."""

    def __init__(self, stage: Stage, workload: Workload, *, last_call_s: int | None) -> None:
        """`last_call_s`: how long a rendezvous waits for more nodes than the minimum; None:
        torchrun's default, 30 s."""
        self._stage = stage
        self._workload = workload
        self._port = free_port()
        self._last_call = (
            () if last_call_s is None else ("--rdzv-conf", f"last_call_timeout={last_call_s}")
        )
        self._host = self._start_agent()
        stage.wait_until("the rendezvous' store", lambda: listens(self._port), timeout_s=30)
        for _ in range(workload.ranks - 1):
            self._start_agent()

    def may_kill(self, pid: int) -> bool:
        return int(psutil.Process(pid).ppid()) != self._host

    def kill(self, pid: int) -> None:
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def replace(self) -> None:
        self._start_agent()

    def _start_agent(self) -> int:
        command = [
            *(
                beside_python("torchrun"),
                "--nnodes",
                f"2:{self._workload.ranks}",
                "--nproc-per-node",
                "1",
                *_MANY_RESTARTS,
            ),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{self._port}",
                "--rdzv-id",
                "benchmark",
                *self._last_call,
            ),
            *("-m", "benchmarks.workers.train_ddp", *self._workload.arguments()),
        ]
        return self._stage.start("torchrun", command, STORE_PER_START, expendable=True).pid


@dataclass(frozen=True, kw_only=True)
class TorchftSettings:
    """Timeouts that determine how fast torchft notices a death, with torchft's own defaults."""

    heartbeat_timeout_ms: int = 5000
    """Time without heartbeats after which the lighthouse considers a replica dead."""
    heartbeat_ms: int = 100
    """Interval between a replica's heartbeats."""
    join_timeout_ms: int = 60_000
    """Maximum time that the lighthouse, when it forms a quorum, waits for live replicas that have
    not requested one yet."""
    quorum_tick_ms: int = 100
    """Interval at which the lighthouse checks whether it can form a quorum."""
    timeout_s: float = 60
    """Timeout of collectives, RPCs and connections."""


def lighthouse_of(settings: TorchftSettings, *, port: int, min_replicas: int) -> list[str]:
    """Returns the command that starts torchft's lighthouse. `min_replicas`: minimum number of
    replicas for a step."""
    timeouts = ("heartbeat_timeout_ms", "join_timeout_ms", "quorum_tick_ms")
    return [
        *(str(peers.LIGHTHOUSE), "--bind", f"127.0.0.1:{port}"),
        *("--min_replicas", str(min_replicas)),
        *(word for t in timeouts for word in (f"--{t}", str(getattr(settings, t)))),
    ]


class Torchft:
    """torchft's lighthouse, and one process per replica. There is no launcher, so that the
    benchmark decides when a replacement starts."""

    def __init__(
        self, stage: Stage, workload: Workload, *, settings: TorchftSettings, min_replicas: int
    ) -> None:
        """`min_replicas`: minimum number of replicas for a step. Raises MeasurementError if torchft
        is not installed."""
        peers.torchft_version()
        self._stage = stage
        self._workload = workload
        self._settings = settings
        self._port = free_port()
        self._replicas: dict[int, int] = {}
        self._missing: list[int] = []
        stage.start(
            "lighthouse", lighthouse_of(settings, port=self._port, min_replicas=min_replicas)
        )
        stage.wait_until("torchft's lighthouse", lambda: listens(self._port), timeout_s=10)
        for replica in range(workload.ranks):
            self._start(replica)

    def may_kill(self, pid: int) -> bool:
        return True

    def kill(self, pid: int) -> None:
        self._missing.append(self._replicas.pop(pid))
        os.kill(pid, signal.SIGKILL)

    def replace(self) -> None:
        while self._missing:
            self._start(self._missing.pop())

    def _start(self, replica: int) -> None:
        command = [
            *(
                str(peers.PYTHON),
                "-u",
                "-m",
                "benchmarks.workers.train_torchft",
                *self._workload.arguments(),
            ),
            *("--replica", str(replica), "--lighthouse", f"http://127.0.0.1:{self._port}"),
            *(
                "--timeout-s",
                str(self._settings.timeout_s),
                "--heartbeat-ms",
                str(self._settings.heartbeat_ms),
            ),
        ]
        process = self._stage.start(f"torchft-{replica}", command, expendable=True)
        self._replicas[process.pid] = replica


class Reconfiguring:
    """Workers whose Gloo group changes its ranks by `_reconfigure`, and a process that watches them
    (`benchmarks.workers.membership`). There is no launcher, so that the benchmark decides when a
    replacement starts."""

    def __init__(self, stage: Stage, workload: Workload, *, timeout_s: float) -> None:
        """`timeout_s`: limit of collectives and of forming a group. Raises MeasurementError if no
        installed torch has `_reconfigure`."""
        self._python, _ = peers.reconfiguring_python()
        self._stage = stage
        self._port = free_port()
        self._words = (
            *workload.arguments(),
            *("--watcher", str(self._port), "--timeout-s", str(timeout_s)),
        )
        self._start("membership", "--port", str(self._port), "--ranks", str(workload.ranks))
        stage.wait_until("the watcher", lambda: listens(self._port), timeout_s=30)
        for _ in range(workload.ranks):
            self.replace()

    def may_kill(self, pid: int) -> bool:
        return True

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def replace(self) -> None:
        self._start("train_reconfigure", *self._words)

    def _start(self, module: str, *words: str) -> None:
        command = [str(self._python), "-u", "-m", f"benchmarks.workers.{module}", *words]
        self._stage.start(module, command, expendable=True)


def free_port() -> int:
    """Returns a port on which no process is listening at the moment. For servers that cannot choose
    a free port themselves and report it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Returns whether a server on this machine accepts connections at `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def beside_python(program: str) -> str:
    """Returns the path of a program in this Python environment, whose directory need not be on
    PATH."""
    return str(Path(sys.executable).with_name(program))
