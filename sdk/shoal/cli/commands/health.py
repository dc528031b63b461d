"""`shoal health`: checks this machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer


def health(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Check this machine: disk, memory, and matrix products on each processor.

    The products have known results, so that a processor that computes wrongly is found. With GPUs,
    NCCL is checked too. The status is 1 if a check fails.
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
