"""Implements Initialize, Push and Pull for any transport: gRPC (servicer.py) or a bulk connection
(bulk/server.py). Belongs to the event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from shoal_common.bulk.transport import Transport
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.service.intake import Intake
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.pulls import Pulls
from shoal_ps_server.service.requests import UploadKind, check_job, parse_pull
from shoal_ps_server.service.streams import Part
from shoal_ps_server.shard.reading import Reading


class Transfers:
    """The upload and pull streams of one server."""

    def __init__(
        self,
        *,
        job_id: str,
        check_place: Callable[[], Awaitable[None]],
        layouts: Layouts,
        intake: Intake,
        pulls: Pulls,
        metrics: Metrics,
    ) -> None:
        """`check_place`: raises UnavailableError unless it is known that this server, and not its
        backup or a replacement, must serve requests."""
        self._job_id = job_id
        self._check_place = check_place
        self._layouts = layouts
        self._intake = intake
        self._pulls = pulls
        self._metrics = metrics

    async def upload(
        self, parts: AsyncIterator[Part], kind: UploadKind, transport: Transport, *, key: str = ""
    ) -> pb.PushResponse:
        """Serves one Initialize or Push stream to its end. `key`: key presented by the caller.
        Raises the errors of `Intake.receive`."""
        with self._counted(kind.value, transport):
            await self._check_place()
            return await self._intake.receive(parts, kind, key=key)

    async def pull(
        self, request: pb.PullRequest, transport: Transport, *, key: str = ""
    ) -> AsyncGenerator[tuple[pb.PullHeader, Reading | None]]:
        """Serves one Pull. Yields the header and the values of each partition; instead of values,
        yields None for an unchanged partition. The values must be read before the next partition is
        requested. `key`: key presented by the caller.

        Raises the errors documented for Pull in the .proto.
        """
        with self._counted("Pull", transport):
            check_job(request.job_id, self._job_id)
            await self._check_place()
            pull = parse_pull(request, await self._layouts.of_epoch(request.shard_map_epoch))
            async with aclosing(self._pulls.serve(pull, key=key)) as answers:
                async for answer in answers:
                    yield answer

    @contextmanager
    def _counted(self, method: str, transport: Transport) -> Iterator[None]:
        self._metrics.streams.labels(method, transport).inc()
        with self._metrics.counting_refusals(method):
            yield
