"""`shoal.AsyncClient`: the calls of `shoal.Client` for asyncio. Each call runs on one of the
client's threads, so that it does not block the event loop; `wait` sleeps on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

from shoal_common.rpc.channel import ChannelSettings
from typing_extensions import override

from shoal.client.event import Event
from shoal.client.job import Job, JobSummary, Member, Server
from shoal.client.result import Result
from shoal.client.streams import Deadline
from shoal.client.sync import CALL_TIMEOUT, LOOK_INTERVAL, PATIENCE, Client

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ItemT_co = TypeVar("ItemT_co", covariant=True)
_MOST_THREADS: Final = 64
"""Maximum number of threads. Each stream occupies a thread while its next item is being awaited."""


class _Stream(Protocol[ItemT_co]):
    def __iter__(self) -> Iterator[ItemT_co]: ...
    def close(self) -> None: ...


class AsyncClient:
    """Asynchronous version of `shoal.Client`. The methods of that class document the calls.

    An asynchronous context manager that belongs to one event loop. If a call is cancelled, it
    returns immediately, but a request that was already sent may still be carried out."""

    @override
    def __init__(
        self, coordinator: str | ChannelSettings | None = None, *, timeout: timedelta = CALL_TIMEOUT
    ) -> None:
        self._client = Client(coordinator, timeout=timeout)
        self._threads = ThreadPoolExecutor(
            max_workers=_MOST_THREADS, thread_name_prefix="shoal-client"
        )

    # ----------------------------------------------------------------------------------- submitting

    async def submit(
        self,
        script: str | Path,
        *arguments: str,
        workers: int = 1,
        servers: int = 0,
        job_id: str | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
    ) -> str:
        """Submits a script, like `Client.submit`."""
        return await self._call(
            lambda: self._client.submit(
                script,
                *arguments,
                workers=workers,
                servers=servers,
                job_id=job_id,
                flags=flags,
                environment=environment,
                directory=directory,
            )
        )

    async def wait(self, job_id: str, *, timeout: timedelta | None) -> Result:
        """Waits until a job has ended, like `Client.wait`."""
        deadline = Deadline(timeout)
        while (result := await self._call(lambda: self._client.outcome(job_id))) is None:
            deadline.check(f"the end of job {job_id!r}")
            await asyncio.sleep(LOOK_INTERVAL.total_seconds())
        return result

    async def result(self, job_id: str) -> Result:
        """Returns the result of a finished job, like `Client.result`."""
        return await self._call(lambda: self._client.result(job_id))

    async def outcome(self, job_id: str) -> Result | None:
        """Returns the result of a job or None while it runs, like `Client.outcome`."""
        return await self._call(lambda: self._client.outcome(job_id))

    # ----------------------------------------------------------------------------------- inspecting

    async def jobs(self) -> tuple[JobSummary, ...]:
        """Returns all known jobs, like `Client.jobs`."""
        return await self._call(self._client.jobs)

    async def job(self, job_id: str) -> Job:
        """Returns a job, like `Client.job`."""
        return await self._call(lambda: self._client.job(job_id))

    async def members(self, job_id: str) -> tuple[Member, ...]:
        """Returns a job's workers, like `Client.members`."""
        return await self._call(lambda: self._client.members(job_id))

    async def servers(self, job_id: str) -> tuple[Server, ...]:
        """Returns a job's parameter servers, like `Client.servers`."""
        return await self._call(lambda: self._client.servers(job_id))

    async def events(
        self,
        job_id: str,
        *,
        after: str = "",
        follow: bool = False,
        timeout: timedelta | None = None,
    ) -> AsyncIterator[Event]:
        """Yields a job's events, like `Client.events`."""
        stream = await self._call(
            lambda: self._client.events(job_id, after=after, follow=follow, timeout=timeout)
        )
        async for event in self._each(stream):
            yield event

    async def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        follow: bool = False,
        timeout: timedelta | None = None,
    ) -> AsyncIterator[str]:
        """Yields the lines of a job's output, like `Client.logs`."""
        stream = await self._call(
            lambda: self._client.logs(job_id, rank=rank, follow=follow, timeout=timeout)
        )
        async for line in self._each(stream):
            yield line

    async def state_dict(
        self, job_id: str, *, timeout: timedelta = PATIENCE
    ) -> dict[str, torch.Tensor]:
        """Returns the model's newest values from the parameter servers, like
        `Client.state_dict`."""
        return await self._call(lambda: self._client.state_dict(job_id, timeout=timeout))

    # ------------------------------------------------------------------------------------- stopping

    async def stop(self, job_id: str, *, reason: str = "") -> None:
        """Asks all workers of a job to stop, like `Client.stop`."""
        await self._call(lambda: self._client.stop(job_id, reason=reason))

    async def drain(
        self, job_id: str, *, rank: int | None = None, server: str | None = None, reason: str = ""
    ) -> str:
        """Asks a worker or a parameter server to leave, like `Client.drain`."""
        return await self._call(
            lambda: self._client.drain(job_id, rank=rank, server=server, reason=reason)
        )

    async def readmit(self, job_id: str, host: str) -> None:
        """Admits workers on a machine again, like `Client.readmit`."""
        await self._call(lambda: self._client.readmit(job_id, host))

    async def kill(
        self, job_id: str, *, rank: int | None = None, server: str | None = None
    ) -> Member | None:
        """Kills a worker, a parameter server or a submitted job, like `Client.kill`."""
        return await self._call(lambda: self._client.kill(job_id, rank=rank, server=server))

    # -------------------------------------------------------------------------------------- closing

    async def close(self) -> None:
        """Closes all connections, like `Client.close`."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _each(self, stream: _Stream[T]) -> AsyncIterator[T]:
        """Yields the items of a stream. Each item is fetched on a thread. Closing the generator
        closes the stream, which frees the thread."""
        try:
            while items := await self._call(lambda: list(islice(stream, 1))):
                yield items[0]
        finally:
            stream.close()
