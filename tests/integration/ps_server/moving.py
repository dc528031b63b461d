"""Servers between which partitions move, with a coordinator whose decisions the test controls and a
trainer that follows its shard map."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.bulk.transport import Transport
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import PreconditionError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.service.requests import UploadKind, parse_optimizer, parse_upload_header
from shoal_ps_server.shard.layout import layout_from_shard_map
from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.shard.shard import Shard

from tests.integration.ps_server.conftest import JOB, shard_map
from tests.zygote.children import Child, Zygote, eventually

ADAMW = pb.OptimizerSpec(name="adamw", hyperparameters={"lr": 0.01, "weight_decay": 0.1})
ASP = pb.Consistency(mode=pb.Consistency.MODE_ASP)


class MovingCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator of any number of servers `s0`, `s1`, ... at the places 0, 1, ... Its decisions
    are published as its shard map. `_lock` guards its state."""

    def __init__(
        self,
        *tensors: tuple[str, int, str],
        partition: int,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`credentials`: for TLS; None: no TLS."""
        self._lock = threading.RLock()
        self.map = shard_map(*tensors, partition=partition)
        self.order: coordinator_pb2.MovePartitions | None = None
        self._giver = 0
        self._settled = coordinator_pb2.MovesSettled(move=0, epoch=1)
        self.decides = True
        """True: decides as soon as the giver has reported. False: the test calls `decide`."""
        self.reports: queue.Queue[coordinator_pb2.MoveReport] = queue.Queue()
        self.members: tuple[int, tuple[str, ...]] = (1, ("a", "b"))
        self.registered: dict[int, coordinator_pb2.RegisterServer] = {}
        self._outboxes: dict[int, queue.Queue[coordinator_pb2.ServerDirective]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        with ReservedPort() as reserved:
            self.address = f"127.0.0.1:{reserved.port}"
            if credentials is None:
                self._server.add_insecure_port(self.address)
            else:
                self._server.add_secure_port(self.address, credentials)
            self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(5)

    def move(self, partition_ids: Sequence[int], giver: int, receiver: int) -> int:
        """Orders the giver to move partitions; returns the move's number."""
        with self._lock:
            self.order = coordinator_pb2.MovePartitions(
                move=self._settled.move + 1,
                partition_ids=partition_ids,
                receiver_index=receiver,
                receiver_address=self.registered[receiver].address
                if receiver in self.registered
                else "",
                giver_incarnation=self.registered[giver].incarnation,
            )
            self._giver = giver
            self._tell(giver, coordinator_pb2.ServerDirective(move=self.order))
            return self.order.move

    def decide(self, report: coordinator_pb2.MoveReport | None = None) -> None:
        """Ends the current move with the outcome in `report`; None: ends it without effect."""
        with self._lock:
            order, self.order = self.order, None
            assert order is not None
            taken = report is not None and report.taken
            if (
                taken
                and report is not None
                and report.receiver_incarnation == self.registered[order.receiver_index].incarnation
            ):
                self.map.epoch += 1
                for partition_id in order.partition_ids:
                    self.map.partitions[partition_id].primary = order.receiver_index
            self._settled = coordinator_pb2.MovesSettled(move=order.move, epoch=self.map.epoch)
            for index in self._outboxes:
                self._tell(index, coordinator_pb2.ServerDirective(settled=self._settled))

    def newest_map(self) -> coordinator_pb2.ShardMap:
        with self._lock:
            made = coordinator_pb2.ShardMap()
            made.CopyFrom(self.map)
            return made

    def owner(self, partition_id: int) -> int:
        with self._lock:
            return self.map.partitions[partition_id].primary

    def address_of(self, index: int) -> str:
        with self._lock:
            return self.registered[index].address

    def send_members(self, generation: int, *member_ids: str) -> None:
        with self._lock:
            self.members = (generation, member_ids)
            for index in self._outboxes:
                self._tell(index, self._members_directive())

    def _members_directive(self) -> coordinator_pb2.ServerDirective:
        generation, member_ids = self.members
        return coordinator_pb2.ServerDirective(
            members=coordinator_pb2.Members(generation=generation, member_ids=member_ids)
        )

    def _tell(self, index: int, directive: coordinator_pb2.ServerDirective) -> None:
        if index in self._outboxes:
            self._outboxes[index].put(directive)

    # ----------------------------------------------------------------------------------------- RPCs

    def ServerSession(
        self, requests: Iterator[coordinator_pb2.ServerMessage], context: Any
    ) -> Iterator[coordinator_pb2.ServerDirective]:
        register = next(requests).register
        index = int(register.server_id.removeprefix("s"))
        outbox: queue.Queue[coordinator_pb2.ServerDirective] = queue.Queue()
        with self._lock:
            self.registered[index] = register
            self._outboxes[index] = outbox
            welcome = coordinator_pb2.ServerWelcome(server_index=index, heartbeat_interval_ms=50)
            for directive in (
                coordinator_pb2.ServerDirective(welcome=welcome),
                self._members_directive(),
                coordinator_pb2.ServerDirective(place=coordinator_pb2.ServerPlace(epoch=1)),
                coordinator_pb2.ServerDirective(settled=self._settled),
            ):
                outbox.put(directive)
            if self.order is not None and self._giver == index:
                outbox.put(coordinator_pb2.ServerDirective(move=self.order))
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        while context.is_active():
            with suppress(queue.Empty):
                yield outbox.get(timeout=0.2)
        with self._lock:
            if self._outboxes.get(index) is outbox:
                del self._outboxes[index]

    def _read(self, requests: Iterator[coordinator_pb2.ServerMessage]) -> None:
        with suppress(grpc.RpcError):
            for message in requests:
                if message.HasField("move"):
                    self.reports.put(message.move)
                    with self._lock:
                        if (
                            self.decides
                            and self.order is not None
                            and self.order.move == message.move.move
                        ):
                            self.decide(message.move)

    def GetShardMap(
        self, request: coordinator_pb2.GetShardMapRequest, context: Any
    ) -> coordinator_pb2.GetShardMapResponse:
        return coordinator_pb2.GetShardMapResponse(shard_map=self.newest_map())


class MovingServer:
    """The server process of one place, which can be restarted on the same data directory."""

    def __init__(
        self,
        zygote: Zygote,
        directory: Path,
        coordinator: MovingCoordinator,
        index: int,
        *,
        keeps_data: bool = True,
        flags: Sequence[str] = (),
    ) -> None:
        self._flags = flags
        self._zygote, self._directory, self._coordinator, self._index = (
            zygote,
            directory,
            coordinator,
            index,
        )
        self._keeps_data = keeps_data
        self.process: Child
        self._http = ""

    def start(self, **environment: str) -> None:
        with self._coordinator._lock:
            self._coordinator.registered.pop(self._index, None)
        port_file = self._directory / f"{time.monotonic_ns()}.json"
        arguments = [
            "--coordinator",
            self._coordinator.address,
            "--job",
            JOB,
            "--server-id",
            f"s{self._index}",
        ]
        arguments += ["--port-file", str(port_file), "--snapshot-interval", "0s", *self._flags]
        if self._keeps_data:
            arguments += ["--data-dir", str(self._directory / f"data-{self._index}")]
        self.process = self._zygote.start(
            "server", arguments, output=self._directory / f"log-{self._index}", **environment
        )
        eventually(
            lambda: self._index in self._coordinator.registered or self.process.ended.is_set(),
            "the server to register",
        )
        if not environment:
            assert not self.process.ended.is_set(), self.process.said()
            self._http = json.loads(port_file.read_text())["http"]

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's samples of exactly this name."""
        with urllib.request.urlopen(f"http://{self._http}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        )


class Trainer:
    """One worker that follows the shard map and repeats unacknowledged pushes with their sequence
    numbers. `whole` is a reference server that applies the same pushes without moves."""

    def __init__(
        self,
        coordinator: MovingCoordinator,
        *,
        member: str = "a",
        optimizer: pb.OptimizerSpec = ADAMW,
        **channel: Any,
    ) -> None:
        """`channel`: ChannelSettings other than the address."""
        self._channel = channel
        self._coordinator = coordinator
        self._member = member
        self._optimizer = optimizer
        self._clients: dict[str, ParameterServerClient] = {}
        self._map = coordinator.newest_map()
        self.steps = 0
        self.refusals: set[str] = set()
        alone = coordinator.newest_map()
        for partition in alone.partitions:
            partition.primary = 0
        self._layout = layout_from_shard_map(alone, server_index=0)
        self.whole = Shard(optimizer=parse_optimizer(optimizer, None))
        self.whole.adopt(self._layout)

    @property
    def partition_ids(self) -> range:
        return range(len(self._map.partitions))

    def begin(self, consistency: pb.Consistency = ASP) -> None:
        """Sends the initial values of all partitions."""
        for index in {self._coordinator.owner(each) for each in self.partition_ids}:
            self._client(index).configure_optimizer(JOB, self._optimizer, consistency)
        for partition_id in self.partition_ids:
            self._send(partition_id, UploadKind.INITIALIZE)

    def step(self) -> None:
        """Pushes each partition once."""
        self.steps += 1
        for partition_id in self.partition_ids:
            assert not self._send(partition_id, UploadKind.PUSH).known_batch

    def push_again(self, partition_id: int) -> pb.PartitionResult:
        """Repeats the last push of a partition, as if its answer had been lost."""
        return self._send(partition_id, UploadKind.PUSH, again=True)

    def check(self) -> None:
        """Checks that the servers' state equals bit for bit that of the reference server without
        moves."""
        for partition_id in self.partition_ids:
            version, values = self._retry_until(
                lambda partition_id=partition_id: self._pull(partition_id)
            )
            image = self.whole.image(partition_id)
            assert image is not None
            assert version == image.version
            assert torch.equal(torch.from_numpy(values), image.values)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _send(
        self, partition_id: int, kind: UploadKind, *, again: bool = False
    ) -> pb.PartitionResult:
        length = sum(piece.length for piece in self._map.partitions[partition_id].pieces)
        generator = torch.Generator().manual_seed(1000 * self.steps + partition_id)
        values = torch.randn(length, generator=generator)
        push = kind is UploadKind.PUSH

        def header() -> pb.PushHeader:
            return pb.PushHeader(
                job_id=JOB,
                member_id=self._member,
                generation=1,
                partition_id=partition_id,
                shard_map_epoch=self._map.epoch,
                sequence=self.steps if push else 0,
                base_version=1 if push else 0,
                clock=self.steps,
                dtype=pb.DTYPE_FLOAT32,
                codec=pb.CODEC_RAW,
                length=length,
                payload_bytes=4 * length,
            )

        payload = memoryview(values.numpy())

        def send() -> pb.PartitionResult:
            client = self._client(self._map.partitions[partition_id].primary)
            (result,) = (client.push if push else client.initialize)([(header(), payload)])
            return result

        result = self._retry_until(send)
        if not again:
            parsed = parse_upload_header(
                pb.PushHeader.FromString(header().SerializeToString()), self._at_epoch(), kind
            )
            upload = Upload(parsed)
            upload.add(payload.cast("B"))
            (self.whole.push if push else self.whole.initialize)(upload)
        return result

    def _at_epoch(self) -> Any:
        return self._layout

    def _pull(self, partition_id: int) -> tuple[int, np.ndarray[Any, Any]]:
        buffers: list[np.ndarray[Any, Any]] = []

        def into(header: pb.PullHeader) -> memoryview:
            buffers.append(np.empty(header.length, np.float32))
            return memoryview(buffers[0]).cast("B")

        request = pb.PullRequest(
            job_id=JOB,
            shard_map_epoch=self._map.epoch,
            partitions=[pb.PartitionPull(partition_id=partition_id)],
        )
        (header,) = self._client(self._map.partitions[partition_id].primary).pull(request, into)
        return header.version, buffers[0]

    def _retry_until(self, attempt: Any) -> Any:
        def attempted() -> Any:
            try:
                return [attempt()]
            except (UnavailableError, PreconditionError) as error:
                if isinstance(error, PreconditionError) and error.reason != "STALE_SHARD_MAP":
                    raise
                self.refusals.add(error.reason)
                self._map = self._coordinator.newest_map()
            except KeyError:  # not registered yet
                pass
            return None

        return eventually(attempted, "a server to answer")[0]

    def _client(self, index: int) -> ParameterServerClient:
        address = self._coordinator.address_of(index)
        if address not in self._clients:
            self._clients[address] = ParameterServerClient(
                ChannelSettings(address=address, **self._channel), transport=Transport.GRPC
            )
        return self._clients[address]


def holds(server_address: str) -> dict[int, int]:
    """Returns the version of each partition on a server; empty while it cannot be reached."""
    with (
        suppress(ShoalError),
        ParameterServerClient(ChannelSettings(address=server_address)) as client,
    ):
        return {each.partition_id: each.version for each in client.get_server().partitions}
    return {}
