"""`shoal-ps-server`: starts one parameter server and runs it until SIGTERM or the end of its
job."""

from __future__ import annotations

import os

# Before grpc is imported: no child of this process may touch its channels.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import asyncio
import gc
import signal
import sys
from collections.abc import Sequence

from shoal_common.errors import ShoalError
from shoal_common.system.allocator import keep_freed_memory
from shoal_common.system.scratch import temporary_directory
from shoal_common.telemetry import configure_logging

from shoal_ps_server.service.bulk.descriptors import raise_limit
from shoal_ps_server.settings import PsServerSettings, parse_command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server and returns its exit status: 0 after SIGTERM, SIGINT or the end of the job;
    1, with one line on stderr, if the server could not serve.

    While torch is being imported, which takes seconds, either signal terminates the process
    immediately, since there is nothing to clean up yet.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        # set explicitly, since the kernel's default action does not apply to the first process of a
        # container
        signal.signal(number, lambda number, frame: os._exit(0))
    try:
        settings = parse_command_line(arguments)
        configure_logging("ps-server", settings.log_level)
        temporary_directory()  # packages imported by torch need a temporary directory
        keep_freed_memory()
        raise_limit()
        asyncio.run(_serve(settings))
    except ShoalError as error:
        # logging may not be configured yet
        print(f"shoal-ps-server: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(settings: PsServerSettings) -> None:
    # Imported late, since these modules import torch, and --help or a wrong flag should not have to
    # wait for it.
    import torch

    from shoal_ps_server.serving import serve
    from shoal_ps_server.shard.run_optimizer import warm_up

    torch.set_num_threads(settings.threads)
    warm_up()
    # Imported objects live forever; scanning them in every garbage collection would delay calls by
    # 0.2 s.
    gc.freeze()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


if __name__ == "__main__":
    sys.exit(main())
