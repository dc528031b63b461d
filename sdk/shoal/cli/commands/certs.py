"""`shoal certs`: creates certificates for a cluster without an authority of its own."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

import typer

_ALWAYS: Final = ("localhost", "127.0.0.1", "::1")


def certs(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory to write them to; existing files are not overwritten.",
            show_default=False,
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|ADDRESS]...",
            help="Names and addresses at which the services' machines are reached. localhost and "
            "this machine's name are always included.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Validity in days.", min=1)] = 365,
) -> None:
    """Create certificates of a private authority, for development and private networks.

    All programs trust `ca.pem` (--tls-ca). The coordinator and parameter servers use `server.pem`
    and `server.key` (--tls-cert, --tls-key). Others use `client.pem` and `client.key` if servers
    require certificates (--tls-client-ca ca.pem). The authority's key is not kept.
    """
    from shoal_common.security.certificates import development_files, write_files

    known = list(dict.fromkeys((*_ALWAYS, socket.gethostname(), *(names or ()))))
    write_files(directory, development_files(known, lifetime=timedelta(days=days)))
    typer.echo(
        f"{directory}: ca.pem, server.pem and client.pem with their keys, for {', '.join(known)}, "
        f"valid for {days} days"
    )
