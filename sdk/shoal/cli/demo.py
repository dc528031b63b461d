"""`shoal demo`: hands over to the demo, with all its arguments."""

from __future__ import annotations

import typer


def demo(context: typer.Context) -> None:
    """Train on handwritten digits on a cluster of processes, with faults (at most 90 s)."""
    import shoal.demo

    raise typer.Exit(shoal.demo.main(context.args))
