"""`shoal-coordinator`: starts one coordinator and runs it until SIGTERM."""

from __future__ import annotations

import os

# Before grpc is imported: the embedded Redis server is started by a fork, which must not touch grpc's threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

from shoal_common.errors import ShoalError
from shoal_common.redis import EmbeddedRedis
from shoal_common.telemetry import configure_logging

from shoal_coordinator.settings import CoordinatorSettings, parse_command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after SIGTERM or SIGINT; 1, with one line on stderr, if it could not serve or was replaced."""
    try:
        settings = parse_command_line(arguments)
        configure_logging("coordinator", settings.log_level)
        with _redis(settings.redis.get_secret_value()) as redis_url:
            asyncio.run(_serve(settings, redis_url))
    except ShoalError as error:
        print(f"shoal-coordinator: {error}", file=sys.stderr)  # noqa: T201 - it may have no logging yet
        return 1
    return 0


@contextmanager
def _redis(url: str) -> Iterator[str]:
    """The URL of the Redis to use: that of one of our own for embedded://, which starts while the rest of the program is imported."""
    if urlsplit(url).scheme != "embedded":
        yield url
        return
    with ThreadPoolExecutor(max_workers=1) as starter:
        starting = starter.submit(EmbeddedRedis.from_url, url)
        import shoal_coordinator.server  # noqa: F401 - see above
    with starting.result() as server:
        yield server.url


async def _serve(settings: CoordinatorSettings, redis_url: str) -> None:
    from shoal_coordinator.server import serve

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, redis_url, stop)


if __name__ == "__main__":
    sys.exit(main())
