"""`shoal coordinate`: runs a command together with a coordinator."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def coordinate(
    command: Annotated[
        list[str],
        typer.Argument(help="What starts the launchers, here or elsewhere.", show_default=False),
    ],
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS|INTERFACE|HOSTNAME",
            help="This machine, as the others reach it. Default: its own name; if that is none for "
            "others, the address of the way to them.",
            envvar="SHOAL_LOCAL_ADDR",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other machines without TLS or tokens: on a private network."
        ),
    ] = False,
) -> None:
    """Run a command together with a coordinator, for launchers on any number of machines.

    Launchers started by COMMAND find the coordinator through their environment: `shoal coordinate
    --insecure -- srun shoal run train.py`. Under SLURM the environment also contains the job's id
    and the number of machines. The status is the status of COMMAND.

    The coordinator itself is configured by the variables SHOAL_COORDINATOR_... Without
    SHOAL_COORDINATOR_REDIS it starts its own Redis.
    """
    from shoal_common.system.own_address import own_host

    from shoal.cli.terminal.console import tell
    from shoal.launcher.clusters.coordination import Coordination

    coordination = Coordination(
        command, host=own_host(host), insecure=insecure, environment=os.environ, note=tell
    )
    sys.exit(coordination.run())
