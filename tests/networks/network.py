"""A job on separate machines: the coordinator, Redis and each launcher have one machine each. Tests
cut links between them, and check the invariants that must hold at the end after any cut."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from shoal_common.redis.embedded import find_server_binary
from shoal_common.settings import Address, parse_address
from shoal_common.system.processes import tied_to_parent
from shoal_worker.data.record import audit

from benchmarks.machines import Machines

ROOT: Final = Path(__file__).parents[2]
COORDINATOR: Final = "coordinator"
REDIS: Final = "redis"
EXPLAINED_WITHIN_S: Final = 15.0
ACTED_ON_WITHIN_S: Final = 60.0
_SLACK_S: Final = 10.0
"""Additional time allowed on a busy machine."""
_PATIENCE_S: Final = 120.0
_REDIS_PORT: Final = 6400
_PORT: Final = 7000
_SHOWN: Final = 3000


class Process:
    """A program on one of the machines. Its output goes to a file, so that tests can read it while
    it grows."""

    def __init__(
        self, command: list[str], *, machine: str, output: Path, environment: dict[str, str]
    ) -> None:
        self.machine = machine
        self.output = output
        with output.open("ab") as log:
            self.process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
            )

    def said(self) -> str:
        return self.output.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = _PATIENCE_S) -> int:
        """Waits for the process to end and returns its exit status; negative if a signal
        ended it."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"{self.output.stem} did not end within {within_s:g} s; it said: {self.said()}"
            )


class Network:
    """The machines and the processes on them. The script is train.py, whose steps are slow until
    `release`."""

    def __init__(
        self, machines: Machines, hosts: list[str], directory: Path, **script: str
    ) -> None:
        """`script`: environment variables of train.py that differ from the default."""
        self.machines = machines
        self.hosts = hosts
        self.directory = directory
        self._recorded_in = directory / "records"
        self.records = self._recorded_in / "run-1"
        """Records of the job's only run."""
        self.launchers: list[Process] = []
        self._services: dict[str, Process] = {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHOAL_", "PET_"))
        }
        self._environment = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **{
                "OUTPUT": str(directory / "results"),
                "EPOCHS": "10",
                "WIDTH": "32",
                "STRATEGY": "ddp",
                "BETWEEN": "",
            },
            **script,
        }
        (directory / "results").mkdir()
        self._hold = directory / "results" / "hold"
        self._hold.touch()

    # ------------------------------------------------------------------------------------- starting

    def start_services(self) -> None:
        data = self.directory / "redis"
        data.mkdir(exist_ok=True)
        valkey = [
            str(find_server_binary()),
            "--bind",
            self.machines.address(REDIS),
            "--port",
            str(_REDIS_PORT),
            "--save",
            "",
        ]
        durable = [
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--dir",
            str(data),
            "--protected-mode",
            "no",
        ]
        self._services[REDIS] = self._start(REDIS, "redis", [*valkey, *durable])
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Starts the coordinator, for the first time or again after its end."""
        ports = self.directory / "ports.json"
        ports.unlink(missing_ok=True)
        own = ["--listen", self.endpoint, "--insecure", "--port-file", str(ports)]
        state = ["--redis", f"redis://{Address(self.machines.address(REDIS), _REDIS_PORT)}"]
        coordinator = self._start(
            COORDINATOR, "coordinator", [sys.executable, "-m", "shoal_coordinator", *own, *state]
        )
        self._services[COORDINATOR] = coordinator
        self.eventually(
            lambda: ports.exists() or coordinator.process.poll() is not None, "the coordinator"
        )
        assert ports.exists(), coordinator.said()

    def launch(self, host: str, *flags: str, nnodes: str = "", script: str = "train.py") -> Process:
        """Starts `shoal run` on a machine."""
        nodes = ["--nnodes", nnodes or str(len(self.hosts)), "--rdzv-endpoint", self.endpoint]
        command = [
            sys.executable,
            "-m",
            "shoal",
            "run",
            *nodes,
            "--record-dir",
            str(self._recorded_in),
            *flags,
        ]
        launcher = self._start(
            host, f"{host}-launcher-{len(self.launchers)}", [*command, f"tests/networks/{script}"]
        )
        self.launchers.append(launcher)
        return launcher

    def start_parameter_server(self, host: str, *flags: str) -> None:
        """Starts a parameter server that listens on all addresses of the machine."""
        listen = "[::]:0" if ":" in self.machines.address(host) else "0.0.0.0:0"
        command = [
            sys.executable,
            "-m",
            "shoal_ps_server",
            "--coordinator",
            self.endpoint,
            "--job",
            "default",
            "--listen",
            listen,
        ]
        self._services["server"] = self._start(host, "server", [*command, "--insecure", *flags])

    def targets(self) -> set[str]:
        """Returns the metrics hosts that the coordinator's /sd announces to Prometheus."""
        http = json.loads((self.directory / "ports.json").read_text())["http"]
        read = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], "
            "timeout=30).read().decode())"
        )
        command = self.machines.on(COORDINATOR, [sys.executable, "-c", read, f"http://{http}/sd"])
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return {
            parse_address(target).host
            for group in json.loads(answer.stdout)
            for target in group["targets"]
        }

    def launch_all(self, *flags: str, nnodes: str = "") -> list[Process]:
        """Starts a launcher on every host and waits until all of them train together."""
        launchers = [self.launch(host, *flags, nnodes=nnodes) for host in self.hosts]
        self.eventually(
            lambda: self.workers() or any(each.process.poll() is not None for each in launchers),
            "the first step",
        )
        self.wait_all_train()
        return launchers

    def run_alone(self) -> Process:
        """Starts the script as a single process, without a network or faults. The results of the
        other ranks are compared with its result. `finish` starts it unless a test has already done
        so, for example to use the time while a fault lasts."""
        alone = self.directory / "alone"
        alone.mkdir()
        environment = {**self._environment, "OUTPUT": str(alone)}
        process = Process(
            [sys.executable, "tests/networks/train.py"],
            machine="",
            output=alone / "log",
            environment=environment,
        )
        self._services["alone"] = process
        return process

    def status(self) -> dict[str, Any]:
        """Returns the output of `shoal status` on the coordinator's machine."""
        ask = [
            sys.executable,
            "-m",
            "shoal",
            "status",
            "--coordinator",
            self.endpoint,
            "--job",
            "default",
            "--json",
        ]
        command = self.machines.on(COORDINATOR, ask)
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=self._environment,
            cwd=ROOT,
        )
        return dict(json.loads(answer.stdout))

    @property
    def endpoint(self) -> str:
        return str(Address(self.machines.address(COORDINATOR), _PORT))

    @property
    def coordinator(self) -> Process:
        return self._services[COORDINATOR]

    def _start(self, machine: str, name: str, command: list[str]) -> Process:
        on_machine = self.machines.on(machine, command)
        return Process(
            on_machine,
            machine=machine,
            output=self.directory / f"{name}.log",
            environment=self._environment,
        )

    # -------------------------------------------------------------------------------------- cutting

    def cut(self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        """Drops all traffic between `some` and `others`; `one_way`: only from `some` to
        `others`."""
        for sender, receiver in self._ways(some, others, one_way):
            self.machines.lose(sender, receiver)

    def heal(self, some: Iterable[str], others: Iterable[str]) -> None:
        for sender, receiver in self._ways(some, others, False):
            self.machines.deliver(sender, receiver)

    @contextmanager
    def parted(
        self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False
    ) -> Iterator[None]:
        """Cuts the links within the block."""
        self.cut(some, others, one_way=one_way)
        yield
        self.heal(some, others)

    def others(self, *machines: str) -> list[str]:
        """Returns all machines except these."""
        return [name for name in (COORDINATOR, REDIS, *self.hosts) if name not in machines]

    @staticmethod
    def _ways(
        some: Iterable[str], others: Iterable[str], one_way: bool
    ) -> Iterator[tuple[str, str]]:
        receivers = list(others)
        for sender in some:
            for receiver in receivers:
                yield sender, receiver
                if not one_way:
                    yield receiver, sender

    # --------------------------------------------------------------------------------------- seeing

    def eventually(
        self, condition: Callable[[], Any], what: str, *, within_s: float = _PATIENCE_S
    ) -> Any:
        """Waits for the condition's first true value and returns it."""
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited {within_s:g} s for {what}\n{self.received()}")
            time.sleep(0.05)
        return value

    def lasts(self, seconds: float) -> None:
        """Lets a fault last for some time. It is the length of the fault, not a wait for its
        consequences."""
        time.sleep(seconds)

    def said(self) -> str:
        """Returns the full output of launchers, workers and the coordinator."""
        return "\n".join(
            f"--- {log.stem}\n{log.read_text()}" for log in sorted(self.directory.glob("*.log"))
        )

    def received(self) -> str:
        """Returns the last output of each process, for failure messages."""
        return "\n".join(
            f"--- {log.stem}\n{log.read_text()[-_SHOWN:]}"
            for log in sorted(self.directory.glob("*.log"))
        )

    def committed(self) -> dict[tuple[int, int], set[int]]:
        """Returns the generations that committed each step, by epoch and position in the epoch, as
        recorded by the workers."""
        steps: dict[tuple[int, int], set[int]] = defaultdict(set)
        for lines in self._recorded().values():
            for line in lines:
                if line["kind"] == "committed":
                    steps[line["epoch"], line["begin"]].add(line["generation"])
        return steps

    def workers(self) -> set[str]:
        """Returns the member ids that have ever committed a step: one for each worker process that
        trained."""
        return {
            member
            for member, lines in self._recorded().items()
            if any(line["kind"] == "committed" for line in lines)
        }

    def _recorded(self) -> dict[str, list[dict[str, Any]]]:
        found = {}
        for file in self.records.glob("*.jsonl"):
            whole, _, _torn = file.read_bytes().rpartition(b"\n")
            found[file.stem] = [json.loads(line) for line in whole.split(b"\n")] if whole else []
        return found

    def wait_steps(self, more: int, *, within_s: float = _PATIENCE_S) -> None:
        """Waits until `more` further steps are committed."""
        target = len(self.committed()) + more
        self.eventually(
            lambda: len(self.committed()) >= target, f"{more} further steps", within_s=within_s
        )

    def wait_all_train(self) -> None:
        """Waits until workers on all hosts, including replacements, have committed a step together
        that was not committed before."""
        before = self.committed()
        assert any(launcher.process.poll() is None for launcher in self.launchers), self.received()

        def together() -> bool:
            members = defaultdict(set)
            for member, lines in self._recorded().items():
                for line in lines:
                    if line["kind"] == "committed" and (line["epoch"], line["begin"]) not in before:
                        members[line["generation"]].add(member)
            return any(len(those) == len(self.hosts) for those in members.values())

        self.eventually(together, "a step that all hosts have part in")

    def kill_worker(self, host: str) -> None:
        """Kills the worker on a host with SIGKILL, but not its launcher."""
        for pid in self.machines.pids(host):
            if b"SHOAL_MEMBER_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)

    def wait_explained(self, pattern: str) -> str:
        """Waits for a new output line that explains the fault, from a launcher, a worker or the
        coordinator, and returns it."""
        before = self.said()

        def line() -> str | None:
            return next(
                (
                    match[0]
                    for match in re.finditer(rf"^.*{pattern}.*$", self.said(), re.MULTILINE)
                    if match[0] not in before
                ),
                None,
            )

        return str(
            self.eventually(
                line, f"a line with {pattern!r}", within_s=EXPLAINED_WITHIN_S + _SLACK_S
            )
        )

    @contextmanager
    def stopped(self, *processes: int) -> Iterator[None]:
        """Stops the processes with SIGSTOP within the block, as on a suspended machine."""
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        yield
        for pid in processes:
            os.kill(pid, signal.SIGCONT)

    def wait_acted_on(self) -> None:
        """Waits until steps continue, within the allowed time."""
        self.wait_steps(2, within_s=ACTED_ON_WITHIN_S + _SLACK_S)

    # --------------------------------------------------------------------------------------- ending

    def release(self) -> None:
        """Lets the steps run at full speed."""
        self._hold.unlink(missing_ok=True)

    def finish(
        self, *, statuses: dict[Process, int] | None = None, redone: int = 0, to_the_end: int = 0
    ) -> None:
        """Lets the run come to its end, and checks what must hold whatever has happened.

        Args:
            statuses: of launchers that do not end with 0.
            to_the_end: how many workers train to the end; 0: one on each host.
            redone: at most so many steps may have been committed in two generations: by one that
                was evicted as it committed, and by those that went on without it.
        """
        alone = self._services.get("alone") or self.run_alone()
        self.release()
        ended = {launcher.output.stem: launcher.wait() for launcher in self.launchers}
        expected = {
            launcher.output.stem: (statuses or {}).get(launcher, 0) for launcher in self.launchers
        }
        assert ended == expected, self.received()
        assert alone.wait() == 0, alone.said()
        want = json.loads((self.directory / "alone" / "alone.json").read_text())
        results = self.results()
        assert len(results) == (to_the_end or len(self.hosts)), f"{results}\n{self.received()}"
        for result in results:
            assert (result["steps"], result["digest"]) == (want["steps"], want["digest"]), (
                f"{result}, without faults {want}\n{self.received()}"
            )
        places = [(result["generation"], result["rank"]) for result in results]
        assert len(set(places)) == len(places), f"two had the same rank: {results}"
        verdict = audit(self.records)
        assert verdict.epochs, "no epoch was recorded"
        assert all(epoch.exactly_once for epoch in verdict.epochs), f"{verdict}\n{self.received()}"
        twice = {
            step: generations
            for step, generations in self.committed().items()
            if len(generations) > 1
        }
        assert len(twice) <= redone, (
            f"steps that two generations committed: {twice}\n{self.received()}"
        )
        assert {host: self.machines.pids(host) for host in self.hosts} == {
            host: [] for host in self.hosts
        }, "processes were left behind"

    def results(self) -> list[dict[str, Any]]:
        """Returns the final states of the workers that trained to the end."""
        return [
            json.loads(file.read_text()) for file in (self.directory / "results").glob("*.json")
        ]

    def check_all_stayed(self) -> None:
        """Checks that no worker was restarted, and that there was only one generation."""
        assert len(self.workers()) == len(self.hosts), f"workers were restarted\n{self.received()}"
        assert {
            generation for generations in self.committed().values() for generation in generations
        } == {1}, self.received()

    def close(self) -> None:
        """Ends all running processes."""
        for process in (*self.launchers, *self._services.values()):
            process.process.kill()
            process.process.wait()
