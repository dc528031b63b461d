"""The processes of a campaign's job: how each is started, how the others reach it, and the files
that it leaves.

The job has a coordinator, Redis, two parameter servers with data directories (four if each has a
backup), and three workers. A relay (tests/relay.py) is in front of the coordinator and of each
server, also for connections between servers. A dead worker is replaced by a new member. All other
processes are restarted on their data; a server keeps its id, whatever its role is by then.

faults.py decides when they fail.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self

from shoal.launcher.processes.ports import ReservedPort
from shoal_common.clients import CoordinatorClient, ParameterServerClient
from shoal_common.errors import ShoalError
from shoal_common.redis.embedded import EmbeddedRedis
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import ServerImage, ServerState
from shoal_ps_server.storage.snapshot import write_snapshot

from tests.history import recording
from tests.history.modes import Mode
from tests.history.targets import (
    BACKUP_FAILPOINTS,
    COORDINATOR_FAILPOINTS,
    MOVE_FAILPOINTS,
    SERVER_FAILPOINTS,
    WORKER_FAILPOINTS,
    Target,
)
from tests.integration.coordinator.harness import Coordinator
from tests.relay import Relay
from tests.zygote.children import Child, Zygote

WORKERS, SERVERS = 3, 2
MOST_SERVERS = 3
"""Largest number of servers in mode `moves`."""
LEASE_MS = 3000
"""A worker that is stalled for longer is evicted."""
_SNAPSHOT_INTERVAL_S = 2
"""Interval of snapshots. Backups cannot be asked for one, so all servers that may become a backup
use it."""


class Cluster:
    """The processes of the job. They run only within the block; files on disk remain."""

    def __init__(self, zygote: Zygote, directory: Path, mode: Mode, *, seed: int) -> None:
        """`seed`: seed of the workers' samples and steps."""
        self._zygote = zygote
        self._directory = directory
        self._mode, self._seed = mode, seed
        self.history = directory / "history"
        """Directory of the records that processes write."""
        self.records = directory / "records"
        """The samples that each worker received."""
        self._end = directory / "end"
        self._checkpoints = directory / "checkpoints"
        self._job_id = f"job-{uuid.uuid4().hex[:8]}"
        self._places = itertools.count()
        self._members = itertools.count()
        self._stack = ExitStack()
        self._ports: list[ReservedPort] = []
        self._links: list[Relay] = []
        self._read: dict[Path, int] = {}
        self._acknowledged = 0
        self.servers: list[Target] = []
        self.workers: list[Target] = []
        self.coordinator: Target

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def targets(self) -> Sequence[Target]:
        """All processes except Redis."""
        return [self.coordinator, *self.servers, *self.workers]

    @property
    def relays(self) -> Sequence[Relay]:
        """The relay in front of the coordinator, and those in front of servers."""
        return [self._relay, *self._links]

    # ------------------------------------------------------------------------------------- starting

    def _start(self) -> None:
        for path in (self._directory, self.history):
            path.mkdir(parents=True, exist_ok=True)
        before = self._train_before() if self._mode.has_table else None
        self._redis_port = self._stack.enter_context(ReservedPort())
        self._redis = EmbeddedRedis(self._directory / "redis", port=self._redis_port.port)
        self._stack.callback(self._close_redis)
        self._boss = Coordinator(self._zygote, self._directory, "--redis", self._redis.url).start()
        self._stack.callback(self._boss.close)
        self._relay = self._stack.enter_context(Relay(self._boss.address))
        with self._boss.client() as client:
            spec = pb.JobSpec(
                job_id=self._job_id,
                min_workers=1,
                max_workers=8,
                parameter_servers=SERVERS,
                lease_ms=LEASE_MS,
            )
            spec.parameter_server_backups = self._mode.backups
            spec.max_parameter_servers = MOST_SERVERS if self._mode.moves else SERVERS
            client.create_job(spec)
        first = self._boss.process
        self.coordinator = Target(
            name="coordinator",
            start=self._start_coordinator,
            failpoints=COORDINATOR_FAILPOINTS,
            child=first,
        )
        for _ in range(SERVERS * (1 + self._mode.backups)):
            self.add_server()
        self.workers = [
            Target(name=f"worker-{i}", start=self._start_worker, failpoints=WORKER_FAILPOINTS)
            for i in range(WORKERS)
        ]
        self._stack.callback(self._kill_all)
        for target in self.servers:
            target.child = target.start("")
        if before is not None:
            assert before.wait() == 0, before.said()
        for target in self.workers:
            target.child = target.start("")

    def _train_before(self) -> Child:
        """Starts a worker that trains alone for one epoch, on its own servers, and returns its
        process. The worker writes the checkpoint whose rows the job starts from."""
        config = {
            "end": str(self._directory),
            "seed": self._seed,
            "longest_step_s": 0.0,
            "options": {"lease_ahead": 2.0},
        }
        config["checkpoints"] = str(self._checkpoints)
        child = self._zygote.start(
            "history-train", [json.dumps(config)], output=self._directory / "before.log"
        )
        self._stack.callback(child.kill)
        return child

    def add_server(self) -> Target:
        """Adds a server, without starting it."""
        index = next(self._places)
        self._ports.append(self._stack.enter_context(ReservedPort()))
        self._links.append(self._stack.enter_context(Relay(f"127.0.0.1:{self._ports[index].port}")))
        failpoints = (
            SERVER_FAILPOINTS
            | (BACKUP_FAILPOINTS if self._mode.backups else {})
            | (MOVE_FAILPOINTS if self._mode.moves else {})
        )
        target = Target(
            name=f"server-{index}", start=partial(self._start_server, index), failpoints=failpoints
        )
        self.servers.append(target)
        return target

    def _close_redis(self) -> None:
        self._redis.close()  # the last one of them

    def _kill_all(self) -> None:
        for target in reversed(self.targets):
            if target.child is not None:
                target.child.kill()
                target.child.wait()

    def restart_redis(self) -> None:
        """Kills Redis, and starts a new one on the same port and data."""
        os.kill(self._redis.pid, signal.SIGKILL)
        self._redis.close()
        self._redis = EmbeddedRedis(self._directory / "redis", port=self._redis_port.port)

    def _start_coordinator(self, armed: str) -> Child:
        return self._boss.start(wait=False, SHOAL_FAILPOINTS=armed).process

    def _start_server(self, index: int, armed: str) -> Child:
        name = f"server-{index}"
        arguments = [
            "--coordinator",
            self._relay.address,
            "--job",
            self._job_id,
            "--server-id",
            name,
        ]
        arguments += [
            "--listen",
            f"127.0.0.1:{self._ports[index].port}",
            "--data-dir",
            str(self._directory / name),
        ]
        arguments += ["--snapshot-interval", f"{_SNAPSHOT_INTERVAL_S * self._mode.backups}s"]
        environment = {
            recording.DIRECTORY: str(self.history),
            recording.REACHED_AT: self._links[index].address,
            "SHOAL_FAILPOINTS": armed,
        }
        return self._zygote.start(
            "recorded-server", arguments, output=self._directory / f"{name}.log", **environment
        )

    def _start_worker(self, armed: str) -> Child:
        number = next(self._members)
        options = {"lease_ahead": 2.0, **self._mode.options}
        config = {
            "end": str(self._end),
            "seed": self._seed * 1000 + number,
            "longest_step_s": 0.01,
            "options": options,
        }
        config["checkpoints"] = str(self._checkpoints) if self._mode.has_table else ""
        environment = {
            recording.DIRECTORY: str(self.history),
            "SHOAL_COORDINATOR": self._relay.address,
            "SHOAL_JOB_ID": self._job_id,
            "SHOAL_MEMBER_ID": f"member-{number}",
            "SHOAL_LOCAL_INDEX": str(number),
            "SHOAL_RECORD_DIR": str(self.records),
            "SHOAL_RENDEZVOUS_TIMEOUT_S": "120",
            "SHOAL_FAILPOINTS": armed,
        }
        output = self._directory / f"member-{number}.log"
        return self._zygote.start(
            "recorded-train", [json.dumps(config)], output=output, **environment
        )

    # --------------------------------------------------------------------------------------- asking

    def client(self) -> CoordinatorClient:
        """Returns a client of the coordinator that bypasses the relay."""
        return self._boss.client()

    def drain(self, server_id: str) -> bool:
        """Asks the coordinator to drain a server. Returns False if the coordinator is away."""
        with suppress(ShoalError), self.client() as client:
            client.drain_server(self._job_id, server_id, reason="it is its turn")
            return True
        return False

    def ask_for_a_snapshot(self, chance: random.Random) -> bool:
        """Asks a server for a snapshot. Returns False if the server is unavailable, or becomes
        unavailable during the request."""
        settings = ChannelSettings(
            address=f"127.0.0.1:{chance.choice(self._ports).port}", attempts=1
        )
        with suppress(ShoalError), ParameterServerClient(settings) as client:
            client.snapshot(self._job_id, deadline=timedelta(seconds=3))
            return True
        return False

    def end_epoch(self) -> None:
        """Makes the workers stop at the end of their current epoch."""
        self._end.touch()

    def acknowledged(self) -> int:
        """Returns how many pushes have been acknowledged to workers."""
        for path in self.history.glob("member-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                self._acknowledged += file.read().count(b'"kind":"pushed"')
                self._read[path] = file.tell()
        return self._acknowledged

    # ------------------------------------------------------------------------------ what they leave

    def owners(self) -> Mapping[str, frozenset[int]]:
        """Returns the partitions of each primary."""
        with self.client() as client:
            shard_map = client.get_shard_map(self._job_id).shard_map
        return {
            server.server_id: frozenset(
                each.partition_id
                for each in shard_map.partitions
                if each.primary == server.server_index
            )
            for server in shard_map.servers
        }

    def held_at_the_end(self, server_id: str, owned: frozenset[int]) -> Path:
        """Returns a snapshot of the partitions that a stopped server has on disk. A server with a
        synchronized backup does not write a snapshot of its own. A server that exits may still have
        partitions that another server has taken."""
        path = self._directory / f"{server_id}-at-the-end.safetensors"
        with DataDirectory(self._directory / server_id) as directory:
            recovered = directory.recover(job_id=self._job_id, server_id=server_id)
        shard = recovered.shard
        assert recovered.layout is not None, "there were pushes"
        state = ServerState(
            job_id=self._job_id,
            server_id=server_id,
            layout=recovered.layout,
            configuration=recovered.configuration,
            membership=recovered.members,
        )
        images = (
            shard.image(partition_id)
            for partition_id in shard.partition_ids()
            if partition_id in owned
        )
        write_snapshot(
            path,
            ServerImage(
                state=state, partitions=tuple(image for image in images if image is not None)
            ),
        )
        return path
