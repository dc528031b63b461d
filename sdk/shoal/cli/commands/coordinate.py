"""`shoal coordinate`: runs a command together with a coordinator."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def coordinate(
    command: Annotated[
        list[str],
        typer.Argument(
            help="Command that starts `shoal run` on this machine or on others, with its "
            "arguments.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS|INTERFACE|HOSTNAME",
            help="Address at which the other machines reach this one. Default: its host name, or, "
            "if other machines cannot resolve that, the address from which it sends to them.",
            envvar="SHOAL_LOCAL_ADDR",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other machines without TLS or tokens; for private networks."
        ),
    ] = False,
) -> None:
    """Run a command, and a coordinator for as long as the command runs.

    COMMAND may start launchers on any number of machines. Programs started by COMMAND find the
    coordinator through their environment: `shoal coordinate --insecure -- srun shoal run train.py`.
    Under SLURM, the environment also has the job's id and the number of machines. The exit status
    is that of COMMAND.

    The coordinator's own settings are read from SHOAL_COORDINATOR_... variables. If
    SHOAL_COORDINATOR_REDIS is not set, the coordinator starts a Redis server of its own.
    """
    from shoal_common.system.own_address import own_host

    from shoal.cli.terminal.console import tell
    from shoal.launcher.clusters.coordination import Coordination

    coordination = Coordination(
        command, host=own_host(host), insecure=insecure, environment=os.environ, note=tell
    )
    sys.exit(coordination.run())
