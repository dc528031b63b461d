"""A coordinator and workers for tests: real processes and a real Valkey, killed with real
signals."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator
from tests.zygote.children import Child, Zygote, eventually


class Cluster:
    """One coordinator, one job, and the workers that a test starts."""

    def __init__(
        self,
        zygote: Zygote,
        directory: Path,
        *,
        min_workers: int = 1,
        max_workers: int = 3,
        join_grace_ms: int = 120_000,
        lease_ms: int = 5000,
        stall_timeout_ms: int = 0,
        script: Path | None = None,
        **environment: str,
    ) -> None:
        self._zygote = zygote
        self.directory = directory
        self.records = directory / "records"
        self.output = directory / "output"
        self.output.mkdir()
        self._environment = environment
        self._max_workers = max_workers
        self._min_workers = min_workers
        self._join_grace_ms = join_grace_ms
        self._lease_ms = lease_ms
        self._stall_timeout_ms = stall_timeout_ms
        self._program = ("elastic", []) if script is None else ("script", [str(script)])
        self.workers: dict[int, Child] = {}
        self.members: dict[int, str] = {}
        self.coordinator = Coordinator(
            zygote, directory, "--redis", f"embedded://{directory / 'valkey'}"
        )
        self._start_coordinator()

    def _start_coordinator(self) -> None:
        self.address = self.coordinator.start().address
        self.client = CoordinatorClient(ChannelSettings(address=self.address))
        spec = pb.JobSpec(
            job_id="job",
            min_workers=self._min_workers,
            max_workers=self._max_workers,
            join_grace_ms=self._join_grace_ms,
            lease_ms=self._lease_ms,
            stall_timeout_ms=self._stall_timeout_ms,
        )
        self.client.create_job(spec)

    def start(self, index: int, **environment: str) -> None:
        """Starts worker `index`."""
        self.members[index] = uuid.uuid4().hex
        settings = {
            "SHOAL_COORDINATOR": self.address,
            "SHOAL_JOB_ID": "job",
            "SHOAL_MEMBER_ID": self.members[index],
            "SHOAL_LOCAL_INDEX": str(index),
            "SHOAL_RECORD_DIR": str(self.records),
            "SHOAL_RENDEZVOUS_TIMEOUT_S": "60",
            "OUTPUT": str(self.output),
        }
        variables = {**settings, **self._environment, **environment}
        self.workers[index] = self._zygote.start(
            *self._program, output=self.output / f"{index}.log", **variables
        )

    @contextmanager
    def held(self, *, before: int | None = None) -> Iterator[None]:
        """Slows the run's steps while the block runs, or holds the run at step `before` (counted
        from 0). So a condition that the block waits for occurs before the run ends, or before that
        step."""
        hold = self.output / "hold"
        hold.write_text("" if before is None else str(before))
        yield
        hold.unlink()

    def job(self) -> pb.GetJobResponse:
        return self.client.get_job("job")

    def steps(self) -> int:
        """Returns the highest step that a member with a rank has reported."""
        return max((m.progress.step for m in self.job().members if m.rank >= 0), default=0)

    def wait_steps(self, count: int) -> None:
        eventually(lambda: self.steps() >= count, f"{count} steps")

    def wait_ranked(self, index: int) -> None:
        """Waits until worker `index` has a rank and has committed a step with it."""
        member = self.members[index]
        eventually(
            lambda: any(m.member_id == member and m.progress.step > 0 for m in self.job().members),
            f"worker {index} in the run",
        )

    def said(self) -> str:
        """Returns the output of all workers."""
        return "".join(worker.said() for worker in self.workers.values())

    def signal(self, index: int, number: signal.Signals) -> None:
        self.workers[index].kill(number)

    def restart_coordinator(self) -> None:
        """Kills the coordinator with SIGKILL and starts a new one at the same address on the same
        data."""
        self.coordinator.kill()
        self.client.close()
        self._start_coordinator()

    def finish(
        self, *expected_to_end_well: int, may_end_well: bool = False
    ) -> list[dict[str, Any]]:
        """Waits for all workers; returns the results of those that are expected to exit with status
        0. `may_end_well`: the other workers may do so too (drained workers)."""
        for index, worker in self.workers.items():
            code = worker.wait()
            well = index in expected_to_end_well
            assert (code == 0) == well or (code == 0 and may_end_well), (
                f"worker {index} ended with {code}; it said: {worker.said()}"
            )
        outputs = [self.output / f"{self.members[i]}.json" for i in expected_to_end_well]
        return [
            json.loads(path.read_text()) for path in outputs if path.exists() or not may_end_well
        ]

    def close(self) -> None:
        self.client.close()
        for worker in self.workers.values():
            worker.kill()  # also a stopped process
            worker.wait()
        self.coordinator.kill()
        self.coordinator.close()


@contextmanager
def cluster(zygote: Zygote, directory: Path, **settings: Any) -> Iterator[Cluster]:
    running = Cluster(zygote, directory, **settings)
    try:
        yield running
    finally:
        running.close()
