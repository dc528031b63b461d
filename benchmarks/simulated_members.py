"""Simulates thousands of members of a job in one process, over real gRPC. The members only keep
their sessions with the coordinator open.

Unlike real members, they share a few connections, so the cost of a connection is not measured.
Messages whose content is not needed are not parsed, so that this process does not become the
bottleneck. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

import grpc
import grpc.aio
from shoal_protos.v1 import coordinator_pb2 as pb

JOIN_SESSION: Final = "/shoal.v1.Coordinator/JoinSession"
RANKS_PER_HOST: Final = 8
_CONNECTIONS: Final = 16
_READY: Final = pb.MemberMessage(ready=pb.Ready()).SerializeToString()


@dataclass(kw_only=True)
class Member:
    """One simulated member."""

    number: int
    member_id: str
    call: Any = None
    informed: dict[int, float] = field(default_factory=dict)
    """Generation number -> time at which this member received it, by time.perf_counter."""
    announced_bytes: int = 0
    """Total size in bytes of the messages that announced generations to this member."""
    newest: pb.Generation | None = None
    ended: str = ""
    """Reason why its session has ended; empty while it is open."""
    task: asyncio.Task[None] | None = None

    @property
    def join(self) -> bytes:
        """The member's first message, serialized."""
        host = f"node-{self.number // RANKS_PER_HOST:04d}.cluster.internal"
        ids = {
            "donor_address": f"{ip_address((10 << 24) + self.number)}:40123",
            "donor_key": f"{self.number:032x}",
        }
        return pb.MemberMessage(
            join=pb.Join(
                job_id="crowd",
                member_id=self.member_id,
                host=host,
                pid=1000 + self.number,
                launcher_id=f"launcher-{self.number // RANKS_PER_HOST}",
                local_index=self.number % RANKS_PER_HOST,
                **ids,
            )
        ).SerializeToString()


class Crowd:
    """Simulated members of a job at one coordinator. Must be closed with `close`."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(_CONNECTIONS)]
        self._sessions = [channel.stream_stream(JOIN_SESSION) for channel in self._channels]
        self.members: list[Member] = []
        self._informed: Counter[int] = Counter()
        self._changed = asyncio.Event()

    async def join(self, member: Member) -> None:
        """Opens a member's session. When the coordinator has accepted it, the member reports that
        it is ready."""
        member.call = self._sessions[member.number % _CONNECTIONS]()
        await member.call.write(member.join)
        self.members.append(member)
        member.task = asyncio.create_task(self._listen(member))

    async def enter(self, number: int) -> None:
        """Makes all members report, by a heartbeat, that they are in generation `number`."""
        beat = pb.MemberMessage(heartbeat=pb.Heartbeat(generation=number)).SerializeToString()
        for member in self.members:
            await member.call.write(beat)

    def informed(self, number: int) -> int:
        """Returns the number of members that have received generation `number`."""
        return self._informed[number]

    async def until(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until `condition` returns True. It is evaluated whenever a member has received a
        message. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        """Ends all sessions."""
        for member in self.members:
            member.call.cancel()
        await asyncio.gather(
            *(member.task for member in self.members if member.task is not None),
            return_exceptions=True,
        )
        for channel in self._channels:
            await channel.close()

    async def _listen(self, member: Member) -> None:
        call = member.call
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                directive = pb.MemberDirective.FromString(message)
                kind = directive.WhichOneof("directive")
                if kind == "welcome":
                    await call.write(_READY)
                elif kind == "generation":
                    member.informed[directive.generation.number] = time.perf_counter()
                    member.newest = directive.generation
                    self._informed[directive.generation.number] += 1
                    member.announced_bytes += len(message)
                    self._changed.set()
            member.ended = "the coordinator ended the session"
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            member.ended = str(error) or "cancelled"
        self._changed.set()
