"""A coordinator and worker processes for tests: real processes, a real Valkey, killed with real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.processes import tied_to_parent
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

SCRIPT = Path(__file__).parent / "train.py"
PATIENCE_S = 60.0


def eventually(condition: Callable[[], Any], what: str, *, within_s: float = PATIENCE_S) -> Any:
    """Polls until `condition` gives something true, and returns it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"waited {within_s} s for {what}")


class Cluster:
    """One coordinator, one job, and the workers that a test starts."""

    def __init__(
        self, directory: Path, *, min_workers: int = 1, max_workers: int = 3, join_grace_ms: int = 30_000, **environment: str
    ) -> None:
        self.directory = directory
        self.records = directory / "records"
        self.output = directory / "output"
        self.output.mkdir()
        self._environment = environment
        self._max_workers = max_workers
        self._min_workers = min_workers
        self._join_grace_ms = join_grace_ms
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._members: dict[int, str] = {}
        self._port_file = directory / "coordinator.json"
        self.start_coordinator()

    def start_coordinator(self, listen: str = "127.0.0.1:0", redis: str | None = None) -> None:
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "shoal_coordinator", "--listen", listen, "--http", "127.0.0.1:0"]
        command += ["--redis", redis or f"embedded://{self.directory / 'valkey'}", "--port-file", str(self._port_file)]
        self.coordinator = subprocess.Popen(tied_to_parent(command))
        self.addresses = json.loads(eventually(lambda: self._port_file.exists() and self._port_file.read_text(), "the coordinator"))
        self.client = CoordinatorClient(ChannelSettings(address=self.addresses["grpc"]))
        spec = pb.JobSpec(
            job_id="job", min_workers=self._min_workers, max_workers=self._max_workers, join_grace_ms=self._join_grace_ms, lease_ms=3000
        )
        self.client.create_job(spec)

    def start(self, index: int, **environment: str) -> None:
        """Starts worker `index`."""
        self._members[index] = uuid.uuid4().hex
        settings = {
            "SHOAL_COORDINATOR": self.addresses["grpc"],
            "SHOAL_JOB_ID": "job",
            "SHOAL_MEMBER_ID": self._members[index],
            "SHOAL_LOCAL_INDEX": str(index),
            "SHOAL_RECORD_DIR": str(self.records),
            "SHOAL_RENDEZVOUS_TIMEOUT_S": "60",
            "OUTPUT": str(self.output),
            "OMP_NUM_THREADS": "1",
        }
        command = tied_to_parent([sys.executable, str(SCRIPT)])
        self.workers[index] = subprocess.Popen(command, env={**os.environ, **settings, **self._environment, **environment})

    @contextmanager
    def held(self) -> Iterator[None]:
        """While open, steps are slow: what is waited for in the block happens before the run's end."""
        hold = self.output / "hold"
        hold.touch()
        yield
        hold.unlink()

    def job(self) -> pb.GetJobResponse:
        return self.client.get_job("job")

    def steps(self) -> int:
        """The most steps that a ranked member reported."""
        return max((m.progress.step for m in self.job().members if m.rank >= 0), default=0)

    def wait_steps(self, count: int) -> None:
        eventually(lambda: self.steps() >= count, f"{count} steps")

    def wait_ranked(self, index: int) -> None:
        """Waits until worker `index` has a rank and has committed a step with it."""
        member = self._members[index]
        eventually(lambda: any(m.member_id == member and m.progress.step > 0 for m in self.job().members), f"worker {index} in the run")

    def signal(self, index: int, number: signal.Signals) -> None:
        os.kill(self.workers[index].pid, number)

    def finish(self, *expected_to_end_well: int) -> list[dict[str, Any]]:
        """Waits for all workers, and returns what those that are expected to end well say."""
        for index, worker in self.workers.items():
            code = worker.wait(PATIENCE_S)
            assert (code == 0) == (index in expected_to_end_well), f"worker {index} ended with {code}"
        return [json.loads((self.output / f"{self._members[i]}.json").read_text()) for i in expected_to_end_well]

    def close(self) -> None:
        self.client.close()
        for process in (*self.workers.values(), self.coordinator):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@contextmanager
def cluster(directory: Path, **settings: Any) -> Iterator[Cluster]:
    running = Cluster(directory, **settings)
    try:
        yield running
    finally:
        running.close()
