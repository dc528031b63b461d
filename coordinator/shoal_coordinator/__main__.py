"""`shoal-coordinator`: starts one coordinator and runs it until SIGTERM."""

from __future__ import annotations

import os

# The embedded Redis server is forked before grpc is imported, since a fork must not copy grpc's
# threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import asyncio
import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from shoal_common.errors import ConfigurationError, ShoalError, UnavailableError
from shoal_common.redis import EmbeddedRedis, with_authority
from shoal_common.settings import Address
from shoal_common.telemetry import configure_logging

from shoal_coordinator.settings import CoordinatorSettings, parse_command_line

_REDIS_CHECK_INTERVAL_S: Final = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the coordinator and returns its exit status: 0 after SIGTERM or SIGINT; 1, with one line
    on stderr, if the coordinator could not serve, had to stop serving, or was replaced by a
    different coordinator."""
    try:
        settings = parse_command_line(arguments)
        configure_logging("coordinator", settings.log_level)
        with _own_redis(settings) as own_redis:
            asyncio.run(_serve(settings, own_redis))
    except ShoalError as error:
        # logging may not be configured yet
        print(f"shoal-coordinator: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


@contextmanager
def _own_redis(settings: CoordinatorSettings) -> Iterator[EmbeddedRedis | None]:
    """Context manager that runs the embedded Redis server if the URL is embedded://. The server
    starts while the rest of the program is being imported. Yields None for any other URL."""
    url = settings.redis_url
    if urlsplit(url).scheme != "embedded":
        yield None
        return
    host = urlsplit(url).netloc
    if host and not Address(host, 0).is_loopback and not settings.insecure:
        raise ConfigurationError(
            f"--redis {url} can be reached from other machines without TLS; pass --insecure to "
            "allow this, or use a server with TLS (rediss://...)"
        )
    with ThreadPoolExecutor(max_workers=1) as starter:
        starting = starter.submit(EmbeddedRedis.from_url, url)
        import shoal_coordinator.server  # noqa: F401 - see above
    with starting.result() as server:
        yield server


def _rarely_collect() -> None:
    """Makes garbage collection rare, because a coordinator has many objects that live long.

    Ten thousand sessions amount to a million long-lived objects. By default, Python scans objects
    after every few hundred allocations, which took a third of the time of ten thousand joins.

    The older generations of objects must still be collected: a refused call leaves about 50 kB of
    gRPC garbage. If the youngest generation is scanned during the call, the call's objects are
    promoted, and become garbage in an older generation. Python runs a full collection only when a
    quarter of all objects are new.
    """
    gc.freeze()
    gc.set_threshold(100_000, 5, 5)


async def _serve(settings: CoordinatorSettings, own_redis: EmbeddedRedis | None) -> None:
    from shoal_coordinator.server import serve

    _rarely_collect()

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if own_redis is None:
        await serve(settings, with_authority(settings.redis_url, settings.redis_ca), stop)
        return
    lost = asyncio.create_task(_lost(own_redis, stop))
    # The embedded server's password protects only the rendezvous stores of this coordinator's
    # members.
    await serve(settings.model_copy(update={"share_store_credentials": True}), own_redis.url, stop)
    if lost.done() and lost.result():
        raise UnavailableError(
            f"the embedded Redis server (pid {own_redis.pid}) exited; its last log lines: "
            f"{own_redis.last_words()}. Restart the coordinator, which restores the data "
            "unless it was temporary (embedded:// without a directory)",
            reason="REDIS_UNAVAILABLE",
        )


async def _lost(own_redis: EmbeddedRedis, stop: asyncio.Event) -> bool:
    """Waits until the embedded Redis server has exited, then stops this coordinator, which cannot
    restart the server. Returns False if the coordinator was already stopping."""
    while own_redis.alive:
        await asyncio.sleep(_REDIS_CHECK_INTERVAL_S)
    unasked = not stop.is_set()
    stop.set()
    return unasked


if __name__ == "__main__":
    sys.exit(main())
