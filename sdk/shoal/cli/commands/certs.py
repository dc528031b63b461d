"""`shoal certs`: creates certificates for a cluster without its own authority."""

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
            help="Directory for the certificates. Existing files are not overwritten.",
            show_default=False,
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|ADDRESS]...",
            help="Host name or address of a machine that runs a service; may be repeated. "
            "localhost and this machine's name are always included.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="Number of days for which the certificates are valid.", min=1)
    ] = 365,
) -> None:
    """Create certificates of a new private authority, for development and private networks.

    All programs trust `ca.pem` (--tls-ca). The coordinator and parameter servers use `server.pem`
    and `server.key` (--tls-cert, --tls-key). Other programs use `client.pem` and `client.key` if
    servers require client certificates (--tls-client-ca ca.pem). The authority's private key is
    discarded.
    """
    from shoal_common.security.certificates import development_files, write_files

    known = list(dict.fromkeys((*_ALWAYS, socket.gethostname(), *(names or ()))))
    write_files(directory, development_files(known, lifetime=timedelta(days=days)))
    typer.echo(
        f"wrote ca.pem, server.pem and client.pem, with their keys, to {directory}: valid for "
        f"{days} days, for {', '.join(known)}"
    )
