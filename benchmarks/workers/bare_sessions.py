"""A server that measures the lower bound of T12, the cost of gRPC alone: `python -m
benchmarks.workers.bare_sessions PORT_FILE MEMBERS`.

It keeps a stream open for each member, answers the member's first message, and notifies all members
once each of them has sent a second one. When a member sends the message `GOODBYE`, the server
immediately notifies all others, as a coordinator does after a death. It makes no decisions and
writes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from shoal_common.rpc.server import ALL_AT_ONCE
from shoal_protos.v1 import coordinator_pb2 as pb

from benchmarks.simulated_members import JOIN_SESSION

GOODBYE = b"\x22\x00"
"""A MemberMessage with an empty Leave."""


class Sessions:
    """The open streams of all members."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._boxes: dict[int, asyncio.Queue[bytes]] = {}
        self._ready = 0
        self._number = 0

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serves the stream of one member. Called by gRPC."""
        box: asyncio.Queue[bytes] = asyncio.Queue()
        self._boxes[id(box)] = box
        box.put_nowait(
            pb.MemberDirective(welcome=pb.Welcome(heartbeat_interval_ms=1000)).SerializeToString()
        )
        reader = asyncio.create_task(self._read(requests, box))
        try:
            while True:
                yield await box.get()
        finally:
            reader.cancel()
            self._boxes.pop(id(box), None)

    async def _read(self, requests: AsyncIterator[bytes], box: asyncio.Queue[bytes]) -> None:
        said = 0
        async for message in requests:
            said += 1
            if said == 2:
                self._ready += 1
                if self._ready == self._members:
                    self._announce()
            elif message == GOODBYE:
                self._boxes.pop(id(box))
                self._announce()

    def _announce(self) -> None:
        self._number += 1
        generation = pb.Generation(
            number=self._number, nonce="0" * 32, world_size=self._ready, table_digest=bytes(16)
        )
        message = pb.MemberDirective(generation=generation).SerializeToString()
        for box in self._boxes.values():
            box.put_nowait(message)


async def _main(port_file: Path, members: int) -> None:
    gc.freeze()
    gc.set_threshold(100_000, 5, 5)  # as the coordinator
    server = grpc.aio.server(options=ALL_AT_ONCE)
    service, method = JOIN_SESSION.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(Sessions(members).serve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    port_file.write_text(json.dumps({"grpc": f"127.0.0.1:{port}"}))
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
