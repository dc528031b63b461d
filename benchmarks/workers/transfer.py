"""The client of T4: pushes 64 MiB of gradients to a parameter server and pulls 64 MiB of values,
with one of the compared systems, when the harness's gate allows it.

A step is one push, which is acknowledged, and one pull into existing memory. The two durations are
reported separately. For Shoal, the harness starts the coordinator and the parameter server. For the
other systems, the server is a child of this process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import numpy as np

ELEMENTS: Final = 16 << 20
NBYTES: Final = 4 * ELEMENTS
LEARNING_RATE: Final = 2.0**-10
"""A power of two; with gradients of ones, the values stay exact and can be checked at the end."""
_READ: Final = 1 << 20
_WAIT_S: Final = 60


class Transfer(NamedTuple):
    """A system that is connected and ready to transfer tensors."""

    push: Callable[[np.ndarray[Any, Any]], None]
    pull: Callable[[np.ndarray[Any, Any]], None]
    updates: bool
    """True if the server applies SGD, False if it only stores bytes."""


def main() -> None:
    """Runs blocks of steps until the harness closes the gate."""
    flags = argparse.ArgumentParser()
    flags.add_argument("system", choices=sorted(_SYSTEMS))
    flags.add_argument("--gate", type=Path, required=True)
    flags.add_argument("--coordinator")
    flags.add_argument("--job")
    flags.add_argument(
        "--elements",
        type=int,
        default=ELEMENTS,
        help="how many floats the values are; raw TCP and Shoal",
    )
    flags.add_argument(
        "--servers", type=int, default=1, help="how many hold the values, of Shoal's"
    )
    flags.add_argument(
        "--clients", type=int, default=1, help="how many push and pull at once, of Shoal's"
    )
    flags.add_argument("--rank", type=int, default=0, help="which of them this is")
    flags.add_argument("--transport", default="auto", help="what Shoal's tensors travel by")
    flags.add_argument(
        "--tensors", type=int, default=1, help="how many the values are cut into, by Shoal"
    )
    flags.add_argument(
        "--checksums", action="store_true", help="have Shoal compute and compare them"
    )
    options = flags.parse_args()
    gradient, values = np.ones(options.elements, np.float32), np.zeros(options.elements, np.float32)
    with _SYSTEMS[options.system](options) as transfer, socket.socket(socket.AF_UNIX) as gate:
        gate.connect(str(options.gate))
        lines = gate.makefile("r")
        gate.sendall(b"rank %d\n" % options.rank)
        done = 0
        while steps := int(lines.readline() or 0):
            times: list[int] = []
            for _ in range(steps):
                begun = time.perf_counter_ns()
                transfer.push(gradient)
                pushed = time.perf_counter_ns()
                transfer.pull(values)
                times += [pushed - begun, time.perf_counter_ns() - pushed]
                done += 1
            if (
                transfer.updates
                and options.clients == 1
                and not (values == -LEARNING_RATE * done).all()
            ):
                raise AssertionError(
                    f"{options.system}: after {done} pushes the values are {values[:4]}..., "
                    f"expected {-LEARNING_RATE * done}"
                )
            gate.sendall(" ".join(map(str, times)).encode() + b"\n")


# ------------------------------------------------------------------------------------------ raw TCP


@contextmanager
def _tcp(options: argparse.Namespace) -> Iterator[Transfer]:
    ports: multiprocessing.SimpleQueue[int] = multiprocessing.get_context("spawn").SimpleQueue()
    with (
        _child(_serve_tcp, ports, 4 * options.elements),
        socket.create_connection(("127.0.0.1", ports.get())) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def push(gradient: np.ndarray[Any, Any]) -> None:
            connection.sendall(b"+")
            connection.sendall(gradient)
            connection.recv(1)

        def pull(values: np.ndarray[Any, Any]) -> None:
            connection.sendall(b"-")
            _receive(connection, memoryview(values).cast("B"))

        yield Transfer(push, pull, updates=False)


def _serve_tcp(ports: multiprocessing.SimpleQueue[int], nbytes: int) -> None:
    held = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports.put(listener.getsockname()[1])
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while command := connection.recv(1):
            if command == b"+":
                _receive(connection, held)
                connection.sendall(b"!")
            else:
                connection.sendall(held)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        into = into[connection.recv_into(into, min(into.nbytes, _READ)) :]


@contextmanager
def _memcpy(options: argparse.Namespace) -> Iterator[Transfer]:
    held = np.zeros(ELEMENTS, np.float32)
    yield Transfer(
        lambda gradient: np.copyto(held, gradient),
        lambda values: np.copyto(values, held),
        updates=False,
    )


# --------------------------------------------------------------------------------------- gRPC unary


@contextmanager
def _unary(options: argparse.Namespace) -> Iterator[Transfer]:
    import grpc
    from shoal_protos.v1 import parameter_server_pb2 as pb

    ports: multiprocessing.SimpleQueue[int] = multiprocessing.get_context("spawn").SimpleQueue()
    with (
        _child(_serve_unary, ports),
        grpc.insecure_channel(f"127.0.0.1:{ports.get()}", options=_UNLIMITED) as channel,
    ):
        send = channel.unary_unary("/plain/push", request_serializer=pb.PushChunk.SerializeToString)
        fetch = channel.unary_unary("/plain/pull", response_deserializer=pb.PullChunk.FromString)

        def push(gradient: np.ndarray[Any, Any]) -> None:
            send(pb.PushChunk(payload=gradient.tobytes()))

        def pull(values: np.ndarray[Any, Any]) -> None:
            values[:] = np.frombuffer(fetch(b"").payload, np.float32)

        yield Transfer(push, pull, updates=True)


_UNLIMITED: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def _serve_unary(ports: multiprocessing.SimpleQueue[int]) -> None:
    import grpc
    from shoal_protos.v1 import parameter_server_pb2 as pb

    held = np.zeros(ELEMENTS, np.float32)
    step = np.empty_like(held)

    def push(request: pb.PushChunk, context: Any) -> bytes:
        np.multiply(np.frombuffer(request.payload, np.float32), LEARNING_RATE, out=step)
        np.subtract(held, step, out=held)
        return b""

    def pull(request: bytes, context: Any) -> pb.PullChunk:
        return pb.PullChunk(payload=held.tobytes())

    handlers = {
        "push": grpc.unary_unary_rpc_method_handler(
            push, request_deserializer=pb.PushChunk.FromString
        ),
        "pull": grpc.unary_unary_rpc_method_handler(
            pull, response_serializer=pb.PullChunk.SerializeToString
        ),
    }
    server = grpc.server(ThreadPoolExecutor(2), options=_UNLIMITED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", handlers),))
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


# ---------------------------------------------------------------------------------------- torch RPC


@contextmanager
def _torch_rpc(options: argparse.Namespace, *, over_tcp: bool = False) -> Iterator[Transfer]:
    import torch
    from torch.distributed import rpc

    from benchmarks.workers import torch_rpc_peer

    store = f"file://{options.gate}.rendezvous"
    with _child(torch_rpc_peer.serve, store, ELEMENTS, over_tcp):
        torch_rpc_peer.join(store, over_tcp=over_tcp)

        def push(gradient: np.ndarray[Any, Any]) -> None:
            rpc.rpc_sync(
                torch_rpc_peer.SERVER,
                torch_rpc_peer.push,
                args=(torch.from_numpy(gradient), LEARNING_RATE),
            )

        def pull(values: np.ndarray[Any, Any]) -> None:
            torch.from_numpy(values).copy_(rpc.rpc_sync(torch_rpc_peer.SERVER, torch_rpc_peer.pull))

        yield Transfer(push, pull, updates=True)
        rpc.shutdown(graceful=False)


# -------------------------------------------------------------------------------------------- Shoal


@contextmanager
def _shoal(options: argparse.Namespace) -> Iterator[Transfer]:
    from shoal_common.bulk.transport import Transport
    from shoal_common.clients.coordinator import CoordinatorClient
    from shoal_common.clients.parameter_server import ParameterServerClient
    from shoal_common.errors import UnavailableError
    from shoal_common.formats.wire import checksum
    from shoal_common.rpc.channel import ChannelSettings
    from shoal_protos.v1 import coordinator_pb2
    from shoal_protos.v1 import parameter_server_pb2 as pb

    job, member = options.job, f"transfer-{os.getpid()}"
    with CoordinatorClient(ChannelSettings(address=options.coordinator)) as coordinator:
        workers, servers = options.clients, options.servers
        spec = coordinator_pb2.JobSpec(
            job_id=job,
            min_workers=workers,
            max_workers=workers,
            parameter_servers=servers,
            lease_ms=600_000,
        )
        coordinator.create_job(spec)
        outbox: queue.Queue[coordinator_pb2.MemberMessage | None] = queue.Queue()
        join = coordinator_pb2.Join(
            job_id=job, member_id=member, host="localhost", pid=os.getpid(), launcher_id=member
        )
        outbox.put(coordinator_pb2.MemberMessage(join=join))
        outbox.put(coordinator_pb2.MemberMessage(ready=coordinator_pb2.Ready()))
        session = coordinator.join_session(iter(outbox.get, None))
        generation = next(each.generation.number for each in session if each.HasField("generation"))
        bounds = np.linspace(0, options.elements, options.tensors + 1, dtype=np.int64)
        declared = [
            coordinator_pb2.TensorSpec(
                name=f"weight{number}", shape=[int(end - begin)], dtype="float32"
            )
            for number, (begin, end) in enumerate(pairwise(bounds))
        ]
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                shard_map = coordinator.declare_tensors(job, declared).shard_map
                break
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
        common = {
            "job_id": job,
            "member_id": member,
            "generation": generation,
            "shard_map_epoch": shard_map.epoch,
        }
        sequence = 0

        def parts(
            memory: np.ndarray[Any, Any], partition: coordinator_pb2.Partition
        ) -> list[np.ndarray[Any, Any]]:
            """Returns the parts of `memory` that belong to a partition: one array for each of its
            pieces of tensors."""
            starts = [bounds[piece.tensor_index] + piece.offset for piece in partition.pieces]
            return [
                memory[start : start + piece.length]
                for start, piece in zip(starts, partition.pieces, strict=True)
            ]

        def uploads(
            source: np.ndarray[Any, Any], server: int
        ) -> Iterator[tuple[pb.PushHeader, memoryview]]:
            for partition in (each for each in shard_map.partitions if each.primary == server):
                own = parts(source, partition)
                payload = memoryview(own[0] if len(own) == 1 else np.concatenate(own))
                header = pb.PushHeader(
                    **common,
                    partition_id=partition.partition_id,
                    sequence=sequence,
                    base_version=sequence,
                    clock=sequence,
                    dtype=pb.DTYPE_FLOAT32,
                    codec=pb.CODEC_RAW,
                    length=len(payload),
                    payload_bytes=4 * len(payload),
                    checksum=checksum(payload) if options.checksums else 0,
                )
                yield header, payload

        with ExitStack() as stack:
            transport = Transport(options.transport)
            clients = {
                server.server_index: stack.enter_context(
                    ParameterServerClient(
                        ChannelSettings(address=server.address),
                        transport=transport,
                        member_id=member,
                    )
                )
                for server in shard_map.servers
            }
            pool = stack.enter_context(ThreadPoolExecutor(len(clients)))

            def each_server(call: Callable[[int, ParameterServerClient], Any]) -> None:
                if len(clients) == 1:
                    call(*next(iter(clients.items())))
                else:
                    list(pool.map(lambda item: call(*item), clients.items()))

            for server in clients.values():
                server.configure_optimizer(
                    job,
                    pb.OptimizerSpec(name="sgd", hyperparameters={"lr": LEARNING_RATE}),
                    pb.Consistency(mode=pb.Consistency.MODE_ASP),
                )
            each_server(
                lambda index, server: server.initialize(
                    uploads(np.zeros(options.elements, np.float32), index)
                )
            )

            def push(gradient: np.ndarray[Any, Any]) -> None:
                nonlocal sequence
                sequence += 1
                each_server(lambda index, server: server.push(uploads(gradient, index)))

            landings: dict[int, np.ndarray[Any, Any]] = {}

            def pull(values: np.ndarray[Any, Any]) -> None:
                def into(header: pb.PullHeader) -> memoryview:
                    own = parts(values, shard_map.partitions[header.partition_id])
                    if len(own) == 1:
                        return memoryview(own[0])
                    return memoryview(
                        landings.setdefault(
                            header.partition_id, np.empty(header.length, np.float32)
                        )
                    )

                def pull_from(index: int, server: ParameterServerClient) -> None:
                    for header in server.pull(
                        pb.PullRequest(**common, clock=sequence, checksums=options.checksums), into
                    ):
                        if header.partition_id in landings:
                            own = parts(values, shard_map.partitions[header.partition_id])
                            landed = np.split(
                                landings[header.partition_id], np.cumsum(list(map(len, own)))[:-1]
                            )
                            for part, arrived in zip(own, landed, strict=True):
                                part[:] = arrived

                each_server(pull_from)

            yield Transfer(push, pull, updates=True)
        outbox.put(None)
        session.cancel()


@contextmanager
def _torch_rpc_over_tcp(options: argparse.Namespace) -> Iterator[Transfer]:
    with _torch_rpc(options, over_tcp=True) as transfer:
        yield transfer


_SYSTEMS: Final[dict[str, Callable[[argparse.Namespace], AbstractContextManager[Transfer]]]] = {
    "memcpy": _memcpy,
    "tcp": _tcp,
    "unary": _unary,
    "torch-rpc": _torch_rpc,
    "torch-rpc-tcp": _torch_rpc_over_tcp,
    "shoal": _shoal,
}


@contextmanager
def _child(serve: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Runs a server process within the block, and kills it at the end."""
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=arguments, daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(_WAIT_S)


if __name__ == "__main__":
    main()
