"""Real parameter servers on real sockets: on an event loop in a thread for most tests, as processes
where signals and files matter.

Their coordinator is either the real one (test_ps_real_coordinator.py) or a scripted one, which also
uses real gRPC. The scripted one produces events whose time the real one leaves to chance: the
eviction of a member, or the crash and return of a coordinator.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.bulk.transport import Transport
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import ShoalError
from shoal_common.formats.wire import checksum
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.status import to_status
from shoal_common.security.authentication import member_key_digest
from shoal_protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server import serving
from shoal_ps_server.server import ParameterServer
from shoal_ps_server.settings import PsServerSettings

from tests.zygote.children import Child, Zygote, eventually

JOB = "job"
DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Returns the condition's first true value; `what` names the condition in the failure
    message."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.005)
    return value


class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator whose messages the test decides. Begins with `start`, and after `stop` again on
    the same port."""

    def __init__(self) -> None:
        self.registrations: queue.Queue[coordinator_pb2.RegisterServer] = queue.Queue()
        self.heartbeats: queue.Queue[coordinator_pb2.ServerHeartbeat] = queue.Queue()
        self.reports: queue.Queue[coordinator_pb2.BackupReport] = queue.Queue()
        self.server_index = 0
        self.place = coordinator_pb2.ServerPlace(epoch=1)
        self.shard_map: coordinator_pb2.ShardMap | None = None
        self.tokens: queue.Queue[str] = queue.Queue()
        self.credentials: grpc.ServerCredentials | None = None
        """Credentials for TLS; take effect at the next start."""
        self.refusal: ShoalError | None = None
        """Error returned to registrations; None: they succeed."""
        self._reserved = ReservedPort()  # for the next start
        self._members = (0, ())
        self._keys: Mapping[str, str] = {}
        self._outbox: queue.Queue[coordinator_pb2.ServerDirective | None] = queue.Queue()
        self._server: grpc.Server | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Listening address, host:port; known before the start."""
        return f"127.0.0.1:{self._reserved.port}"

    def start(self) -> str:
        """Starts to serve and returns host:port."""
        self._server = grpc.server(ThreadPoolExecutor(8))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        address = self.address
        if self.credentials is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, self.credentials)
        self._server.start()
        return address

    def stop(self) -> None:
        """Breaks every session, like the death of a coordinator."""
        if self._server is not None:
            self._outbox.put(None)
            self._server.stop(None).wait(5)
            self._server = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()

    def members(
        self, generation: int, *member_ids: str, keys: Mapping[str, str] | None = None
    ) -> None:
        """Sends a generation to the server, now and at every reconnection. `keys`: keys of those
        members that have one."""
        with self._lock:
            self._members = (generation, member_ids)
            self._keys = keys or {}
            self._outbox.put(self._members_directive())

    def placed(self, **place: Any) -> None:
        """Sends the server its place, now and at every reconnection."""
        with self._lock:
            self.place = coordinator_pb2.ServerPlace(**place)
            self._outbox.put(coordinator_pb2.ServerDirective(place=self.place))

    def over(self) -> None:
        """Tells the server that the job is over."""
        self._outbox.put(
            coordinator_pb2.ServerDirective(stop=coordinator_pb2.Stop(reason="finished"))
        )

    def _members_directive(self) -> coordinator_pb2.ServerDirective:
        generation, member_ids = self._members
        digests = [
            bytes.fromhex(member_key_digest(self._keys.get(member, ""))) for member in member_ids
        ]
        members = coordinator_pb2.Members(
            generation=generation, member_ids=member_ids, key_digests=digests
        )
        return coordinator_pb2.ServerDirective(members=members)

    # ----------------------------------------------------------------------------------------- RPCs

    def ServerSession(
        self, requests: Iterator[coordinator_pb2.ServerMessage], context: Any
    ) -> Iterator[coordinator_pb2.ServerDirective]:
        register = next(requests).register
        self.tokens.put(dict(context.invocation_metadata()).get("authorization", ""))
        if self.refusal is not None:
            context.abort_with_status(to_status(self.refusal))
        with self._lock:
            outbox = self._outbox = queue.Queue()
            outbox.put(
                coordinator_pb2.ServerDirective(
                    welcome=coordinator_pb2.ServerWelcome(
                        server_index=self.server_index, heartbeat_interval_ms=50
                    )
                )
            )
            outbox.put(self._members_directive())
            outbox.put(coordinator_pb2.ServerDirective(place=self.place))
        self.registrations.put(register)
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        while context.is_active():  # a session whose server is gone has nobody to wait for
            try:
                directive = outbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if directive is None:
                break
            yield directive
        context.abort(grpc.StatusCode.UNAVAILABLE, "the scripted coordinator goes away")

    def _read(self, requests: Iterator[coordinator_pb2.ServerMessage]) -> None:
        try:
            for message in requests:
                if message.HasField("backup"):
                    self.reports.put(message.backup)
                else:
                    self.heartbeats.put(message.heartbeat)
        except grpc.RpcError:
            pass

    def GetShardMap(
        self, request: coordinator_pb2.GetShardMapRequest, context: Any
    ) -> coordinator_pb2.GetShardMapResponse:
        if self.shard_map is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no tensors were declared")
        return coordinator_pb2.GetShardMapResponse(shard_map=self.shard_map)


def shard_map(
    *tensors: tuple[str, int, str], epoch: int = 1, partition: int = 2 << 20, owner: int = 0
) -> coordinator_pb2.ShardMap:
    """Returns a map of flat tensors (name, length, dtype) in partitions of `partition` elements,
    all on server `owner`."""
    made = coordinator_pb2.ShardMap(epoch=epoch)
    for index, (name, length, dtype) in enumerate(tensors):
        made.tensors.add(name=name, shape=[length], dtype=dtype)
        for offset in range(0, length, partition):
            piece = coordinator_pb2.Piece(
                tensor_index=index, offset=offset, length=min(partition, length - offset)
            )
            made.partitions.add(partition_id=len(made.partitions), pieces=[piece], primary=owner)
    return made


class Member:
    """A worker from a parameter server's point of view: keeps its sequence numbers and the versions
    that it has pulled."""

    def __init__(
        self,
        client: ParameterServerClient,
        shard_map: coordinator_pb2.ShardMap,
        member_id: str,
        generation: int,
    ) -> None:
        self.client = client
        self.member_id = member_id
        self.generation = generation
        self.clock = 0
        self._map = shard_map
        self._sequences: dict[int, int] = {}
        self.versions: dict[int, int] = {}

    def header(self, partition_id: int, **changes: Any) -> pb.PushHeader:
        """Returns the header of the next push of a partition, without consuming its sequence
        number."""
        tensor, length = self._shape(partition_id)
        dtype, size = {
            "float32": (pb.DTYPE_FLOAT32, 4),
            "float64": (pb.DTYPE_FLOAT64, 8),
            "bfloat16": (pb.DTYPE_BFLOAT16, 2),
        }[tensor.dtype]
        fields: dict[str, Any] = {
            "job_id": JOB,
            "member_id": self.member_id,
            "generation": self.generation,
            "partition_id": partition_id,
            "shard_map_epoch": self._map.epoch,
            "sequence": self._sequences.get(partition_id, 0) + 1,
            "base_version": self.versions.get(partition_id, 1),
            "clock": self.clock + 1,
            "dtype": dtype,
            "codec": pb.CODEC_RAW,
            "length": length,
            "payload_bytes": length * size,
        }
        return pb.PushHeader(**{**fields, **changes})

    def initialize(self, values: np.ndarray[Any, Any]) -> list[pb.PartitionResult]:
        """Sends initial values, the same for every partition, repeated to its length."""
        return self.client.initialize(
            (
                self.header(each.partition_id, sequence=0, base_version=0),
                self._payload(each.partition_id, values),
            )
            for each in self._map.partitions
        )

    def push(
        self, gradient: np.ndarray[Any, Any] | float, partitions: Sequence[int] = (), **changes: Any
    ) -> list[pb.PartitionResult]:
        """Pushes one iteration to the given partitions (default: all) and advances the clock."""
        wanted = list(partitions) or [each.partition_id for each in self._map.partitions]
        uploads = []
        for partition_id in wanted:
            payload = self._payload(partition_id, gradient)
            uploads.append(
                (self.header(partition_id, checksum=checksum(payload), **changes), payload)
            )
        results = self.client.push(uploads)
        for header, _ in uploads:
            self._sequences[header.partition_id] = header.sequence
        self.clock += 1
        return results

    def pull(
        self, *, wait: timedelta = timedelta(0), **changes: Any
    ) -> dict[int, np.ndarray[Any, Any]]:
        """Returns the bytes of all partitions that are newer than those pulled before."""
        buffers: dict[int, np.ndarray[Any, Any]] = {}

        def into(header: pb.PullHeader) -> memoryview:
            buffers[header.partition_id] = np.empty(header.payload_bytes, np.uint8)
            return memoryview(buffers[header.partition_id])

        fields: dict[str, Any] = {
            "job_id": JOB,
            "member_id": self.member_id,
            "generation": self.generation,
            "shard_map_epoch": self._map.epoch,
            "clock": self.clock,
            "wait_ms": wait // timedelta(milliseconds=1),
            "checksums": True,
        }
        headers = self.client.pull(pb.PullRequest(**{**fields, **changes}), into)
        self.versions.update({header.partition_id: header.version for header in headers})
        return buffers

    def _payload(self, partition_id: int, values: np.ndarray[Any, Any] | float) -> memoryview:
        tensor, length = self._shape(partition_id)
        if tensor.dtype == "bfloat16":
            whole = (np.full(length, values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            whole = np.resize(np.asarray(values, tensor.dtype), length)
        return memoryview(whole)

    def _shape(self, partition_id: int) -> tuple[coordinator_pb2.TensorSpec, int]:
        """Returns the first tensor of a partition, and the number of the partition's elements."""
        pieces = self._map.partitions[partition_id].pieces
        return self._map.tensors[pieces[0].tensor_index], sum(piece.length for piece in pieces)


class Cluster:
    """A scripted coordinator, and servers on event loops in this process."""

    wait_until = staticmethod(wait_until)

    def __init__(self, directory: Path, transport: Transport) -> None:
        self.directory = directory
        self.transport = transport
        self.coordinator = ScriptedCoordinator()
        self.address = self.coordinator.start()
        self._running: list[Running] = []
        self._clients: list[ParameterServerClient] = []

    def server(
        self,
        *tensors: tuple[str, int, str],
        members: Mapping[int, Sequence[str]] | None = None,
        partition: int = 256,
        **settings: Any,
    ) -> ParameterServerClient:
        """Starts a server for these tensors (default: 600 floats) in partitions of `partition`
        elements. Waits until it is registered and knows the members (default: a, b in generation
        1)."""
        self.declare(*tensors, members=members, partition=partition)
        client = self.unregistered(**settings)
        self.coordinator.registrations.get(timeout=DEADLINE_S)
        self.coordinator.heartbeats.get(timeout=DEADLINE_S)  # by now the welcome has arrived too
        return client

    def declare(
        self,
        *tensors: tuple[str, int, str],
        members: Mapping[int, Sequence[str]] | None = None,
        partition: int = 256,
    ) -> None:
        """Declares tensors and members as the coordinator does."""
        self.coordinator.shard_map = shard_map(
            *(tensors or (("weight", 600, "float32"),)), partition=partition
        )
        for generation, names in (members or {1: ("a", "b")}).items():
            self.coordinator.members(generation, *names)

    def unregistered(self, **settings: Any) -> ParameterServerClient:
        """Starts a server without waiting for its registration."""
        self._running.append(Running(self.directory, **{"coordinator": self.address, **settings}))
        return self.client(self._running[-1])

    def client(
        self, running: Running, *, transport: Transport | None = None, **settings: Any
    ) -> ParameterServerClient:
        """Returns another client of a server. `transport`: default: the cluster's."""
        channel = ChannelSettings(
            address=running.address, deadline=timedelta(seconds=DEADLINE_S), **settings
        )
        client = ParameterServerClient(
            channel, transport=self.transport if transport is None else transport
        )
        self._clients.append(client)
        return client

    @property
    def all_running(self) -> Sequence[Running]:
        """All servers, in the order in which they were started."""
        return self._running

    @property
    def running(self) -> Running:
        """The server that was started last."""
        return self._running[-1]

    def member(
        self, client: ParameterServerClient, name: str = "a", *, generation: int = 1
    ) -> Member:
        """Returns a worker. Call `server` first: the worker needs the shard map."""
        assert self.coordinator.shard_map is not None
        return Member(client, self.coordinator.shard_map, name, generation)

    def trainable(
        self, client: ParameterServerClient, *, bound: int | None = None, lr: float = 1.0
    ) -> Member:
        """Configures plain SGD with asp, or with ssp(bound), and initializes all values
        with zeros."""
        mode = (
            pb.Consistency(mode=pb.Consistency.MODE_ASP)
            if bound is None
            else pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=bound)
        )
        client.configure_optimizer(
            JOB, pb.OptimizerSpec(name="sgd", hyperparameters={"lr": lr}), mode
        )
        member = self.member(client)
        member.initialize(np.zeros(1))
        return member

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for running in self._running:
            running.stop()
        self.coordinator.close()


class _Noted(ParameterServer):
    """A server that its `Running` can find by the thread it runs on."""

    of_thread: ClassVar[dict[int, ParameterServer]] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.of_thread[threading.get_ident()] = self


class Running:
    """One server on an event loop in its own thread."""

    def __init__(self, directory: Path, *, until_serving: bool = True, **settings: Any) -> None:
        """`until_serving`: waits until the server serves, which a backup may never do."""
        port_file = directory / f"port-{time.monotonic_ns()}"
        defaults = {
            "job": JOB,
            "server_id": "server",
            "port_file": port_file,
            "snapshot_interval": "0s",
        }
        self.settings = PsServerSettings.load(**{**defaults, **settings})
        port_file = Path(self.settings.port_file or port_file)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="test-ps-server", daemon=True)
        self.thread.start()
        if not until_serving:
            return
        wait_until(lambda: port_file.exists() or self.failure, "the server to serve")
        # A failure after the server began to serve is left to the test.
        if self.failure is not None and not port_file.exists():
            raise self.failure
        addresses = json.loads(port_file.read_text())
        # The advertised host name may be known only to the test.
        self.address = "127.0.0.1:" + addresses["grpc"].rpartition(":")[2]
        self.http: str = addresses["http"]

    def _run(self) -> None:
        async def serve() -> None:
            await serving.serve(self.settings, self._stop)

        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(serve())
        except BaseException as error:  # read by the test's own thread
            self.failure = error

    def shut_bulk_channel(self) -> None:
        """Closes the bulk channel as a firewall does: its port and socket refuse all
        connections."""
        assert self._loop is not None
        assert self.thread.ident is not None
        bulk = _Noted.of_thread[self.thread.ident]._bulk
        asyncio.run_coroutine_threadsafe(bulk.drain_and_stop(timedelta(0)), self._loop).result(
            DEADLINE_S
        )

    def stop(self) -> None:
        """Stops the server in the same way as SIGTERM."""
        if self._loop is not None and self.thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the server did not stop"


@pytest.fixture
def transport() -> Transport:
    """Each transport for tensors in turn."""
    return Transport.AUTO


@pytest.fixture
def cluster(
    tmp_path: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setattr(serving, "ParameterServer", _Noted)
    made = Cluster(tmp_path, transport)
    yield made
    made.close()


class ServerProcess:
    """A parameter server in its own process, forked from the zygote or started as by a launcher."""

    def __init__(
        self,
        directory: Path,
        zygote: Zygote | None,
        *flags: str,
        most_descriptors: int | None = None,
        **variables: str,
    ) -> None:
        """Starts the process, without waiting until it serves.

        zygote: process to fork from; None: a fresh `python -m shoal_ps_server`.

        most_descriptors: limit of open files, for a fresh process only.

        variables: added to its environment.
        """
        self._port_file = directory / f"port-{time.monotonic_ns()}"
        self._log = directory / f"log-{time.monotonic_ns()}"
        arguments = ["--port-file", str(self._port_file), *flags]
        self._process: Child | subprocess.Popen[bytes]
        if zygote is not None:
            self._process = zygote.start("server", arguments, output=self._log, **variables)
            return
        own = {name: text for name, text in os.environ.items() if not name.startswith("SHOAL_")}
        limited: list[str] = []
        if most_descriptors is not None:
            limited = ["sh", "-c", f'ulimit -n {most_descriptors}; exec "$@"', "sh"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*limited, sys.executable, "-m", "shoal_ps_server", *arguments],
                stderr=log,
                env={**own, "OMP_NUM_THREADS": "1", **variables},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        if isinstance(self._process, Child):
            return self._process.ended.is_set()
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def address(self) -> str:
        """The server's address; waits until it serves."""
        eventually(lambda: self._port_file.exists() or self.ended, "the server process to serve")
        assert not self.ended, self.log
        return str(json.loads(self._port_file.read_text())["grpc"])

    @property
    def http(self) -> str:
        """The address of the metrics; waits until they are served."""
        return str(json.loads(self._port_file.read_text())["http"])

    def client(self) -> ParameterServerClient:
        """Returns a client; waits until the server serves."""
        return ParameterServerClient(
            ChannelSettings(address=self.address(), deadline=timedelta(seconds=DEADLINE_S))
        )

    def wait(self) -> int:
        """Waits for the process and returns its exit status."""
        if isinstance(self._process, Child):
            return self._process.wait()
        return self._process.wait(DEADLINE_S)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and waits for the process."""
        if not self.ended:
            with suppress(ProcessLookupError):  # ended, but not reaped yet
                os.kill(self.pid, number)
        return self.wait()


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Fixture `start(*flags, fresh=False, most_descriptors, **environment)`: a ServerProcess."""
    started: list[ServerProcess] = []

    def start_one(*flags: str, fresh: bool = False, **options: Any) -> ServerProcess:
        started.append(ServerProcess(tmp_path, None if fresh else zygote, *flags, **options))
        return started[-1]

    yield start_one
    for each in started:
        each.end(signal.SIGKILL)
