"""`shoal health`: checks this machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer


def health(
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check the health of this machine: its disk, its memory and the results of its processors.

    The processors multiply matrices with known products, which reveals one that computes wrongly.
    With GPUs, NCCL is checked too. The exit status is 1 if a check fails.
    """
    from shoal.launcher.machines.health import check_machine

    results = asyncio.run(check_machine())
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=2))
    else:
        for result in results:
            typer.echo(f"{'ok    ' if result.ok else 'FAILED'}  {result.name}: {result.detail}")
    if not all(result.ok for result in results):
        raise typer.Exit(1)
